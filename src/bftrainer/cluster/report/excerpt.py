"""An excerpt presents part of a live run as a complete run.

`bftrainer report` uses it to compute efficiency and bound of the span (`efficiency.py`), given the usage report of the
span. Trainers count with what they made in the span. Nodes that were present at its beginning count as if they had
joined then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from bftrainer.cluster.report.efficiency import judge
from bftrainer.cluster.report.usage import UsageReport
from bftrainer.cluster.store.schema import EventRow, TrainerRow
from bftrainer.cluster.store.store import Store
from bftrainer.errors import BFTrainerError
from bftrainer.scheduler import Policy

MOST_EVENTS = 200_000
MOST_TRAINERS = 2_000
"""Limit of trainers; more take minutes, and the user must ask for that."""
_KINDS = ("node.joined", "node.leaving", "node.left", "trainer.learned", "rescale", "worker.started")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """U and the bound, or the reason why they are not known."""

    efficiency: float | None = None
    bound: float | None = None
    why: str = ""


def efficiency_of(store: Store, account: UsageReport, policy: Policy, *, at_any_cost: bool = False) -> Efficiency:
    """Return the efficiency of the span of a usage report. This may take many seconds."""
    if not account.samples:
        return Efficiency(why="no sample was made")
    large = store.event_span().count > MOST_EVENTS or len(account.trainers) > MOST_TRAINERS
    if large and not at_any_cost:
        return Efficiency(why="the log is long: ask for it with --efficiency, and wait some minutes")
    try:
        found = judge(cast(Store, _Excerpt(store, account)), policy)
    except BFTrainerError as problem:
        return Efficiency(why=str(problem))
    except (KeyError, ZeroDivisionError):
        return Efficiency(why="too little has happened")
    if not (math.isfinite(found.efficiency) and math.isfinite(found.bound)):
        return Efficiency(why="too little has happened")
    return Efficiency(found.efficiency, found.bound)


class _Excerpt:
    """A store restricted to a window, as if the run had begun and ended with it."""

    def __init__(self, store: Store, account: UsageReport) -> None:
        self._store = store
        self._window = account.window
        self._samples = {one.trainer: one.samples for one in account.trainers}

    def all_events(self) -> Iterator[EventRow]:
        """Yield the state at the beginning of the window as events, then the events in the window."""
        start, end = self._window.start, self._window.end
        before: dict[tuple[str, str], EventRow] = {}
        begun = False
        seq = 0
        for event in self._store.all_events(_KINDS):
            if event.time > end:
                break
            if event.time < start:
                if event.kind in ("node.leaving", "node.left"):
                    before.pop(("node.joined", event.node), None)
                elif event.kind in ("node.joined", "trainer.learned"):
                    before[event.kind, event.node or event.trainer] = event
                continue
            if not begun:
                begun = True
                yield from (replace(known, time=start) for known in before.values())
            seq = event.seq
            yield event
        if not begun:
            yield from (replace(known, time=start) for known in before.values())
        yield EventRow(seq + 1, end, "report.end", "", "")

    def trainers(self) -> list[TrainerRow]:
        """Return the trainers that made samples in the window, with only those samples."""
        found = []
        for row in self._store.trainers():
            made = round(self._samples.get(row.id, 0))
            if not made:
                continue
            over = row.ended is not None and row.ended <= self._window.end
            # The simulator needs an amount of work. Trainers that do not state theirs get more than they could do.
            left = 100 * made if row.total is None else max(row.total - row.samples, 0) + made
            state = row.state if over else "running"
            found.append(replace(row, samples=made, total=left, state=state, ended=row.ended if over else None))
        return found
