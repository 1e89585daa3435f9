"""Data source: reads the arguments of `run.batches`, a dataset with loading options or a DataLoader.

The result is a `DataSource`, from which `batches.py` plans and loads. Only the parts of a DataLoader are used:
BFTrainer takes the samples in its own order, so that each is trained on once per epoch while nodes come and go. Inputs
for which that is impossible (a stream, the script's own sampler) are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from bftrainer.elastic.torch.arguments import flag, function, optional, positive
from bftrainer.elastic.torch.data.batch_plan import whole_number
from bftrainer.errors import InputError

LOADING = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "prefetch_factor",
    "worker_init_fn",
    "multiprocessing_context",
    "timeout",
    "persistent_workers",
)
"""The options of torch's DataLoader that `run.batches` takes."""
_INSTEAD = {
    "sampler": "the order comes from `seed` of elastic.init(); give shuffle=False, or a torch.utils.data.Subset",
    "batch_sampler": "give `batch_size` or `global_batch`",
    "generator": "the order of samples comes from elastic.init(seed=…)",
    "in_order": "batches always come in order",
}
_STEPS = (
    "draw from the stream in a loop over steps: `for number in run.steps(1000):`, and in it batch = next(stream), "
    "loss.backward(), run.step(loss=loss, samples=len(batch)); after elastic.prepare() it is elastic.steps(1000), and "
    "the step is that of the optimizer"
)


@dataclass(frozen=True, slots=True)
class DataSource:
    """A map-style dataset and its loading options."""

    dataset: Any
    length: int
    batch_size: int | None
    """Samples per rank and step; None if the script gives a global batch."""
    shuffle: bool
    drop_last: bool
    loading: Mapping[str, Any]
    """Options of `loader.Loader`."""
    sampler: Any = None
    """The script's own sampler, if the order of samples is its own."""
    persistent: bool = False
    """Whether worker processes stay alive from epoch to epoch, with the copy of the dataset they started with."""


def read(
    data: Any,
    *,
    batch_size: int | None,
    global_batch: int | None,
    shuffle: bool | None,
    drop_last: bool | None,
    loading: Mapping[str, Any],
    own_sampler: bool = False,
) -> DataSource:
    """Read the arguments of `run.batches`. Options given beside a DataLoader replace those of the DataLoader.

    `own_sampler`: a DataLoader may have any sampler.
    """
    given = _checked(loading)
    persistent = given.pop("persistent_workers", None)
    found: dict[str, Any] = {}
    own: Any = None
    if isinstance(data, DataLoader):
        persistent = data.persistent_workers if persistent is None else persistent
        length = length_of(data.dataset)
        sampler, size, drops = _batching(data, length)
        found = _loading_of(data, given.get("num_workers", data.num_workers))
        batch_size = size if batch_size is None and global_batch is None else batch_size
        if own_sampler and not _is_plain(sampler, length):
            own = sampler
        elif shuffle is None:
            shuffle = _shuffles(sampler, length)
        drop_last = drops if drop_last is None else drop_last
        data = data.dataset
    else:
        length = length_of(data)
    shuffle, drop_last = True if shuffle is None else shuffle, False if drop_last is None else drop_last
    shuffles, drops = flag("shuffle", shuffle), flag("drop_last", drop_last)
    return DataSource(data, length, batch_size, shuffles, drops, {**found, **given}, own, bool(persistent))


def length_of(dataset: Any) -> int:
    """Return the number of samples of a map-style dataset; refuse any other kind."""
    kind = type(dataset)
    # IterableDataset inherits a `__getitem__` that only raises.
    if isinstance(dataset, IterableDataset) or not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
        raise InputError(
            f"the dataset must be map-style (with `__len__` and `__getitem__`), but got {kind.__name__}; a stream has "
            f"no order that changing nodes could share. Write it to files and give samples by index, or {_STEPS}"
        )
    if isinstance(dataset, Mapping):
        raise InputError(
            f"the dataset must give samples by index, but got {kind.__name__}, which has keys; give one of its parts, "
            f"such as that of {next(iter(dataset), 'train')!r}"
        )
    length = len(dataset)
    if length == 0:
        raise InputError(f"the dataset ({kind.__name__}) has no samples; is its path right on this node?")
    return length


