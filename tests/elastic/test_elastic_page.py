"""The code on the page for users of PyTorch runs, each block as a script of its own, and its diff tells the truth."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.elastic.jobs import run_alone

pytest.importorskip("torch")

pytestmark = [pytest.mark.docs, pytest.mark.xdist_group("elastic page")]  # they share a warm parent

PAGE = (Path(__file__).resolve().parents[2] / "docs/elastic.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(DIFF,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)


def side(sign: str) -> str:
    """The script before (`-`) or after (`+`) the diff."""
    return "".join(line[1:] for line in DIFF.splitlines(keepends=True) if line[0] in (" ", sign))


def output(script: str, folder: Path) -> str:
    """What a script prints; an error of it is the test's."""
    path = folder / "script.py"
    path.write_text(script)
    results = str(folder.with_name(f"{folder.name}-output"))
    said = run_alone(folder, path, PYTHONWARNINGS="error", BFTRAINER_OUTPUT=results)
    assert list(folder.iterdir()) == [path]
    return said


def test_the_diff_leads_to_the_first_script() -> None:
    assert side("+") == BLOCKS[0]


def test_the_script_before_the_diff_is_plain_pytorch(tmp_path: Path) -> None:
    assert "bftrainer" not in side("-")
    assert len(output(side("-"), tmp_path).splitlines()) == 3


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_script_on_the_page_runs_alone(number: int, tmp_path: Path) -> None:
    said = output(BLOCKS[number], tmp_path)
    assert bool(said) == ("print(" in BLOCKS[number])


def test_the_page_names_every_call_of_a_run() -> None:
    from bftrainer.elastic.torch.run import Run

    public = [name for name in vars(Run) if not name.startswith("_")]
    assert [name for name in public if f"run.{name}" not in PAGE] == []
