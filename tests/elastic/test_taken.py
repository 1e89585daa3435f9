"""A node is taken at once: who saves the state, when, and who ends without a word."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from bftrainer.elastic.protocol import Broken, Leaving, Message
from bftrainer.elastic.torch.snapshots.last_save import TAKEN, LastSave


class Ended(Exception):  # noqa: N818 - stands for the end of the process
    """The process has ended."""


class Stage:
    """A worker that can be asked what it did."""

    def __init__(self, *, needed: bool = True, others: bool = False) -> None:
        self.needed, self.others = needed, others
        self.now = 0.0
        self.saved: list[float] = []
        self.sent: list[Message] = []
        self.last = LastSave(
            self.saved.append,
            needed=lambda within_s: self.needed,
            someone_else_has_it=lambda: self.others,
            send=self.sent.append,
            generation=lambda: 7,
            exit_=self.exit,
            clock=lambda: self.now,
        )

    def exit(self, status: int) -> None:
        assert status == TAKEN
        raise Ended

    def signalled(self, signum: int, frame: object) -> None:
        self.last.interrupt()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    before = signal.signal(signal.SIGTERM, stage.signalled)
    yield stage
    signal.signal(signal.SIGTERM, before)


def from_the_listener(stage: Stage, within_s: float) -> None:
    """As the manager's word comes: in another thread, while the main thread does something else."""
    thread = threading.Thread(target=stage.last.taken, args=(within_s,))
    thread.start()
    thread.join()


def test_in_the_midst_of_a_batch_the_state_is_saved_at_once(stage: Stage) -> None:
    stage.last.at_rest = True
    with pytest.raises(Ended):
        from_the_listener(stage, 2.0)
    assert stage.saved == [2.0]
    assert stage.sent == [Broken(7, "its node is taken"), Leaving()], "the others wait for nobody"


def test_while_a_step_is_applied_it_is_saved_at_the_next_boundary(stage: Stage) -> None:
    stage.last.at_rest = False
    from_the_listener(stage, 2.0)
    assert stage.saved == []
    stage.now = 0.5
    with pytest.raises(Ended):
        stage.last.end_if_taken()
    assert stage.saved == [1.5]


def test_in_the_middle_of_the_scripts_code_it_ends_without_saving(stage: Stage) -> None:
    from_the_listener(stage, 2.0)
    with pytest.raises(Ended):
        stage.last.end_if_taken(saves=False)
    assert stage.saved == []
    assert stage.sent[0] == Broken(7, "its node is taken")


def test_who_is_told_twice_saves_once(stage: Stage) -> None:
    from_the_listener(stage, 2.0)
    from_the_listener(stage, 1.0)
    with pytest.raises(Ended):
        stage.last.end_if_taken()
    assert stage.saved == [2.0]
    assert len(stage.sent) == 2


@pytest.mark.parametrize("stage_", [Stage(needed=False), Stage(others=True)], ids=["nothing new", "others have it"])
def test_who_has_nothing_to_save_ends_at_once(stage_: Stage) -> None:
    stage_.last.at_rest = True
    with pytest.raises(Ended):
        stage_.last.taken(2.0)
    assert (stage_.saved, stage_.sent) == ([], [])


def test_a_save_that_fails_ends_the_process_all_the_same() -> None:
    def fails(within_s: float) -> None:
        raise OSError("no disk")

    ended: list[int] = []
    last = LastSave(
        fails,
        needed=lambda within_s: True,
        someone_else_has_it=lambda: False,
        send=lambda message: None,
        generation=lambda: 1,
        exit_=ended.append,
    )
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a script may have it
    try:
        last.taken(1.0)
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(OSError, match="no disk"):
        last.end_if_taken()
    assert ended == [TAKEN]


def test_sigterm_by_itself_means_what_it_always_did(stage: Stage) -> None:
    stage.last.at_rest = True
    assert not stage.last.interrupt()
    stage.last.end_if_taken()
    assert stage.saved == []
