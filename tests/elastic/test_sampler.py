from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.elastic.torch.data.batch_plan import BatchPlan, Step
from bftrainer.errors import InputError

WORLDS = st.integers(1, 12)


@st.composite
def plans(draw: st.DrawFn, *, drop_last: bool | None = None) -> BatchPlan:
    length = draw(st.integers(1, 200))
    drop = draw(st.booleans()) if drop_last is None else drop_last
    size = draw(st.integers(1, length if drop else 300))
    kind = draw(st.sampled_from(["batch_size", "global_batch"]))
    return BatchPlan(
        length,
        **{kind: size},
        max_batch=draw(st.none() | st.integers(1, 20)),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 2**64)),
        drop_last=drop,
    )


def step_of_all(plan: BatchPlan, epoch: int, cursor: int, world: int) -> list[Step] | None:
    steps = [plan.step_at(epoch, cursor, rank, world) for rank in range(world)]
    if None in steps:
        assert steps == [None] * world
        return None
    return [step for step in steps if step is not None]


def real_indices(steps: list[Step]) -> list[int]:
    return [i for step in steps for micro in step.micros for i in micro.indices[: micro.samples]]


@given(plans(drop_last=False), st.integers(0, 1000), st.data())
def test_an_epoch_visits_every_index_once_whatever_the_world_does_between_steps(
    plan: BatchPlan, epoch: int, data: st.DataObject
) -> None:
    visited: list[int] = []
    cursor = 0
    while steps := step_of_all(plan, epoch, cursor, data.draw(WORLDS)):
        visited += real_indices(steps)
        cursor = steps[0].stop
    assert cursor == plan.length
    assert sorted(visited) == list(range(plan.length))


@given(plans(drop_last=True), st.data())
def test_with_drop_last_less_than_a_batch_is_left_and_nothing_comes_twice(plan: BatchPlan, data: st.DataObject) -> None:
    visited: list[int] = []
    cursor = 0
    while steps := step_of_all(plan, 0, cursor, world := data.draw(WORLDS)):
        size = steps[0].stop - steps[0].start
        assert size == plan.global_batch_size(world) or cursor == 0
        visited += real_indices(steps)
        cursor = steps[0].stop
    assert len(visited) == len(set(visited)) == cursor > 0
    assert plan.length - cursor < plan.global_batch_size(world)


@given(plans(), WORLDS, st.data())
def test_the_ranks_share_a_step_evenly_in_order_and_their_weights_add_up_to_one(
    plan: BatchPlan, world: int, data: st.DataObject
) -> None:
    cursor = data.draw(st.integers(0, plan.length - 1))
    steps = step_of_all(plan, 3, cursor, world)
    if steps is None:
        assert plan.drop_last
        return
    assert {(step.start, step.stop) for step in steps} == {(cursor, steps[0].stop)}
    assert real_indices(steps) == plan.order(3)[cursor : steps[0].stop].tolist()
    total = steps[0].stop - cursor
    shares = [sum(micro.samples for micro in step.micros) for step in steps]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] <= 1
    for step, share in zip(steps, shares, strict=True):
        for micro in step.micros:
            assert micro.weight == micro.samples / total
            assert len(micro.indices) == max(1, micro.samples)
        sizes = [micro.samples for micro in step.micros]
        assert max(sizes) - min(sizes) <= 1
        assert len(sizes) == max(1, math.ceil(share / (plan.max_batch or max(1, share))))
        assert plan.max_batch is None or max(sizes) <= plan.max_batch
    assert sum(micro.weight for step in steps for micro in step.micros) == pytest.approx(1, abs=1e-12)


