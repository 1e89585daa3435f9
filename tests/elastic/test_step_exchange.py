"""Numbers that ranks exchange along with the gradients of a step."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

from bftrainer.elastic.torch.gradients.step_exchange import Numbers, StepExchange, StepNumbers


class Summing:
    """Sums over ranks that are threads. It counts the sums, and refuses rows of different lengths."""

    def __init__(self, world: int, *, breaks: bool = False) -> None:
        self.count = 0
        self._rows: list[list[float]] = []
        self._breaks = breaks
        self._barrier = threading.Barrier(world, timeout=30)

    def __call__(self, row: Sequence[float]) -> list[float] | None:
        self._rows.append(list(row))
        self._barrier.wait()
        rows = self._rows
        assert len({len(one) for one in rows}) == 1
        sums = [math.fsum(values) for values in zip(*rows, strict=True)]
        if self._barrier.wait() == 0:
            self._rows = []
            self.count += 1
        self._barrier.wait()
        return None if self._breaks else sums


def exchange(numbers: list[Numbers], *, breaks: bool = False) -> tuple[list[list[Numbers] | None], int]:
    """What each rank gets, and how many sums that took."""
    world = len(numbers)
    summing = Summing(world, breaks=breaks)
    with ThreadPoolExecutor(world) as ranks:
        found = list(ranks.map(lambda rank: exchanged(numbers[rank], rank, world, summing), range(world)))
    return found, summing.count


def exchanged(numbers: Numbers, rank: int, world: int, summing: Summing) -> list[Numbers] | None:
    exchange = StepExchange(numbers, rank, world)
    sums = summing(exchange.row)
    return exchange.numbers if sums is not None and exchange.take(sums, summing) else None


def test_few_numbers_under_the_same_names_take_one_sum() -> None:
    numbers: list[Numbers] = [{"loss": [rank + 0.5, 1.0], "acc": [0.1 * rank, 1.0]} for rank in range(3)]
    found, sums = exchange(numbers)
    assert found == [numbers] * 3
    assert sums == 1


def test_many_numbers_take_two_sums() -> None:
    numbers: list[Numbers] = [{"matrix": [float(n * (rank + 1)) for n in range(500)]} for rank in range(2)]
    found, sums = exchange(numbers)
    assert found == [numbers] * 2
    assert sums == 2


def test_ranks_with_other_names_are_understood() -> None:
    numbers: list[Numbers] = [{"loss": [1.0, 2.0]}, {}, {"loss": [3.0, 4.0], "only here, näturally": [5.0] * 60}]
    found, _ = exchange(numbers)
    assert found == [numbers] * 3


def test_a_rank_alone_needs_no_sum() -> None:
    assert StepExchange({"loss": [1.0]}, 0, 1).numbers == [{"loss": [1.0]}]


def test_a_lost_peer_is_told_to_all() -> None:
    found, _ = exchange([{"loss": [1.0]}, {"loss": [2.0]}], breaks=True)
    assert found == [None, None]


def test_a_rank_that_missed_a_step_finds_its_numbers_in_the_state_and_no_others() -> None:
    mine, theirs = StepNumbers(), StepNumbers()
    mine.made(7, [{"loss": [1.0]}, {"loss": [2.0]}])
    theirs.load(json.loads(json.dumps(mine.as_state())))
    assert theirs.of(7) == [{"loss": [1.0]}, {"loss": [2.0]}]
    assert theirs.of(8) is None
    theirs.load({})  # a snapshot of an older version
    assert theirs.of(7) is None
