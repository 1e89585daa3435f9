"""What `run.batches` returns, and what it makes of a DataLoader. One process, no manager."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from bftrainer import elastic  # noqa: E402
from bftrainer.errors import InputError  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("sigterm_restored"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def numbers(length: int = 20) -> TensorDataset:
    return TensorDataset(torch.arange(float(length)).unsqueeze(1))


def epoch_of(run: elastic.Run, batches: elastic.Batches) -> list[list[int]]:
    """The samples of each batch of one epoch."""
    found = []
    for (x,) in batches:
        run.model(x).mean().backward()
        run.step()
        found.append(x.flatten().int().tolist())
    return found


def test_the_batches_have_a_length_a_dataset_and_a_place(run: elastic.Run) -> None:
    data = numbers(22)
    batches = run.batches(data, batch_size=8, max_batch=3)
    assert (len(batches), batches.steps, batches.samples, batches.global_batch) == (3 + 3 + 2, 3, 22, 8)
    assert batches.dataset is data
    places = []
    for _ in run.epochs(1):
        assert batches.position == 0
        for number, (x,) in enumerate(batches):
            run.model(x).mean().backward()
            run.step()
            places.append((number, batches.position))
    assert [place for number, place in places if number in (2, 5, 7)] == [8, 16, 22]
    assert len(places) == len(batches)


def test_one_object_serves_all_epochs(run: elastic.Run) -> None:
    batches = run.batches(numbers(), batch_size=8)
    epochs = [sorted(chain(*epoch_of(run, batches))) for _ in run.epochs(3)]
    assert epochs == [list(range(20))] * 3


def test_a_break_ends_the_epoch_and_the_object_goes_on_in_the_next(run: elastic.Run) -> None:
    batches = run.batches(numbers(), batch_size=8)
    counts = []
    for epoch in run.epochs(2):
        for (x,) in batches:
            run.model(x).mean().backward()
            run.step()
            if epoch == 0:
                break
        counts.append((epoch, batches.position))
    assert counts == [(0, 8), (1, 20)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_data_loader_gives_its_dataset_and_its_settings(run: elastic.Run, shuffle: bool) -> None:
    data = numbers(22)
    loader = DataLoader(data, batch_size=4, shuffle=shuffle, drop_last=True, collate_fn=lambda rows: torch.cat(rows[0]))
    batches = run.batches(loader)
    assert batches.dataset is data
    assert (batches.global_batch, batches.samples, len(batches)) == (4, 20, 5)
    assert batches.loading["collate_fn"] is loader.collate_fn
    assert batches.signature.shuffle is shuffle
    plain = run.batches(data, batch_size=4, shuffle=shuffle, drop_last=True)
    assert batches.signature == plain.signature


@pytest.mark.waits
def test_the_workers_of_a_data_loader_load_the_batches_and_survive_epochs(run: elastic.Run) -> None:
    data, found = numbers(), []
    for _ in run.epochs(2):
        # A script may make a new DataLoader in each epoch: the workers are the same.
        again = DataLoader(data, batch_size=5, num_workers=2, shuffle=True, timeout=60, persistent_workers=True)
        found.append(sorted(chain(*epoch_of(run, run.batches(again)))))
    assert found == [list(range(20))] * 2
    assert len(run._member.loaders._loaders) == 1


def test_what_is_given_beside_a_data_loader_wins(run: elastic.Run) -> None:
    loader = DataLoader(numbers(), batch_size=5, shuffle=True, num_workers=1, prefetch_factor=3)
    batches = run.batches(loader, global_batch=10, shuffle=False, num_workers=0)
    assert (batches.global_batch, batches.plan.batch_size) == (10, None)
    for _ in run.epochs(1):
        assert epoch_of(run, batches) == [list(range(10)), list(range(10, 20))]


def test_samplers_that_give_each_sample_once_are_taken_for_what_they_do(run: elastic.Run) -> None:
    data = numbers(21)

    def shuffles(**given: Any) -> bool:
        return run.batches(DataLoader(data, **given)).signature.shuffle

    assert shuffles(batch_size=3, sampler=RandomSampler(data))
    assert not shuffles(batch_size=3, sampler=SequentialSampler(data))
    assert shuffles(batch_size=3, sampler=DistributedSampler(data, 2, 0))
    assert not shuffles(batch_size=3, sampler=DistributedSampler(data, 2, 0, shuffle=False))
    given = BatchSampler(RandomSampler(data), 4, drop_last=True)
    batches = run.batches(DataLoader(data, batch_sampler=given))
    assert (batches.global_batch, batches.samples) == (4, 20)


class Own(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))

    def __len__(self) -> int:
        return 20


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(reversed(range(20)))


class OwnBatches(BatchSampler):
    pass


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sampler": Own()},
            "sampler Own is one of its own, .* give the dataset instead: .* or a torch.utils.data.Subset",
        ),
        ({"sampler": Backwards(range(20))}, "sampler Backwards is one of its own"),
        ({"sampler": RandomSampler(range(20), replacement=True)}, "RandomSampler does not give each sample once"),
        ({"sampler": RandomSampler(range(20), num_samples=7)}, "RandomSampler does not give each sample once"),
        ({"sampler": SequentialSampler(range(7))}, "SequentialSampler does not give each sample once"),
        ({"sampler": DistributedSampler(range(7), 2, 0)}, "DistributedSampler does not give each sample once"),
        ({"sampler": SubsetRandomSampler(range(7))}, r"run.batches\(torch.utils.data.Subset\(dataset, indices\)"),
        ({"sampler": WeightedRandomSampler([1.0] * 20, 20)}, "WeightedRandomSampler draws .* weight the loss"),
        ({"batch_sampler": OwnBatches(range(20), 4, False)}, r"its own batch sampler \(OwnBatches\)"),
        ({"batch_size": None}, "batch_size=None makes no batches"),
    ],
)
def test_a_data_loader_that_does_not_give_each_sample_once_is_refused(
    run: elastic.Run, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run.batches(DataLoader(numbers(), **options))


def test_a_stream_is_refused_and_the_loop_over_steps_is_named(run: elastic.Run) -> None:
    for stream in (Stream(), DataLoader(Stream(), batch_size=4)):
        with pytest.raises(InputError, match=r"but got Stream; a stream has .* `for number in run.steps\(1000\):`"):
            run.batches(stream, batch_size=4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": [1], "test": [2]}, "but got dict, which has keys; give one of its parts, such as that of 'train'"),
        ([], r"the dataset \(list\) has no samples"),
        (3, "must be map-style .* but got int"),
    ],
)
def test_data_that_is_no_dataset_is_refused(run: elastic.Run, data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run.batches(data, batch_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be a whole number, 1 or more, but got 0"),
        ({"batch_size": "32"}, "`batch_size` must be a whole number, 1 or more, but got '32'"),
        ({"batch_size": 2, "global_batch": 4}, "one of `batch_size` and `global_batch` must be given, but got both"),
        ({"batch_size": 2, "max_batch": 1.5}, "`max_batch` must be a whole number"),
        ({"batch_size": 2, "shuffle": "yes"}, "`shuffle` must be True or False, but got 'yes'"),
        ({"batch_size": 2, "drop_last": 1}, "`drop_last` must be True or False, but got 1"),
        ({"batch_size": 2, "workers": 2}, "no option `workers`; it has batch_size, .* num_workers, collate_fn"),
        ({"batch_size": 2, "sampler": Own()}, "takes no `sampler`: the order comes from `seed`"),
        ({"batch_size": 2, "batch_sampler": None}, "takes no `batch_sampler`: give `batch_size` or `global_batch`"),
        ({"batch_size": 2, "generator": torch.Generator()}, r"takes no `generator`: .* elastic.init\(seed=…\)"),
        ({"batch_size": 2, "collate_fn": 3}, "`collate_fn` must be a function, but got 3"),
        ({"batch_size": 2, "pin_memory": "cuda"}, "`pin_memory` must be True or False, but got 'cuda'"),
        ({"batch_size": 2, "num_workers": -1}, "`num_workers` must be a whole number, 0 or more, but got -1"),
        ({"batch_size": 2, "prefetch_factor": 0}, "`prefetch_factor` must be a whole number, 1 or more, but got 0"),
        ({"batch_size": 2, "timeout": -1}, "`timeout` must be a number above 0, but got -1"),
        ({"batch_size": 2, "persistent_workers": "no"}, "`persistent_workers` must be True or False"),
    ],
)
def test_wrong_options_are_refused_before_training(run: elastic.Run, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run.batches(numbers(), **options)


@pytest.mark.waits
def test_persistent_workers_are_what_there_is_anyway(run: elastic.Run) -> None:
    batches = run.batches(numbers(), batch_size=10, num_workers=1, persistent_workers=True)
    for _ in run.epochs(1):
        assert len(epoch_of(run, batches)) == 2


class Shifted(Dataset):  # type: ignore[type-arg]
    """A dataset that the script changes between two epochs, as one that knows the epoch for its augmentation."""

    shift = 0

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index + self.shift)])


@pytest.mark.waits
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=repr)
def test_a_change_of_the_dataset_between_epochs_is_seen_when_torch_sees_it(
    run: elastic.Run, options: dict[str, Any]
) -> None:
    given, loaded, plain = DataLoader(Shifted(), batch_size=2, **options), [], []
    for epoch in run.epochs(3):
        given.dataset.shift = 10 * epoch
        for x in run.batches(given):
            run.model(x).mean().backward()
            run.step()
            loaded.append(x.flatten().tolist())
    torchs = DataLoader(Shifted(), batch_size=2, **options)
    for epoch in range(3):
        torchs.dataset.shift = 10 * epoch
        plain += [x.flatten().tolist() for x in torchs]
    assert loaded == plain
    assert loaded[2] == ([0.0, 1.0] if options.get("persistent_workers") else [20.0, 21.0])


def test_a_dataset_that_grows_is_trained_on_whole_when_it_is_given_again(run: elastic.Run) -> None:
    data = list(torch.arange(8.0).reshape(4, 2, 1))
    first = run.batches(data, batch_size=2)
    seen = []
    for _ in run.epochs(2):
        count = 0
        for x in run.batches(data, batch_size=2):
            run.model(x).mean().backward()
            run.step()
            count += len(x)
        seen.append(count)
        data += list(torch.arange(4.0).reshape(2, 2, 1))
    assert seen == [4, 6]
    with pytest.raises(InputError, match="had 4 samples when .* and has 8 now; call run.batches"):
        iter(first)


def test_signatures_tell_the_data_of_two_ranks_apart() -> None:
    from bftrainer.elastic.torch.data.batch_plan import BatchPlan, DataSignature, refuse_different_data

    plan = BatchPlan(100, batch_size=4, seed=3, drop_last=True)
    same = BatchPlan(100, batch_size=4, seed=3, drop_last=True, max_batch=2)
    assert plan.signature == same.signature == DataSignature.of(plan.signature.numbers())
    refuse_different_data([plan.signature, same.signature])
    others = [
        BatchPlan(99, batch_size=4, seed=3, drop_last=True),
        BatchPlan(100, global_batch=4, seed=3, drop_last=True),
        BatchPlan(100, batch_size=5, seed=3, drop_last=True),
        BatchPlan(100, batch_size=4, seed=4, drop_last=True),
        BatchPlan(100, batch_size=4, seed=3),
        BatchPlan(100, batch_size=4, seed=3, drop_last=True, shuffle=False),
    ]
    for other in others:
        with pytest.raises(
            InputError, match="the ranks train on different data: rank 0 has 100 samples, .*; rank 2 has"
        ):
            refuse_different_data([plan.signature, same.signature, other.signature])
    assert str(others[0].signature) == "99 samples, batch_size 4, shuffled with seed 3, drop_last"
    assert str(others[5].signature) == "100 samples, batch_size 4, not shuffled, drop_last"
    unshuffled = (BatchPlan(100, batch_size=4, shuffle=False, seed=seed).signature for seed in (1, 2))
    refuse_different_data(list(unshuffled))
    large = BatchPlan(10, global_batch=2, seed=2**70 + 5).signature.numbers()
    assert torch.tensor(large, dtype=torch.int64).tolist() == list(large)
