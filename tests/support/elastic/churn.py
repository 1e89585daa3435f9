"""Disturbs a job on eight fake nodes by joins, leaves, kills and hangs, and checks what it has computed all the same.

`test_chaos.py` does so once, `soak.py` for as long as one likes. Nodes may have several ranks. Kills and hangs then hit
a whole node or one rank of it; either way the node is lost as a unit.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening
from bftrainer.elastic.protocol import Done, Failed, Formed, Report
from support.elastic.jobs import SETTINGS, on, play, script
from support.elastic.ledger import News, committed, same_as_alone

WORKER = script("chaos_worker.py")
EVENTS = ["join"] * 16 + ["leave"] * 9 + ["kill"] * 11 + ["stop"] * 4
WAIT_S = 60.0
"""Nothing that is waited for takes that long on a machine that works."""


@dataclass(slots=True)
class Account:
    """What was done to a job, and what came of it."""

    counts: Counter[str] = field(default_factory=Counter)
    """Events by kind. A kill or stop of two workers counts twice."""
    single: Counter[str] = field(default_factory=Counter)
    """Of these, the kills and stops that hit only one of a node's ranks, by kind."""
    extra_joins: int = 0
    """Nodes that came beyond the events, so that there is somebody to take away."""
    struck: dict[str, int] = field(default_factory=dict)
    """Nodes that were killed or stopped, and by which signal."""
    told: set[str] = field(default_factory=set)
    """Nodes that were told to leave."""
    blows: list[tuple[str, float, int]] = field(default_factory=list)
    """Kills and stops: the kind, when, and the generation of that time."""
    pids: set[int] = field(default_factory=set)
    formed: dict[str, int] = field(default_factory=dict)
    """The last generation that each node has formed: from then on it has the state."""
    worlds: set[int] = field(default_factory=set)
    """How many nodes have trained together."""
    silent: list[str] = field(default_factory=list)
    """Nodes that were taken for lost though nothing was done to them: the machine was too slow to let them report."""
    ended: list[str] = field(default_factory=list)
    """Nodes that ended without a reason."""
    errors: list[str] = field(default_factory=list)
    over: bool = False
    """Whether the training is complete. Newcomers are ended then."""

    def watch(self, happening: Happening) -> None:
        """Hear what happens to the job."""
        node, what = happening.node, happening.what
        if isinstance(happening.message, Formed):
            self.worlds.add(happening.message.world)
            self.formed[node] = happening.message.generation
        if isinstance(happening.message, Failed):
            self.errors.append(happening.message.traceback or happening.message.error)
        if isinstance(happening.message, Done):
            self.over = True
        if what == "silent" and node not in self.struck:
            self.silent.append(node)
        reasons = {"ended with status 0"}
        if node in self.struck or node in self.told or node in self.silent:
            reasons.add("ended with status -9")
        if what.startswith("ended") and what not in reasons and not self.over:
            self.ended.append(f"{node} {what}")

    def pauses(self, folder: Path) -> dict[str, list[float]]:
        """Seconds from each kill or stop to the next commit of the survivors, by kind.

        Where a stopped worker was not noticed yet, or another one was stopped meanwhile, the pause is that of a stop.
        """
        commits = sorted((said["at"], said["generation"]) for said in News(folder).read() if "commit" in said)
        found: dict[str, list[float]] = defaultdict(list)
        for kind, at, generation in self.blows:
            after = next((when for when, of in commits if when > at and of > generation), None)
            if after is not None:
                stopped = any(other == "stop" and at <= when < after for other, when, _ in self.blows)
                found["stop" if stopped else kind].append(after - at)
        return found


