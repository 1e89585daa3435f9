"""Portable states: convert a state to values torch's safe loader accepts, and back.

`snapshot_copy.py` calls `portable` before a snapshot is written; `snapshot_file.py` calls `restored` on what was read
with `torch.load(weights_only=True)`. Values that the safe loader knows stay as they are. numpy scalars become plain
numbers. Arrays, deques, defaultdicts, frozensets and empty bytes are stored as a tuple that begins with a mark. All
other values are refused with an `InputError` that names their place in the state.
"""

from __future__ import annotations

import functools
import io
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from bftrainer.errors import InputError

_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None), torch.Size, torch.dtype, torch.device})
_DICTS: frozenset[type] = frozenset({dict, OrderedDict, Counter})
_LAYOUTS = frozenset(
    {torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)
_INT_BITS = 2040
"""torch's safe loader accepts no integer of more than 255 bytes, including its sign."""
_MARK = "__bftrainer__"
"""First item of a tuple that stands for a value of another type: mark, type, contents."""
_FACTORIES: Mapping[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, str, bool, list, tuple, dict, set)},
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "None": None,
}
"""Factories that a defaultdict may have."""

OnTensor = Callable[[torch.Tensor], torch.Tensor]


def check_snapshotable(state: Mapping[str, Any]) -> None:
    """Raise an InputError that names the first value a snapshot cannot hold. No tensor is copied."""
    portable(state, lambda tensor: tensor)


def portable(state: Mapping[str, Any], on_tensor: OnTensor) -> dict[str, Any]:
    """Return the same state made of values that torch's safe loader knows.

    Each tensor is replaced by `on_tensor` of it.
    """
    if not isinstance(state, Mapping):
        raise InputError(f"`state` must be a dict, but got {_type_name(state)}")
    try:
        return {
            _portable(key, "a key of state", on_tensor): _portable(state[key], f"state[{key!r}]", on_tensor)
            for key in state
        }
    except RecursionError:
        raise InputError("`state` must not contain itself or be nested hundreds of levels deep, but it does") from None


def _portable(value: Any, path: str, on_tensor: OnTensor) -> Any:
    # Types must match exactly: a subclass (an enum, a named tuple) is pickled as something else.
    kind = type(value)
    if kind in _PLAIN:
        if kind is int and value.bit_length() >= _INT_BITS:
            _refuse(path, f"an int of {value.bit_length()} bits")
        if kind is bytes and not value:  # pickled as a call of `bytes`, which torch's safe loader refuses
            return (_MARK, "bytes")
        return value
    if isinstance(value, torch.Tensor):
        return on_tensor(_plain_tensor(value, path))
    if kind in _DICTS:
        made = kind()
        for key, item in value.items():
            made[_portable(key, f"a key of {path}", on_tensor)] = _portable(item, f"{path}[{key!r}]", on_tensor)
        if kind is OrderedDict:  # a module's state_dict() keeps the versions of its layers in an attribute
            vars(made).update({k: _portable(item, f"{path}.{k}", on_tensor) for k, item in vars(value).items()})
        return made
    if kind is list or kind is tuple:
        if kind is tuple and value and type(value[0]) is str and value[0] == _MARK:
            _refuse(path, f"a tuple that begins with {_MARK!r}")
        return kind(_portable(item, f"{path}[{index}]", on_tensor) for index, item in enumerate(value))
    if kind is set:
        return {_portable(item, f"an item of {path}", on_tensor) for item in value}
    if kind is bytearray:
        return bytearray(value)
    return _marked(value, path, on_tensor)


def _marked(value: Any, path: str, on_tensor: OnTensor) -> Any:
    """Return a tuple that stands for a value that the safe loader does not know; for a numpy number, a plain number."""
    kind = type(value)
    if kind is frozenset:
        return (_MARK, "frozenset", tuple(_portable(item, f"an item of {path}", on_tensor) for item in value))
    if kind is deque:
        items = [_portable(item, f"{path}[{index}]", on_tensor) for index, item in enumerate(value)]
        return (_MARK, "deque", items, value.maxlen)
    if kind is defaultdict:
        factory = next((name for name, known in _FACTORIES.items() if known is value.default_factory), None)
        if factory is None:
            _refuse(path, f"a defaultdict of {value.default_factory!r}")
        return (_MARK, "defaultdict", factory, _portable(dict(value), path, on_tensor))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        plain = value.item()
        return _portable(plain, path, on_tensor) if type(plain) in _PLAIN else _refuse(path, _type_name(value))
    if numpy is not None and kind is numpy.ndarray:
        try:
            tensor = torch.from_numpy(numpy.array(value))  # a copy: torch warns about read-only memory
        except (TypeError, ValueError):
            _refuse(path, f"a numpy array of {value.dtype}")
        return (_MARK, "ndarray", tensor)
    return _refuse(path, _type_name(value))


def restored(value: Any) -> Any:
    """Undo `portable` on a loaded value. Containers without a marked value are changed in place or not at all."""
    kind = type(value)
    if kind is tuple:
        if value and type(value[0]) is str and value[0] == _MARK:
            return _RESTORED[value[1]](*(restored(item) for item in value[2:]))
        return tuple(restored(item) for item in value)
    if kind is list:
        value[:] = [restored(item) for item in value]
    elif kind is set:
        return {restored(item) for item in value}
    elif kind in _DICTS:
        items = [(restored(key), restored(item)) for key, item in value.items()]
        value.clear()
        for key, item in items:
            value[key] = item
        if kind is OrderedDict:
            vars(value).update({name: restored(item) for name, item in vars(value).items()})
    return value


_RESTORED: Mapping[str, Callable[..., Any]] = {
    "bytes": bytes,
    "frozenset": frozenset,
    "deque": deque,
    "defaultdict": lambda factory, items: defaultdict(_FACTORIES[factory], items),
    "ndarray": lambda tensor: tensor.numpy(),
}


def _plain_tensor(value: torch.Tensor, path: str) -> torch.Tensor:
    plain = value.detach()
    if type(plain) is not torch.Tensor:
        _refuse(path, _type_name(value))
    if plain.is_meta or plain.layout not in _LAYOUTS or not _is_loadable(plain.dtype):
        _refuse(path, f"a tensor of {plain.dtype}, {plain.layout}, on {plain.device}")
    return plain


@functools.cache
def _is_loadable(dtype: torch.dtype) -> bool:
    """Return whether tensors of this type can be saved and loaded again.

    Types smaller than a byte, for example, cannot.
    """
    file = io.BytesIO()
    try:
        torch.save(torch.empty(1, dtype=dtype), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # whatever torch raises, such a snapshot could not be loaded
        return False
    return True


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _refuse(path: str, got: str) -> NoReturn:
    raise InputError(
        f"{path} must be a tensor, an array, a plain value or a dict, list, tuple, set or deque of them, but got "
        f"{got}, which could not be loaded from a snapshot: leave it out of `state_dict()`, or keep it as a tensor or "
        "plain value"
    )
