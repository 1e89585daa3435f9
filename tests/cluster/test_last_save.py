"""All nodes of trainers are taken with notice, again and again: no committed step is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from support.cluster.live import Live, gone, wait_until  # noqa: E402
from support.elastic.jobs import run_alone  # noqa: E402

pytestmark = pytest.mark.waits

WORKER = Path(__file__).parent / "taken_worker.py"
STEPS = 60


def commits(folder: Path) -> list[int]:
    path = folder / "commits"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def take_all(live: Live) -> None:
    """What Slurm does to pilots whose nodes are wanted."""
    pids = {node["agent_pid"] for node in live.nodes() if node["agent_pid"]}
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    gone(pids, 30)


def test_trainers_whose_nodes_all_go_at_once_go_on_from_the_step_they_were_at(tmp_path: Path) -> None:
    alone, one, two = (tmp_path / name for name in ("alone", "one", "two"))
    for folder in (alone, one, two):
        folder.mkdir()
    run_alone(tmp_path, WORKER, alone, 3, 0)
    with Live(tmp_path / "state", "--nodes", "3", "--set", "agents.last_save_s=20") as live:
        refs = [
            live.submit(WORKER, str(folder), "3", "0.05", nodes=nodes) for folder, nodes in ((one, "1-1"), (two, "2-2"))
        ]
        for least in (8, 25):
            wait_until(lambda least=least: min(commits(f)[-1:] for f in (one, two)) >= [least], f"step {least}", 90)
            take_all(live)
        ends = [live.until_state(ref, "done", "failed") for ref in refs]
        logs = str([live.api.logs(ref, tail=100) for ref in refs])
        live.nodes()
    gone(live.pids)
    assert [(end["state"], end["samples"]) for end in ends] == [("done", 8 * STEPS)] * 2, logs
    for folder in (one, two):
        assert commits(folder) == list(range(1, STEPS + 1)), logs  # none is made again, none is missing
    assert ends[0]["samples_redone"] == 0
    expected, found = (torch.load(folder / "final.pt")["model"] for folder in (alone, one))
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
