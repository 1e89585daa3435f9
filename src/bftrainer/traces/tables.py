"""Rows of trace files: Parquet or CSV on one side, a `Trace` on the other, by way of Polars.

`files.py` calls `read` and `write` and is what other modules use.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, tzinfo
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from polars.io.plugins import register_io_source

from bftrainer.core.trace import Floats, Trace, Window
from bftrainer.errors import InputError
from bftrainer.traces.files import KEY, read_node_names, refuse_twice, writing
from bftrainer.traces.ranges import RangeTrace
from bftrainer.traces.times import LATEST, Clock

COLUMNS = ("node", "start", "end", "open")
_ROWS_AT_ONCE = 1 << 20
_TIME = pl.Datetime("ms", "UTC")
_SCHEMA = {"node": pl.String(), "start": _TIME, "end": _TIME, "open": pl.Boolean()}


def read(data: bytes, parquet: bool, beside: Path, zone: tzinfo) -> Trace:
    """Read the trace in a file's contents, Parquet or CSV. `beside` is the list of nodes for a file without one."""
    table, meta = _from_parquet(data) if parquet else _from_csv(data)
    return _to_trace(table, meta, beside, Clock(zone))


def write(ranges: RangeTrace, path: Path, provenance: Mapping[str, Any]) -> None:
    """Write a trace to a `.parquet` or `.csv` file. Rows are made piece by piece."""
    meta = json.dumps(
        {
            "format": 1,
            "window": (_milliseconds(np.array([ranges.window.start, ranges.window.end])) / 1000).tolist(),
            "nodes": list(ranges.nodes),
            "nodes_known": ranges.nodes_known,
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


@dataclass(frozen=True, slots=True)
class _TraceTable:
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


def _from_parquet(data: bytes) -> tuple[_TraceTable, dict[str, Any]]:
    try:
        meta = pl.read_parquet_metadata(io.BytesIO(data)).get(KEY, "{}")
        frame = pl.scan_parquet(io.BytesIO(data))
        columns = frame.collect_schema().names()
        rows = int(frame.select(pl.len()).collect().item())
    except (Exception, pl.exceptions.PanicException) as problem:
        raise InputError(f"truncated or damaged Parquet file ({_first_line(problem)})") from None
    return _TraceTable(frame.select(name for name in COLUMNS if name in columns), columns, rows), _meta(meta)


def _from_csv(data: bytes) -> tuple[_TraceTable, dict[str, Any]]:
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
    return _TraceTable(frame.lazy(), frame.columns, len(frame)), _meta(meta)


def _meta(text: str) -> dict[str, Any]:
    try:
        meta = json.loads(text)
    except ValueError:
        raise InputError("its metadata is damaged: not JSON") from None
    if not isinstance(meta, dict):
        raise InputError("its metadata is damaged: not a JSON object")
    return meta


def _to_trace(table: _TraceTable, meta: dict[str, Any], beside: Path, clock: Clock) -> Trace:
    missing = [name for name in COLUMNS[:3] if name not in table.columns]
    if missing:
        raise InputError(
            f"a trace must have the columns node, start and end, but {', '.join(missing)} is missing "
            f"(found {', '.join(table.columns[:8]) or 'none'})"
        )
    nodes, known = _machine(table, meta, beside)
    position = pl.DataFrame(
        {"node": pl.Series(nodes, dtype=pl.String), "position": np.arange(len(nodes), dtype=np.int32)}
    )
    node, start, end = (np.empty(table.rows, dtype) for dtype in (np.int32, np.float64, np.float64))
    is_open = np.zeros(table.rows, dtype=np.bool_)
    for at in range(0, table.rows, _ROWS_AT_ONCE):
        part = table.part(at, _ROWS_AT_ONCE)
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


def _machine(table: _TraceTable, meta: dict[str, Any], beside: Path) -> tuple[Sequence[str], bool]:
    """The machine's nodes, and whether the list is known to be complete."""
    names = meta.get("nodes")
    if names is not None:
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise InputError("its metadata is damaged: nodes must be a list of names")
        refuse_twice(names)
        return names, bool(meta.get("nodes_known", True))
    if beside.is_file():
        return read_node_names(beside), True
    parts = (_complete(table.part(at, _ROWS_AT_ONCE)["node"], at) for at in range(0, table.rows, _ROWS_AT_ONCE))
    seen = (part.cast(pl.String).unique(maintain_order=True).to_list() for part in parts)
    return list(dict.fromkeys(chain.from_iterable(seen))), False


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
