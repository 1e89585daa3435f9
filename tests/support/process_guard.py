"""Finds tests that start another process without a marker that says so: `make test-fast` must not run them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Set

import pytest

MARKERS = ("slurm", "browser", "waits", "docs")
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
ONCE = {"fc-list"}
"""Programs that a library runs once per machine: Matplotlib looks for fonts before its first figure."""
_started: list[str] = []


def _note(event: str, arguments: tuple[object, ...], starts: Set[str] = frozenset(STARTS)) -> None:
    # The interpreter calls it to its very end, when the globals of this module are gone.
    if event in starts and len(_started) < 3 and not ONCE & set(map(str, arguments[:1])):
        _started.append(f"{event} {' '.join(map(str, arguments[:2]))}".strip())


def pytest_configure() -> None:
    sys.addaudithook(_note)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup() -> Iterator[None]:
    _started.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    result = yield
    if _started and not any(item.get_closest_marker(name) for name in MARKERS):
        others = ", ".join(name for name in MARKERS if name != "waits")
        pytest.fail(
            f"It starts another process ({'; '.join(_started)[:300]}), so it needs a marker: @pytest.mark.waits, or "
            f"one of {others}. `make test-fast` runs what has none.",
            pytrace=False,
        )
    return result
