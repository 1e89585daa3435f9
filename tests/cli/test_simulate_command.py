"""The simulate and tune commands as a person calls them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cli.main import run
from bftrainer.traces.files import save_trace
from bftrainer.traces.synthetic.synth import synthesise
from bftrainer.util.provenance import file_hash

Call = Callable[..., tuple[int, str, str]]
WORKLOAD = """
defaults: {min_nodes: 1, max_nodes: 16, scale_up_s: 18, scale_down_s: 12, samples: 1e7}
trainers:
  - {hpo: 30, model: ShuffleNet, every_s: 36}
  - {diverse: 7, every_s: 100}
"""
CONTRACT = {
    "efficiency", "bound", "outcome_samples", "resource_integral_node_hours", "eq_nodes", "hours", "completed",
    "events", "decisions", "preemption_cost_samples", "rescale_cost_samples", "decision_ms", "wall_s", "trainers",
}  # fmt: skip
SHARED = ("--trace", "t.parquet", "--workload", "w.yaml")


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs a command line in a folder with a trace and a workload."""
    save_trace(synthesise("summit", nodes=96, hours=24.0, seed=2), tmp_path / "t.parquet", {})
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)

    def calling(*args: object) -> tuple[int, str, str]:
        words = [str(a) for a in args]
        monkeypatch.setattr(sys, "argv", ["bftrainer", *words])
        status = run(words)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return calling


def figures(call: Call, *options: object) -> dict[str, Any]:
    status, out, _ = call("simulate", *SHARED, "--json", *options)
    assert status == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_json_has_the_keys_others_rely_on(call: Call, tmp_path: Path) -> None:
    result = figures(call)
    assert result.keys() >= CONTRACT
    assert {"p50", "p99", "max"} == result["decision_ms"].keys()
    row_keys = {"name", "model", "submit", "start", "end", "run_hours", "samples"}
    assert row_keys <= result["trainers"][0].keys()
    assert result["completed"] == 37 == len(result["trainers"])
    assert result["provenance"]["inputs"]["t.parquet"] == file_hash(tmp_path / "t.parquet")
    assert 0 < result["efficiency"] <= result["bound"]


def test_the_summary_shows_where_the_rest_went(call: Call) -> None:
    status, out, err = call("simulate", *SHARED)
    assert (status, err) == (0, "")
    assert all(word in out for word in ("efficiency U", "bound", "preemption", "ShuffleNet", "decisions at"))


def test_settings_change_the_result(call: Call) -> None:
    usual = figures(call)
    others = {"--allocator": "equal", "--objective": "efficiency", "--max-parallel": "3", "--accounting": "paper",
              "--decide-on": "pool", "--nodes": "32", "--horizon": "5"}  # fmt: skip
    for option, value in others.items():
        result = figures(call, option, value)
        assert result["outcome_samples"] > 0
        assert result["hours"] != usual["hours"]


def test_automatic_settings_work(call: Call) -> None:
    assert figures(call, "--horizon", "auto", "--max-parallel", "auto")["completed"] == 37


def test_parts_are_independent_schedulers_that_add_up(call: Call) -> None:
    result = figures(call, "--parts", 3)
    assert len(result["parts"]) == 3
    assert result["completed"] == sum(part["completed"] for part in result["parts"]) == 37
    assert result["outcome_samples"] == pytest.approx(37e7)


def test_an_unfinished_workload_is_said_so(call: Call) -> None:
    status, _, err = call("simulate", *SHARED, "--to", "2021-02-10T02:00:00")
    assert status == 0
    assert "the trace ended before the workload" in err


def test_the_rigid_baseline_is_worse_and_harms_nobody_without_a_guarantee(call: Call) -> None:
    status, out, _ = call("simulate", *SHARED, "--rigid", 8, "--json")
    rigid = json.loads(out)
    assert status == 0
    assert rigid["delay_node_seconds"] == 0
    assert rigid["efficiency"] < figures(call)["efficiency"]
    status, out, _ = call("simulate", *SHARED, "--rigid", 8, "--guarantee", "16:7200")
    assert status == 0
    assert "main queue delayed" in out


