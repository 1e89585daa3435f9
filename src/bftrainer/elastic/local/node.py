"""One virtual node of a local job: its worker, and what the coordinator knows of it."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from bftrainer.elastic.manager.worker_process import WorkerProcess
from bftrainer.elastic.protocol import Report
from bftrainer.errors import InputError
from bftrainer.processes.launch import Process


@dataclass(slots=True)
class VirtualNode:
    """A node with its worker, which has one process per rank. See `ManagedWorker`."""

    id: str
    worker: WorkerProcess
    leave_by: float | None = None
    finish_by: float | None = None
    joined: bool = False
    failed: bool = False
    """It reported an exception before it joined."""
    killed: bool = False
    over: bool = False
    """It reported that it left or is done."""
    report: Report | None = None

    def process(self, rank: int) -> Process:
        """Return one of its processes."""
        processes = self.worker.processes
        if not 0 <= rank < len(processes):
            raise InputError(f"`rank` must be from 0 to {len(processes) - 1}, but got {rank}")
        return processes[rank]

    def kill(self) -> None:
        """Kill all its processes, because the coordinator wants it."""
        self.killed = True
        self.worker.kill()

    def signal(self, signum: int, rank: int | None = None) -> None:
        """Signal all its processes, or only that of `rank`. SIGKILL also ends what they have started."""
        for process in self.worker.processes if rank is None else (self.process(rank),):
            send = process.kill_group if signum == signal.SIGKILL else process.signal
            send(signum)
