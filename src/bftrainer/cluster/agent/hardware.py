"""The hardware of a node, as far as its agent may use it: GPUs, processor cores, and how many ranks they are for.

The agent finds it once, before it joins, and tells the controller. `AgentWorkers` places the ranks of workers on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bftrainer.cluster.wire.messages import Gpu
from bftrainer.processes.cpu_cores import node_cores
from bftrainer.processes.gpus import GpuDevice, find_gpus
from bftrainer.processes.rank_places import RankPlace, rank_places, thread_variables


@dataclass(frozen=True, slots=True)
class NodeHardware:
    """GPUs and cores of a node. `slots` is the number of ranks that the pool gave it; 0: it gave none."""

    gpus: tuple[GpuDevice, ...] = ()
    cores: tuple[int, ...] = ()
    slots: int = 0

    @property
    def ranks(self) -> int:
        """How many ranks a worker has here, if its trainer does not say: one per GPU, or one."""
        return self.slots or len(self.gpus) or 1

    def places(self, ranks: int, environment: Mapping[str, str]) -> tuple[RankPlace, ...]:
        """Return the devices, cores and variables of each of a worker's ranks."""
        return rank_places(ranks, self.gpus, self.cores, environment)

    def threads(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that set the number of threads of each rank, which libraries read when they load."""
        return thread_variables(self.ranks, self.cores, environment)

    def as_message(self) -> tuple[Gpu, ...]:
        """Return the GPUs as the controller is told of them."""
        return tuple(Gpu(gpu.id, gpu.kind, gpu.name, gpu.memory_mb) for gpu in self.gpus)


def find_hardware(environment: Mapping[str, str], slots: int = 0) -> NodeHardware:
    """Look at what this process was given. It may ask a command, so it blocks."""
    return NodeHardware(find_gpus(environment), node_cores(), slots)
