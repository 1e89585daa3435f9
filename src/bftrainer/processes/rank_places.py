"""Gives each rank of a node its place: its GPUs, its share of the CPU cores, and the variables that say so.

The manager of a node (an agent, or the local coordinator) calls `rank_places` before it starts the ranks of a worker.
It adds a place's variables to the environment of the process and passes the cores on in `Command.cores`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bftrainer.processes import gpus as devices
from bftrainer.processes import variables
from bftrainer.processes.core_shares import core_shares
from bftrainer.processes.gpus import GpuDevice

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """What one rank of a node gets."""

    device: str
    """The ids of its GPUs, joined by commas; empty: the CPU."""
    environment: Mapping[str, str]
    """Variables to set on top of the node's environment."""
    cores: tuple[int, ...]
    """The CPU cores for `Command.cores`; empty: no affinity is set."""


def rank_places(
    ranks: int, gpus: Sequence[GpuDevice], cores: Collection[int], environment: Mapping[str, str]
) -> tuple[RankPlace, ...]:
    """Return the places of a node's ranks, by local rank.

    `cores` are those that the node's ranks may use. Cores that stand side by side in a sequence, such as that of
    `node_cores`, go to the same rank if possible; other collections are sorted. `environment` is that of the node.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, but got {ranks}")
    ordered = list(dict.fromkeys(cores)) if isinstance(cores, Sequence) else sorted(cores)
    own = [own_gpus(rank, ranks, gpus) for rank in range(ranks)]
    near = [frozenset[int]().union(*(gpu.cores for gpu in some)) for some in own]
    shares = core_shares(ordered, near) if ranks > 1 else ((),)
    threads = thread_variables(ranks, ordered, environment)
    places = []
    for rank, (some, share) in enumerate(zip(own, shares, strict=True)):
        own_variables = {variables.LOCAL_RANK: str(rank), variables.LOCAL_WORLD: str(ranks)}
        given = {**own_variables, **threads, **device_variables(some, environment)}
        places.append(RankPlace(",".join(gpu.id for gpu in some), given, share))
    return tuple(places)


def thread_variables(ranks: int, cores: Collection[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that limit the threads of each of a node's ranks.

    They are the same for all ranks, also where some have one core more: OpenMP reads them when it is loaded, and one
    warm parent can fork only processes that agree on them. Without them, each rank would start a thread per core of
    the node. A rank that is alone may use all cores anyway.
    """
    if ranks == 1 or THREADS in environment:
        return {}
    return {THREADS: str(max(1, len(cores) // ranks))}


def own_gpus(rank: int, ranks: int, gpus: Sequence[GpuDevice]) -> Sequence[GpuDevice]:
    """Return the GPUs of one of `ranks`: an even part, or one that it shares if there are more ranks than GPUs."""
    if ranks > len(gpus) > 0:
        return [gpus[rank % len(gpus)]]
    return gpus[rank * len(gpus) // ranks : (rank + 1) * len(gpus) // ranks]


def device_variables(gpus: Sequence[GpuDevice], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make these GPUs the only visible ones, as far as the environment does not say so."""
    if not gpus:
        return {}
    ids = ",".join(gpu.id for gpu in gpus)
    if gpus[0].kind == "cuda":
        wanted = {devices.CUDA: ids}
    else:
        # The other variables count the devices that ROCR_VISIBLE_DEVICES leaves visible. HIP reads NVIDIA's variable
        # too, and Slurm may have set all of them to the same numbers: then a rank would see no device.
        rest = [name for name in (devices.HIP, devices.CUDA, devices.ORDINAL) if name in environment]
        wanted = {devices.ROCM: ids, **dict.fromkeys(rest, ",".join(str(position) for position in range(len(gpus))))}
    return {name: value for name, value in wanted.items() if environment.get(name) != value}