@given(plans(), WORLDS, st.data())
def test_the_steps_from_a_cursor_are_those_found_one_by_one(plan: BatchPlan, world: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    cursor = data.draw(st.integers(0, plan.length))
    for step in plan.steps_from(1, cursor, rank, world):
        assert step == plan.step_at(1, cursor, rank, world)
        cursor = step.stop
    assert plan.step_at(1, cursor, rank, world) is None


@given(plans(), WORLDS, st.data())
def test_the_counts_of_an_epoch_are_those_of_its_steps(plan: BatchPlan, world: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    steps = list(plan.steps_from(0, 0, rank, world))
    assert plan.steps_in_epoch(world) == len(steps)
    assert plan.samples_in_epoch(world) == steps[-1].stop
    assert plan.batches_in_epoch(rank, world) == sum(len(step.micros) for step in steps)


def test_a_batch_per_rank_grows_with_the_world_and_a_global_batch_stays() -> None:
    assert [BatchPlan(100, batch_size=8).global_batch_size(world) for world in (1, 2, 5)] == [8, 16, 40]
    assert [BatchPlan(100, global_batch=8).global_batch_size(world) for world in (1, 2, 5)] == [8, 8, 8]


def test_a_rank_without_a_share_works_on_the_first_sample_of_the_batch_for_nothing() -> None:
    plan = BatchPlan(10, global_batch=4, seed=5)
    step = plan.step_at(0, 4, 6, 7)
    assert step is not None
    assert (step.start, step.stop) == (4, 8)
    (micro,) = step.micros
    assert micro.indices == (plan.order(0)[4],)
    assert (micro.weight, micro.samples) == (0.0, 0)


def test_a_large_share_is_split_into_even_micro_batches() -> None:
    step = BatchPlan(100, batch_size=10, max_batch=4, shuffle=False).step_at(0, 0, 1, 2)
    assert step is not None
    assert [micro.indices for micro in step.micros] == [(10, 11, 12, 13), (14, 15, 16), (17, 18, 19)]
    assert [micro.weight for micro in step.micros] == [0.2, 0.15, 0.15]


def test_a_world_that_grew_beyond_the_dataset_still_takes_one_step_an_epoch_with_drop_last() -> None:
    plan = BatchPlan(10, batch_size=4, drop_last=True)
    assert [(step.start, step.stop) for step in plan.steps_from(0, 0, 0, 2)] == [(0, 8)]
    assert [(step.start, step.stop) for step in plan.steps_from(0, 0, 0, 5)] == [(0, 10)]


def test_the_order_is_the_same_on_all_machines() -> None:
    # A change of these numbers means that a training could not go on from a snapshot taken before it.
    assert BatchPlan(8, batch_size=1, seed=7).order(2).tolist() == [6, 0, 2, 3, 7, 5, 1, 4]


def test_the_order_depends_on_the_seed_and_the_epoch_only() -> None:
    plan = BatchPlan(1000, batch_size=1, seed=1)
    first = plan.order(0).tolist()
    assert sorted(first) == list(range(1000))
    assert first != plan.order(1).tolist()
    assert first != BatchPlan(1000, batch_size=1, seed=2).order(0).tolist()
    assert first == BatchPlan(1000, global_batch=64, seed=1).order(0).tolist() == plan.order(0).tolist()
    assert BatchPlan(5, batch_size=1, shuffle=False).order(9).tolist() == [0, 1, 2, 3, 4]


def test_the_order_is_made_once_an_epoch_and_cannot_be_spoiled() -> None:
    plan = BatchPlan(100, batch_size=1)
    assert plan.order(4) is plan.order(4)
    assert plan.order(4).dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        plan.order(4)[0] = 0


def test_indices_are_plain_integers() -> None:
    for world in (1, 200):
        step = BatchPlan(100, global_batch=10).step_at(0, 0, world - 1, world)
        assert step is not None
        assert {type(i) for i in step.micros[0].indices} == {int}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of `batch_size` and `global_batch` must be given, but got neither"),
        ({"batch_size": 1, "global_batch": 1}, "must be given, but got both"),
        ({"batch_size": 0}, "`batch_size` must be a whole number, 1 or more, but got 0"),
        ({"batch_size": True}, "`batch_size` must be a whole number, 1 or more, but got True"),
        ({"global_batch": 2.5}, "`global_batch` must be a whole number, 1 or more, but got 2.5"),
        ({"batch_size": 1, "max_batch": 0}, "`max_batch` must be a whole number, 1 or more, but got 0"),
        ({"batch_size": 1, "seed": -1}, "`seed` must be a whole number, 0 or more, but got -1"),
        ({"batch_size": 1, "length": 0}, "`length` must be a whole number, 1 or more, but got 0"),
        ({"global_batch": 11, "drop_last": True}, "`global_batch` must be at most the 10 samples of the dataset"),
        ({"batch_size": 11, "drop_last": True}, "`batch_size` must be at most the 10 samples of the dataset"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BatchPlan(**{"length": 10, **options})


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((0, 0, 2, 2), "`rank` must be from 0 to below `world`, but got rank 2 of 2"),
        ((0, 0, -1, 2), "but got rank -1 of 2"),
        ((0, 0, 0, 0), "but got rank 0 of 0"),
        ((0, 11, 0, 1), "`cursor` must be from 0 to 10, the dataset's length, but got 11"),
        ((0, -1, 0, 1), "but got -1"),
        ((-1, 0, 0, 1), "`epoch` must be a whole number, 0 or more, but got -1"),
    ],
)
def test_a_step_that_cannot_be_is_refused(place: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BatchPlan(10, batch_size=2).step_at(*place)
