"""Selection of parts of a trace from command-line options: some nodes, a window."""

from __future__ import annotations

from datetime import tzinfo

from bftrainer.cli.common.output import warn
from bftrainer.core.trace import Trace, Window
from bftrainer.errors import InputError
from bftrainer.traces.times import parse_time


def some_nodes(trace: Trace, text: str) -> tuple[str, ...]:
    """`N`: the first N nodes; `A:B`: from A (counting from 0) up to, not including, B."""
    low, colon, high = text.partition(":")
    try:
        first, last = (int(low or 0), int(high) if high else len(trace.nodes)) if colon else (0, int(low))
    except ValueError:
        raise InputError(f"--nodes must be a number N or a range A:B, but got {text!r}") from None
    if not 0 <= first < last:
        raise InputError(f"--nodes must name at least one node, but got {text!r}")
    if last > len(trace.nodes):
        raise InputError(f"--nodes asks for {last} nodes, but the trace has {len(trace.nodes)}")
    return trace.nodes[first:last]


def some_window(trace: Trace, start: float | None, end: float | None) -> Window:
    """The requested window, cut to what the trace covers."""
    covered = trace.window
    if (start is not None and start >= covered.end) or (end is not None and end <= covered.start):
        raise InputError(f"the window must overlap what the trace covers: {covered}")
    wanted = Window(covered.start if start is None else start, covered.end if end is None else end)
    window = Window(max(wanted.start, covered.start), min(wanted.end, covered.end))
    if window != wanted:
        warn(f"the trace covers {covered}; figures are for {window}")
    return window


def some_time(text: str | None, zone: tzinfo, what: str) -> float | None:
    """Parse a time, if one was given."""
    return None if text is None else parse_time(text, zone, what)