class Churn:
    """Joins, leaves, kills and hangs in random order, some in a burst, some after training went on for a few steps.

    One healthy node at least is left at any time: without any the state would be gone, which is another test. A worker
    that takes long to join does not have the state yet: with `holders_only` no such node is counted or hit.
    """

    def __init__(
        self, job: Coordinator, rng: random.Random, folder: Path, account: Account, *, holders_only: bool = False
    ) -> None:
        self._job = job
        self._rng = rng
        self._folder = folder
        self._account = account
        self._holders_only = holders_only
        self._news = News(folder)
        self._steps = 0
        self._limit = -1

    async def run(self, events: list[str]) -> None:
        job, rng, account = self._job, self._rng, self._account
        self._allow(0)
        await job.add(3)
        await self._until(lambda: len(job.members) >= 2, "the first generation")
        events = rng.sample(events, len(events))
        while events:
            while len(self._healthy()) < 3 and len(job.nodes) < 8:
                await job.add(1)
                account.extra_joins += 1
            await self._until(lambda: any(map(self._possible, events)), f"a chance for one of {events}")
            event = next(filter(self._possible, events))
            events.remove(event)
            await self._do(event)
            seen = self._steps
            self._allow(seen + 4)
            if rng.random() < 0.7:
                await self._until(lambda seen=seen: self._steps > seen + 2, f"progress after {event} at step {seen}")
        (self._folder / "hurry").touch()

    async def _do(self, event: str) -> None:
        job, rng, account = self._job, self._rng, self._account
        if event == "join":
            await job.add(1)
            account.counts[event] += 1
        elif event == "leave":
            node = rng.choice(self._training())
            account.told.add(node)
            account.counts[event] += 1
            job.remove(node)
        else:
            signum = signal.SIGKILL if event == "kill" else signal.SIGSTOP
            several = len(self._training()) > 3 and rng.random() < 0.2
            hanging = any(how == signal.SIGSTOP and node in job.roster for node, how in account.struck.items())
            kind = "stop" if hanging else event
            account.blows.append((kind, time.monotonic(), job.roster.going.id))
            for victim in rng.sample(self._training(), 2 if several else 1):
                account.struck[victim] = signum
                account.counts[event] += 1
                job.signal(victim, signum, self._rank_to_hit(event))

    def _rank_to_hit(self, event: str) -> int | None:
        """Every other time one rank of a node with several; None: all of them."""
        ranks = self._job.settings.ranks_per_node
        if ranks == 1 or self._account.counts[event] % 2 == 0:
            return None
        self._account.single[event] += 1
        return self._rng.randrange(ranks)

    def _healthy(self) -> list[str]:
        doomed = self._account.struck.keys() | self._account.told
        return [node for node in self._job.nodes if node not in doomed]

    def _training(self) -> list[str]:
        training = [node for node in self._healthy() if node in self._job.members]
        if not self._holders_only:
            return training
        return [node for node in training if self._account.formed.get(node) == self._job.roster.going.id]

    def _possible(self, event: str) -> bool:
        return len(self._job.nodes) < 8 if event == "join" else len(self._training()) > 1

    def _allow(self, step: int) -> None:
        """Let training run freely up to this step."""
        if step > self._limit:
            self._limit = step
            beside = self._folder / "limit.new"
            beside.write_text(str(step))
            beside.rename(self._folder / "limit")

    async def _describe(self) -> str:
        """How the job stands; the workers print to their logs where they are."""
        job, roster = self._job, self._job.roster
        for node in self._healthy():
            job.signal(node, signal.SIGUSR1)
        await asyncio.sleep(1.0)
        unready = [node for node in job.nodes if not roster.is_ready(node)]
        return f"nodes {job.nodes}, of them not ready {unready}, announced {roster.generation}, going {roster.going}"

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        await asyncio.sleep(0)  # what happened meanwhile is heard first
        while True:
            commits = [said["commit"][2] + 1 for said in self._news.read() if "commit" in said]
            self._steps = max([self._steps, *commits])
            if condition():
                return
            assert not self._account.errors, self._account.errors[0]
            job = self._job
            if any(job.roster.is_ready(node) and node not in job.members for node in job.nodes):
                self._allow(self._steps + 2)  # newcomers join at a step boundary
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not happen within {WAIT_S:g} s: {await self._describe()}")
            await asyncio.sleep(0.01)


def undisturbed(folder: Path, epochs: int) -> Path:
    """The same training on one node, to compare with."""
    folder.mkdir(parents=True)
    assert play(on(1), folder, [WORKER, str(folder), str(epochs), "0"]).status == "done"
    return folder


def disturb(
    folder: Path,
    seed: int,
    epochs: int,
    events: list[str],
    *,
    settings: CoordinatorSettings = SETTINGS,
    snapshots: bool = False,
    account: Account | None = None,
    argv: list[str] | None = None,
    preload: tuple[str, ...] = (),
    holders_only: bool = False,
) -> Account:
    """Train while all these events happen. `account` is filled in also where that fails. `argv` is another script."""
    folder.mkdir(parents=True)
    account = account or Account()

    jobs: list[Coordinator] = []

    async def scenario(job: Coordinator) -> None:
        jobs.append(job)
        await Churn(job, random.Random(seed), folder, account, holders_only=holders_only).run(events)

    def watch(happening: Happening) -> None:
        account.watch(happening)
        if happening.what == "started":
            account.pids |= {jobs[0].pid(happening.node, rank) for rank in range(settings.ranks_per_node)}
        if not isinstance(happening.message, Report):
            happenings.write(f"{happening.at:.3f} {happening.node} {happening.what} {happening.message or ''}\n")

    argv = argv or [WORKER, str(folder), str(epochs), "0.12", *(["--snapshots"] if snapshots else [])]
    with (folder / "happenings.txt").open("w", buffering=1) as happenings:
        outcome = play(scenario, folder, argv, settings=settings, watch=watch, preload=preload)
    assert outcome.status == "done", outcome
    return account


def check(folder: Path, alone: Path, epochs: int, account: Account) -> None:
    """Assert that the disturbed job took every sample once, computed what one node does, and left nothing behind."""
    assert len(account.worlds) >= 2  # how many sizes there were depends on when newcomers were ready
    counts = committed(folder)
    assert sorted(counts) == list(range(epochs))
    for epoch, counter in counts.items():
        assert counter == Counter(range(600)), f"epoch {epoch}"
    same_as_alone(alone, folder)
    assert account.ended == [], account.ended
    assert not [pid for pid in account.pids if Path(f"/proc/{pid}").exists()]
    assert leaks(folder) == []
    assert [path.name for path in (folder / "snapshots").glob(".*")] == []


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
