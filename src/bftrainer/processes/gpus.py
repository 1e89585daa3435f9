"""Finds the GPUs of a node that ranks may use: what was granted first, else what the driver lists.

`find_gpus` reads the environment of an agent or of the local coordinator. `rank_places.py` gives the devices to ranks,
`gpu_use.py` reads how busy they are. PyTorch is not asked: it would start the driver in a process that forks workers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bftrainer.processes.cpu_cores import number_list
from bftrainer.processes.gpu_queries import (
    Ask,
    ListedGpu,
    ask_command,
    matching,
    nvidia_gpus,
    nvidia_parts,
    rocm_gpus,
)

CUDA = "CUDA_VISIBLE_DEVICES"
ROCM = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ORDINAL = "GPU_DEVICE_ORDINAL"
DEVICE_VARIABLES = (CUDA, ROCM, HIP, ORDINAL)
MOST_GPUS = 256
"""The most GPUs of a node. A variable that says more is garbage."""

_ID = re.compile(r"[0-9]{1,4}|(?:GPU|MIG)-[0-9A-Za-z][0-9A-Za-z./:_-]*")
_COUNT = re.compile(r"(?:[^:,]*:)*([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """A GPU, or a part of one (MIG), that a rank may use."""

    id: str
    """Its number, UUID or MIG name, as it stands in `CUDA_VISIBLE_DEVICES` or `ROCR_VISIBLE_DEVICES`."""
    kind: str
    """`cuda` or `rocm`."""
    name: str = ""
    memory_mb: int = 0
    """0: unknown."""
    cores: frozenset[int] = frozenset()
    """The CPU cores near it; empty: unknown."""


def find_gpus(
    environment: Mapping[str, str], ask: Ask = ask_command, sys_root: Path = Path("/sys")
) -> tuple[GpuDevice, ...]:
    """Return the GPUs that ranks on this node may use.

    The variables of the driver's libraries name the granted devices, then those of Slurm. Only where neither says
    anything, all GPUs that the driver lists count. `ask` also adds what the devices are called; without an answer
    the granted devices count all the same.
    """
    granted = _granted(environment)
    if granted is not None and not granted.ids:
        return ()
    for kind, list_gpus in (("cuda", nvidia_gpus), ("rocm", rocm_gpus)):
        listed = list_gpus(ask) if granted is None or kind in granted.ids else ()
        if listed:
            ids = tuple(gpu.index for gpu in listed)
            # Where a job sees only its own devices, they count from 0, whatever their numbers on the node are.
            if granted is not None and not (granted.numbers_on_node and len(listed) == len(granted.ids[kind])):
                ids = granted.ids[kind]
            return _described(ids, kind, listed, ask, sys_root)
    if granted is None:
        return ()
    kind, ids = next(iter(granted.ids.items()))
    return tuple(GpuDevice(gpu_id, kind) for gpu_id in ids)


@dataclass(frozen=True, slots=True)
class _Granted:
    """Devices that the environment names."""

    ids: Mapping[str, tuple[str, ...]]
    """By kind. Several kinds: only the driver knows which one the node has. Empty: no GPU may be used."""
    numbers_on_node: bool = False
    """Whether the numbers are those of the whole node."""


def _granted(environment: Mapping[str, str]) -> _Granted | None:
    """Return the devices that the environment names; None: it does not say anything about GPUs."""
    visible = {"cuda": _visible(environment, CUDA), "rocm": _visible_to_rocm(environment)}
    if any(ids is not None for ids in visible.values()):
        # Slurm sets the variables of all makers, unless its configuration says which GPUs the node has.
        return _Granted({kind: ids for kind, ids in visible.items() if ids})
    for variable in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        numbers = tuple(str(number) for number in number_list(environment.get(variable, "")))
        if 0 < len(numbers) <= MOST_GPUS:
            return _Granted({"cuda": numbers, "rocm": numbers}, numbers_on_node=True)
    if count := _count(environment.get("SLURM_GPUS_ON_NODE", "")):
        numbers = tuple(str(number) for number in range(count))
        return _Granted({"cuda": numbers, "rocm": numbers})
    # A job that was granted no GPU may still see some: not every site hides them. They belong to other jobs, and an
    # agent must not use what it was not granted.
    return _Granted({}) if "SLURM_JOB_ID" in environment else None


def _visible(environment: Mapping[str, str], variable: str) -> tuple[str, ...] | None:
    """Return the ids in a variable of the driver's libraries; None: it is not set.

    As the libraries do, it stops at the first entry that is no id: `-1`, `NoDevFiles`, nothing. A repeated id counts
    once.
    """
    text = environment.get(variable)
    if text is None:
        return None
    ids: dict[str, None] = {}
    for entry in text.split(","):
        gpu_id = entry.strip()
        if not _ID.fullmatch(gpu_id):
            break
        ids[str(int(gpu_id)) if gpu_id.isdigit() else gpu_id] = None
    return tuple(ids)[:MOST_GPUS]


def _visible_to_rocm(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the ids that the variables for AMD GPUs name; None: none of them is set."""
    devices, chosen = _visible(environment, ROCM), _visible(environment, HIP)
    if devices is None:
        return _visible(environment, ORDINAL) if chosen is None else chosen
    if chosen is None:
        return devices
    # HIP counts the devices that ROCR_VISIBLE_DEVICES leaves visible. Numbers that are not among those are taken for a
    # repetition of that variable, as some sites set both.
    positions = [int(position) for position in chosen if position.isdigit() and int(position) < len(devices)]
    return tuple(devices[position] for position in positions) if len(positions) == len(chosen) else devices


def _count(text: str) -> int:
    """Return the number of GPUs in texts such as `4`, `a100:4` and `a100:2,v100:2`; 0: it cannot be read."""
    counts = [_COUNT.fullmatch(part.strip()) for part in text.split(",")]
    count = sum(int(match[1]) for match in counts if match)
    return count if count <= MOST_GPUS else 0


def _described(
    ids: Sequence[str], kind: str, listed: Sequence[ListedGpu], ask: Ask, sys_root: Path
) -> tuple[GpuDevice, ...]:
    """Return devices with what the driver's tool says about them."""
    parts = nvidia_parts(ask) if any(gpu_id.startswith("MIG-") for gpu_id in ids) else {}
    devices = []
    for gpu_id in ids:
        gpu, profile = matching(gpu_id, listed), ""
        if gpu_id.startswith("MIG-"):
            # A part is named by an id of its own, or, by older drivers, after its GPU: MIG-GPU-<UUID>/1/0.
            whole, profile = parts.get(gpu_id, (gpu_id.removeprefix("MIG-").split("/")[0], ""))
            gpu = matching(whole, listed)
        if gpu is None:
            devices.append(GpuDevice(gpu_id, kind))
        else:
            memory_mb = 0 if gpu_id.startswith("MIG-") else gpu.memory_mb  # that of the whole GPU
            devices.append(GpuDevice(gpu_id, kind, f"{gpu.name} {profile}".strip(), memory_mb, gpu.cores(sys_root)))
    return tuple(devices)
