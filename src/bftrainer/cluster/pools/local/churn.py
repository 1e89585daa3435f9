"""A churn schedule says when virtual nodes join and leave.

Settings come in, a `Schedule` of timed actions comes out. `pool.py` carries the actions out on the wall clock. A
schedule is fixed, scripted, or made from a trace. The same settings always give the same schedule, so a restarted
controller continues at the current time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np

from bftrainer.cluster.pools.keeper import NODE_NAME
from bftrainer.core.trace import Floats, Trace
from bftrainer.errors import InputError
from bftrainer.traces.files import is_csv, is_parquet, load_trace
from bftrainer.traces.source import opened
from bftrainer.traces.synthetic.synth import PROFILES, synthesise
from bftrainer.util.suggest import closest

ActionKind = Literal["join", "leave", "kill"]
DRAWS = 32
"""Number of random choices of trace nodes that are compared."""
MOST_ACTIONS = 100_000


@dataclass(frozen=True, slots=True)
class Action:
    """A node joins, leaves after a warning, or is killed without one."""

    time_s: float
    kind: ActionKind
    node: str

    def apply(self, nodes: set[str]) -> None:
        """Add the node to the present `nodes`, or remove it."""
        if self.kind == "join":
            nodes.add(self.node)
        else:
            nodes.discard(self.node)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The nodes that are present at the start, and the timed actions from then on."""

    nodes: tuple[str, ...]
    """All nodes that are ever present, in order."""
    start: frozenset[str]
    actions: tuple[Action, ...] = ()
    """In order of time. With a period, all lie within it and lead back to the start."""
    period_s: float | None = None
    """Time after which the schedule repeats. None: the nodes after the last action stay."""

    def present(self, time_s: float) -> frozenset[str]:
        """Return the nodes that should be present at a time."""
        _, within = self._lap(time_s)
        nodes = set(self.start)
        for action in self.actions[: bisect_right(self.actions, within, key=lambda action: action.time_s)]:
            action.apply(nodes)
        return frozenset(nodes)

    def between(self, after_s: float, until_s: float) -> Iterator[Action]:
        """Yield the actions after one time up to and including another, in order."""
        for action in self._from(after_s):
            if action.time_s > until_s:
                return
            yield action

    def next_time(self, after_s: float) -> float | None:
        """Return the time of the next action; None if there is none."""
        return next((action.time_s for action in self._from(after_s)), None)

    def _lap(self, time_s: float) -> tuple[int, float]:
        if self.period_s is None or time_s < self.period_s:
            return 0, time_s
        lap = math.floor(time_s / self.period_s)
        return lap, time_s - lap * self.period_s

    def _from(self, after_s: float) -> Iterator[Action]:
        if not self.actions:
            return
        lap, _ = self._lap(after_s)
        # Rounding may put a time into the wrong lap, so begin one lap earlier and compare.
        lap = max(lap - 1, 0)
        while True:
            begin = lap * self.period_s if self.period_s is not None else 0.0
            for action in self.actions:
                if begin + action.time_s > after_s:
                    yield Action(begin + action.time_s, action.kind, action.node)
            if self.period_s is None:
                return
            lap += 1


def make_schedule(
    churn: str | Sequence[object],
    nodes: int,
    *,
    speed: float = 1.0,
    hours: float = 24.0,
    seed: int = 0,
    abrupt: float = 0.0,
    loop: bool = False,
) -> Schedule:
    """Return the schedule for `churn`: `fixed`, a list of actions, the name of a profile, or a file.

    A file holds a trace or actions.
    """
    names = tuple(f"node-{i}" for i in range(1, nodes + 1))
    if not isinstance(churn, str):
        return scripted([(f"action {i}", row) for i, row in enumerate(churn, 1)], names, speed, loop)
    if churn == "fixed":
        return Schedule(names, frozenset(names))
    if churn in PROFILES:
        return after_trace(synthesise(churn, hours=hours, seed=seed), names, speed, seed, abrupt, loop)
    path = Path(churn)
    if not path.exists():
        near = closest(churn, ("fixed", *PROFILES))
        raise InputError(
            f"`churn` must be fixed, a profile ({', '.join(PROFILES)}), or a file with a trace or with actions, but "
            f"got {churn!r}, and there is no such file" + (f"; did you mean {near!r}?" if near else "")
        )
    with opened(path) as source:
        head = source.head()
        if not (is_parquet(head) or is_csv(head)):
            lines = ((number, line.partition("#")[0].strip()) for number, line in source.lines())
            return scripted([(f"line {number}", line) for number, line in lines if line], names, speed, loop)
    return after_trace(load_trace(path), names, speed, seed, abrupt, loop)


