from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, IterableDataset  # noqa: E402

from bftrainer.elastic.torch.data.batch_plan import BatchPlan, Step  # noqa: E402
from bftrainer.elastic.torch.data.loader import Loader  # noqa: E402
from bftrainer.errors import InputError  # noqa: E402
from support.waiting import wait_until  # noqa: E402

pytestmark = [
    pytest.mark.waits,
    # About the machine the tests run on: few cores, or threads of torch when the workers are forked.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
Opened = Callable[..., Loader]


class Numbers(Dataset[Any]):
    """Each sample is its index, and who fetched it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


class Raising(Numbers):
    """One sample cannot be had."""

    def __init__(self, length: int, bad: int, error: type[Exception]) -> None:
        super().__init__(length)
        self.bad, self.error = bad, error

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == self.bad:
            raise self.error(f"sample {index}")
        return super().__getitem__(index)


class Deadly(Numbers):
    """One sample kills the worker that fetches it."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Whole(Numbers):
    """Fetches a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        return [(index, -1) for index in indices]


class Gated(Numbers):
    """Counts what is fetched; nothing is before the gate opens."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.fetched = multiprocessing.Value("i", 0)
        self.gate = multiprocessing.Event()

    def __getitem__(self, index: int) -> tuple[int, int]:
        with self.fetched.get_lock():
            self.fetched.value += 1
        assert self.gate.wait(60)
        return super().__getitem__(index)


class Seeds(Numbers):
    def __getitem__(self, index: int) -> tuple[int, int]:
        return torch.initial_seed(), index


@pytest.fixture
def opened() -> Iterator[Opened]:
    loaders: list[Loader] = []

    def make(*args: Any, **options: Any) -> Loader:
        loaders.append(Loader(*args, **options))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()
    assert multiprocessing.active_children() == []


def indices(batch: Any) -> list[int]:
    return batch[0].tolist()


def rest(loader: Loader) -> list[tuple[Step, int, list[int]]]:
    found = []
    while (item := loader.next()) is not None:
        step, number, batch = item
        found.append((step, number, indices(batch)))
    return found


def planned(plan: BatchPlan, epoch: int, cursor: int, rank: int, world: int) -> list[tuple[Step, int, list[int]]]:
    return [
        (step, number, list(micro.indices))
        for step in plan.steps_from(epoch, cursor, rank, world)
        for number, micro in enumerate(step.micros)
    ]


@WORKERS
def test_the_batches_of_an_epoch_are_those_planned(num_workers: int, opened: Opened) -> None:
    plan = BatchPlan(101, batch_size=7, max_batch=3)
    loader = opened(Numbers(101), plan, num_workers=num_workers)
    for epoch in range(3):
        loader.begin(epoch, 0, 1, 2)
        assert rest(loader) == planned(plan, epoch, 0, 1, 2)
        assert loader.next() is None


@WORKERS
def test_after_many_beginnings_in_the_middle_of_epochs_the_batches_are_right(num_workers: int, opened: Opened) -> None:
    chance = random.Random(4)
    plan = BatchPlan(200, global_batch=10, max_batch=2)
    loader = opened(Numbers(200), plan, num_workers=num_workers)
    pids = set()
    for _ in range(60):
        world = chance.randint(1, 12)
        place = (chance.randint(0, 5), chance.randint(0, 200), chance.randrange(world), world)
        loader.begin(*place)
        expected = planned(plan, *place)
        for number in range(min(chance.randint(0, 12), len(expected))):
            item = loader.next()
            assert item is not None
            assert (item[0], item[1], indices(item[2])) == expected[number]
            pids |= set(item[2][1].tolist())
    loader.begin(0, 30, 0, 3)
    assert rest(loader) == planned(plan, 0, 30, 0, 3)
    assert len(pids) == max(1, num_workers)  # the same workers all the time
    assert (os.getpid() in pids) == (num_workers == 0)
    loader.close()
    assert multiprocessing.active_children() == []


def test_samples_are_fetched_when_asked_for_and_not_before_without_workers(opened: Opened) -> None:
    fetched = []

    class Watched(Numbers):
        def __getitem__(self, index: int) -> tuple[int, int]:
            fetched.append(index)
            return super().__getitem__(index)

    loader = opened(Watched(12), BatchPlan(12, batch_size=4, max_batch=2, shuffle=False))
    loader.begin(0, 4, 0, 1)
    assert fetched == []
    loader.next()
    assert fetched == [4, 5]


@WORKERS
def test_a_dataset_that_can_fetches_a_batch_at_once(num_workers: int, opened: Opened) -> None:
    loader = opened(Whole(10), BatchPlan(10, batch_size=5, shuffle=False), num_workers=num_workers)
    loader.begin(0, 0, 0, 1)
    item = loader.next()
    assert item is not None
    assert (indices(item[2]), item[2][1].tolist()) == ([0, 1, 2, 3, 4], [-1] * 5)


def test_a_collate_function_makes_the_batches(opened: Opened) -> None:
    loader = opened(Numbers(4), BatchPlan(4, batch_size=2, shuffle=False), collate_fn=len)
    loader.begin(0, 0, 0, 1)
    item = loader.next()
    assert item is not None
    assert item[2] == 2


@WORKERS
def test_loading_does_not_move_the_random_numbers_of_the_training(num_workers: int, opened: Opened) -> None:
    loader = opened(Numbers(20), BatchPlan(20, batch_size=4), num_workers=num_workers)
    before = torch.get_rng_state(), random.getstate()
    for epoch in range(3):
        loader.begin(epoch, 0, 0, 2)
        loader.next()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_workers_of_two_ranks_have_different_seeds_and_the_same_in_another_run(opened: Opened) -> None:
    def seeds(rank: int) -> set[int]:
        loader = opened(Seeds(8), BatchPlan(8, batch_size=1), num_workers=2)
        loader.begin(0, 0, rank, 2)
        found = {seed for _, _, batch in rest(loader) for seed in batch}
        loader.close()
        return found

    first, second = seeds(0), seeds(1)
    assert len(first | second) == 4
    assert seeds(0) == first


@WORKERS
@pytest.mark.parametrize("error", [KeyError, StopIteration])
def test_an_error_of_the_dataset_ends_the_epoch_loudly_until_the_next_beginning(
    error: type[Exception], num_workers: int, opened: Opened
) -> None:
    # StopIteration in particular must not be taken for the end of the epoch: samples would be lost.
    dataset = Raising(12, bad=11, error=error)
    plan = BatchPlan(12, batch_size=3, shuffle=False)
    loader = opened(dataset, plan, num_workers=num_workers)
    loader.begin(0, 6, 0, 1)
    assert loader.next() is not None
    with pytest.raises(InputError if error is StopIteration else error, match="the step from 9 to 12|sample 11"):
        loader.next()
    with pytest.raises(InputError, match="`begin` must be called before `next`"):
        loader.next()
    loader.begin(0, 0, 0, 1)
    item = loader.next()
    assert item is not None
    assert indices(item[2]) == [0, 1, 2]


def test_a_rescale_does_not_wait_for_what_no_worker_has_begun(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, plan = Gated(20), BatchPlan(20, batch_size=1)
    loader = opened(dataset, plan, num_workers=1, prefetch_factor=8)
    loader.begin(0, 0, 0, 1)
    # One batch is with the worker or about to be; the rest has to be on its way before it can be taken back.
    assert wait_until(lambda: dataset.fetched.value == 1)
    assert loader._batches._index_queues[0]._reader.poll(60)
    reset = DataLoader.__iter__

    def open_the_gate(self: Any) -> Any:
        dataset.gate.set()
        return reset(self)

    monkeypatch.setattr(DataLoader, "__iter__", open_the_gate)
    loader.begin(0, 10, 0, 1)
    assert rest(loader) == planned(plan, 0, 10, 0, 1)
    assert 1 + 10 <= dataset.fetched.value < 8 + 10


def test_an_error_in_a_batch_that_a_rescale_drops_is_never_seen(opened: Opened) -> None:
    plan = BatchPlan(40, batch_size=2, shuffle=False)
    loader = opened(Raising(40, bad=3, error=KeyError), plan, num_workers=2)
    loader.begin(0, 0, 0, 1)
    assert loader.next() is not None
    loader.begin(0, 4, 0, 2)
    assert rest(loader) == planned(plan, 0, 4, 0, 2)


def test_a_dead_worker_is_an_error_and_a_later_beginning_starts_new_ones(opened: Opened) -> None:
    loader = opened(Deadly(12), BatchPlan(12, batch_size=2, shuffle=False), num_workers=2)

    def epoch() -> None:
        loader.begin(0, 0, 0, 1)
        rest(loader)

    # Torch raises when the signal comes, wherever the main thread is then.
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        epoch()
    loader.close()
    loader.begin(0, 6, 0, 1)
    assert [found for _, _, found in rest(loader)] == [[6, 7], [8, 9], [10, 11]]


def test_a_beginning_that_fails_leaves_nothing_behind_for_the_next(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = BatchPlan(40, batch_size=2)
    loader = opened(Numbers(40), plan, num_workers=2)
    loader.begin(0, 0, 0, 1)
    with monkeypatch.context() as patched:
        patched.setattr(plan, "steps_from", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loader.begin(0, 10, 0, 1)
    assert multiprocessing.active_children() == []
    loader.begin(0, 20, 0, 1)
    assert rest(loader) == planned(plan, 0, 20, 0, 1)


def test_closing_twice_is_fine_and_a_closed_loader_can_begin_again(opened: Opened) -> None:
    plan = BatchPlan(10, batch_size=2)
    loader = opened(Numbers(10), plan, num_workers=2)
    loader.close()
    loader.begin(0, 0, 0, 1)
    loader.next()
    loader.close()
    loader.close()
    assert multiprocessing.active_children() == []
    with pytest.raises(InputError, match="`begin` must be called before `next`"):
        loader.next()
    loader.begin(0, 0, 0, 1)
    assert rest(loader) == planned(plan, 0, 0, 0, 1)


def test_pinned_memory_where_there_is_no_accelerator_is_plain_memory(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getattr(torch, "accelerator", torch.cuda), "is_available", lambda: False)
    loader = opened(Numbers(4), BatchPlan(4, batch_size=2), pin_memory=True)
    loader.begin(0, 0, 0, 1)
    item = loader.next()  # torch would warn
    assert item is not None


def test_a_place_that_cannot_be_is_refused_and_the_epoch_goes_on(opened: Opened) -> None:
    plan = BatchPlan(10, batch_size=2)
    loader = opened(Numbers(10), plan, num_workers=2)
    loader.begin(0, 0, 0, 1)
    with pytest.raises(InputError, match="`rank` must be"):
        loader.begin(0, 0, 3, 2)
    assert rest(loader) == planned(plan, 0, 0, 0, 1)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def __len__(self) -> int:
        return 10


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("dataset", [Stream(), Unsized(), iter([1, 2])])
def test_a_dataset_without_indices_is_refused(dataset: Any) -> None:
    with pytest.raises(InputError, match=r"must be map-style .* but got (Stream|Unsized|list_iterator); a stream has"):
        Loader(dataset, BatchPlan(10, batch_size=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "`num_workers` must be a whole number, 0 or more, but got -1"),
        ({"num_workers": 1, "prefetch_factor": 0}, "`prefetch_factor` must be a whole number, 1 or more, but got 0"),
        ({"prefetch_factor": 2}, "torch's DataLoader refuses these options: prefetch_factor option could only be"),
        ({"num_workers": 1, "multiprocessing_context": "thread"}, "torch's DataLoader refuses these options"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Loader(Numbers(10), BatchPlan(10, batch_size=2), **options)


def test_a_dataset_of_another_length_than_the_plan_is_refused() -> None:
    with pytest.raises(InputError, match="must have the 11 samples the plan is for, but got 10"):
        Loader(Numbers(10), BatchPlan(11, batch_size=2))
