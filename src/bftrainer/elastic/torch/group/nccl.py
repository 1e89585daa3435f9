"""NCCL support: aborts the communicator, so that a group survives the loss of a peer.

NCCL does not report a lost peer: a kernel on the device waits for data that never comes, and the host waits for the
kernel. The only way out is to abort the communicator from another thread. The wait then returns without an error and
with a result that must not be used. `Group` aborts, and remembers that it did.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # otherwise torch's watchdog ends the process of a survivor
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # otherwise its monitor does, when an abort takes long
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # otherwise the watchdog sleeps a minute before it frees a group
}


def prepare() -> None:
    """Keep torch's watchdog from ending this process. Call it before the first group is made."""
    os.environ.update(_ENVIRONMENT)


def connect(device: torch.device) -> None:
    """Connect to all peers of the default group by a first collective. Blocks until they are there."""
    if device.index is not None:
        torch.cuda.set_device(device)  # a new thread begins on the first device
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    torch.cuda.current_stream(device).synchronize()


def abort() -> object:
    """End all waits in the group, on the host and on the device. Results returned after that are incomplete.

    Returns the dead group. Dropping it waits for torch's watchdog thread, which may take a while.
    """
    if not dist.is_initialized():
        return None
    group = dist.distributed_c10d._get_default_group()
    dist.distributed_c10d._abort_process_group()
    return group


def error_of(device: torch.device) -> str:
    """Return the error that NCCL found in the default group; empty if there is none or this torch cannot tell."""
    if not dist.is_initialized():
        return ""
    try:
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
        found = str(backend.get_error())
    except (AttributeError, RuntimeError, ValueError):
        return ""
    return "" if found.endswith("SUCCESS") else found