def test_a_report_is_one_page_that_needs_nothing_from_outside(call: Call, tmp_path: Path) -> None:
    status, out, _ = call("simulate", *SHARED, "--report", "r.html", "--gantt-from", "2021-02-10T06:00:00")
    page = (tmp_path / "r.html").read_text()
    assert status == 0
    assert out.endswith("wrote r.html\n")
    assert page.startswith("<!DOCTYPE html>") or page.startswith("<!doctype html>")
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def test_tune_tries_every_combination_recommends_and_draws(call: Call, tmp_path: Path) -> None:
    options = ("--horizons", "30,120", "--max-parallels", "4,8")
    status, out, _ = call("tune", *SHARED, *options, "--plot", "t.png", "--json")
    advice = json.loads(out)
    assert status == 0
    assert {(t["horizon_s"], t["max_parallel"]) for t in advice["trials"]} == {(30, 4), (30, 8), (120, 4), (120, 8)}
    assert advice["recommended"] in advice["trials"]
    assert advice["best"]["efficiency"] == max(t["efficiency"] for t in advice["trials"])
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    status, out, _ = call("tune", *SHARED, "--horizons", "120", "--max-parallels", "8")
    assert "recommended: --horizon 120 --max-parallel 8" in out


MISTAKES: dict[str, tuple[list[str], str]] = {
    "unknown curve": (["--workload", "strange.yaml"], "Nonesuch"),
    "late submit": (["--workload", "late.yaml"], "submitted at or after the end of the trace"),
    "too large": (["--workload", "large.yaml"], "needs at least 500 nodes, but the machine has 96"),
    "zero nodes": (["--nodes", "0"], "--nodes must name at least one node"),
    "unknown allocator": (["--allocator", "guess"], "allocator must be one of"),
    "unknown objective": (["--objective", "fame"], "objective must be one of"),
    "unknown accounting": (["--accounting", "creative"], "--accounting must be one of paper, stall"),
    "unknown decide-on": (["--decide-on", "whim"], "--decide-on must be one of pool, all"),
    "odd horizon": (["--horizon", "soon"], "--horizon must be a number or auto"),
    "negative horizon": (["--horizon", "-1"], "horizon must be a number of seconds above 0"),
    "no parallel": (["--max-parallel", "0"], "max parallel must be 1 or more"),
    "too many parts": (["--parts", "90"], "--parts must be at most the number of trainers"),
    "odd guarantee": (["--rigid", "4", "--guarantee", "x"], "--guarantee must be NODES:SECONDS pairs"),
    "elastic checkpoint": (["--checkpoint", "60"], "--checkpoint is for jobs of a fixed size: give --rigid N"),
    "elastic guarantee": (["--guarantee", "4:60"], "--guarantee is for jobs of a fixed size: give --rigid N"),
    "report of parts": (["--parts", "2", "--report", "r.html"], "it cannot be combined with --parts or --rigid"),
    "odd report": (["--report", "r.pdf"], "a report must end in .html"),
    "gantt elsewhere": (
        ["--report", "r.html", "--gantt-from", "2031-01-01"],
        "--gantt-from must be within the replayed window",
    ),
    "missing workload": (["--workload", "nope.yaml"], "No such file"),
    "missing trace": (["--trace", "nope.parquet"], "No such file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit_gives_one_line_and_exit_status_2(mistake: str, call: Call, tmp_path: Path) -> None:
    rest = "max_nodes: 600, scale_up_s: 1, scale_down_s: 1, samples: 5"
    one = f"{{{{name: a, model: {{}}, submit: '{{}}', min_nodes: {{}}, {rest}}}}}"
    for name, fields in (("strange", ("Nonesuch", "+0", 1)), ("late", ("AlexNet", "+9999999", 1)),
                         ("large", ("AlexNet", "+0", 500))):  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(f"trainers:\n  - {one.format(*fields)}\n")
    options, message = MISTAKES[mistake]
    status, out, err = call("simulate", *SHARED, *options)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
