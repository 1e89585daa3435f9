"""Chaos for nodes with several ranks under a real controller: each node is one unit, whatever hits it.

Nodes join and leave by the schedule of the local pool. Beside that, single ranks and whole agents are killed, and
single ranks and all ranks of a node are stopped. `rank_chaos` is one episode, for a test;
`python -m support.cluster.chaos --ranks-per-node 2` runs it as a program.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bftrainer.cluster.store.store import FILE, Store
from support.cluster.live import LOOK_S, Live, gone
from support.cluster.verdict import assert_decisions_can_be_made_again, assert_trained_as_alone
from support.elastic.jobs import run_alone
from support.waiting import wait_until

WORKER = Path(__file__).resolve().parents[2] / "elastic" / "chaos_worker.py"
STRIKES = ("rank kill", "agent kill", "rank stop", "rank kill", "node stop", "agent kill")
"""What is done beside joins and leaves, again and again."""
BEGIN_S, APART_S = 5.0, (2.5, 5.0)
"""When the first node leaves, and the time from each join or leave to the next one."""
UNIT_S = 30.0
"""No rank of a node may live on for longer than this after another one was killed or stopped."""


@dataclass
class RankTally:
    """What was done to the system, and what it made of that."""

    seed: int
    nodes: int
    ranks_per_node: int
    events: Counter[str] = field(default_factory=Counter)
    """By kind."""
    nodes_joined: int = 0
    """Also those that came back after their agents were killed."""
    nodes_left: int = 0
    rescales: int = 0
    decisions: int = 0
    processes: int = 0
    """Agents and ranks that were seen. None is left."""
    slowest_unit_s: float = 0.0
    """The longest time from a kill or stop until no process of the node's worker was left."""
    seconds: float = 0.0


class RankChaos:
    """One trainer on nodes with several ranks, and what is done to it."""

    def __init__(self, live: Live, ref: str, rng: random.Random, tally: RankTally) -> None:
        self._live = live
        self._ref = ref
        self._rng = rng
        self._tally = tally

    def strike(self, kind: str) -> None:
        """Kill or stop something, and wait until the whole node's worker is gone and the others train on."""
        while not self._hit(kind):
            time.sleep(LOOK_S)  # the victim had just gone by itself
        self._tally.events[kind] += 1
        self._live.until_steps(self._ref)

    def _hit(self, kind: str) -> bool:
        """Return whether there was somebody to hit."""
        workers = wait_until(self._training, f"two nodes that train, for a {kind}", 90, LOOK_S)
        worker = self._rng.choice(workers)
        ranks = [rank["pid"] for rank in worker["ranks"]]
        assert len(ranks) == self._tally.ranks_per_node, worker
        if kind == "agent kill":
            targets = [node["agent_pid"] for node in self._live.nodes() if node["node"] == worker["node"]]
        else:
            targets = ranks if kind == "node stop" else [self._rng.choice(ranks)]
        signum = signal.SIGSTOP if kind.endswith("stop") else signal.SIGKILL
        began = time.monotonic()
        try:
            for pid in targets:
                os.kill(pid, signum)
        except ProcessLookupError:
            return False
        gone(set(ranks), UNIT_S)
        self._tally.slowest_unit_s = max(self._tally.slowest_unit_s, round(time.monotonic() - began, 2))
        return bool(targets)

    def _training(self) -> list[dict[str, Any]]:
        """The workers that train, if they are at least two: one that has the state must be left."""
        workers = [worker for worker in self._live.trainer(self._ref)["workers"] if worker["state"] == "training"]
        return workers if len(workers) > 1 else []


def rank_chaos(
    folder: Path, seed: int, *, events: int = 40, nodes: int = 3, ranks_per_node: int = 2, epochs: int = 80
) -> RankTally:
    """One episode of so many events: half of them joins and leaves, half kills and stops.

    Asserts that a node's ranks go together, that the trainer is done, that each sample counted once per epoch, that the
    weights are those of an undisturbed run, that no process is left, that the doctor finds nothing, and that every
    decision can be made again.
    """
    began, rng = time.monotonic(), random.Random(seed)
    tally = RankTally(seed, nodes, ranks_per_node)
    alone, home = folder / "alone", folder / "job"
    alone.mkdir(parents=True)
    home.mkdir()
    (home / "limit").write_text("0")  # every step takes a while, until `hurry` is there
    run_alone(folder, WORKER, alone, epochs, 0)
    churn, kinds = schedule(rng, nodes, events // 2)
    (folder / "churn.txt").write_text(churn)
    tally.events.update(kinds)
    settings = {"pool.nodes": nodes, "pool.churn": folder / "churn.txt", "agents.worker_silence_s": 3}
    settings |= {"agents.silence_s": 5, "agents.leave_grace_s": 5}
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    strikes = list(itertools.islice(itertools.cycle(STRIKES), events - len(kinds)))
    with Live(folder / "state", *options) as live:
        arguments = str(home), str(epochs), "0.1"
        ref = live.submit(WORKER, *arguments, nodes=f"1-{nodes}", ranks_per_node=ranks_per_node)
        wait_until(lambda: live.trainer(ref)["step"] > 2, "the first steps", 60, LOOK_S)
        chaos = RankChaos(live, ref, rng, tally)
        for kind in rng.sample(strikes, len(strikes)):
            chaos.strike(kind)
        wait_until(lambda: live.api.status()["pool"]["next_change_s"] is None, "the last join or leave", 600, LOOK_S)
        (home / "hurry").touch()
        row = live.until_state(ref, "done", "failed", "cancelled", timeout_s=240)
        assert row["state"] == "done", (row["reason"], row["traceback"], row["log_tail"])
        assert row["samples"] == row["total"] == 600 * epochs, row
        tally.rescales = row["rescales"]
        live.nodes()
        assert live.problems() == []
        assert live.stop() == 0
    # A rank that was never seen in an answer of the controller has written its pid into the name of its ledger.
    live.pids |= {int(path.stem.rpartition("-")[2]) for path in home.glob("steps-*.jsonl")}
    gone(live.pids)
    tally.processes = len(live.pids)
    assert_trained_as_alone(home, alone, epochs)
    tally.decisions = assert_decisions_can_be_made_again(folder / "state")
    with Store.open(folder / "state" / FILE, read_only=True) as store:
        tally.nodes_joined = len(list(store.all_events(("node.joined",))))
        tally.nodes_left = len(list(store.all_events(("node.left",))))
    tally.seconds = round(time.monotonic() - began, 1)
    return tally


def schedule(rng: random.Random, nodes: int, count: int) -> tuple[str, list[str]]:
    """So many joins and leaves, as the local pool reads them, and their kinds. The first node stays."""
    at, away = BEGIN_S, set[int]()
    lines, kinds = [], []
    for _ in range(count):
        here = sorted(set(range(2, nodes + 1)) - away)
        if not here or (away and (len(here) < 2 or rng.random() < 0.5)):
            kind, node = "join", rng.choice(sorted(away))
            away.remove(node)
        else:
            kind, node = "leave", rng.choice(here)
            away.add(node)
        lines.append(f"{at:.1f} {kind} node-{node}")
        kinds.append(kind)
        at += rng.uniform(*APART_S)
    return "\n".join(lines) + "\n", kinds
