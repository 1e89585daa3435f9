"""Preparation of a script's objects: what `elastic.prepare` does with each of them.

The objects stay the script's own. Models, optimizers, schedulers, GradScalers and other objects with a state are
registered, so that newcomers and resumed runs receive their state. Optimizers and GradScalers work on gradients summed
over all ranks. In place of a DataLoader the script gets one that looks the same and gives each rank its share.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from bftrainer.elastic import protocol
from bftrainer.elastic.torch.data.batch_plan import BatchPlan, whole_number
from bftrainer.elastic.torch.data.batches import Batches
from bftrainer.elastic.torch.data.fingerprint import fingerprint
from bftrainer.elastic.torch.data.sampler_order import SampleOrder, SamplerOrder
from bftrainer.elastic.torch.data.source import read
from bftrainer.elastic.torch.loop import TrainingLoop
from bftrainer.elastic.torch.member import TrainingMember
from bftrainer.elastic.torch.prepare import backward
from bftrainer.elastic.torch.prepare.carried import CarriedVariables, calling_frame
from bftrainer.elastic.torch.prepare.framework import FrameworkLoop
from bftrainer.elastic.torch.prepare.loader import PreparedLoader
from bftrainer.elastic.torch.prepare.loop import PreparedLoop
from bftrainer.elastic.torch.prepare.optimizer import make_elastic
from bftrainer.elastic.torch.prepare.saving import Saves
from bftrainer.elastic.torch.prepare.scaler import make_elastic_scaler, refuse_other_scalers
from bftrainer.elastic.torch.prepare.training import PreparedTraining
from bftrainer.elastic.torch.present_batch import PresentBatch
from bftrainer.elastic.torch.reports import ProgressReports
from bftrainer.elastic.torch.state.transfer import Stateful
from bftrainer.elastic.torch.value import CARRIED, Value
from bftrainer.errors import InputError

_PATTERN = "bftrainer_passes"
"""Name under which the pattern of backward passes is registered."""
_FIRST_EPOCH = "bftrainer_first_epoch"
"""Name under which the number of the first epoch is registered."""


class _Registers(Protocol):
    def __call__(self, **objects: Any) -> None: ...


class Preparation:
    """Objects of one script that were prepared."""

    def __init__(
        self,
        member: TrainingMember,
        batch: PresentBatch,
        loop: TrainingLoop,
        reports: ProgressReports,
        register: _Registers,
        seed: int,
    ) -> None:
        self.saves = Saves(lambda: member.rank == 0)
        """The calls of `torch.save`."""
        self.training = PreparedTraining(member, batch, self.saves)
        self._carried = CarriedVariables()
        self._loop = PreparedLoop(member, loop, reports, self.training, self.saves, self._carried)
        self.framework = FrameworkLoop(member, batch, loop, reports, self._loop, self.training)
        """The loop, for a framework that counts batches and steps itself."""
        self._member = member
        self._batch = batch
        self._register = register
        self._seed = seed
        self._epochs = loop.epochs
        self._looped_to: int | None = None
        """Where the last loop over `epochs` ended or will end; None before the first one."""
        self._first_epoch = Value(0)
        self._is_used = False
        self._modules: list[nn.Module] = []
        self._names: dict[str, int] = {}
        self._loaders: list[PreparedLoader] = []

    def prepare(
        self,
        objects: Sequence[Any],
        *,
        accumulate: int | None = None,
        per_rank_batch: bool = False,
        carry: str | Collection[str] = (),
        **options: Any,
    ) -> Any:
        """Prepare objects, and return them in the order given. A single one is returned by itself."""
        if accumulate is not None:
            self.training.accumulate = whole_number("accumulate", accumulate, 1)
        variables = self._carried.checked(carry, calling_frame())
        first = not self._is_used
        if first:
            self._member.registers_by = "elastic.prepare()"
        registered = {self._name(thing): thing for thing in objects if not isinstance(thing, DataLoader)}
        if first:
            registered |= {_PATTERN: self.training.pattern, _FIRST_EPOCH: self._first_epoch}
        if variables:
            registered[CARRIED] = self._carried
        if registered or options:
            self._register(**registered, **options)
        self._carried.add(variables)
        self._loop.keeps_values |= bool(variables) or any(isinstance(thing, Value) for thing in objects)
        self._is_used = True
        prepared = [self._prepared(thing, per_rank_batch) for thing in objects]
        if first:
            backward.observe(self.training)
            if self._member.membership is not None:
                self.saves.take_charge()
            refuse_other_scalers(self._member.stepper.optimizers)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    @property
    def is_used(self) -> bool:
        """Whether the script has called `prepare`."""
        return self._is_used

    def epochs(self, start: int, stop: int) -> Iterator[int]:
        """Iterate over the epochs of a script that counts them from `start`.

        A worker that joins later counts as the others do, even if it has read another `start` from a checkpoint.
        """
        start, stop = whole_number("start", start, 0), whole_number("stop", stop, 0)
        if not self.is_used:
            raise InputError("call elastic.prepare(model, optimizer, …) before the training loop")
        return self._numbered(start, stop)

    def _numbered(self, start: int, stop: int) -> Iterator[int]:
        if self._looped_to is not None and stop <= self._looped_to:
            raise InputError(
                f"the epochs before {self._looped_to} were looped over already: elastic.epochs counts those of the "
                f"whole training, so a second loop goes on where the first one ended. Write elastic.epochs("
                f"{self._looped_to}, {self._looped_to + stop - start}) for {stop - start} more"
            )
        self._looped_to = stop
        if not self._member.joined:
            self._first_epoch.value = start
            self._member.join()
        first = self._first_epoch.value
        for epoch in self._epochs(max(0, stop - first), finishes=False):
            yield epoch + first

    def refuse_end_in_repeat(self) -> None:
        """Refuse an end of the script that values of a later epoch have led to."""
        self._loop.refuse_end_in_repeat()

    def finished(self) -> None:
        """Write what the lost main rank should have written. The training is complete."""
        self.saves.take_over()

    @property
    def is_training(self) -> bool:
        """Whether a prepared model is in training mode, or there is none."""
        return not self._modules or any(module.training for module in self._modules)

    @property
    def repeats_epochs(self) -> bool:
        """Whether the script runs code of epochs that were over before this worker came."""
        return self._loop.repeats_epochs

    # For scripts that keep torch's own interface (`elastic.torch.ddp`).

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._member.rank == 0

    @property
    def world(self) -> int:
        """Number of ranks that train at present."""
        return self._member.world

    @property
    def epoch(self) -> int:
        """The epoch in progress, from 0."""
        return self._member.progress.epoch

    @property
    def loops_begun(self) -> int:
        """Number of loops over prepared loaders that the script has begun."""
        return self._loop.begun

    @property
    def has_taken_over(self) -> bool:
        """Whether the last step that was lost here was complete on another rank, and is in the state."""
        return self._batch.taken_over

    def looks_again(self) -> None:
        """Give one batch, for nothing, in each loop of an epoch that was over before this worker came.

        Then all names that the script's loop defines are known after it.
        """
        self._loop.looks_again = True

    def prepare_in_order(self, loader: DataLoader[Any], order: SampleOrder) -> PreparedLoader:
        """Prepare a DataLoader whose samples come in a given order."""
        return self._prepared_loader(loader, per_rank_batch=False, order=order)

    def steps(self, count: int) -> Iterator[int]:
        """Iterate over the steps of a script with its own data."""
        return self._loop.steps(count)

    def micro_steps(self, count: int) -> Iterator[int]:
        """Iterate over this rank's micro-steps of a step."""
        return self._loop.micro_steps(whole_number("count", count, 1), self._seed)

    def _name(self, thing: Any) -> str:
        """Return a name to register an object by: the order of the arguments is the same on all ranks."""
        kind = _kind(thing)
        self._names[kind] = self._names.get(kind, 0) + 1
        return kind if self._names[kind] == 1 else f"{kind}{self._names[kind]}"

    def _prepared(self, thing: Any, per_rank_batch: bool) -> Any:
        if isinstance(thing, DataLoader):
            return self._prepared_loader(thing, per_rank_batch)
        if isinstance(thing, nn.Module):
            self._modules.append(thing)
        elif isinstance(thing, Optimizer):
            make_elastic(thing, self.training, self._member.stepper)
        elif isinstance(thing, torch.amp.GradScaler):
            make_elastic_scaler(thing, self.training)
            self.training.loss.scaler = thing
        return thing

    def _prepared_loader(
        self, loader: DataLoader[Any], per_rank_batch: bool, order: SampleOrder | None = None
    ) -> PreparedLoader:
        if isinstance(loader, PreparedLoader):
            raise InputError("this DataLoader is prepared already: give each object to elastic.prepare() once")
        source = read(
            loader, batch_size=None, global_batch=None, shuffle=None, drop_last=None, loading={}, own_sampler=True
        )
        if order is None and source.sampler is not None:
            order = SamplerOrder(source.sampler, self._seed)
        size = source.batch_size
        assert size is not None
        plan = BatchPlan(
            source.length if order is None else order.length,
            batch_size=size if per_rank_batch else None,
            global_batch=None if per_rank_batch else size * ranks_submitted_for(),
            max_batch=size if len(self._member.stepper.optimizers) < 2 else None,
            shuffle=source.shuffle,
            seed=self._seed,
            drop_last=source.drop_last,
            order=order,
            samples=fingerprint(source.dataset),
        )
        batches = Batches(self._member, source, plan, self._loop.batches)
        prepared = PreparedLoader(loader, batches, lambda: self.is_training, self._loop.length)
        self._loaders.append(prepared)
        return prepared


def ranks_submitted_for() -> int:
    """Return the number of ranks that the script's batch size was chosen for; 1 if nothing was said."""
    named = os.environ.get(protocol.RANKS) or "1"
    try:
        return whole_number(protocol.RANKS, int(named), 1)
    except ValueError:
        raise InputError(f"{protocol.RANKS} must be a whole number, 1 or more, but got {named!r}") from None


def _kind(thing: Any) -> str:
    if isinstance(thing, nn.Module):
        return "model"
    if isinstance(thing, Optimizer):
        return "optimizer"
    if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
        return "scheduler"
    if isinstance(thing, torch.amp.GradScaler):
        return "scaler"
    if isinstance(thing, Stateful) and not isinstance(thing, type):
        return type(thing).__name__.lower()
    what = f"the class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
    raise InputError(
        "elastic.prepare() takes models, optimizers, DataLoaders, schedulers, GradScalers and objects with "
        f"state_dict() and load_state_dict(), but got {what}; for a plain value give the name of its variable, "
        'carry="name", or write elastic.Value(…)'
    )
