"""Merges the messages of a worker's ranks, so that a node with several GPUs speaks with one voice.

`WorkerProcesses` passes in what each process of a worker says and passes on what comes out. Managers and the controller
therefore see one worker per node, however many ranks it has. It uses no clock, socket or process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from bftrainer.elastic.protocol import (
    Arrived,
    Broken,
    Done,
    Failed,
    FirstStep,
    Follow,
    Formed,
    FromWorker,
    Hello,
    Leaving,
    Left,
    PreloadRefused,
    Report,
)

InGeneration = TypeVar("InGeneration", Arrived, Formed)


class MergedVoice:
    """The voice of one worker that has `ranks` processes.

    What is true of a node only when it is true of all its ranks is said when the last one says it: ready, arrived,
    formed, left, done. What one rank can say for all is passed on once: a broken group, a failure, the wish to leave.
    The first rank reports for the node.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._said: dict[type[FromWorker], dict[int, FromWorker]] = {}
        """The last message of each kind by rank."""
        self._broken = 0

    def merge(self, rank: int, message: FromWorker) -> FromWorker | None:
        """Take a message of one rank. Return the worker's message that follows from it, if one does."""
        if self._ranks == 1:
            return message
        said = self._said.setdefault(type(message), {})
        first = not said
        said[rank] = message
        match message:
            case Hello():
                return message if rank == 0 else None
            case Follow():
                return None  # several ranks take the state together, when they join
            case Report():
                redone = sum(report.redone for report in said.values() if isinstance(report, Report))
                return replace(message, redone=redone) if rank == 0 else None
            case FirstStep():
                return message if rank == 0 else None
            case PreloadRefused():
                return message if first else None
            case Leaving():
                return message if first else None
            case Failed():
                return replace(message, error=f"{message.error} (local rank {rank})") if first else None
            case Broken(generation):
                newer = generation > self._broken
                self._broken = max(generation, self._broken)
                return message if newer else None
            case Arrived(generation):
                addresses = tuple(each.address for each in self._all_in(generation, Arrived))
                return Arrived(generation, addresses[0], addresses) if addresses else None
            case Formed(generation):
                if generation <= self._broken:
                    return None  # a sibling has said that it is broken
                return max(self._all_in(generation, Formed), key=lambda formed: formed.pause_s, default=None)
            case Left() | Done():
                over = self._said.get(Left, {}).keys() | self._said.get(Done, {}).keys()
                return message if len(over) == self._ranks else None
            case _:  # ready
                return message if len(said) == self._ranks else None

    def _all_in(self, generation: int, kind: type[InGeneration]) -> list[InGeneration]:
        """Return the messages of all ranks about a generation, in the order of ranks; empty if one is missing."""
        said = sorted(self._said[kind].items())
        messages = [message for _, message in said if isinstance(message, kind) and message.generation == generation]
        return messages if len(messages) == self._ranks else []
