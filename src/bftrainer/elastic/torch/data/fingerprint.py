"""Fingerprint of a dataset: shows whether the samples of two ranks are the same, without loading any.

Data that is split or made with unseeded random numbers has the same length on all nodes, but other samples. The
fingerprint is made of some of the samples that a dataset holds in memory: the indices of a `Subset`, tensors, arrays,
and lists of numbers, texts and tensors. No method of a dataset is called, so random transforms do not matter, and data
in files is not read. A dataset with the attribute `same_on_all_ranks = True` is not looked into: its author knows.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

SAME = "same_on_all_ranks"
"""Attribute by which a dataset says that its samples are the same on all ranks."""
_VALUES = 256
"""Values that are looked at of each tensor, array, or list of indices."""
_ITEMS = 64
"""Items that are looked at of each list."""
_LEAVES = 2048
"""Tensors, arrays and single values that are looked at in all."""
_DEPTH = 8
"""How deep datasets, lists and tuples within each other are followed."""
_UNIT = 1e-6
_TOLERANCE = 1000
"""Largest difference, in units, of sums over the same data: other processors round floats differently."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Numbers made of the samples of a dataset. All are 0 if nothing of it is known."""

    exact: int = 0
    """Digest of whole numbers, texts and shapes."""
    first: int = 0
    """Weighted sum of floats, in millionths."""
    second: int = 0
    """Another weighted sum of them."""

    def agrees_with(self, other: Fingerprint) -> bool:
        """Return whether the samples are the same, but for rounding."""
        near = max(abs(self.first - other.first), abs(self.second - other.second)) <= _TOLERANCE
        return self.exact == other.exact and near


_seen: WeakKeyDictionary[Dataset[Any], Fingerprint] = WeakKeyDictionary()


def fingerprint(dataset: Any) -> Fingerprint:
    """Return the fingerprint of a dataset. It stays what it was at first: a dataset may keep what it has loaded."""
    if not isinstance(dataset, Dataset) or dataset.__hash__ is None:
        return _made_of(dataset)
    if dataset not in _seen:
        _seen[dataset] = _made_of(dataset)
    return _seen[dataset]


def _made_of(dataset: Any) -> Fingerprint:
    digest, floats, leaves = hashlib.sha256(), [np.zeros(0)], 0
    for leaf in _leaves(dataset, _DEPTH):
        leaves += 1
        if leaves > _LEAVES:
            break
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
            floats.append(leaf)
        else:
            digest.update(leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode())
    if not leaves:
        return Fingerprint()
    values = np.nan_to_num(np.concatenate(floats), nan=0.0, posinf=0.0, neginf=0.0)
    # A relative error of a value becomes an absolute error of the same size, whatever the values are.
    values = np.arcsinh(values * 1000)
    random = np.random.Generator(np.random.PCG64(1))
    sums = (random.standard_normal((len(values), 2)).T @ values) / max(1, len(values)) ** 0.5
    exact = int.from_bytes(digest.digest()[:8], "big") >> 2
    return Fingerprint(exact, *(round(float(total) / _UNIT) for total in sums))


def _leaves(data: Any, depth: int) -> Iterator[Any]:
    """Yield values and arrays of values that a dataset holds, or some of them. The order is always the same."""
    if depth == 0 or inspect.getattr_static(data, SAME, False) is True:
        return
    if isinstance(data, Subset):
        yield from _leaves(data.indices, depth - 1)
        yield from _leaves(data.dataset, depth - 1)
    elif isinstance(data, TensorDataset):
        yield from _leaves(data.tensors, depth - 1)
    elif isinstance(data, ConcatDataset | StackDataset):
        yield from _leaves(data.datasets, depth - 1)
    elif isinstance(data, Dataset):
        for name in sorted(vars(data)):
            if _holds_samples(vars(data)[name], data):
                yield from _leaves(vars(data)[name], depth - 1)
    elif isinstance(data, Tensor):
        yield from _leaves_of_tensor(data)
    elif isinstance(data, np.ndarray | np.generic):
        yield from _leaves_of_array(np.asarray(data))
    elif isinstance(data, list | tuple | range):
        yield len(data)
        for place in _places(len(data), _ITEMS):
            yield from _leaves(data[place], depth - 1)
    elif type(data) is dict:
        yield from _leaves(list(data.values()), depth - 1)
    elif isinstance(data, str | bytes):
        # Files may be in another folder on each node.
        yield data[-200:].rsplit("/", 1)[-1] if isinstance(data, str) else data[:200]
    elif isinstance(data, float):
        yield np.array([data])
    elif isinstance(data, int):
        yield data
    elif _is_split(data):
        yield [data._indices.column(0)[place].as_py() for place in _places(len(data), _ITEMS).tolist()]


def _leaves_of_tensor(data: Tensor) -> Iterator[Any]:
    if data.layout is not torch.strided or data.is_meta or data.is_quantized:
        return
    places = tuple(torch.from_numpy(axis) for axis in _places_in(tuple(data.shape)))
    found = data.detach()[places].reshape(-1).cpu()
    if found.is_complex():
        found = torch.view_as_real(found.resolve_conj()).reshape(-1)
    yield tuple(data.shape)
    yield (found.double() if found.is_floating_point() else found.long()).numpy()


def _leaves_of_array(data: npt.NDArray[Any]) -> Iterator[Any]:
    values = np.asarray(data[_places_in(data.shape)]).reshape(-1)
    yield data.shape
    if values.dtype.kind == "f":
        yield values.astype(np.float64)
    elif values.dtype.kind in "iub":
        yield values.astype(np.int64)
    else:
        yield from _leaves(values.tolist(), 2)


def _holds_samples(value: Any, dataset: Any) -> bool:
    """Return whether an attribute of a dataset of the script's own holds its samples: it is as long as the dataset.

    Others, such as settings of transforms, may differ from node to node.
    """
    if isinstance(value, Dataset) or _is_split(value):
        return True
    has_length = isinstance(value, list | tuple) or (isinstance(value, Tensor | np.ndarray) and value.ndim > 0)
    return has_length and hasattr(type(dataset), "__len__") and len(value) == len(dataset)


def _is_split(data: Any) -> bool:
    """Return whether a dataset is a part of a table of Hugging Face, with indices as a table of pyarrow."""
    return type(data).__module__.split(".")[0] == "datasets" and hasattr(getattr(data, "_indices", None), "column")


def _places_in(shape: tuple[int, ...]) -> tuple[npt.NDArray[np.intp], ...]:
    """Return at most `_VALUES` places in an array, spread over it."""
    return np.unravel_index(_places(math.prod(shape), _VALUES), shape) if shape else ()


def _places(length: int, most: int) -> npt.NDArray[np.int64]:
    """Return at most `most` places in a list, spread over it."""
    return np.unique(np.linspace(0, max(length - 1, 0), min(length, most)).astype(np.int64))
