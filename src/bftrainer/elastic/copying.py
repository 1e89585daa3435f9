"""The copy of a training state that a snapshot is written from while training goes on.

A state of any nesting, on any device, comes in from `snapshot.py`, the only caller; out goes the same with every tensor
once, in CPU memory of its own, and with nothing that `torch.load(weights_only=True)` would not give back. What it would
not is refused here, when it can still be mended.
"""

from __future__ import annotations

import functools
import io
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from bftrainer.errors import InputError

_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None), torch.Size, torch.dtype, torch.device})
_LAYOUTS = frozenset(
    {torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)
_INT_BITS = 2040
"""torch's safe loader knows no integer of more than 255 bytes, its sign included."""


def copy_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that later changes of `state` do not reach, or an InputError naming what could not be loaded again."""
    if not isinstance(state, Mapping):
        raise InputError(f"`state` must be a dict, but got {_type_name(state)}")
    copies: dict[object, torch.Tensor] = {}
    try:
        return {_copied(key, "a key of state", copies): _copied(state[key], f"state[{key!r}]", copies) for key in state}
    except RecursionError:
        raise InputError("`state` must not contain itself or be nested hundreds of levels deep, but it does") from None


def _copied(value: Any, path: str, copies: dict[object, torch.Tensor]) -> Any:
    # Types must match exactly: a subclass (an enum, numpy's float64, a named tuple) is pickled as something else.
    kind = type(value)
    if kind in _PLAIN:
        if kind is int and value.bit_length() >= _INT_BITS:
            _refuse(path, f"an int of {value.bit_length()} bits")
        if kind is bytes and not value:  # pickled as a call of `bytes`, which torch's safe loader does not make
            _refuse(path, "empty bytes")
        return value
    if isinstance(value, torch.Tensor):
        return _copied_tensor(value, path, copies)
    if kind is dict or kind is OrderedDict:
        made = kind()
        for key, item in value.items():
            made[_copied(key, f"a key of {path}", copies)] = _copied(item, f"{path}[{key!r}]", copies)
        if kind is OrderedDict:  # a module's state_dict() keeps the versions of its layers in an attribute
            vars(made).update({name: _copied(item, f"{path}.{name}", copies) for name, item in vars(value).items()})
        return made
    if kind is list or kind is tuple:
        return kind(_copied(item, f"{path}[{index}]", copies) for index, item in enumerate(value))
    if kind is set:
        return {_copied(item, f"an item of {path}", copies) for item in value}
    return _refuse(path, _type_name(value))


def _copied_tensor(value: torch.Tensor, path: str, copies: dict[object, torch.Tensor]) -> torch.Tensor:
    plain = value.detach()
    if type(plain) is not torch.Tensor:
        _refuse(path, _type_name(value))
    if plain.is_meta or plain.layout not in _LAYOUTS or not _is_loadable(plain.dtype):
        _refuse(path, f"a tensor of {plain.dtype}, {plain.layout}, on {plain.device}")
    key: object = id(value)
    if plain.layout is torch.strided:
        # Tied weights are different tensor objects over the same memory.
        key = (
            plain.device,
            plain.data_ptr(),
            plain.shape,
            plain.stride(),
            plain.dtype,
            plain.is_conj(),
            plain.is_neg(),
        )
    if key not in copies:
        copies[key] = plain.to("cpu", copy=True)
    return copies[key]


@functools.cache
def _is_loadable(dtype: torch.dtype) -> bool:
    """Whether tensors of this type can be saved and loaded again: those of less than a byte, for one, cannot."""
    file = io.BytesIO()
    try:
        torch.save(torch.empty(1, dtype=dtype), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # whatever torch raises, such a snapshot would be lost
        return False
    return True


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _refuse(path: str, got: str) -> NoReturn:
    raise InputError(
        f"{path} must be a tensor, a plain value or a dict, list, tuple or set of them, but got {got}, which could not "
        "be loaded from a snapshot: leave it out of `state_dict()`, or keep it as a tensor or plain value"
    )
