"""Profiling measures the rate of a training script by node count, for `bftrainer profile`.

A script and sizes come in. One job on fake nodes of this machine grows from size to size while it trains, and shrinks
by one node at the end. A `ScriptProfile` comes out: rates, and the cost of growing and shrinking. The state of the job
is discarded.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bftrainer.core.curve import Curve
from bftrainer.elastic import protocol
from bftrainer.elastic.local.console import rescale
from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening, Outcome
from bftrainer.elastic.protocol import Formed
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes.launch import ColdLauncher, ProcessLauncher
from bftrainer.processes.warm import WarmLauncher
from bftrainer.util.text import last_line

LEAST_WINDOWS = 3
"""Least number of measurements whose median is a rate."""
PATIENCE_S = 180.0
"""Seconds that a size may take to start, and then to be measured, beyond the seconds asked for."""
MOST_NODES = 256
"""Limit of fake nodes, and of the ranks on all of them, because they are processes of one machine."""


@dataclass(frozen=True, slots=True)
class MeasuredSize:
    """Measurements at one size."""

    nodes: int
    rate: float
    """Samples per second."""
    pause_s: float | None
    """Seconds that the members stood still while the job grew to this size; None at the first size."""


@dataclass(frozen=True, slots=True)
class ScriptProfile:
    """Measurements of a script."""

    points: tuple[MeasuredSize, ...]
    up_s: float | None
    """Median pause of growing; None if the job did not grow."""
    down_s: float | None
    """Pause of shrinking by one node; None if the job could not shrink."""

    @property
    def curve(self) -> Curve:
        """The scaling curve through the measured sizes."""
        return Curve.through([point.nodes for point in self.points], [point.rate for point in self.points])

    def efficiency(self, point: MeasuredSize) -> float:
        """Return the rate per node, relative to that at the smallest size."""
        first = self.points[0]
        return point.rate / point.nodes / (first.rate / first.nodes)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the node counts of "1,2,4,8" or "1-8", in rising order."""
    sizes: set[int] = set()
    try:
        for part in text.split(","):
            low, dash, high = part.partition("-")
            first, last = int(low), int(high) if dash else int(low)
            if not 1 <= first <= last <= MOST_NODES:
                raise ValueError
            sizes.update(range(first, last + 1))
    except ValueError:
        raise InputError(
            f"`--nodes` must be node counts such as 1,2,4,8 or 1-8, from 1 to {MOST_NODES}, but got {text[:100]!r}"
        ) from None
    return tuple(sorted(sizes))


def check_ranks(ranks_per_node: int, sizes: Sequence[int]) -> None:
    """Raise an `InputError` if this machine would have to run no process on a node, or too many in all."""
    if ranks_per_node < 1:
        raise InputError(f"`--ranks-per-node` must be 1 or more, but got {ranks_per_node}")
    if ranks_per_node * sizes[-1] > MOST_NODES:
        what = f"{sizes[-1]} nodes with {ranks_per_node} ranks each"
        raise InputError(f"`--nodes` times `--ranks-per-node` must be at most {MOST_NODES}, but got {what}")


async def profile(
    script: Sequence[str],
    sizes: Sequence[int],
    *,
    seconds: float = 20.0,
    pace: str | None = None,
    threads: int = 1,
    ranks_per_node: int = 1,
    launcher: ProcessLauncher | None = None,
    patience_s: float = PATIENCE_S,
    progress: Callable[[int], None] = lambda size: None,
) -> ScriptProfile:
    """Run a script at each of the rising sizes for `seconds`, or longer if measuring takes longer.

    Each node has `ranks_per_node` processes. Sizes and rates are still those of nodes.
    `progress` is called with each size when the script trains at it. A `launcher` passed by the caller is not closed.
    """
    own = launcher is None
    used = launcher or (WarmLauncher() if importlib.util.find_spec("torch") is not None else ColdLauncher())
    # A profile neither resumes from an existing snapshot nor leaves one.
    environment = {protocol.SNAPSHOTS: "", protocol.PACE: pace or ""}
    settings = CoordinatorSettings(threads=threads, ranks_per_node=ranks_per_node, environment=environment)
    formed: dict[int, dict[str, Formed]] = {}

    def watch(news: Happening) -> None:
        if isinstance(news.message, Formed):
            formed.setdefault(news.message.generation, {})[news.node] = news.message

    try:
        async with Coordinator(script, used, nodes=(sizes[0], sizes[-1]), settings=settings, watch=watch) as job:
            session = _Session(job, formed, Path(script[0]).name, patience_s)
            points, ups = [], []
            for size in sizes:
                pauses = await session.grow(size)
                progress(size)
                points.append(MeasuredSize(size, await session.measure(size, seconds), pauses[-1] if pauses else None))
                ups += pauses
            down_s = await session.shrink() if len(sizes) > 1 else None
        return ScriptProfile(tuple(points), statistics.median(ups) if ups else None, down_s)
    finally:
        if own:
            await used.close()


