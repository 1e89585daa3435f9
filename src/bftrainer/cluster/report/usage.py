"""A usage report counts node time, GPU time and samples by trainer and owner, from the event log.

The report covers a span of time. Node time is counted as held, used and computing. GPU time is that of the GPUs of the
same nodes; a node without GPUs has none. `bftrainer report` asks for a `UsageReport`. Times are whole microseconds
here, so that sums are exact: the node time of all owners plus the unused node time equals the node time of the pool, to
the last digit, and so does the GPU time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from bftrainer.cluster.report.log_gaps import here_at_the_cut, lost_while_away
from bftrainer.cluster.report.step_function import StepFunction
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.store.events import (
    Decided,
    NodeGpusChanged,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    Rescaled,
    StateChanged,
    kinds_of,
)
from bftrainer.cluster.store.replay import POOL_EVENTS, PoolReplay, Replayed
from bftrainer.cluster.store.rows import TrainerRow
from bftrainer.cluster.store.store import Store
from bftrainer.core.node_time import GpuCounts
from bftrainer.core.trace import Window, utc
from bftrainer.errors import InputError

KINDS = kinds_of(*POOL_EVENTS, NodeGpusChanged, StateChanged, Decided, Rescaled)
_STANDS = ("queued", "starting", "waiting", *FINISHED)
"""States in which a trainer does not compute."""
_MICRO = 1_000_000


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of one trainer within the window."""

    trainer: str
    name: str
    owner: str
    state: str
    """State now, not at the end of the window."""
    used_us: int
    """Node time that was assigned to the trainer."""
    computing_us: int
    """Part of it in which its members trained. In the rest they started, loaded or waited for each other."""
    samples: float
    """Counted where the counts are known, else distributed in proportion to computing node time."""
    rescales: int
    preemptions: int
    finished: bool
    """True if the trainer ended within the window."""
    gpu_us: int = 0
    """GPU time of the nodes that were assigned to the trainer."""


