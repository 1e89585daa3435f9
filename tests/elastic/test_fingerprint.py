"""Fingerprints of datasets: other samples of the same number are noticed, and nothing is loaded to see them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from bftrainer.elastic.torch.data.batch_plan import BatchPlan, DataSignature, refuse_different_data
from bftrainer.elastic.torch.data.fingerprint import Fingerprint, fingerprint
from bftrainer.elastic.torch.meetings.together import Together
from bftrainer.elastic.torch.state.outcomes import Outcomes
from bftrainer.errors import InputError


class Files(Dataset[Any]):
    """A dataset as scripts write them: it must not be asked for a sample."""

    def __init__(self, names: list[str], settings: Any = None) -> None:
        self.names, self.settings = names, settings

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample was loaded")


def drawn(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


NAMES = [f"/data/{number}.png" for number in range(500)]


def split(seed: int) -> Any:
    return random_split(Files(NAMES), [400, 100], generator=drawn(seed))[0]


def tensors(seed: int) -> Any:
    return TensorDataset(torch.randn(1000, 8, generator=drawn(seed)), torch.arange(1000))


def pairs(seed: int) -> Any:
    generator = drawn(seed)
    return [(torch.rand(5, generator=generator), torch.rand(1, generator=generator)) for _ in range(50)]


def shuffled(seed: int) -> Any:
    return Files([NAMES[place] for place in np.random.default_rng(seed).permutation(len(NAMES))])


MADE = [
    split,
    tensors,
    pairs,
    shuffled,
    lambda seed: Subset(split(seed), range(300)),
    lambda seed: ConcatDataset([tensors(0), tensors(seed)]),
    lambda seed: np.random.default_rng(seed).integers(0, 9, (100, 3)),
    lambda seed: [{"x": float(value)} for value in np.random.default_rng(seed).random(100)],
    lambda seed: Subset(Files(NAMES), torch.randperm(500, generator=drawn(seed))),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("made", MADE)
def test_data_made_with_another_seed_is_noticed_and_with_the_same_seed_accepted(made: Any) -> None:
    assert fingerprint(made(1)).agrees_with(fingerprint(made(1)))
    assert not fingerprint(made(1)).agrees_with(fingerprint(made(2)))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (Files(NAMES, [1, 2]), Files(NAMES, [3, 4])),  # settings of transforms
        (Files(NAMES), Files([f"/scratch/7{name}" for name in NAMES])),  # another folder on each node
        (tensors(1), TensorDataset(tensors(1).tensors[0] * (1 + 1e-6), torch.arange(1000))),  # another processor
        (object(), 3.0j),
    ],
)
def test_what_may_differ_from_node_to_node_is_accepted(mine: Any, theirs: Any) -> None:
    assert fingerprint(mine).agrees_with(fingerprint(theirs))


def test_what_a_dataset_keeps_of_what_it_loaded_does_not_count() -> None:
    data = Files([""] * 10)
    before = fingerprint(data)
    data.names[3] = "loaded"
    assert fingerprint(data) == before


class Cached(Dataset[Any]):
    """Keeps what it has loaded in an array that nothing fills at first."""

    def __init__(self, rest: int) -> None:
        self.kept = np.full((100, 3), rest)

    def __len__(self) -> int:
        return len(self.kept)


def test_a_dataset_can_say_that_its_samples_are_the_same_and_its_split_is_compared_all_the_same() -> None:
    mine, theirs = Cached(1), Cached(2)
    assert not fingerprint(mine).agrees_with(fingerprint(theirs))
    told = [Cached(rest) for rest in (1, 2)]
    for data in told:
        data.same_on_all_ranks = True  # type: ignore[attr-defined]
    assert fingerprint(told[0]) == fingerprint(told[1]) == Fingerprint()
    first, same, other = (
        random_split(data, [60, 40], generator=drawn(seed))[0]
        for data, seed in ((told[0], 1), (told[1], 1), (told[1], 2))
    )
    assert fingerprint(first).agrees_with(fingerprint(same))
    assert not fingerprint(first).agrees_with(fingerprint(other))


@pytest.mark.parametrize("word", [False, "no", 1])
def test_only_true_says_that_samples_are_the_same(word: Any) -> None:
    mine, theirs = Cached(1), Cached(2)
    mine.same_on_all_ranks = theirs.same_on_all_ranks = word  # type: ignore[attr-defined]
    assert not fingerprint(mine).agrees_with(fingerprint(theirs))


@pytest.mark.parametrize(
    "odd",
    [torch.eye(3).to_sparse(), torch.ones(3, dtype=torch.cfloat), torch.zeros(0), np.zeros((0, 3)), np.array("a"), []],
)
def test_unusual_data_is_no_error(odd: Any) -> None:
    assert isinstance(fingerprint(odd), Fingerprint)


def test_ranks_with_other_samples_are_refused_with_the_remedy_and_old_snapshots_are_taken_up() -> None:
    first, second = (BatchPlan(400, batch_size=4, samples=fingerprint(split(seed))).signature for seed in (1, 2))
    assert DataSignature.of(first.numbers()) == first
    refuse_different_data([first, first])
    with pytest.raises(InputError, match=r"rank 0 and rank 1 have 400 samples .*: call torch.manual_seed\(0\)"):
        refuse_different_data([first, second])
    old = DataSignature.of(first.numbers()[:6])
    refuse_different_data([old, first])
    assert old == first.settings


def test_a_training_of_an_older_snapshot_goes_on_and_then_knows_its_samples() -> None:
    first, second = (BatchPlan(400, batch_size=4, samples=fingerprint(split(seed))).signature for seed in (1, 2))
    state, alone = SimpleNamespace(outcomes=Outcomes()), SimpleNamespace(meetings=None)
    together = Together(state, alone, lambda problem: None)  # type: ignore[arg-type]
    state.outcomes.note_data(3, first.numbers()[:6])
    together.compare_data(first, 3)
    assert state.outcomes.data_of(3) == list(first.numbers())
    together.compare_data(first, 4)
    with pytest.raises(InputError, match="but not the same ones"):
        together.compare_data(second, 4)
