from __future__ import annotations

import io

from rich.console import Console

from bftrainer.cli.progress import byte_progress


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
