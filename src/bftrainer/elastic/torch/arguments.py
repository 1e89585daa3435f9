"""Argument checks for `elastic.init` and `Run`: return checked values, or raise an `InputError`.

Each function takes what the training script gave and returns it in the type that the rest of the package uses.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bftrainer.elastic import defaults, protocol
from bftrainer.elastic.torch.data.batch_plan import whole_number
from bftrainer.errors import InputError
from bftrainer.processes import start_up

BACKENDS = ("gloo", "nccl")


def flag(name: str, value: object) -> bool:
    """Return `value`, which must be True or False."""
    if not isinstance(value, bool):
        raise InputError(f"`{name}` must be True or False, but got {value!r}")
    return value


def optional(name: str, value: object, check: Callable[[str, object], Any]) -> Any:
    """Return None for None, otherwise the result of `check` for `value`."""
    return None if value is None else check(name, value)


def positive(name: str, value: object) -> float:
    """Return `value`, which must be a number above 0; infinity is allowed."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise InputError(f"`{name}` must be a number above 0, but got {value!r}")
    return float(value)


def function(name: str, value: object) -> Any:
    """Return `value`, which must be callable."""
    if not callable(value):
        raise InputError(f"`{name}` must be a function, but got {value!r}")
    return value


def device_in_use(device: object) -> torch.device:
    """Return the torch device to train on. A worker's GPU is taken into use: how long that takes is part of its start.

    See `existing_device`.
    """
    start = start_up.current()
    began = start_up.now()
    chosen = existing_device(device)
    if chosen.type == "cuda" and protocol.CHANNEL in os.environ:
        torch.empty(1, device=chosen)
    start.device_took(start_up.now() - began)
    return chosen


def existing_device(device: object) -> torch.device:
    """Return the torch device to train on, which must exist here. Default: the GPU if there is one, else the CPU.

    The ranks of one node take different GPUs, unless `device` has a number.
    """
    if device is None:
        return _gpu_of_rank() if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        raise InputError(f"`device` must be a torch device such as 'cuda' or 'cpu', but got {device!r}") from None
    assert isinstance(found, torch.device)
    if found.type == "meta":
        raise InputError("`device` must be one that computes, but got 'meta'; train on 'cuda' or 'cpu'")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            there = f"{count} CUDA device{'s' if count > 1 else ''}" if count else "no CUDA device"
            raise InputError(
                f"`device` is {str(found)!r}, but torch finds {there} here; omit it to use the available device"
            )
        if found == torch.device("cuda"):  # without a number
            return _gpu_of_rank()
    elif found.type != "cpu":
        try:
            torch.empty(1, device=found)
        except Exception as problem:  # each kind of device raises its own errors
            reason = str(problem).partition("\n")[0]
            raise InputError(f"`device` is {str(found)!r}, which torch cannot use here: {reason}") from None
    return found


def _gpu_of_rank() -> torch.device:
    """Return the GPU of this rank, and make it torch's current one.

    A manager shows each rank one GPU, its own. If the ranks of a node see several, each takes one by its number.
    """
    count, ranks = torch.cuda.device_count(), int(os.environ.get(protocol.LOCAL_WORLD) or 1)
    if count < 2 or ranks < 2 or not os.environ.get(protocol.CHANNEL):
        return torch.device("cuda")
    own = torch.device("cuda", int(os.environ.get(protocol.LOCAL_RANK) or 0) % count)
    torch.cuda.set_device(own)  # NCCL and the script's own `.cuda()` must not use the GPU of another rank
    return own


def known_backend(backend: object, device: torch.device) -> str | None:
    """Return the communication backend, which must fit the device. None leaves the choice to BFTrainer."""
    if backend is None:
        return None
    if backend not in BACKENDS:
        raise InputError(f"`backend` must be gloo or nccl, but got {backend!r}; omit it to use the right one")
    if backend == "nccl" and device.type != "cuda":
        raise InputError(f"`backend` is 'nccl', which needs a GPU, but the device is {str(device)!r}; use 'gloo'")
    if backend == "nccl" and not dist.is_nccl_available():
        raise InputError("`backend` is 'nccl', but this build of PyTorch has no NCCL; use 'gloo'")
    return str(backend)


def snapshot_folder(snapshots: object) -> Path | None:
    """Return the folder for snapshots, from the script or else from the environment. It need not exist yet."""
    name = "snapshots"
    if snapshots is None:
        name, snapshots = protocol.SNAPSHOTS, os.environ.get(protocol.SNAPSHOTS)
    if not snapshots:
        return None
    if not isinstance(snapshots, str | os.PathLike):
        raise InputError(f"`{name}` must be the path of a folder, but got {snapshots!r}")
    folder = Path(snapshots)
    with contextlib.suppress(PermissionError):  # reported when a snapshot is written
        for path in (folder, *folder.parents):
            if path.is_dir():
                break
            if path.exists() or path.is_symlink():
                raise InputError(f"`{name}` must be a folder, but {path} is not a folder; name a separate folder")
    return folder


def snapshot_interval(every_s: object) -> float:
    """Return the seconds between snapshots, from the script, else from the environment, else the default."""
    if every_s is not None:
        return positive("snapshot_every_s", every_s)
    named = os.environ.get(protocol.SNAPSHOT_EVERY)
    if not named:
        return defaults.SNAPSHOT_EVERY_S
    try:
        found = float(named)
    except ValueError:
        found = math.nan
    if not found > 0:
        raise InputError(f"{protocol.SNAPSHOT_EVERY} must be a number of seconds above 0, but got {named!r}")
    return found


def metric_values(metrics: dict[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers."""
    return {name: _number(name, value) for name, value in metrics.items()}


def check_step(loss: object, samples: object) -> None:
    """Refuse arguments that `run.step` cannot use."""
    if samples is not None:
        whole_number("samples", samples, 0)
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise InputError(
                f"`loss` must be one number, the mean over the batch, but got a tensor of shape {tuple(loss.shape)}; "
                "give loss.mean(), and call backward() on that"
            )
        if loss.is_complex():
            raise InputError("`loss` must be a real number, but got a complex tensor; give loss.real or loss.abs()")
    elif loss is not None:
        _number("loss", loss)


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    if isinstance(value, Real) or (hasattr(value, "shape") and getattr(value, "size", 0) == 1):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass  # an array that does not hold a number
    shown = f"{type(value).__name__} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]
    raise InputError(
        f"`{name}` must be one number, but got {shown}; report a mean, or several numbers by several names"
    )
