from __future__ import annotations

import io
import time

from rich.console import Console

from bftrainer.cli.common.progress import byte_progress, waiting


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(seconds_between: float, terminal: bool) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=100)
    clock = FakeClock()
    with byte_progress("reading log", console, clock) as progress:
        for done in range(0, 1001, 100):
            progress(done, 1000)
            clock.now += seconds_between
    return screen.getvalue()


def test_a_bar_appears_after_two_seconds_when_a_terminal_watches() -> None:
    assert "reading log" in watched(0.5, terminal=True)


def test_no_bar_for_what_is_quick() -> None:
    assert watched(0.1, terminal=True) == ""


def test_no_bar_when_nobody_watches() -> None:
    assert watched(0.5, terminal=False) == ""


def test_work_without_a_known_end_shows_that_it_goes_on() -> None:
    screen = io.StringIO()
    with waiting("measuring", Console(file=screen, force_terminal=True, width=100), patience_s=0.01):
        deadline = time.monotonic() + 30
        while "measuring" not in screen.getvalue():
            assert time.monotonic() < deadline, "no bar appeared"
            time.sleep(0.01)


def test_quick_or_unwatched_work_shows_nothing() -> None:
    for terminal, patience in ((True, 60.0), (False, 0.0)):
        screen = io.StringIO()
        with waiting("measuring", Console(file=screen, force_terminal=terminal, width=100), patience_s=patience):
            pass
        assert screen.getvalue() == ""
