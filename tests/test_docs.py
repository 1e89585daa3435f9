"""The documentation is true: the commands and the code it shows run. What tells a story in order is in tests/docs."""

from __future__ import annotations

import re
import shlex
import signal
import stat
from pathlib import Path

import pytest

from bftrainer.cli.main import COMMANDS as COMMAND_NAMES
from bftrainer.cli.main import run

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RUN_IN_ORDER = ("README.md", "docs/quickstart.md", "docs/extend.md")  # by tests/docs
COMMANDS = [
    (page.relative_to(ROOT).as_posix(), line.removeprefix("$ "))
    for page in PAGES
    if page.relative_to(ROOT).as_posix() not in RUN_IN_ORDER
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ bftrainer ")
]
SACCT = """JobID|Start|End|State|NodeList
1|2026-01-02T00:00:00|2026-01-02T01:00:00|COMPLETED|n[1-4]
2|2026-01-08T02:00:00|2026-01-08T03:00:00|COMPLETED|n[1-4],login1
3|2026-01-20T02:30:00|2026-01-20T04:00:00|COMPLETED|n[1-4]
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files the documentation speaks of, and a Slurm that answers."""
    (tmp_path / "jobs.log").write_text(SACCT)
    (tmp_path / "noheader.log").write_text(SACCT.partition("\n")[2])
    (tmp_path / "nodes.txt").write_text("".join(f"n{i}\n" for i in range(1, 7)) + "login1\n")
    rows = "".join(f"{i} {100 * i} 5 50 2 -1 -1 2 -1 -1 1 1 1 1 1 -1 -1 -1\n" for i in range(1, 9))
    (tmp_path / "theta.swf").write_text("; MaxNodes: 4\n" + rows)
    problem = re.search(r"```json\n(.*?)```", (ROOT / "docs/allocation.md").read_text(), re.DOTALL)
    assert problem is not None
    (tmp_path / "problem.json").write_text(problem[1])
    workload = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/simulation.md").read_text(), re.DOTALL)
    assert workload is not None
    (tmp_path / "trainers.yaml").write_text(workload[1])
    (tmp_path / "idle-nodes.txt").write_text("n1\nn2\n")
    sinfo = tmp_path / "bin" / "sinfo"
    sinfo.parent.mkdir()
    sinfo.write_text("#!/bin/sh\nprintf 'n1 idle\\nn2 mixed\\n'\n")
    sinfo.chmod(sinfo.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(sinfo.parent), prepend=":")
    monkeypatch.setenv("BFTRAINER_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    assert run(["trace", "import", "jobs.log", "-o", "t.parquet"]) == 0
    assert run(["trace", "import", "jobs.log", "-o", "january.parquet"]) == 0
    return tmp_path


def test_the_documentation_shows_commands() -> None:
    assert {page for page, _ in COMMANDS} >= {"docs/traces.md", "docs/allocation.md", "docs/simulation.md"}


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{p}: {c}" for p, c in COMMANDS])
def test_a_command_of_the_documentation_runs(page: str, command: str, site: Path) -> None:
    words = shlex.split(command)[1:]
    if "live.parquet.journal" in words:
        assert (
            run(
                ["trace", "record", "--source", "slurm", "--interval", "0.1", "--duration", "0.5", "-o", "live.parquet"]
            )
            == 0
        )
    if words[:2] == ["trace", "record"] and "--interval" not in words:
        words += ["--interval", "0.1"]
    assert run(words) == 0, f"{page}: {command}"


def test_every_command_has_a_page() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    commands = [*COMMAND_NAMES, *(f"trace {c}" for c in ("import", "stats", "synth", "record"))]
    assert [command for command in commands if f"bftrainer {command}" not in text] == []


def test_python_in_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [page for page in PAGES if page.name != "elastic.md"]  # has a test of its own, with processes of its own
    # Programs to be installed somewhere, which begin with #!, have tests where what they need is.
    blocks = [b for page in pages for b in re.findall(r"```python\n(?!#!)(.*?)```", page.read_text(), re.DOTALL)]
    before = signal.getsignal(signal.SIGTERM)
    for block in blocks:
        exec(block, {})
    signal.signal(signal.SIGTERM, before)
    assert "a starts on 3 nodes (from 0)" in capsys.readouterr().out
