"""A controller that stops without giving its nodes back says what it leaves running."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bftrainer.cli import main
from bftrainer.cluster.stopping import left_running
from support.cluster.bench import Bench
from support.cluster.live import Live, gone
from support.waiting import wait_until


def test_agents_pilots_and_workers_are_counted_and_the_way_to_end_them_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.submit("1-2")
    bench.join(*(f"n{number}" for number in range(1, 11)))
    bench.settle()
    said = left_running(bench.cluster, {"kind": "slurm", "pending": 1, "job_name": "bftrainer-1a2b"}, 600.0)
    assert "10 agents on n1, n2, n3, n4, n5, n6, n7, n8 and 2 more nodes" in said
    assert "2 workers of 1 trainer" in said
    assert "1 pilot in Slurm's queue" in said
    assert "They wait 600 s for the next `bftrainer serve`" in said
    assert "`scancel --name=bftrainer-1a2b`" in said
    assert "`bftrainer drain`" in said


def test_nothing_is_said_where_nothing_stays(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert left_running(bench.cluster, {"kind": "slurm", "pending": 0, "job_name": "x"}, 600.0) == ""
    bench.join("n1")
    assert left_running(bench.cluster, {"kind": "slurm"}, 600.0)
    bench.cluster.settings = replace(bench.cluster.settings, dry_run=True)
    assert left_running(bench.cluster, {"kind": "slurm"}, 600.0) == "", "a dry run starts nothing"


def test_without_slurm_no_slurm_command_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.join("n1")
    said = left_running(bench.cluster, {"kind": "script"}, 60.0)
    assert said.startswith("left running: 1 agent on n1. They wait 60 s")
    assert "scancel" not in said


@pytest.mark.waits
def test_serve_says_what_it_leaves_and_drain_takes_all_back(tmp_path: Path) -> None:
    with Live(tmp_path / "state", "--nodes", "1", "--keep") as live:
        wait_until(lambda: [row["state"] for row in live.nodes()] == ["free"], "the node", 60)
        assert live.stop() == 0
        assert "left running: 1 agent on node-1. They wait 60 s" in live.log.read_text(), "pool.orphan_s"
        live.start()
        wait_until(lambda: [row["state"] for row in live.nodes()] == ["free"], "the same node", 60)
        assert main.run(["drain", "--state", str(live.folder)]) == 0
        gone(live.pids)
        assert live.log.read_text().count("left running") == 1
