"""The profile command as a person calls it, with a trainer that is not PyTorch and needs no time to start."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bftrainer import profiling as profiling
from bftrainer.cli.main import run
from bftrainer.core.curve import Curve
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes.launch import ColdLauncher
from bftrainer.simulate.workload import load_curves

pytestmark = pytest.mark.waits

Call = Callable[..., tuple[int, str, str]]

TRAINER = """
import os, sys, time
from bftrainer.elastic.membership import Assignment, Leave, Membership
from bftrainer.elastic.protocol import Done, Formed, Report

job, step, place, began = Membership.connect(), 0, Assignment(0, (), 0, ()), 0
most = int(sys.argv[1])
print(f"snapshots={os.environ['BFTRAINER_SNAPSHOTS']!r} pace={os.environ['BFTRAINER_PACE']!r}", sys.argv[2:])


def report():
    world = place.nodes
    known = {str(world): 100 * world**0.5 * place.local_world} if "--mute" not in sys.argv else {}
    return Report(job.formed, step, world=world, rates=known, windows=(step - began) // 10)


job.report = report
job.ready()
try:
    while step < most:
        if step == 0 or job.changed:
            place, began = job.arrive(lambda rank: "127.0.0.1:0"), step
            if job.entered(place.generation):
                job.send(Formed(place.generation, place.nodes, 0.25 * place.nodes, 0.1, 0.1))
        time.sleep(0.01)
        step += 1
    job.send(Done(step))
except Leave:
    job.leave(step)
"""


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs a command line in a folder with a script."""
    (tmp_path / "train.py").write_text(TRAINER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiling, "WarmLauncher", ColdLauncher)  # there is no PyTorch to load

    def calling(*args: object) -> tuple[int, str, str]:
        words = ["profile", *map(str, args)]
        monkeypatch.setattr(sys, "argv", ["bftrainer", *words])
        status = run(words)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return calling


def test_the_curve_is_written_as_simulate_reads_it(call: Call, tmp_path: Path) -> None:
    output = tmp_path / "curve.json"
    status, out, err = call("train.py", "1000000", "--nodes", "1,2,4", "--seconds", "0.1", "-o", output, "--mode", "x")
    assert (status, err) == (0, "")
    curve = load_curves(output)["train"]
    assert curve.nodes == (0, 1, 2, 4)
    assert curve.rates == pytest.approx((0, 100, 141.421, 200), rel=1e-3)
    rows = [line.split() for line in out.splitlines()]
    assert rows[:2] == [["nodes", "samples/s", "efficiency", "pause", "s"], ["1", "100.0", "100%", "–"]]
    assert rows[3] == ["4", "200.0", "50%", "1.00"]
    assert "shrinking 0.75 s" in out
    assert not list(tmp_path.glob(".curve*"))


def test_json_and_csv_say_the_same(call: Call, tmp_path: Path) -> None:
    status, out, _ = call("--json", "--nodes", "2-3", "--seconds", "0.1", "-o", "c.csv", "train.py", "1000000")
    assert status == 0
    found = json.loads(out)
    assert [point["nodes"] for point in found["points"]] == [2, 3]
    assert [point["pause_s"] for point in found["points"]] == [None, 0.75]
    assert (found["name"], found["up_s"], found["down_s"]) == ("train", 0.75, 0.5)
    assert set(found["provenance"]["inputs"]) == {"train.py"}
    curve = Curve.from_csv((tmp_path / "c.csv").read_text())
    assert curve.rates[1:] == pytest.approx([point["samples_per_s"] for point in found["points"]])


def test_a_script_that_ends_too_early_is_said_so(call: Call, tmp_path: Path) -> None:
    status, _, err = call("train.py", "20", "--nodes", "1,2", "-o", "c.json")
    assert status == 1
    assert err.startswith("bftrainer: train.py ended before it could be measured on 1 node")
    assert err.count("\n") == 1
    assert not (tmp_path / "c.json").exists()


def test_a_script_that_fails_is_said_so_with_its_reason(call: Call, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import sys\nprint('the data is missing')\nsys.exit(3)\n")
    status, _, err = call("bad.py", "--nodes", "1")
    assert (status, err.count("\n")) == (1, 1)
    assert "bad.py failed: node-1 ended with status 3: the data is missing" in err


@pytest.mark.parametrize(
    ("script", "args", "message"),
    [
        ("import time\ntime.sleep(600)", [], "lone.py has not begun to train on 1 node within 1 s"),
        (TRAINER, ["1000000", "--mute"], "lone.py has reported no rate on 1 node within 1.1 s"),
    ],
)
def test_a_script_that_says_nothing_is_not_waited_for(
    tmp_path: Path, script: str, args: list[str], message: str
) -> None:
    (tmp_path / "lone.py").write_text(script)

    async def main() -> None:
        launcher = ColdLauncher()
        try:
            await profiling.profile(
                [str(tmp_path / "lone.py"), *args], (1,), seconds=0.1, launcher=launcher, patience_s=1.0
            )
        finally:
            await launcher.close()

    with pytest.raises(BFTrainerError, match=message):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.py"], "there is no script none.py"),
        (["train.py", "--nodes", "0,2"], "`--nodes` must be node counts such as 1,2,4,8 or 1-8"),
        (["train.py", "--nodes", "4-2"], "`--nodes` must be"),
        (["train.py", "--nodes", "1-99999999"], "`--nodes` must be"),
        (["train.py", "--ranks-per-node", "0"], "`--ranks-per-node` must be 1 or more, but got 0"),
        (
            ["train.py", "--nodes", "1-8", "--ranks-per-node", "33"],
            "`--nodes` times `--ranks-per-node` must be at most 256, but got 8 nodes with 33 ranks each",
        ),
        (["train.py", "--seconds", "-1"], "`--seconds` must be"),
        (["train.py", "--pace", "quick"], "`--pace` must be the seconds of a step"),
        (["train.py", "-o", "curve.txt"], "curve.txt: a curve file must end in .json or .csv"),
        (["train.py", "-o", "no/such/curve.json"], "there is no folder no/such"),
    ],
)
def test_a_wrong_call_is_one_line(call: Call, args: list[str], message: str) -> None:
    status, _, err = call(*args)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def test_every_node_of_a_profile_has_the_ranks_that_were_asked_for(call: Call) -> None:
    options = ("--json", "--nodes", "1,2", "--ranks-per-node", "2", "--seconds", "0.1")
    status, out, err = call(*options, "train.py", "1000000")
    assert (status, err) == (0, "")
    found = json.loads(out)
    rates = {point["nodes"]: point["samples_per_s"] for point in found["points"]}
    assert rates == pytest.approx({1: 200, 2: 282.843}, rel=1e-3)
    assert found["ranks_per_node"] == 2


def test_sizes_are_taken_once_and_in_order() -> None:
    assert profiling.parse_sizes("4,1-3,2") == (1, 2, 3, 4)
    with pytest.raises(InputError):
        profiling.parse_sizes("")
