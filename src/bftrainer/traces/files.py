"""Trace files: reads and writes Parquet (the native form) or CSV with the columns node, start, end, open.

Nodes, window and provenance are stored as file metadata. A file without them can be opened too: its nodes come from a
`nodes.txt` beside it, or else are those that the file mentions. `tables.py` reads and writes the rows. It is imported
when a trace is read or written, because Polars takes long to import and most commands do without.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, tzinfo
from pathlib import Path
from typing import IO, Any

from bftrainer.core.trace import Trace
from bftrainer.errors import InputError
from bftrainer.traces.ranges import RangeTrace
from bftrainer.traces.source import Source, opened
from bftrainer.util.files import replacing

KEY = "bftrainer"
"""Name of the metadata entry in Parquet, and word after `#` in the first line of a CSV file. Holds non-column data."""

SUFFIXES = (".parquet", ".csv")


def load_trace(path: Path, zone: tzinfo = UTC) -> Trace:
    """Open a trace file. Naive times in it are in `zone`."""
    with opened(path) as source:
        return read_trace(source, zone)


def read_trace(source: Source, zone: tzinfo = UTC) -> Trace:
    """Read the trace in an open Parquet or CSV file."""
    head = source.head()
    if not head:
        raise InputError("is empty")
    if not is_parquet(head) and not is_csv(head):
        raise InputError(
            "is not a trace (Parquet, or CSV with the columns node,start,end). If it is a scheduler's log, "
            "turn it into a trace first: bftrainer trace import FILE -o T.parquet"
        )
    from bftrainer.traces import tables

    return tables.read(source.stream.read(), is_parquet(head), source.path.parent / "nodes.txt", zone)


def save_trace(trace: Trace | RangeTrace, path: Path, provenance: Mapping[str, Any]) -> None:
    """Write `trace` to a `.parquet` or `.csv` file, completely or not at all. Rows are made piece by piece."""
    check_output(path)
    from bftrainer.traces import tables

    tables.write(trace if isinstance(trace, RangeTrace) else RangeTrace.of(trace), path, provenance)


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
        refuse_twice(names)
    return names


def refuse_twice(names: Sequence[str]) -> None:
    """Refuse a list of nodes that names one twice."""
    if len(set(names)) != len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise InputError(f"node {twice!r} is named twice in the list of nodes")


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
