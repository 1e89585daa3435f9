"""Progress bar for work that takes longer than two seconds. Shown only on a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PATIENCE_S = 2.0

_LABEL = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
_BYTES = (*_LABEL, DownloadColumn(), TimeRemainingColumn())
_SHARE = (*_LABEL, TaskProgressColumn(), TimeRemainingColumn())


@contextmanager
def byte_progress(
    label: str,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
    columns: Sequence[ProgressColumn] = _BYTES,
) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with the bytes done and the total. The bar appears only after two seconds."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(label, total=None)
    began = clock()
    shown = False

    def advance(done: int, total: int) -> None:
        nonlocal shown
        if not shown and clock() - began >= PATIENCE_S:
            bar.start()
            shown = True
        bar.update(task, completed=done, total=total or None)

    try:
        yield advance
    finally:
        bar.stop()


@contextmanager
def share_progress(label: str, console: Console | None = None) -> Iterator[Callable[[float], None]]:
    """Yield a function to call with the share of the work that is done, 0 to 1."""
    with byte_progress(label, console, columns=_SHARE) as progress:
        yield lambda share: progress(int(share * 10_000), 10_000)


@contextmanager
def waiting(label: str, console: Console | None = None, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Show a bar without an end while the block runs, after two seconds. For work of unknown length."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    bar = Progress(*_LABEL, TimeElapsedColumn(), console=console, transient=True)
    bar.add_task(label, total=None)
    timer = threading.Timer(patience_s, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # so that the bar is not started after it was stopped
        bar.stop()