def _checked(loading: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loading options that the script gives by name, after checking them."""
    for name in loading:
        if name in _INSTEAD:
            raise InputError(f"run.batches() takes no `{name}`: {_INSTEAD[name]}")
        if name not in LOADING:
            raise InputError(
                f"run.batches() has no option `{name}`; it has batch_size, global_batch, max_batch, shuffle, drop_last "
                f"and, for loading, {', '.join(LOADING)}"
            )
    checked = dict(loading)
    flag("persistent_workers", checked.get("persistent_workers", False))
    for name in ("collate_fn", "worker_init_fn"):
        optional(name, checked.get(name), function)
    flag("pin_memory", checked.get("pin_memory", False))
    whole_number("num_workers", checked.get("num_workers", 0), 0)
    if checked.get("prefetch_factor") is not None:
        whole_number("prefetch_factor", checked["prefetch_factor"], 1)
    if checked.get("timeout", 0) != 0:
        checked["timeout"] = positive("timeout", checked["timeout"])
    return checked


def _loading_of(loader: DataLoader[Any], num_workers: int) -> dict[str, Any]:
    """Return the options of a DataLoader; those of its workers only if there will be workers."""
    found: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
    }
    if num_workers:
        found["timeout"] = loader.timeout
        found["worker_init_fn"] = loader.worker_init_fn
        found["prefetch_factor"] = loader.prefetch_factor
        found["multiprocessing_context"] = loader.multiprocessing_context
    return found


def _batching(loader: DataLoader[Any], length: int) -> tuple[Any, int, bool]:
    """Return the sampler, the batch size and `drop_last` of a DataLoader."""
    batches = loader.batch_sampler
    if batches is None:
        raise InputError(
            "a DataLoader with batch_size=None makes no batches; give it a batch size and a collate_fn, or give "
            "run.batches() the dataset: run.batches(loader.dataset, batch_size=…, collate_fn=…)"
        )
    if type(batches) is not BatchSampler:
        raise InputError(
            f"the DataLoader has its own batch sampler ({type(batches).__name__}), which cannot be used while "
            "nodes come and go; use a DataLoader with batch_size=… and, if you need one, a sampler, or give "
            "run.batches() the dataset: run.batches(loader.dataset, batch_size=…)"
        )
    return batches.sampler, batches.batch_size, batches.drop_last


def _is_plain(sampler: Any, length: int) -> bool:
    """Return whether a sampler of torch gives each sample once."""
    kind = type(sampler)
    if kind is DistributedSampler:
        return len(sampler.dataset) == length
    if kind is RandomSampler:
        return not sampler.replacement and sampler.num_samples == length
    return kind is SequentialSampler and len(sampler) == length


def _shuffles(sampler: Any, length: int) -> bool:
    """Return whether a sampler of torch shuffles; refuse a sampler that does not give each sample once."""
    kind = type(sampler)
    whole = "give the dataset instead: run.batches(loader.dataset, batch_size=…)"
    if isinstance(sampler, WeightedRandomSampler):
        raise InputError(
            "the DataLoader's WeightedRandomSampler draws some samples several times, but run.batches() gives each "
            f"once per epoch; {whole}, and weight the loss (CrossEntropyLoss(weight=…)) or repeat samples in the "
            "dataset (Subset with repeated indices)"
        )
    if isinstance(sampler, SubsetRandomSampler):
        raise InputError(
            "the DataLoader's SubsetRandomSampler leaves samples out; give the subset instead: "
            "run.batches(torch.utils.data.Subset(dataset, indices), batch_size=…)"
        )
    if _is_plain(sampler, length):
        return bool(sampler.shuffle) if kind is DistributedSampler else kind is RandomSampler
    known = kind in (RandomSampler, SequentialSampler, DistributedSampler)
    what = f"{kind.__name__} does not give each sample once" if known else f"sampler {kind.__name__} is one of its own"
    raise InputError(
        f"the DataLoader's {what}, but run.batches() gives each sample once per epoch, in an order that changing nodes "
        f"can share; {whole}, or a torch.utils.data.Subset of it"
    )
