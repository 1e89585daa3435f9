"""Import options of a log, and how they are applied: window, nodes, exclusions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, tzinfo
from fnmatch import fnmatchcase

from bftrainer.core.hostlist import expand, split_terms
from bftrainer.core.trace import Window
from bftrainer.errors import InputError


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Options of an import beyond the file name."""

    zone: tzinfo = UTC
    columns: tuple[str, ...] = ()
    start: float | None = None
    end: float | None = None
    nodes: tuple[str, ...] | None = None
    """All nodes of the machine, in order (`--nodes-file`)."""
    exclude: tuple[str, ...] = ()
    keep_edges: bool = False
    min_idle_s: float = 0.0


def choose_window(start: float, end: float, options: ImportOptions) -> Window:
    """The requested window, or else the one that the log covers, from `start` to `end`."""
    first = start if options.start is None else options.start
    last = end if options.end is None else options.end
    if options.start is None and options.end is None and not end > start:
        raise InputError("all its jobs start and end at the same instant: the window is empty")
    window = Window(first, last)
    if window.end <= start or window.start >= end:
        raise InputError(f"covers {Window(start, end)}, nothing of the window {window}")
    return window


def without_nodes(nodes: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """`nodes` without those that match: host lists such as `login[1-3]`, or shell patterns such as `batch*`."""
    names: set[str] = set()
    globs: list[str] = []
    try:
        for term in (term for pattern in patterns for term in split_terms(pattern)):
            if "*" in term or "?" in term:
                globs.append(term)
            else:
                names.update(expand(term))
    except ValueError as problem:
        raise InputError(f"--exclude: {problem}") from None
    kept = [n for n in nodes if n not in names and not any(fnmatchcase(n, g) for g in globs)]
    if not kept:
        raise InputError("no node is left after --exclude")
    return kept
