"""The trace commands as a person calls them: output, files, exit status, one line for each mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bftrainer import __version__
from bftrainer.cli.main import run
from bftrainer.core import Fragment, Trace, Window
from bftrainer.traces.files import load_trace, save_trace
from support.waiting import wait_until

LOG = """JobID|Start|End|State|NodeList
1|2021-01-01T00:00:00|2021-01-01T01:00:00|COMPLETED|n[1-3]
2|2021-01-01T02:00:00|2021-01-01T03:00:00|COMPLETED|n[1-2]
3|2021-01-01T02:30:00|2021-01-01T04:00:00|CANCELLED by 7|n3
4|Unknown|Unknown|PENDING|None assigned
"""


@dataclass
class Outcome:
    status: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def calling(*args: object) -> Outcome:
        words = [str(a) for a in args]
        monkeypatch.setattr(sys, "argv", ["bftrainer", *words])
        status = run(words)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return calling


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.parquet"
    rows = [Fragment(f"n{i % 7}", 1000.0 * i, 1000.0 * i + 700.0) for i in range(100)]
    save_trace(Trace.from_fragments(rows, [f"n{i}" for i in range(10)], Window(0.0, 100000.0)), path, {})
    return path


def test_an_imported_log_can_be_measured(call: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    done = call("trace", "import", "log", "-o", "t.parquet")
    assert (done.status, done.err) == (0, "")
    assert "1  pending, first in line 5" in done.out
    stats = json.loads(call("trace", "stats", "t.parquet", "--json").out)
    assert stats["fragments"] == 3
    assert stats["node_hours"] == pytest.approx(1 + 1 + 1.5)


def test_a_log_that_ends_in_the_future_asks_for_its_time_zone(call: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG.replace("2021", "2121"))
    done = call("trace", "import", "log", "-o", "t.parquet")
    assert done.status == 0
    assert "ends in the future, at 2121-01-01T04:00:00 UTC; is its time zone right (--tz)?" in done.err


def test_the_import_report_as_json_accounts_for_every_line(call: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    report = json.loads(call("trace", "import", "log", "-o", "t.csv", "--json").out)
    assert (report["lines"], report["used"], report["jobs"], report["nodes"]) == (5, 3, 4, 3)
    assert report["skipped"] == {
        "column names": {"lines": 1, "first_line": 1},
        "pending": {"lines": 1, "first_line": 5},
    }


def test_json_has_the_keys_others_rely_on_and_its_provenance(call: Callable[..., Outcome], trace: Path) -> None:
    done = call("trace", "stats", trace, "--json")
    stats = json.loads(done.out)
    contract = {
        "events", "inc_events", "dec_events", "inc_per_hour", "dec_per_hour", "node_hours", "eq_nodes", "ratio",
        "fragments", "short_fragment_share", "short_fragment_node_time_share", "hours", "nodes",
    }  # fmt: skip
    assert contract <= stats.keys()
    assert stats["provenance"]["version"] == __version__
    assert stats["provenance"]["command"] == f"bftrainer trace stats {trace} --json"
    assert len(stats["provenance"]["inputs"]["t.parquet"]) == 64


def test_nodes_and_window_choose_a_part(call: Callable[..., Outcome], trace: Path) -> None:
    whole = json.loads(call("trace", "stats", trace, "--json").out)
    part = json.loads(call("trace", "stats", trace, "--nodes", "2:5", "--to", "50000", "--json").out)
    assert (whole["nodes"], part["nodes"]) == (10, 3)
    assert part["hours"] == pytest.approx(50000 / 3600)
    assert part["fragments"] == sum(1 for i in range(50) if 2 <= i % 7 < 5)
    assert json.loads(call("trace", "stats", trace, "--nodes", 4, "--json").out)["nodes"] == 4


def test_short_fragments_can_be_dropped(call: Callable[..., Outcome], trace: Path) -> None:
    assert json.loads(call("trace", "stats", trace, "--min-idle", "701", "--json").out)["fragments"] == 1  # cut at 0


def test_an_unknown_machine_is_warned_about(call: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("node,start,end\na,10,20\n")
    done = call("trace", "stats", "t.csv")
    assert done.status == 0
    assert done.err.startswith("bftrainer: warning: t.csv: the machine's nodes are not known")


def test_a_window_wider_than_the_trace_is_cut_with_a_warning(call: Callable[..., Outcome], trace: Path) -> None:
    done = call("trace", "stats", trace, "--to", "2021-01-01", "--json")
    assert "the trace covers" in done.err
    assert json.loads(done.out)["hours"] == pytest.approx(100000 / 3600)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_figure_is_drawn(call: Callable[..., Outcome], trace: Path, tmp_path: Path, suffix: str) -> None:
    done = call("trace", "stats", trace, "--plot", f"f{suffix}")
    assert done.status == 0
    magic = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert (tmp_path / f"f{suffix}").read_bytes().startswith(magic)


def test_a_figure_of_an_empty_trace_is_drawn(call: Callable[..., Outcome], tmp_path: Path) -> None:
    save_trace(Trace.from_fragments([], ["a"], Window(0.0, 10.0)), tmp_path / "t.parquet", {})
    assert call("trace", "stats", "t.parquet", "--plot", "f.png").status == 0


def test_the_same_seed_gives_the_same_file(call: Callable[..., Outcome], tmp_path: Path) -> None:
    for name in ("a", "b"):
        call("trace", "synth", "--profile", "theta", "--nodes", 100, "--hours", 24, "--seed", 3, "-o", f"{name}.csv")
    first, second = ((tmp_path / f"{name}.csv").read_text().replace(f"{name}.csv", "") for name in ("a", "b"))
    assert first == second
    assert '"seed": 3' in first


MISTAKES = {
    "unknown command": ["trace", "frobnicate"],
    "unknown option": ["trace", "stats", "t.parquet", "--frob"],
    "missing argument": ["trace", "stats"],
    "missing file": ["trace", "stats", "nope.parquet"],
    "a directory": ["trace", "stats", "."],
    "not a trace": ["trace", "stats", "log"],
    "truncated": ["trace", "stats", "cut.parquet"],
    "bad time": ["trace", "stats", "t.parquet", "--from", "yesterday"],
    "bad zone": ["trace", "stats", "t.parquet", "--tz", "Mars/Olympus"],
    "window elsewhere": ["trace", "stats", "t.parquet", "--from", "2031-01-01"],
    "window backwards": ["trace", "stats", "t.parquet", "--from", "500", "--to", "400"],
    "too many nodes": ["trace", "stats", "t.parquet", "--nodes", "11"],
    "no nodes": ["trace", "stats", "t.parquet", "--nodes", "0"],
    "odd nodes": ["trace", "stats", "t.parquet", "--nodes", "a:b"],
    "odd picture": ["trace", "stats", "t.parquet", "--plot", "f.gif"],
    "negative min idle": ["trace", "stats", "t.parquet", "--min-idle", "-5"],
    "unknown format": ["trace", "import", "log", "-o", "out.parquet", "--format", "frob"],
    "wrong format": ["trace", "import", "log", "-o", "out.parquet", "--format", "swf"],
    "wrong columns": ["trace", "import", "log", "-o", "out.parquet", "--columns", "a,b,c"],
    "empty log": ["trace", "import", "empty", "-o", "out.parquet"],
    "binary noise": ["trace", "import", "noise", "-o", "out.parquet"],
    "no such folder": ["trace", "import", "log", "-o", "nowhere/out.parquet"],
    "odd output": ["trace", "import", "log", "-o", "out.txt"],
    "output is a folder": ["trace", "import", "log", "-o", "folder.csv"],
    "missing nodes file": ["trace", "import", "log", "-o", "out.parquet", "--nodes-file", "nope"],
    "bad exclude": ["trace", "import", "log", "-o", "out.parquet", "--exclude", "n[1-"],
    "all excluded": ["trace", "import", "log", "-o", "out.parquet", "--exclude", "n*"],
    "unknown profile": ["trace", "synth", "--profile", "mars", "-o", "out.parquet"],
    "no hours": ["trace", "synth", "--profile", "theta", "--hours", "0", "-o", "out.parquet"],
    "too many synthetic nodes": ["trace", "synth", "--profile", "theta", "--nodes", "1000000000", "-o", "out.parquet"],
    "unknown source": ["trace", "record", "--source", "frob", "-o", "out.parquet"],
    "script without command": ["trace", "record", "--source", "script", "-o", "out.parquet"],
    "no interval": ["trace", "record", "--source", "script", "--command", "ls", "--interval", "0", "-o", "out.parquet"],
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_one_line_and_exit_status_2_and_no_file(
    mistake: str, call: Callable[..., Outcome], trace: Path, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(LOG)
    (tmp_path / "empty").write_text("")
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 50)
    (tmp_path / "cut.parquet").write_bytes(trace.read_bytes()[:700])
    (tmp_path / "folder.csv").mkdir()
    before = {p.name for p in tmp_path.iterdir()}
    done = call(*MISTAKES[mistake])
    assert done.status == 2
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert done.err.startswith("bftrainer: ")
    assert "Traceback" not in done.err
    assert {p.name for p in tmp_path.iterdir()} == before


def test_no_arguments_show_the_help(call: Callable[..., Outcome]) -> None:
    for words in ([], ["trace"]):
        done = call(*words)
        assert done.status == 2
        assert "Usage: bftrainer" in done.err


def test_the_version_is_printed(call: Callable[..., Outcome]) -> None:
    assert call("--version").out == f"bftrainer {__version__}\n"


@pytest.mark.waits
def test_a_recording_ends_on_sigterm_with_a_trace_and_goes_on_from_its_journal(tmp_path: Path) -> None:
    (tmp_path / "idle").write_text("n1\nn2\n")
    words = ["trace", "record", "--source", "script", "--command", "cat idle", "--interval", "0.05", "-o", "r.parquet"]
    journal = tmp_path / "r.parquet.journal"
    for lines in (5, 10):
        process = subprocess.Popen(
            [sys.executable, "-m", "bftrainer", *words], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )
        wait_until(lambda n=lines: journal.exists() and journal.read_text().count("\n") > n, "polling")  # type: ignore[misc]
        os.kill(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert b"wrote r.parquet: " in out
    trace = load_trace(tmp_path / "r.parquet")
    assert set(trace.nodes) == {"n1", "n2"}
    assert trace.open.any()


@pytest.mark.waits
def test_a_recording_of_a_missing_tool_fails_at_once_and_leaves_nothing(
    call: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = call("trace", "record", "--source", "slurm", "-o", "r.parquet")
    assert done.status == 1
    assert "is sinfo installed" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.waits
def test_output_cut_short_by_its_reader_is_no_error(trace: Path) -> None:
    line = f"{sys.executable} -m bftrainer trace stats {trace} --json | head -c 10"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ('{\n  "event', "")
