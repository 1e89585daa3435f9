"""A span of a live run as a run of its own, so that its efficiency and the bound can be worked out (`judgement.py`).

`bftrainer report` asks with the account of the span: trainers count with what they made in it, and nodes that were
there at its beginning count as if they had joined then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from bftrainer.cluster.accounting import Account
from bftrainer.cluster.judgement import judge
from bftrainer.cluster.schema import EventRow, TrainerRow
from bftrainer.cluster.store import Store
from bftrainer.errors import BFTrainerError
from bftrainer.scheduler import Policy

MOST_EVENTS = 200_000
MOST_TRAINERS = 2_000
"""Beyond these it takes minutes, and must be asked for."""
_KINDS = ("node.joined", "node.leaving", "node.left", "trainer.learned", "rescale", "worker.started")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """U and the bound, or why they are not known."""

    efficiency: float | None = None
    bound: float | None = None
    why: str = ""


def efficiency_of(store: Store, account: Account, policy: Policy, *, at_any_cost: bool = False) -> Efficiency:
    """How efficient the span of an account was. It takes a while."""
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
    """A store as if the run had begun and ended with the window."""

    def __init__(self, store: Store, account: Account) -> None:
        self._store = store
        self._window = account.window
        self._samples = {one.trainer: one.samples for one in account.trainers}

    def all_events(self) -> Iterator[EventRow]:
        """What happened in the window, after what it began with."""
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
        """Those that made something in the window, with just that."""
        found = []
        for row in self._store.trainers():
            made = round(self._samples.get(row.id, 0))
            if not made:
                continue
            over = row.ended is not None and row.ended <= self._window.end
            # Of those who do not say how much they have to do: more than they could. The simulator wants a number.
            left = 100 * made if row.total is None else max(row.total - row.samples, 0) + made
            state = row.state if over else "running"
            found.append(replace(row, samples=made, total=left, state=state, ended=row.ended if over else None))
        return found
