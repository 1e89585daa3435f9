"""NCCL, made to survive the loss of a peer.

NCCL reports a lost peer to nobody: a kernel on the device waits for data that never comes, and the host waits for the
kernel. The only way out is to abort the communicator from another thread. The wait then returns without an error and
with a result that must not be used. `Group` aborts, and remembers that it did.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else torch's watchdog ends the process of a survivor
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else its monitor does, when an abort takes long
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # else the watchdog sleeps for a minute before it lets a group go
}


def prepare() -> None:
    """Keep torch's watchdog from ending this process. Call it before the first group is made."""
    os.environ.update(_ENVIRONMENT)


def connect(device: torch.device) -> None:
    """Connect to all peers of the default group, by a first collective. Blocks until they are there."""
    if device.index is not None:
        torch.cuda.set_device(device)  # this may be a thread of its own, which begins on the first device
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    torch.cuda.current_stream(device).synchronize()


def abort() -> object:
    """Free whoever waits in a group, on the host or on the device. Results that come of it are not whole.

    Gives the dead group. Who drops it waits for torch's watchdog thread, which may take a while.
    """
    if not dist.is_initialized():
        return None
    group = dist.distributed_c10d._get_default_group()
    dist.distributed_c10d._abort_process_group()
    return group


def error_of(device: torch.device) -> str:
    """What NCCL found wrong with the default group; empty if nothing, or if this torch cannot tell."""
    if not dist.is_initialized():
        return ""
    try:
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
        found = str(backend.get_error())
    except (AttributeError, RuntimeError, ValueError):
        return ""
    return "" if found.endswith("SUCCESS") else found
