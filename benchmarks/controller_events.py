"""Which commands of a controller belong to which event; for `controller.py`, whose docstring defines it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bftrainer.cluster.store.store import Store


class Book:
    """The controller's event log and the agents' record of commands, to find what belongs to what."""

    def __init__(self, store: Store, commands: Sequence[Sequence[Any]]) -> None:
        self._decisions: list[tuple[int, float, dict[str, Any]]] = []
        self._started: dict[float, list[str]] = defaultdict(list)
        self._changes: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for event in store.all_events(("decision", "worker.started", "node.joined", "node.left")):
            if event.kind == "decision":
                self._decisions.append((event.seq, event.time, event.data))
            elif event.kind == "worker.started":
                self._started[event.time].append(event.data["worker"])
            else:
                self._changes[event.node].append((event.time, event.seq))
        self._starts = {command[3]: command[0] for command in commands if command[2] == "start"}
        self._told: dict[str, list[float]] = defaultdict(list)
        self._told_any: dict[str, list[float]] = defaultdict(list)
        for at, _, kind, worker, _ in commands:
            if kind != "start":
                self._told[worker].append(at)
                self._told_any[worker.rpartition("-")[0]].append(at)

    def answers(self, event: Mapping[str, Any]) -> list[float]:
        """When each command that belongs to an event arrived."""
        began = event["time"]
        found = [_first(self._told[worker], began) for _, worker in event["survivors"]]
        for decision_at, data in self._decided(event):
            found += [self._starts.get(worker) for worker in self._started[decision_at]]
            shrunk = (change["trainer"] for change in data["changes"] if change["action"] in ("shrink", "stop"))
            found += [_first(self._told_any[name], decision_at) for name in shrunk]
        return [at for at in found if at is not None]

    def _decided(self, event: Mapping[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """The first decision after each node's change; most nodes share one."""
        seen = set()
        for node in event["nodes"]:
            seq = next((seq for at, seq in self._changes[node] if at >= event["time"]), None)
            if seq is None:
                continue
            index = bisect_left(self._decisions, seq, key=lambda decision: decision[0])
            if index < len(self._decisions) and index not in seen:
                seen.add(index)
                yield self._decisions[index][1:]


def _first(times: Sequence[float], after: float) -> float | None:
    """The first of some times, in order, that is not before another."""
    index = bisect_left(times, after)
    return times[index] if index < len(times) else None
