"""Trace files: reads and writes Parquet (the native form) or CSV with the columns node, start, end, open.

Nodes, window and provenance are stored as file metadata. A file without them can be opened too: its nodes come from a
`nodes.txt` beside it, or else are those that the file mentions.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, tzinfo
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import polars as pl
from polars.io.plugins import register_io_source

from bftrainer.core.trace import Floats, Trace, Window
from bftrainer.errors import InputError
from bftrainer.traces.ranges import RangeTrace
from bftrainer.traces.source import Source, opened
from bftrainer.traces.times import LATEST, Clock
from bftrainer.util.files import replacing

KEY = "bftrainer"
"""Name of the metadata entry in Parquet, and word after `#` in the first line of a CSV file. Holds non-column data."""

SUFFIXES = (".parquet", ".csv")
COLUMNS = ("node", "start", "end", "open")
_ROWS_AT_ONCE = 1 << 20
_TIME = pl.Datetime("ms", "UTC")
_SCHEMA = {"node": pl.String(), "start": _TIME, "end": _TIME, "open": pl.Boolean()}


def load_trace(path: Path, zone: tzinfo = UTC) -> Trace:
    """Open a trace file. Naive times in it are in `zone`."""
    with opened(path) as source:
        return read_trace(source, zone)


def read_trace(source: Source, zone: tzinfo = UTC) -> Trace:
    """Read the trace in an open Parquet or CSV file."""
    head = source.head()
    if not head:
        raise InputError("is empty")
    if is_parquet(head):
        file, meta = _from_parquet(source.stream.read())
    elif is_csv(head):
        file, meta = _from_csv(source.stream.read())
    else:
        raise InputError(
            "is not a trace (Parquet, or CSV with the columns node,start,end). If it is a scheduler's log, "
            "turn it into a trace first: bftrainer trace import FILE -o T.parquet"
        )
    return _to_trace(file, meta, source.path.parent / "nodes.txt", Clock(zone))


def save_trace(trace: Trace | RangeTrace, path: Path, provenance: Mapping[str, Any]) -> None:
    """Write `trace` to a `.parquet` or `.csv` file, completely or not at all. Rows are made piece by piece."""
    check_output(path)
    ranges = trace if isinstance(trace, RangeTrace) else RangeTrace.of(trace)
    meta = json.dumps(
        {
            "format": 1,
            "window": (_milliseconds(np.array([trace.window.start, trace.window.end])) / 1000).tolist(),
            "nodes": list(trace.nodes),
            "nodes_known": trace.nodes_known,
            "provenance": dict(provenance),
        }
    )
    try:
        with writing(path, "wb") as out:
            if path.suffix == ".csv":
                out.write(f"# {KEY} {meta}\n".encode())
                for number, frame in enumerate(_frames(ranges)):
                    frame.write_csv(out, datetime_format="%Y-%m-%dT%H:%M:%S%.3fZ", include_header=number == 0)
            else:
                rows = register_io_source(lambda *_: _frames(ranges), schema=_SCHEMA)
                rows.sink_parquet(out, metadata={KEY: meta})
    except (OSError, pl.exceptions.PolarsError) as problem:
        raise InputError(f"{path}: could not be written ({_first_line(problem)}). Is the disk full?") from None


def _frames(ranges: RangeTrace) -> Iterator[pl.DataFrame]:
    """The rows of a trace file, at least one frame."""
    names = pl.Series(ranges.nodes, dtype=pl.String)
    yield pl.DataFrame(schema=_SCHEMA)
    for node, start, end, is_open in ranges.pieces():
        times = (pl.Series(_milliseconds(times)).cast(_TIME) for times in (start, end))
        yield pl.DataFrame([names.gather(node), *times, pl.Series(is_open)], schema=_SCHEMA)


def _milliseconds(seconds: Floats) -> npt.NDArray[np.int64]:
    """Whole milliseconds, a trace file's resolution. Rounding keeps order, so a fragment stays inside its window."""
    return (seconds * 1000).round().astype(np.int64)


def check_output(path: Path) -> None:
    """Refuse early an output that could not be written later."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: a trace file must end in {' or '.join(SUFFIXES)}")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Refuse a path whose folder is missing or not writable, before any work is done."""
    if path.is_dir():
        raise InputError(f"{path}: is a directory, not a file")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path}: Permission denied")