def scripted(
    rows: Iterable[tuple[str, object]], names: tuple[str, ...], speed: float = 1.0, loop: bool = False
) -> Schedule:
    """Return a schedule from rows such as `12.5 leave node-3`, each with its place in the input.

    The nodes `names` are present at the start, except those whose first action is to join.
    """
    placed = [(where, _action(where, row, speed)) for where, row in rows]
    placed.sort(key=lambda pair: pair[1].time_s)
    if len(placed) > MOST_ACTIONS:
        raise InputError(f"`churn` must have at most {MOST_ACTIONS} actions, but got {len(placed)}")
    first = {action.node: action.kind for _, action in reversed(placed)}
    start = {node for node in (*names, *first) if first.get(node) != "join"}
    present, seen = set(start), set[str]()
    for where, action in placed:
        stranger = action.node not in seen and action.node not in names and action.kind != "join"
        if stranger or (action.kind == "join") == (action.node in present):
            state = "there already" if action.kind == "join" else "not there"
            raise InputError(f"{where}: {action.node} cannot {action.kind} at {action.time_s:g} s: it is {state} then")
        seen.add(action.node)
        action.apply(present)
    actions = tuple(action for _, action in placed)
    every = tuple(dict.fromkeys((*names, *(action.node for action in actions))))
    return _looped(Schedule(every, frozenset(start), actions), actions[-1].time_s if actions else 0.0, loop)


def _action(where: str, row: object, speed: float) -> Action:
    words = row.split() if isinstance(row, str) else list(row) if isinstance(row, list | tuple) else []
    wrong = InputError(
        f"{where}: an action must be like `12.5 leave node-3` (join, leave or kill), but got {row!r:.200}"
    )
    if len(words) != 3 or isinstance(words[0], bool) or words[1] not in get_args(ActionKind):
        raise wrong
    try:
        time_s = float(words[0])
    except (TypeError, ValueError):
        raise wrong from None
    if not (math.isfinite(time_s) and time_s >= 0) or not NODE_NAME.fullmatch(str(words[2])):
        raise wrong
    return Action(time_s / speed, cast(ActionKind, words[1]), str(words[2]))


def after_trace(
    trace: Trace, names: tuple[str, ...], speed: float, seed: int = 0, abrupt: float = 0.0, loop: bool = False
) -> Schedule:
    """Return the fragments of some nodes of a trace as a schedule, `speed` times as fast.

    A share `abrupt` of the departures is unannounced.
    """
    if len(trace.nodes) < len(names):
        raise InputError(f"`nodes` must be at most the {len(trace.nodes)} nodes of the trace, but got {len(names)}")
    rng = np.random.default_rng(seed)
    chosen = choose(trace, len(names), rng)
    name = dict(zip(chosen, names, strict=True))
    rows = [row for row, node in enumerate(trace.node.tolist()) if node in name]
    begin = trace.window.start
    start, actions = set[str](), list[Action]()
    for row in rows:
        node = name[int(trace.node[row])]
        if trace.start[row] <= begin:
            start.add(node)
        else:
            actions.append(Action(float(trace.start[row] - begin) / speed, "join", node))
        sudden = rng.random() < abrupt
        if not trace.open[row]:
            actions.append(Action(float(trace.end[row] - begin) / speed, "kill" if sudden else "leave", node))
    # A fragment may begin when the previous one ends: leaves come first.
    actions.sort(key=lambda action: (action.time_s, action.kind == "join"))
    if len(actions) > MOST_ACTIONS:
        raise InputError(f"the trace has {len(actions)} changes of {len(names)} nodes: take a shorter one")
    return _looped(Schedule(names, frozenset(start), tuple(actions)), trace.window.seconds / speed, loop)


def choose(trace: Trace, count: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Choose nodes of a trace so that the number present varies, and is rarely zero.

    On a large machine most nodes are busy most of the time. So nodes are drawn with a probability that rises with their
    idle time, and the best of several draws is taken: the one with the largest standard deviation of the count times
    the share of time in which the count is not zero.
    """
    idle_s = np.bincount(trace.node, weights=trace.lengths, minlength=len(trace.nodes))
    chance = idle_s + 1e-3 * (idle_s.sum() + 1.0) / len(idle_s)  # never zero, or too few nodes could be drawn
    chance /= chance.sum()
    draws = [np.sort(rng.choice(len(chance), count, replace=False, p=chance)) for _ in range(DRAWS)]
    best = max(draws, key=lambda draw: _liveliness(trace, draw))
    return tuple(int(node) for node in rng.permutation(best))


def _liveliness(trace: Trace, draw: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float:
    mine = np.isin(trace.node, draw)
    times: Floats = np.concatenate(([trace.window.start], trace.start[mine], trace.end[mine], [trace.window.end]))
    change = np.concatenate(([0], np.ones(mine.sum()), -np.ones(mine.sum()), [0]))
    order = np.argsort(times, kind="stable")
    present, length = np.cumsum(change[order])[:-1], np.diff(times[order])
    share = length / length.sum()
    mean = (present * share).sum()
    deviation = math.sqrt(max(float(((present - mean) ** 2 * share).sum()), 0.0))
    return deviation * float(share[present > 0.5].sum())


def _looped(schedule: Schedule, period_s: float, loop: bool) -> Schedule:
    """Return a schedule that repeats: at the end of a period the nodes change to those of the start."""
    if not loop or not schedule.actions:
        return schedule
    if not period_s > 0:
        raise InputError("`loop` needs a schedule that takes time, but its only actions are at 0 s")
    last = schedule.present(math.inf)
    back = [Action(period_s, "leave", node) for node in schedule.nodes if node in last - schedule.start]
    back += [Action(period_s, "join", node) for node in schedule.nodes if node in schedule.start - last]
    return Schedule(schedule.nodes, schedule.start, (*schedule.actions, *back), period_s)
