"""Digest of a rank's state: numbers that show whether ranks drifted apart.

`settings_of` is cheap and is sent with every step: learning rates and other optimizer settings. `Digest` is compared at
the end of each epoch: registered values other than modules and optimizers, and the norms of the weights. Numbers are
rounded, since different kinds of machines may differ in the last digits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bftrainer.elastic.torch.value import CARRIED
from bftrainer.errors import InputError

_MOST = 1 << 22
"""Numbers up to this are exact in single precision, in which riders may be sent."""
_NEAR = 1e-3
"""Relative difference of norms that does not count as drift. A rank that trains alone soon exceeds it by far."""


def settings_of(optimizers: Sequence[Optimizer], place: tuple[int, ...] = ()) -> int:
    """Return a number that differs if learning rates, momenta, weight decays or other optimizer settings differ.

    It also differs with `place`, numbers that say where in the script a rank is.
    """
    found = [_number(value) for opt in optimizers for group in opt.param_groups for value in _values(group)]
    return 1 + hash((*found, *place)) % _MOST  # the hash of numbers is the same in all processes


def _values(group: Mapping[str, Any]) -> list[Any]:
    values: list[Any] = []
    for name, value in group.items():
        if name != "params":
            values += value if isinstance(value, tuple | list) else [value]
    return values


def _number(value: Any) -> float:
    """Round a value to six digits. Values that are no numbers, or are on a device, count as 0."""
    if type(value) is float or value is None or value is False:  # most settings
        return _to_six_digits(value) if value else 0.0
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    elif hasattr(value, "item") and getattr(value, "size", 1) == 1:  # a numpy number
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return float(value) if isinstance(value, bool) else 0.0
    return _to_six_digits(value)


@functools.lru_cache(maxsize=256)  # most settings stay the same from step to step
def _to_six_digits(value: float) -> float:
    return float(f"{value:.6g}") if math.isfinite(value) else -1.0


_CARRIED_AS = "carry="


class Digest:
    """Short description of one rank's registered objects."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects

    def written(self) -> bytes:
        """Return the digest as bytes for the leader of a meeting."""
        values: dict[str, str] = {}
        norms: dict[str, float] = {}
        for name, thing in self._objects.items():
            if isinstance(thing, nn.Module):
                norms[name] = _norm(list(thing.parameters()))
            elif not isinstance(thing, Optimizer):
                with contextlib.suppress(Exception):  # of the script's state_dict(); snapshots report it
                    state = thing.state_dict()
                    # Variables that are carried are compared one by one, so that a message can name one.
                    parts = (
                        {f'{_CARRIED_AS}"{part}"': state[part] for part in state} if name == CARRIED else {name: state}
                    )
                    values |= {
                        part: hashlib.sha256(_text(its).encode()).hexdigest()[:16] for part, its in parts.items()
                    }
        return json.dumps({"values": values, "norms": norms}).encode()


def refuse_drift(notes: Sequence[bytes]) -> None:
    """Raise an InputError that names what differs between rank 0 and another rank. Notes are in order of ranks."""
    first = json.loads(notes[0])
    for rank, note in enumerate(notes):
        other = json.loads(note)
        for name, value in first["values"].items():
            if other["values"].get(name, value) != value:
                if name.startswith(_CARRIED_AS):
                    raise InputError(
                        f"the variable named by `{name}` differs between rank 0 and rank {rank}: a carried variable "
                        "must be the same on all ranks. Change it on all of them (not under `if elastic.is_main():`), "
                        "and not from what one rank has computed, as the loss of its batch"
                    )
                raise InputError(
                    f"`{name}`, which is registered, differs between rank 0 and rank {rank}: registered state must "
                    "be the same on all ranks. Change it on all ranks in the same way, from values that all have: "
                    "run.evaluate(), run.share(), run.mean('loss'), run.progress; what differs by rank must not be "
                    "registered"
                )
        for name, norm in first["norms"].items():
            if not _near(norm, other["norms"].get(name, norm)):
                raise InputError(
                    f"the weights of `{name}` differ between rank 0 and rank {rank}: something changed them on one of "
                    "them only. Change weights on all ranks in the same way, with random numbers of one seed for all"
                )


def _near(one: float, other: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) == math.isnan(other)
    if math.isinf(one) or math.isinf(other):
        return one == other
    return abs(one - other) <= _NEAR * max(abs(one), abs(other))


def _norm(params: list[Tensor]) -> float:
    parts = [param.detach() for param in params if param.numel() and param.layout is torch.strided]
    if not parts:
        return 0.0
    squares = [part.abs().float().square().sum() for part in parts]
    return math.sqrt(float(sum(square.double().item() for square in squares)))


def _text(value: Any) -> str:
    """Return a state as text, with rounded numbers and with the sums of tensors."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)}{_rounded(float(value.detach().double().sum()))}" if _counts(value) else "tensor"
    if isinstance(value, bool) or value is None or isinstance(value, str | int):
        return repr(value)
    if isinstance(value, float):
        return _rounded(value)
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a numpy number
        return _text(value.item())
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key!r}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_text, value)) + "]"
    return type(value).__name__


def _counts(tensor: Tensor) -> bool:
    return not tensor.is_complex() and not tensor.is_meta and tensor.layout is torch.strided


def _rounded(value: float) -> str:
    return f"{value:.6g}"