@contextmanager
def writing(path: Path, mode: str) -> Iterator[IO[Any]]:
    """Open an output file that appears under its name only when complete."""
    check_writable(path)
    with replacing(path, mode) as out:
        yield out


def read_node_names(path: Path) -> list[str]:
    """The nodes of a machine in order, one per line; blank lines and `#` comments are skipped."""
    with opened(path) as source:
        names = [name for _, line in source.lines() if (name := line.partition("#")[0].strip())]
        bad = next((name for name in names if any(c.isspace() or not c.isprintable() for c in name)), None)
        if bad is not None:
            raise InputError(f"must have one node name per line, but got {bad[:60]!r}")
        if not names:
            raise InputError("names no node")
        _refuse_twice(names)
    return names


def is_parquet(head: bytes) -> bool:
    """Whether the file begins with Parquet's magic bytes."""
    return head.startswith(b"PAR1")


def is_csv(head: bytes) -> bool:
    """Whether the file begins with our metadata line, or a header with the columns of a trace."""
    first, _, _rest = head.partition(b"\n")
    if first.startswith(f"# {KEY} ".encode()):
        # The metadata line names every node, so it may be longer than the head.
        return True
    names = {name.strip().strip(b'"').lower() for name in first.split(b",")}
    return {b"node", b"start", b"end"} <= names


@dataclass(frozen=True, slots=True)
class _File:
    """Rows of a trace file, which are read some at a time."""

    frame: pl.LazyFrame
    columns: list[str]
    rows: int

    def part(self, at: int, count: int) -> pl.DataFrame:
        """Some of the rows."""
        try:
            return self.frame.slice(at, count).collect()
        except (Exception, pl.exceptions.PanicException) as problem:  # damaged files can make the decoder panic
            raise InputError(f"truncated or damaged Parquet file ({_first_line(problem)})") from None


def _from_parquet(data: bytes) -> tuple[_File, dict[str, Any]]:
    try:
        meta = pl.read_parquet_metadata(io.BytesIO(data)).get(KEY, "{}")
        frame = pl.scan_parquet(io.BytesIO(data))
        columns = frame.collect_schema().names()
        rows = int(frame.select(pl.len()).collect().item())
    except (Exception, pl.exceptions.PanicException) as problem:
        raise InputError(f"truncated or damaged Parquet file ({_first_line(problem)})") from None
    return _File(frame.select(name for name in COLUMNS if name in columns), columns, rows), _meta(meta)


def _from_csv(data: bytes) -> tuple[_File, dict[str, Any]]:
    meta = "{}"
    mark = f"# {KEY} ".encode()
    if data.startswith(mark):
        line, _, data = data.partition(b"\n")
        meta = line.removeprefix(mark).decode("utf-8", "replace")
    try:
        frame = pl.read_csv(io.BytesIO(data), infer_schema=False)
    except (Exception, pl.exceptions.PanicException) as problem:
        raise InputError(f"unreadable CSV ({_first_line(problem)})") from None
    frame = frame.rename(lambda name: name.strip().lower())
    return _File(frame.lazy(), frame.columns, len(frame)), _meta(meta)


def _meta(text: str) -> dict[str, Any]:
    try:
        meta = json.loads(text)
    except ValueError:
        raise InputError("its metadata is damaged: not JSON") from None
    if not isinstance(meta, dict):
        raise InputError("its metadata is damaged: not a JSON object")
    return meta


