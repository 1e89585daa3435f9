"""A job on eight fake nodes that come, leave, are killed and hang, and what it computes all the same."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from bftrainer.elastic.local import Coordinator, Happening
from bftrainer.elastic.protocol import Hello, Report
from jobs import on, play, script
from ledger import committed, same_as_alone

torch = pytest.importorskip("torch")

WORKER = script("chaos_worker.py")


EVENTS = ["join"] * 16 + ["leave"] * 9 + ["kill"] * 11 + ["stop"] * 4


async def churn(job: Coordinator, rng: random.Random) -> None:
    """Joins, leaves, kills and hangs in random order, some in a burst, some after training went on for a few steps.

    One healthy node at least is left at any time: without any the state would be gone, which is another test.
    """
    struck: set[str] = set()  # killed or stopped, whether that was noticed yet or not

    def healthy() -> list[str]:
        return [name for name in job.nodes if name not in struck and not job.roster.is_leaving(name)]

    def training() -> list[str]:
        return [name for name in healthy() if name in job.members]

    def steps() -> int:
        return max((r.step for n in job.nodes if isinstance(r := job.report(n), Report)), default=0)

    def possible(event: str) -> bool:
        return len(job.nodes) < 8 if event == "join" else len(training()) > 1

    events = rng.sample(EVENTS, len(EVENTS))
    while events:
        while len(healthy()) < 3 and len(job.nodes) < 8:
            await job.add(1)  # so that there is somebody to take away
        await job.until(lambda: any(map(possible, events)), 60, f"a chance for one of {events}")
        event = next(filter(possible, events))
        events.remove(event)
        if event == "join":
            await job.add(1)
        elif event == "leave":
            job.remove(rng.choice(training()))
        else:
            several = len(training()) > 3 and rng.random() < 0.2
            for victim in rng.sample(training(), 2 if several else 1):
                struck.add(victim)
                job.signal(victim, signal.SIGKILL if event == "kill" else signal.SIGSTOP)
        if rng.random() < 0.7:
            seen = steps()
            await job.until(lambda seen=seen: steps() > seen + 2, 60, f"progress after {event} at step {seen}")


def leaks(folder: Path) -> list[str]:
    """Workers that hold more descriptors or threads than they did many generations ago, in a world of the same size."""
    found = []
    for log in folder.glob("steps-*.jsonl"):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        by_world: dict[tuple[int, bool], list[list[int]]] = defaultdict(list)
        for said in lines:
            if "held" in said:  # rank 0 also hosts the store of its generation
                by_world[said["world"], said["rank"] == 0].append(said["held"])
        for world, held in by_world.items():
            if len(held) >= 5 and min(map(sum, held[-5:])) > sum(held[0]) + 10:
                found.append(f"{log.name}, world {world}: {held}")
    return found


def chaos(folder: Path, seed: int, epochs: int) -> None:
    """A disturbed job and an undisturbed one, which must come to the same."""
    alone, disturbed = folder / "alone", folder / "disturbed"
    alone.mkdir(parents=True)
    disturbed.mkdir()
    assert play(on(1), alone, [WORKER, str(alone), str(epochs), "0"]).status == "done"
    pids: set[int] = set()
    worlds: set[int] = set()

    def watch(happening: Happening) -> None:
        if isinstance(happening.message, Report) and happening.message.world:
            worlds.add(happening.message.world)
        if isinstance(happening.message, Hello):
            pids.add(happening.message.pid)

    async def scenario(job: Coordinator) -> None:
        await job.add(3)
        await job.until(lambda: len(job.members) >= 2, 60, "the first generation")
        await churn(job, random.Random(seed))

    outcome = play(scenario, disturbed, [WORKER, str(disturbed), str(epochs), "0.12"], watch=watch)
    assert outcome.status == "done", outcome
    assert len(worlds) >= 3
    counts = committed(disturbed)
    assert sorted(counts) == list(range(epochs))
    for epoch, counter in counts.items():
        assert counter == Counter(range(600)), f"epoch {epoch}"
    same_as_alone(alone, disturbed)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert leaks(disturbed) == []


def test_chaos_changes_nothing_of_what_is_computed(tmp_path: Path) -> None:
    assert len(EVENTS) >= 40
    chaos(tmp_path / "first", 7, 50)
