"""The ranks of a worker speak with one voice."""

from __future__ import annotations

import pytest

from bftrainer.elastic.manager.ranks import MergedVoice
from bftrainer.elastic.protocol import (
    Arrived,
    Broken,
    Done,
    Failed,
    Formed,
    FromWorker,
    Hello,
    Leaving,
    Left,
    Ready,
    Report,
)


def merged(voice: MergedVoice, *said: tuple[int, FromWorker]) -> list[FromWorker | None]:
    return [voice.merge(rank, message) for rank, message in said]


def test_a_worker_with_one_rank_says_what_its_rank_says() -> None:
    voice = MergedVoice(1)
    for message in (Hello("w", 1), Ready(), Arrived(1, "a:1"), Report(1), Report(1), Failed("E", ""), Left(3)):
        assert voice.merge(0, message) is message


def test_a_worker_is_ready_when_all_its_ranks_are() -> None:
    assert merged(MergedVoice(3), (1, Ready()), (0, Ready()), (2, Ready())) == [None, None, Ready()]


def test_a_worker_arrives_with_the_addresses_of_its_ranks_in_their_order() -> None:
    voice = MergedVoice(2)
    assert merged(voice, (1, Arrived(4, "h:2")), (0, Arrived(4, "h:1"))) == [None, Arrived(4, "h:1", ("h:1", "h:2"))]


def test_ranks_that_wait_in_different_generations_have_not_arrived() -> None:
    voice = MergedVoice(2)
    assert merged(voice, (0, Arrived(4, "h:1")), (1, Arrived(5, "h:2"))) == [None, None]
    assert voice.merge(0, Arrived(5, "h:3")) == Arrived(5, "h:3", ("h:3", "h:2"))


def test_a_worker_has_formed_when_its_slowest_rank_has() -> None:
    voice = MergedVoice(2)
    slow, quick = Formed(4, 2, 0.5, 0.1, 0.2), Formed(4, 2, 0.3, 0.1, 0.1)
    assert merged(voice, (0, slow), (1, quick)) == [None, slow]
    assert merged(voice, (1, Formed(5, 2, 0.3, 0.1, 0.1))) == [None]


def test_the_first_rank_reports_for_all_with_the_samples_that_all_computed_in_vain() -> None:
    voice = MergedVoice(2)
    said = ((0, Report(1, step=7, redone=3)), (1, Report(1, step=7, redone=5)), (0, Report(1, step=8, redone=3)))
    assert merged(voice, *said) == [Report(1, step=7, redone=3), None, Report(1, step=8, redone=8)]


def test_the_wish_to_leave_is_told_once() -> None:
    assert merged(MergedVoice(2), (1, Leaving()), (0, Leaving())) == [Leaving(), None]


def test_the_first_failure_is_told_with_its_rank() -> None:
    said = (1, Failed("ValueError: x", "trace")), (0, Failed("ValueError: y", ""))
    assert merged(MergedVoice(2), *said) == [Failed("ValueError: x (local rank 1)", "trace"), None]


def test_a_broken_group_is_told_once_per_generation() -> None:
    voice = MergedVoice(2)
    said = ((1, Broken(3, "a")), (0, Broken(3, "b")), (0, Broken(5, "c")), (1, Broken(3, "late")))
    assert merged(voice, *said) == [Broken(3, "a"), None, Broken(5, "c"), None]


@pytest.mark.parametrize("message", [Left(9), Done(9)])
def test_a_worker_is_over_when_all_its_ranks_are(message: FromWorker) -> None:
    assert merged(MergedVoice(2), (0, message), (1, message)) == [None, message]


def test_a_worker_says_hello_once() -> None:
    first, second = Hello("w", 10, local_rank=0), Hello("w", 11, local_rank=1)
    assert merged(MergedVoice(2), (1, second), (0, first)) == [None, first]


def test_a_worker_whose_group_is_broken_has_not_formed_it() -> None:
    voice = MergedVoice(2)
    formed = Formed(3, 2, 0.1, 0.1, 0.1)
    assert merged(voice, (0, formed), (0, Broken(3, "a")), (1, formed)) == [None, Broken(3, "a"), None]