def _to_trace(file: _File, meta: dict[str, Any], beside: Path, clock: Clock) -> Trace:
    missing = [name for name in COLUMNS[:3] if name not in file.columns]
    if missing:
        raise InputError(
            f"a trace must have the columns node, start and end, but {', '.join(missing)} is missing "
            f"(found {', '.join(file.columns[:8]) or 'none'})"
        )
    nodes, known = _machine(file, meta, beside)
    position = pl.DataFrame(
        {"node": pl.Series(nodes, dtype=pl.String), "position": np.arange(len(nodes), dtype=np.int32)}
    )
    node, start, end = (np.empty(file.rows, dtype) for dtype in (np.int32, np.float64, np.float64))
    is_open = np.zeros(file.rows, dtype=np.bool_)
    for at in range(0, file.rows, _ROWS_AT_ONCE):
        part = file.part(at, _ROWS_AT_ONCE)
        rows = slice(at, at + len(part))
        names = _complete(part["node"], at).cast(pl.String)
        number = names.to_frame("node").join(position, on="node", how="left", maintain_order="left")["position"]
        if number.null_count():
            stranger = names[int(number.is_null().arg_max() or 0)]
            where = "its metadata" if "nodes" in meta else str(beside)
            raise InputError(f"node {stranger!r} has a fragment but is not among the {len(nodes)} nodes of {where}")
        node[rows] = number.to_numpy()
        start[rows], end[rows] = (_seconds(_complete(part[name], at), clock) for name in ("start", "end"))
        if "open" in part.columns:
            is_open[rows] = _flags(part["open"])
    return Trace.build(nodes, node, start, end, is_open, _window(meta), known)


def _complete(column: pl.Series, at: int) -> pl.Series:
    """A column of the rows from row `at` on, in which no value may be missing."""
    if column.null_count():
        raise InputError(f"row {at + int(column.is_null().arg_max() or 0) + 1} has no {column.name}")
    return column


def _machine(file: _File, meta: dict[str, Any], beside: Path) -> tuple[Sequence[str], bool]:
    """The machine's nodes, and whether the list is known to be complete."""
    names = meta.get("nodes")
    if names is not None:
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise InputError("its metadata is damaged: nodes must be a list of names")
        _refuse_twice(names)
        return names, bool(meta.get("nodes_known", True))
    if beside.is_file():
        return read_node_names(beside), True
    parts = (_complete(file.part(at, _ROWS_AT_ONCE)["node"], at) for at in range(0, file.rows, _ROWS_AT_ONCE))
    seen = (part.cast(pl.String).unique(maintain_order=True).to_list() for part in parts)
    return list(dict.fromkeys(chain.from_iterable(seen))), False


def _refuse_twice(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise InputError(f"node {twice!r} is named twice in the list of nodes")


def _window(meta: dict[str, Any]) -> Window | None:
    window = meta.get("window")
    if window is None:
        return None
    try:
        start, end = (float(t) for t in window)
    except (TypeError, ValueError):
        raise InputError("its metadata is damaged: window must be two times in seconds") from None
    return Window(start, end)


def _seconds(column: pl.Series, clock: Clock) -> Floats:
    """A column of times, in any form, as seconds since 1970 UTC."""
    if isinstance(column.dtype, pl.Datetime) and (column.dtype.time_zone or clock.zone is UTC):
        seconds = column.dt.epoch("us").to_numpy() / 1e6
    elif column.dtype.is_numeric():
        seconds = column.cast(pl.Float64).to_numpy()
    else:
        seconds = _parsed(column, clock)
    if len(seconds) and not (np.isfinite(seconds).all() and seconds.min() >= 0 and seconds.max() <= LATEST):
        raise InputError(f"column {column.name} must hold times between 1970 and 2200")
    return seconds


def _parsed(column: pl.Series, clock: Clock) -> Floats:
    """A column of texts or naive times, parsed; our own CSV files take a fast path."""
    if isinstance(column.dtype, pl.Datetime | pl.Date):
        column = column.dt.to_string("iso:strict")
    column = column.cast(pl.String)
    ours = column.str.to_datetime("%Y-%m-%dT%H:%M:%S%.fZ", time_unit="us", strict=False)
    if not ours.null_count():
        return ours.dt.epoch("us").to_numpy() / 1e6
    try:
        return np.array([clock(text) for text in column.to_list()], dtype=np.float64)
    except ValueError as problem:
        raise InputError(f"column {column.name}: {problem}") from None


def _flags(column: pl.Series) -> npt.NDArray[np.bool_]:
    if column.dtype == pl.String:
        column = column.str.to_lowercase().replace_strict(
            {"true": True, "1": True, "false": False, "0": False}, default=None, return_dtype=pl.Boolean
        )
    if column.dtype != pl.Boolean or column.null_count():
        raise InputError("column open must hold true or false")
    return column.to_numpy()


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:120]
