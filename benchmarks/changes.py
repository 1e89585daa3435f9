"""Measures how long an elastic job stands still when its nodes join, leave and are killed.

`rescale.py` and `gpu.py` use it. The workers train for ever and write down each commit: its time, the step and the
number of ranks.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening
from bftrainer.elastic.protocol import PAUSE_PARTS, Follow, Formed, Ready
from bftrainer.processes.launch import ProcessLauncher

HERE = Path(__file__).parent / "workers"
SAYS = "bftrainer: "
CHANGES = ("grow", "shrink", "kill")
DEADLINE_S = 180.0


def commits(folder: Path) -> list[tuple[float, int, int]]:
    """When a step was first committed, which, and by how many ranks; by time."""
    first: dict[int, tuple[float, int]] = {}
    for log in folder.glob("commits-*"):
        for line in log.read_text().splitlines():
            fields = line.split()
            if len(fields) == 3:
                at, step, world = float(fields[0]), int(fields[1]), int(fields[2])
                if step not in first or at < first[step][0]:
                    first[step] = (at, world)
    return sorted((at, step, world) for step, (at, world) in first.items())


def longest_gap(found: list[tuple[float, int, int]], begin: float, end: float) -> float:
    """The longest time without a commit between two moments."""
    times = [at for at, _, _ in found]
    before = [at for at in times if at <= begin]
    inside = [at for at in times if begin < at <= end]
    points = [before[-1] if before else begin, *inside]
    return max((b - a for a, b in pairwise(points)), default=0.0)


def changed_at(found: list[tuple[float, int, int]], world: int, begin: float) -> tuple[float, float]:
    """The last commit by another number of ranks than `world`, and the first by `world`, after a moment."""
    first = min(at for at, _, ranks in found if at > begin and ranks == world)
    return max(at for at, _, ranks in found if at < first), first


def median_gap(found: list[tuple[float, int, int]], begin: float, end: float) -> float:
    """The median time from one commit to the next between two moments."""
    times = [at for at, _, _ in found if begin < at <= end]
    return statistics.median(b - a for a, b in pairwise(times)) if len(times) > 1 else 0.0


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not happen within {DEADLINE_S:g} s")
        await asyncio.sleep(0.05)


async def settled(folder: Path, world: int, after: float, steps: int = 20) -> float:
    """Wait until so many ranks have committed some steps since a moment; the moment when they had."""
    found: list[float] = []

    def enough() -> bool:
        found[:] = [at for at, _, ranks in commits(folder) if at > after and ranks == world]
        return len(found) >= steps

    await until(enough, f"training on {world} ranks")
    return found[steps - 1]


@dataclass(frozen=True, slots=True)
class Shape:
    """How many nodes train all the time, how many others come and go at once, and how many ranks each node has."""

    nodes: int = 2
    changing: int = 1
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.nodes} → {self.most} nodes × {self.ranks} {'rank' if self.ranks == 1 else 'ranks'}"

    @property
    def most(self) -> int:
        """The most nodes at a time."""
        return self.nodes + self.changing


@dataclass(slots=True)
class Measured:
    """What was measured of the changes of one or several jobs of the same shape."""

    gaps: dict[str, list[float]] = field(default_factory=lambda: {change: [] for change in CHANGES})
    """The longest time without a commit around each change."""
    steps_s: dict[str, list[float]] = field(default_factory=lambda: {change: [] for change in CHANGES})
    """The median time from commit to commit after each change, without the first steps."""
    flow_shares: list[float] = field(default_factory=list)
    """The share of their normal rate that the others keep while newcomers follow, for each `grow` in which they do."""
    formed: dict[str, list[Formed]] = field(default_factory=lambda: {change: [] for change in CHANGES})
    stayed: dict[str, list[Formed]] = field(default_factory=lambda: {change: [] for change in CHANGES})
    """What those of them said that had trained before the change, and so know how long it took."""
    switches: dict[str, list[float]] = field(default_factory=lambda: {change: [] for change in CHANGES})
    """From the last commit before the change of ranks to the first after it. Another gap may be the longest one."""
    rate_shares: list[float] = field(default_factory=list)
    """The share of their normal rate that the others keep while newcomers start, for each `grow`."""
    starts_s: list[float] = field(default_factory=list)
    """From the start of newcomers until all of them are ready, for each `grow`."""
    said: Counter[str] = field(default_factory=Counter)
    """Lines in which BFTrainer told users something, such as whether newcomers followed; how often each was said."""

    def beyond_step_s(self, change: str) -> float:
        """The median of how much longer than a step one kind of change takes."""
        return statistics.median(gap - step for gap, step in zip(self.gaps[change], self.steps_s[change], strict=True))

    def pause_s(self, change: str) -> float:
        """The median pause of one kind of change."""
        return statistics.median(self.gaps[change])


class ChangingJob:
    """One elastic job of which nodes come and go."""

    job: Coordinator

    def __init__(self, folder: Path, shape: Shape, found: Measured, calm_s: float, steps: int) -> None:
        self._folder = folder
        self._shape = shape
        self._found = found
        self._calm_s = calm_s
        self._steps = steps
        self._change = ""
        """The kind of change that is under way; empty before the first one."""
        self._ready: dict[str, float] = {}
        """When each node became ready."""
        self._asked: dict[str, float] = {}
        """When each node asked for the state."""
        self._trained: set[str] = set()
        """The nodes that have trained."""

    def watch(self, happening: Happening) -> None:
        """Hear what happens to the job."""
        if isinstance(happening.message, Follow):
            self._asked.setdefault(happening.node, time.monotonic())
        if isinstance(happening.message, Ready):
            self._ready[happening.node] = time.monotonic()
        if isinstance(happening.message, Formed) and self._change:
            self._found.formed[self._change].append(happening.message)
            if happening.node in self._trained:
                self._found.stayed[self._change].append(happening.message)
        if isinstance(happening.message, Formed):
            self._trained.add(happening.node)

    async def begin(self) -> None:
        """Start the nodes that train all the time."""
        await self.job.add(self._shape.nodes)
        await self._settled(self._shape.nodes, 0.0)

    async def repeat(self) -> None:
        """Have nodes join and leave, then join and be killed."""
        for change in ("shrink", "kill"):
            nodes = await self._grow()
            await asyncio.sleep(self._calm_s)
            self._change, begin = change, time.monotonic()
            for node in nodes:
                self.job.remove(node) if change == "shrink" else self.job.signal(node, signal.SIGKILL)
            end = await self._settled(self._shape.nodes, begin)
            await until(lambda: len(self.job.nodes) == self._shape.nodes, "the end of the nodes that left")
            made = commits(self._folder)
            self._note(change, made, self._shape.nodes, begin, end)

    async def _grow(self) -> tuple[str, ...]:
        calm = time.monotonic()
        await asyncio.sleep(self._calm_s)
        self._change, begin = "grow", time.monotonic()
        nodes = await self.job.add(self._shape.changing)
        end = await self._settled(self._shape.most, begin)
        made, found = commits(self._folder), self._found
        self._note("grow", made, self._shape.most, begin, end)
        ready = max(self._ready[node] for node in nodes)
        found.starts_s.append(ready - begin)
        if normal := sum(calm < at <= begin for at, _, _ in made) / (begin - calm):
            meanwhile = sum(begin < at <= ready for at, _, _ in made) / (ready - begin)
            found.rate_shares.append(meanwhile / normal)
            asked = [self._asked[node] for node in nodes if node in self._asked]
            if asked:
                flowing = sum(min(asked) < at <= ready for at, _, _ in made) / (ready - min(asked))
                found.flow_shares.append(flowing / normal)
        return nodes

    def _note(self, change: str, made: list[tuple[float, int, int]], nodes: int, begin: float, end: float) -> None:
        found = self._found
        found.gaps[change].append(longest_gap(made, begin, end))
        found.steps_s[change].append(self._step_s(made, nodes, end))
        before, after = changed_at(made, nodes * self._shape.ranks, begin)
        found.switches[change].append(after - before)

    def _step_s(self, made: list[tuple[float, int, int]], nodes: int, end: float) -> float:
        """The median time of the last steps, on so many nodes."""
        world = nodes * self._shape.ranks
        last = [row for row in made if row[0] <= end and row[2] == world][-self._steps + 1 :]
        return median_gap(last, 0.0, end)

    async def _settled(self, nodes: int, after: float) -> float:
        return await settled(self._folder, nodes * self._shape.ranks, after, self._steps)


async def measure_changes(
    script: Callable[[str], Sequence[str]],
    launcher: ProcessLauncher,
    shape: Shape,
    settings: CoordinatorSettings,
    found: Measured,
    *,
    repetitions: int = 1,
    calm_s: float = 2.0,
    steps: int = 20,
) -> None:
    """Run a job, have its nodes come and go, and add what was measured to `found`.

    `script` returns the worker's command for a folder. `calm_s` is undisturbed training before each change, which tells
    the normal rate. A change is over after so many `steps` on the new number of ranks.
    """
    with tempfile.TemporaryDirectory() as name:
        changing = ChangingJob(Path(name), shape, found, calm_s, steps)
        settings = replace(settings, ranks_per_node=shape.ranks)
        async with Coordinator(
            script(name), launcher, nodes=(1, shape.most), settings=settings, watch=changing.watch
        ) as job:
            changing.job = job
            await changing.begin()
            for _ in range(repetitions):
                await changing.repeat()
            for log in job.folder.glob("*.log"):
                found.said.update(line for line in log.read_text(errors="replace").splitlines() if SAYS in line)


def in_parts(side: Measured, change: str) -> dict[str, Any]:
    """One kind of change with and without the step in it."""
    return {
        "pause_s": round(side.beyond_step_s(change), 4),
        "gap_s": round(side.pause_s(change), 4),
        "step_s": round(statistics.median(side.steps_s[change]), 4),
        "gaps_s": rounded(side.gaps[change]),
        "steps_s": rounded(side.steps_s[change]),
        "parts_s": parts_of(side.stayed[change]),
        "switches_s": rounded(side.switches[change]),
    }


def parts_of(said: list[Formed]) -> dict[str, float]:
    """The median of each part of the pauses that workers measured themselves."""
    known = [formed.parts for formed in said if formed.parts]
    return {part: round(statistics.median(parts[part] for parts in known), 4) for part in PAUSE_PARTS} if known else {}


def rounded(times: list[float], digits: int = 4) -> list[float]:
    """Times as they are printed."""
    return [round(time_s, digits) for time_s in times]