@dataclass(frozen=True, slots=True)
class OwnerUsage:
    """Usage of all trainers of one owner."""

    owner: str
    trainers: int
    finished: int
    used_us: int
    computing_us: int
    samples: float
    rescales: int
    preemptions: int
    gpu_us: int


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Usage of the pool and of all trainers within a window."""

    window: Window
    """The part of the requested window that the log covers."""
    pool_us: int
    """Node time of the pool."""
    unused_us: int
    """Part of it that was assigned to no trainer."""
    most_nodes: int
    joined: int
    left: int
    decisions: int
    trainers: tuple[Usage, ...]
    """Trainers that had nodes, or ended, within the window."""
    notes: tuple[str, ...] = ()
    """Remarks for the reader of the report."""
    pool_gpu_us: int = 0
    """GPU time of the pool."""
    unused_gpu_us: int = 0
    """Part of it that was assigned to no trainer."""

    @property
    def gpu_us(self) -> int:
        """GPU time that was assigned to trainers."""
        return sum(one.gpu_us for one in self.trainers)

    @property
    def used_us(self) -> int:
        """Node time that was assigned to trainers."""
        return sum(one.used_us for one in self.trainers)

    @property
    def computing_us(self) -> int:
        """Node time in which trainers trained."""
        return sum(one.computing_us for one in self.trainers)

    @property
    def samples(self) -> float:
        """Samples that trainers made."""
        return sum(one.samples for one in self.trainers)

    def owners(self) -> list[OwnerUsage]:
        """Return the usage by owner, the largest first."""
        mine: dict[str, list[Usage]] = {}
        for one in self.trainers:
            mine.setdefault(one.owner, []).append(one)
        shares = [
            OwnerUsage(
                owner,
                len(rows),
                sum(row.finished for row in rows),
                sum(row.used_us for row in rows),
                sum(row.computing_us for row in rows),
                sum(row.samples for row in rows),
                sum(row.rescales for row in rows),
                sum(row.preemptions for row in rows),
                sum(row.gpu_us for row in rows),
            )
            for owner, rows in mine.items()
        ]
        return sorted(shares, key=lambda share: (-share.used_us, share.owner))


def account(
    store: Store, start: float | None = None, end: float | None = None, *, now: float | None = None
) -> UsageReport:
    """Read the log and return the usage from `start` to `end`.

    `now` is when the present nodes were last seen, if a controller runs; without it, the log ends with its last event.
    """
    with store.transaction():  # one consistent view, whatever is written meanwhile
        span = store.event_span()
        ends = [*store.events(after=span.first - 1, limit=1), *store.events(limit=1)]
        until = max([now or 0.0, *(one.time for one in ends)])
        if not ends or until <= ends[0].time:
            raise InputError("nothing has happened yet: there is nothing to report")
        first = ends[0]
        asked = (first.time if start is None else start, until if end is None else end)
        if asked[1] <= asked[0]:
            raise InputError(f"the end of a report must be after its start, but got {utc(asked[0])} to {utc(asked[1])}")
        if asked[0] >= until or asked[1] <= first.time:
            raise InputError("the log has no events in that time; see `bftrainer events`, or omit --from and --to")
        window = Window(max(asked[0], first.time), min(asked[1], until))
        notes = []
        if start is not None and start < first.time:
            dropped = ", and older events were dropped (trainers.keep_events, retention)" if span.trimmed else ""
            notes.append(f"the log begins after the requested start{dropped}")
        if end is not None and end > until:
            notes.append(f"the log ends before the requested end, at {utc(until)} UTC")
        lost = {node: [_us(time) for time in times] for node, times in lost_while_away(store).items()}
        totals = _UsageTotals(_us(window.start), _us(window.end), lost)
        if span.trimmed:
            if window.start == first.time:
                notes.append("samples of trainers that began before the log does are estimates")
            totals.begin(_us(first.time), here_at_the_cut(store, first.time))
        for at in PoolReplay().read(store.all_events(KINDS)):
            totals.take(at)
        totals.close(_us(until))
        rows = store.trainers(brief=True)
        points = {row.id: store.points(row.id) for row in rows if totals.straddles(row)}
    used = [totals.usage(row, points.get(row.id, ()), until) for row in rows]
    shown = tuple(one for one in used if one.used_us or one.samples or one.finished)
    return UsageReport(
        window,
        totals.pool_us,
        totals.unused_us,
        totals.most,
        totals.joined,
        totals.left,
        totals.decisions,
        shown,
        tuple(notes),
        totals.pool_gpu_us,
        totals.unused_gpu_us,
    )


@dataclass(slots=True)
class _Trainer:
    given: StepFunction = field(default_factory=StepFunction)
    gpus: StepFunction = field(default_factory=StepFunction)
    computing: StepFunction = field(default_factory=StepFunction)
    nodes: set[str] = field(default_factory=set)
    world: int = 0
    rescales: int = 0
    preemptions: int = 0


class _UsageTotals:
    """Reads the log from its beginning and adds up node time and samples within a window."""

    def __init__(self, start: int, end: int, lost_while_away: dict[str, list[int]]) -> None:
        self.start, self.end = start, end
        self._lost_while_away = lost_while_away
        self.pool_us = self.unused_us = self.most = self.joined = self.left = self.decisions = 0
        self.pool_gpu_us = self.unused_gpu_us = 0
        self._gpus = GpuCounts()
        """GPUs of the nodes that count."""
        self._gpus_used = 0
        self._now = 0
        self._here: set[str] = set()
        """Nodes that count: not those of a dry run, and not those that left while no controller ran."""
        self._user: dict[str, str] = {}
        """Trainer by node, for nodes that are in the pool."""
        self._of: dict[str, _Trainer] = {}
        self._done: set[str] = set()

    def begin(self, time: int, here: Mapping[str, int]) -> None:
        """Set the nodes that were in the pool where a trimmed log begins, and how many GPUs each has."""
        self._now = time
        self._here = set(here)
        for node, gpus in here.items():
            self._gpus.set(node, gpus)

    def take(self, at: Replayed) -> None:
        """Apply one event."""
        time = max(_us(at.time), self._now)  # a clock may be set back
        away = self._lost_while_away
        for node in [node for node in away if node in self._here]:
            if away[node] and away[node][0] <= time:
                self._pass(max(away[node].pop(0), self._now))
                self._leave(node)
        self._pass(time)
        within = self.start <= time <= self.end
        match at.event:
            case NodeJoined(node=node, agent=agent, gpus=gpus):
                # An absence before this time is void: the node had left by announcement.
                away[node] = [left for left in away.get(node, ()) if left >= time]
                if agent != "none":  # a dry run holds nothing
                    self._here.add(node)
                    self._set_gpus(node, gpus)
                    self.joined += within
            case NodeGpusChanged(node=node, gpus=gpus) if node in self._here:
                self._set_gpus(node, gpus)
            case NodeLeaving(node=node) | NodeLeft(node=node) if at.lost and node in self._here:
                self.left += within
                self._leave(node, preempted=within)
            case Decided(nodes=nodes):
                self.decisions += within
                self._assign(nodes)
            case Rescaled() as rescale:
                one = self._of.setdefault(rescale.trainer, _Trainer())
                one.rescales += within and rescale.why != "start"
                paused = min(_us(rescale.pause_s or 0.0), time)
                one.computing.stand_still(time - paused, time)
                one.world = rescale.world
                self._count(one)
            case StateChanged(trainer=trainer, to=to):
                self._moved(trainer, to)

    def close(self, time: int) -> None:
        """End the log at `time`."""
        self._pass(max(time, self._now))

    def straddles(self, row: TrainerRow) -> bool:
        """Return whether only part of the trainer's samples may lie within the window."""
        starts, ends = _us(row.submitted) < self.start, row.ended is None or _us(row.ended) > self.end
        return row.id in self._of and (starts or ends)

    def usage(self, row: TrainerRow, points: Sequence[tuple[float, int]], until: float) -> Usage:
        """Return the usage of one trainer within the window."""
        one = self._of.get(row.id) or _Trainer()
        finished = row.ended is not None and self.start <= _us(row.ended) <= self.end
        ended = row.ended if row.ended is not None else until
        # Samples that a loss took back do not count, not even in the window in which they were first made.
        known = [(0.0, 0), *((at, min(made, row.samples)) for at, made in points if at < ended), (ended, row.samples)]
        counted = list(zip((_us(at) for at, _ in known), accumulate((m for _, m in known), max), strict=True))
        made = _made(one, counted, self.end) - _made(one, counted, self.start)
        return Usage(
            row.id,
            row.name,
            row.owner,
            row.state,
            one.given.until(self.start, self.end),
            one.computing.until(self.start, self.end),
            made if abs(made - round(made)) > 1e-6 else round(made),
            one.rescales,
            one.preemptions,
            finished,
            one.gpus.until(self.start, self.end),
        )

    def _pass(self, time: int) -> None:
        """Add up node time until `time`."""
        span = min(time, self.end) - max(self._now, self.start)
        if span > 0:
            self.most = max(self.most, len(self._here))
            self.pool_us += len(self._here) * span
            self.unused_us += (len(self._here) - len(self._user)) * span
            self.pool_gpu_us += self._gpus.total * span
            self.unused_gpu_us += (self._gpus.total - self._gpus_used) * span
        self._now = max(self._now, time)

    def _set_gpus(self, node: str, gpus: int) -> None:
        self._gpus.set(node, max(gpus, 0))
        if (trainer := self._user.get(node)) is not None:
            self._count(self._of[trainer])

    def _leave(self, node: str, *, preempted: bool = False) -> None:
        self._here.discard(node)
        self._gpus.set(node, 0)
        trainer = self._user.pop(node, None)
        if trainer is not None:
            one = self._of[trainer]
            one.nodes.discard(node)
            one.preemptions += preempted
            self._count(one)

    def _assign(self, nodes: Mapping[str, Sequence[str]]) -> None:
        changed: dict[str, set[str]] = {trainer: set() for trainer in set(self._user.values()) - nodes.keys()}
        for trainer, given in nodes.items():
            one = self._of.setdefault(trainer, _Trainer())
            same = len(given) == len(one.nodes) and one.nodes.issuperset(given)
            if not same and trainer not in self._done:
                changed[trainer] = self._here.intersection(given)
        for trainer in changed:  # all nodes are given up before any is taken
            for node in self._of[trainer].nodes:
                del self._user[node]
        for trainer, mine in changed.items():
            self._of[trainer].nodes = mine
            self._user |= dict.fromkeys(mine, trainer)
            self._count(self._of[trainer])

    def _moved(self, trainer: str, state: str) -> None:
        one = self._of.get(trainer)
        if state in FINISHED:
            self._done.add(trainer)
        if one is None or state not in _STANDS:
            return
        one.world = 0
        if state in FINISHED:
            for node in one.nodes:
                self._user.pop(node, None)
            one.nodes = set()
        self._count(one)

    def _count(self, one: _Trainer) -> None:
        gpus = self._gpus.of(one.nodes)
        self._gpus_used += gpus - one.gpus.values[-1]
        one.given.set(self._now, len(one.nodes))
        one.gpus.set(self._now, gpus)
        one.computing.set(self._now, min(one.world, len(one.nodes)))


def _made(one: _Trainer, known: Sequence[tuple[int, int]], time: int) -> float:
    """Return the samples made up to a time.

    They are known at some times; in between they are distributed in proportion to computing node time.
    """
    after = bisect_right(known, time, key=lambda point: point[0])
    if after == len(known):
        return float(known[-1][1])
    (start, before), (end, most) = known[after - 1], known[after]
    # Scripts that do not report their members: in proportion to the assigned node time.
    steps = one.computing if one.computing.until(start, end) else one.given
    whole = steps.until(start, end)
    return before + (most - before) * (steps.until(start, time) / whole if whole else 0.0)


def _us(time: float) -> int:
    return round(time * _MICRO)


def hours(micro: int) -> float:
    """Convert microseconds of node time or GPU time to hours."""
    return micro / (3600 * _MICRO)
