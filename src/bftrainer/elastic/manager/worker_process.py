"""Worker of a manager with its processes, one per rank: which of them run, have spoken and have ended, and how.

`WorkerProcesses` keeps one record per worker and changes it; managers read it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from bftrainer.elastic.manager.ranks import MergedVoice
from bftrainer.processes.launch import Process


@dataclass(slots=True, eq=False)
class RankProcess:
    """One process of a worker."""

    starting: asyncio.Task[Process]
    process: Process | None = None
    writer: asyncio.StreamWriter | None = None
    heard_at: float | None = None
    """When its last message came; None before the first one."""
    over: bool = False
    """It has sent its last message: left, done or failed."""
    failed: bool = False
    channel: asyncio.Task[None] | None = None
    status: int | None = None

    @property
    def ended_well(self) -> bool:
        """Whether it has ended after it had said that it left or was done, so that its siblings can go on."""
        return self.over and not self.failed


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One worker with its processes, from the order to start them to their end."""

    name: str
    speaks: bool
    """It connects to the channel; otherwise only its exit status is known."""
    ranks: tuple[RankProcess, ...]
    voice: MergedVoice
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all processes run, or one could not be started. No message of the worker goes out before."""
    generation: int = 0
    generation_line: bytes = b""  # the newest, sent again to a process that connects late
    killing: asyncio.TimerHandle | None = None
    unwanted: bool = False  # the order to stop it came before it had started
    taken: bool = False
    """Its node is taken: its processes end one by one, because one of them may have to save the state first."""
    culprit: RankProcess | None = None
    """The first process that ended too early. The others were ended because of it."""

    @property
    def processes(self) -> tuple[Process, ...]:
        """Its processes that were started, in the order of ranks."""
        return tuple(rank.process for rank in self.ranks if rank.process is not None)

    @property
    def connected(self) -> bool:
        """Whether all processes have a channel."""
        return all(rank.writer is not None for rank in self.ranks)

    @property
    def spoke(self) -> bool:
        """Whether it has connected to the channel, or does not need to."""
        spoke = (self.culprit or self.ranks[0]).heard_at is not None
        return spoke or not self.speaks

    @property
    def status(self) -> int:
        """Its exit status: that of the process that ended too early, else the first one that is not 0."""
        return self.ranks[self.culprit_rank].status or 0

    @property
    def culprit_rank(self) -> int:
        """The number of the process whose status is the worker's: one that ended too early or failed at the end."""
        if self.culprit is not None:
            return self.ranks.index(self.culprit)
        return next((number for number, rank in enumerate(self.ranks) if rank.status), 0)

    def signal(self, signum: int) -> None:
        """Signal all its processes."""
        for process in self.processes:
            process.signal(signum)

    def kill(self) -> None:
        """Kill its processes and all that they have started."""
        for process in self.processes:
            process.kill_group()
