"""Summit reader for the BFTrainer authors' published data: a pickled pandas frame, a 0/1 matrix of events by nodes.

A pickle can run any code, so this one is taken apart without running anything: each permitted name loads as an inert
record that only remembers its arguments, and any other name is refused. The matrix is then read from those records;
pandas is not needed.
"""

from __future__ import annotations

import pickle
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from bftrainer.core.trace import Flags, Floats, Trace, Window
from bftrainer.errors import InputError

ALLOWED = {
    ("pandas.core.frame", "DataFrame"),
    ("pandas.core.internals.managers", "BlockManager"),
    ("pandas.core.indexes.base", "_new_Index"),
    ("pandas.core.indexes.base", "Index"),
    ("pandas.core.indexes.datetimes", "_new_DatetimeIndex"),
    ("pandas.core.indexes.datetimes", "DatetimeIndex"),
    ("pandas.core.arrays.datetimes", "DatetimeArray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("builtins", "slice"),
}
"""The names that a frame of numbers over a time index, pickled by pandas 1.x, consists of."""

_NODES_AT_ONCE = 256


class _Record:
    """Stands in for one object of the pickle and keeps its arguments and its state."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.args = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Loads every name of the allow-list as the same inert record, and no other name."""

    def find_class(self, module: str, name: str) -> type[_Record]:
        """Called by pickle for each name: the only place where a pickle could reach code."""
        if (module, name) not in ALLOWED:
            raise InputError(f"refused: the pickle asks for {module}.{name}, which no matrix of node states needs")
        return _Record


def read_matrix(stream: BinaryIO) -> Trace:
    """The trace in a pickled frame of events (rows, by time) by nodes (columns), 1 where a node is idle.

    A node is idle from the first event that shows it idle to the first that does not. The last event ends the window.
    """
    try:
        times, nodes, idle = _frame(_Unpickler(stream).load())
    except InputError:
        raise
    except Exception as problem:  # damaged bytes can make the unpickler raise anything
        reason = str(problem) or type(problem).__name__
        raise InputError(f"not a pickled frame of node states by time ({reason})") from None
    return _trace(times, nodes, idle)


def _frame(frame: Any) -> tuple[Floats, list[str], npt.NDArray[Any]]:
    """Times, node names and the matrix (one row per node) from a frame's records."""
    manager = frame.state["_mgr"].state[3]["0.14.1"]
    columns, index = manager["axes"]
    nodes = columns.args[1]["data"].state[4]
    if not all(isinstance(name, str) for name in nodes):
        raise ValueError("columns are not node names")
    times = _array(index.args[1]["data"].state["_data"])
    if times.dtype.kind != "M" or index.args[1].get("tz") is not None:
        raise ValueError("rows are not times in UTC")
    seconds = times.astype("datetime64[ns]").astype(np.int64) / 1e9
    if len(seconds) < 2 or (np.diff(seconds) <= 0).any():
        raise ValueError("times do not rise")
    (block,) = manager["blocks"]
    if block["mgr_locs"].args != (0, len(nodes), 1):
        raise ValueError("columns are not in one block")
    matrix = _array(block["values"])
    if matrix.shape != (len(nodes), len(seconds)) or matrix.dtype.kind not in "biu":
        raise ValueError(f"matrix is {matrix.shape} of {matrix.dtype}, not nodes by times of 0 and 1")
    return seconds, list(nodes), matrix


def _array(record: Any) -> npt.NDArray[Any]:
    """A plain numpy array from the record of a pickled one."""
    _, shape, dtype, fortran, raw = record.state
    code, order = dtype.args[0], dtype.state[1]
    if code[0] not in "biuM":
        raise ValueError(f"unexpected numbers of type {code!r}")
    if code[0] == "M":
        unit, count = dtype.state[8][1][:2] if len(dtype.state) > 8 else ("ns", 1)
        code = f"M8[{count}{unit if isinstance(unit, str) else unit.decode()}]"
    kind = np.dtype(code if order == "|" else order + code)
    return np.frombuffer(raw, kind).reshape(shape, order="F" if fortran else "C")


def _trace(times: Floats, nodes: list[str], idle: npt.NDArray[Any]) -> Trace:
    rows: list[npt.NDArray[np.int64]] = []
    starts: list[npt.NDArray[np.int64]] = []
    ends: list[npt.NDArray[np.int64]] = []
    for first in range(0, len(nodes), _NODES_AT_ONCE):
        part = idle[first : first + _NODES_AT_ONCE] != 0
        # Pad with "busy" on both sides: every run of idle cells then has a rise and a fall.
        padded = np.zeros((len(part), part.shape[1] + 2), dtype=np.int8)
        padded[:, 1:-1] = part
        change = np.diff(padded, axis=1)
        row, start = np.nonzero(change == 1)
        _, end = np.nonzero(change == -1)
        rows.append(row + first)
        starts.append(start)
        ends.append(end)
    start_at, end_at = np.concatenate(starts), np.concatenate(ends)
    last = len(times) - 1
    is_open: Flags = end_at > last
    end_at = np.minimum(end_at, last)
    # A node idle in the last event only joined then; how long it stayed is unknown.
    keep = end_at > start_at
    return Trace.build(
        nodes,
        np.concatenate(rows)[keep],
        times[start_at[keep]],
        times[end_at[keep]],
        is_open[keep],
        Window(float(times[0]), float(times[-1])),
    )