class _Session:
    """The job being measured. The pause of a change is that of the members that trained before it."""

    def __init__(self, job: Coordinator, formed: dict[int, dict[str, Formed]], name: str, patience_s: float) -> None:
        self._job = job
        self._formed = formed
        self._name = name
        self._patience_s = patience_s
        self._ended = asyncio.ensure_future(job.wait())

    async def grow(self, size: int) -> list[float]:
        """Add nodes and wait until all train. Returns the pauses on the way."""
        before = self._job.roster.going.id
        await self._job.add(size - len(self._job.nodes))
        hint = "does it call bftrainer.elastic.init() and then train?"
        await self._until(lambda: self._trains(size), f"has not begun to train on {_nodes(size)}", hint, size)
        return self._pauses(before)

    async def measure(self, size: int, seconds: float) -> float:
        """Wait until the rate at the present size is known; return it in samples per second."""
        until = time.monotonic() + seconds
        await self._until(
            lambda: time.monotonic() >= until and len(self._rates(size)) > 0,
            f"has reported no rate on {_nodes(size)}",
            "does it call run.step() after each batch, or take longer than that for a few steps?",
            size,
            seconds,
        )
        return statistics.median(self._rates(size))

    async def shrink(self) -> float | None:
        """Remove one node with notice. Returns the pause of the others."""
        before, size = self._job.roster.going.id, len(self._job.members) - 1
        self._job.remove(self._job.members[-1])
        what = f"has not gone on after it shrank to {_nodes(size)}"
        await self._until(lambda: self._trains(size), what, "is it stuck?", size + 1)
        pauses = self._pauses(before)
        return pauses[-1] if pauses else None

    def _trains(self, size: int) -> bool:
        """Return whether the generation in force has `size` members, and all have formed."""
        going = self._job.roster.going
        return len(going.members) == size == len(self._formed.get(going.id, ()))

    def _pauses(self, before: int) -> list[float]:
        """Return the pauses of the generations that came after `before`."""
        pauses, trained = [], set(self._formed.get(before, ()))
        for number in sorted(number for number in self._formed if number > before):
            members = self._formed[number]
            if trained:
                known = [(formed, node in trained) for node, formed in members.items()]
                pauses.append(rescale(number, 0.0, known).pause_s)
            trained = set(members)
        return pauses

    def _rates(self, size: int) -> list[float]:
        """Return the rates at the present size of those members that have measured it often enough."""
        reports = [self._job.report(node) for node in self._job.members]
        return [
            report.rates[str(size)]
            for report in reports
            if report is not None and report.windows >= LEAST_WINDOWS and report.world == size
            if str(size) in report.rates
        ]

    async def _until(self, condition: Callable[[], bool], what: str, hint: str, size: int, extra_s: float = 0) -> None:
        timeout_s = self._patience_s + extra_s
        try:
            await self._job.until(lambda: self._ended.done() or condition(), timeout_s)
        except TimeoutError:
            raise BFTrainerError(f"{self._name} {what} within {timeout_s:g} s; {hint}") from None
        if self._ended.done():
            self._say_end(self._ended.result(), size)

    def _say_end(self, outcome: Outcome, size: int) -> None:
        if outcome.status == "failed":
            line = last_line(outcome.traceback)
            last = f" ({line[:200]})" if line and line not in outcome.error else ""
            raise BFTrainerError(f"{self._name} failed: {outcome.error}{last}")
        raise BFTrainerError(
            f"{self._name} ended before it could be measured on {_nodes(size)}; give it more epochs, or fewer --seconds"
        )


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count > 1 else ''}"
