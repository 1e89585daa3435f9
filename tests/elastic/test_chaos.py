"""A job on eight fake nodes that come, leave, are killed and hang, and what it computes all the same."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bftrainer.elastic.local import Coordinator, Happening, Outcome, Settings
from bftrainer.elastic.processes import Launcher
from bftrainer.elastic.protocol import Report
from bftrainer.elastic.warm import WarmLauncher

torch = pytest.importorskip("torch")

WORKER = str(Path(__file__).with_name("chaos_worker.py"))
SETTINGS = Settings(silence_s=2.0, grace_s=20.0)


def play(
    scenario: Callable[[Coordinator], Awaitable[None]],
    folder: Path,
    script: list[str],
    settings: Settings = SETTINGS,
    watch: Callable[[Happening], None] = lambda happening: None,
) -> Outcome:
    """Run a job, do something to it, and wait for its end."""

    async def main() -> Outcome:
        launcher: Launcher = WarmLauncher()
        try:
            async with Coordinator(
                script, launcher, nodes=(1, 8), folder=folder / "logs", settings=settings, watch=watch
            ) as job:
                await scenario(job)
                outcome = await asyncio.wait_for(job.wait(), 120)
                if outcome.status == "failed":
                    print(outcome.error, outcome.traceback)
                return outcome
        finally:
            await launcher.close()

    return asyncio.run(main())


def committed(folder: Path) -> dict[int, Counter[int]]:
    """How often each sample went into the state that survived, by epoch.

    A rank writes down its samples before the gradients are summed, and the step when they were. If the only rank that
    got so far was killed then, the others have made the step again, in a later generation: that one counts.
    """
    tried: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
    generation_of: dict[tuple[int, ...], int] = {}
    for log in folder.glob("steps-*.jsonl"):
        for line in log.read_text().splitlines():
            said = json.loads(line)
            if "try" in said:
                tried[tuple(said["try"]), said["generation"]] += said["samples"]
            else:
                place = tuple(said["commit"])
                generation_of[place] = max(generation_of.get(place, 0), said["generation"])
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for place, generation in generation_of.items():
        counts[place[0]].update(tried[place, generation])
    return counts


async def churn(job: Coordinator, rng: random.Random, events: int) -> Counter[str]:
    """Random joins, leaves, kills and hangs; each is done when the one before has shown its effect or soon after."""
    done: Counter[str] = Counter()
    while sum(done.values()) < events:
        nodes = [name for name in job.nodes if not job.roster.is_leaving(name)]
        training = [name for name in nodes if name in job.members]
        action = rng.choices(["join", "leave", "kill", "stop"], [6, 2, 3, 1])[0]
        if action == "join" and len(job.nodes) < 8:
            await job.add(1)
        elif action == "leave" and len(training) > 1:
            job.remove(rng.choice(training))
        elif action in ("kill", "stop") and len(training) > 1:
            victims = rng.sample(training, 2 if len(training) > 3 and rng.random() < 0.2 else 1)
            for victim in victims:
                job.signal(victim, signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        else:
            await job.until(lambda: len(job.members) > 1 or len(job.nodes) < 8, 60, "room for something to happen")
            if len(training) <= 1 and len(job.nodes) < 8:
                await job.add(1)
                done["join"] += 1
            continue
        done[action] += 1
        # Sometimes in a burst, sometimes after training has gone on for a few steps.
        if rng.random() < 0.7:
            seen = max((r.step for n in job.nodes if isinstance(r := job.report(n), Report)), default=0)
            await job.until(
                lambda seen=seen: any(isinstance(r := job.report(n), Report) and r.step > seen + 2 for n in job.nodes),
                60,
                f"progress after {done} (step {seen}, members {job.members}, nodes {job.nodes})",
            )
    return done


def descriptors_and_threads(pid: int) -> tuple[int, int]:
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def test_chaos_changes_nothing_of_what_is_computed(tmp_path: Path) -> None:
    alone, disturbed = tmp_path / "alone", tmp_path / "disturbed"
    alone.mkdir()
    disturbed.mkdir()

    async def undisturbed(job: Coordinator) -> None:
        await job.add(1)

    epochs = "60"
    assert play(undisturbed, alone, [WORKER, str(alone), epochs, "0"]).status == "done"

    happened: Counter[str] = Counter()
    pids: list[int] = []
    worlds: set[int] = set()

    def watch(happening: Happening) -> None:
        if isinstance(happening.message, Report) and happening.message.world:
            worlds.add(happening.message.world)

    async def chaos(job: Coordinator) -> None:
        await job.add(3)
        await job.until(lambda: len(job.members) >= 2, 60, "the first generation")
        happened.update(await churn(job, random.Random(7), 40))
        pids.extend(job.pid(name) for name in job.nodes)

    outcome = play(chaos, disturbed, [WORKER, str(disturbed), epochs, "0.12"], watch=watch)
    assert outcome.status == "done", outcome
    assert sum(happened.values()) >= 40
    assert min(happened[kind] for kind in ("join", "leave", "kill", "stop")) >= 1
    assert len(worlds) >= 3

    counts = committed(disturbed)
    assert sorted(counts) == list(range(int(epochs)))
    for epoch, counter in counts.items():
        assert counter == Counter(range(600)), f"epoch {epoch}"

    (expected,) = (torch.load(path) for path in alone.glob("final-*.pt"))
    finals = [torch.load(path) for path in disturbed.glob("final-*.pt")]
    assert finals
    for final in finals:
        assert final["lr"] == expected["lr"]
        for name, weight in final["model"].items():
            assert torch.equal(weight, finals[0]["model"][name])
            assert (weight - expected["model"][name]).abs().max() < 1e-12
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
