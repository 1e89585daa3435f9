"""NCCL support: aborts the communicator, so that a group survives the loss of a peer.

NCCL does not report a lost peer: a kernel on the device waits for data that never comes, and the host waits for the
kernel. The only way out is to abort the communicator from another thread. The wait then returns without an error and
with a result that must not be used. `Group` aborts, and remembers that it did.

An abort frees the communicator, and a thread that is inside NCCL at that moment crashes. So no call into NCCL may wait
for peers (connections are made while the communicator is made, not by its first operations), and operations are handed
over under the lock `issuing`, for which an abort waits.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
import torch.distributed as dist

_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # otherwise torch's watchdog ends the process of a survivor
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # otherwise its monitor does, when an abort takes long
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # otherwise the watchdog sleeps a minute before it frees a group
    "NCCL_RUNTIME_CONNECT": "0",  # otherwise a first all_reduce waits for its peers inside NCCL
}
_HANDING_OVER_S = 5.0
"""Seconds that an abort waits for an operation that is being handed to NCCL. Usually that takes microseconds; it takes
for ever when the device's queue is full behind an operation whose peer is lost."""

issuing = threading.Lock()
"""Held while an operation is handed to NCCL."""


def prepare() -> None:
    """Keep torch's watchdog from ending this process. Call it before the first group is made."""
    os.environ.update(_ENVIRONMENT)


def connect(device: torch.device) -> dist.Work:
    """Connect to all peers of the default group, which blocks until they are there. Return its first operation."""
    if device.index is not None:
        torch.cuda.set_device(device)  # a new thread begins on the first device
    work: dist.Work = dist.all_reduce(torch.ones(1, device=device), async_op=True)
    return work


def abort() -> object:
    """End all waits in the group, on the host and on the device. Results returned after that are incomplete.

    Returns the dead group. Dropping it waits for torch's watchdog thread, which may take a while.
    """
    if not dist.is_initialized():
        return None
    group = dist.distributed_c10d._get_default_group()
    handed_over = issuing.acquire(timeout=_HANDING_OVER_S)
    try:
        dist.distributed_c10d._abort_process_group()
    finally:
        if handed_over:
            issuing.release()
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
