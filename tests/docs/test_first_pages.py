"""README and quick start are true: every command on them runs, in order, in a folder of its own, as it says there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.docs.clone import clone
from support.docs.pages import DOCS, ROOT, Step, blocks, steps, write_files
from support.docs.terminal import Terminal, known

pytest.importorskip("torch")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.docs

SACCT = """JobID|Start|End|State|NodeList
1|2026-01-02T00:00:00|2026-01-02T01:00:00|COMPLETED|n[1-4]
2|2026-01-08T02:00:00|2026-01-08T03:00:00|COMPLETED|n[1-4],login1
3|2026-01-20T02:30:00|2026-01-20T04:00:00|COMPLETED|n[1-4]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone, set up, on a machine whose Slurm answers."""
    here = tmp_path / "bftrainer"
    here.mkdir()
    clone(here)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sacct").write_text(f"#!/bin/sh\ncat <<'END'\n{SACCT}END\n")
    (programs / "sinfo").write_text("#!/bin/sh\nprintf 'n1 idle\\nn2 mixed\\n'\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{Path(sys.executable).parent}", prepend=":")
    monkeypatch.setenv("BFTRAINER_STATE", str(here / "state"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(here)
    return here


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "quickstart.md"], ids=lambda page: page.name)
def test_the_commands_of_a_first_page_run_in_their_order(page: Path, folder: Path) -> None:
    write_files(page, folder)
    if not (folder / "trainers.yaml").exists():
        workload = next(block for block in blocks(DOCS / "simulation.md") if block.language == "yaml")
        (folder / "trainers.yaml").write_text(workload.text)
    typed = steps(page)
    assert len(typed) >= 10
    with Terminal(folder) as terminal:
        for step in typed:
            terminal.type(step)
        assert terminal.controller is not None
        assert terminal.controller.api.trainers(all=True)


def test_every_block_of_the_first_pages_is_one_that_is_looked_at() -> None:
    looked_at = {"sh", "console", "python", "yaml", "text"}  # text: pictures
    for page in (ROOT / "README.md", DOCS / "quickstart.md"):
        assert {block.language for block in blocks(page)} <= looked_at, page


def test_a_reader_notices_when_a_page_is_wrong(folder: Path) -> None:
    with Terminal(folder) as terminal:
        terminal.type(Step("bftrainer --version", ("bftrainer …",)))
        for wrong in (
            Step("bftrainer --version", ("something else",)),
            Step("bftrainer trace stats nothing.parquet"),
            Step("make nonsense"),
            Step("false"),
            Step("bftrainer serve --no-such-option", (), "needs a cluster"),
        ):
            with pytest.raises(AssertionError):
                terminal.type(wrong)
    known("bftrainer slurm check --partition scavenger")
