"""PyTorch `Run`: the object that `bftrainer.elastic.init()` returns and a training script uses.

In `step` the ranks sum their gradients, apply them and agree whether to rescale. Between two batches, when all of the
script's code for a step has run, the group is re-formed, newcomers receive the state and snapshots are taken
(`state/training_state.py`). A peer that dies in between shows as a broken group. The step then counts only for ranks
whose sum was complete, and all ranks take over the state of the most advanced rank.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from bftrainer.elastic.membership import Assignment, Leave, Membership
from bftrainer.elastic.metrics import Position, ReportedMetrics
from bftrainer.elastic.pacing import Pacer
from bftrainer.elastic.protocol import Done, Formed, Generation, Leaving, Message, Report
from bftrainer.elastic.torch import arguments, output
from bftrainer.elastic.torch.data.batch_plan import BatchPlan, Step, whole_number
from bftrainer.elastic.torch.data.batches import Batches
from bftrainer.elastic.torch.data.loader import Loaders
from bftrainer.elastic.torch.data.source import read
from bftrainer.elastic.torch.gradients.gradients import Gradients
from bftrainer.elastic.torch.gradients.loss_reduction import SumWatch
from bftrainer.elastic.torch.gradients.optimizers import Stepper, params_of
from bftrainer.elastic.torch.gradients.reducer import Reducer
from bftrainer.elastic.torch.gradients.riders import CHANGED, RIDERS, SETTINGS, StepRiders, StepTotals
from bftrainer.elastic.torch.group.group import GroupBroken, default_backend
from bftrainer.elastic.torch.group.peers import Peers
from bftrainer.elastic.torch.meetings.digest import Digest, refuse_drift, settings_of
from bftrainer.elastic.torch.meetings.shared_values import packed
from bftrainer.elastic.torch.meetings.together import Note, Together
from bftrainer.elastic.torch.rates import Course, Meter
from bftrainer.elastic.torch.registration import Registration, refuse_sync_batch_norm
from bftrainer.elastic.torch.sigterm import on_sigterm
from bftrainer.elastic.torch.snapshots.last_save import LastSave
from bftrainer.elastic.torch.snapshots.snapshot import Snapshots
from bftrainer.elastic.torch.state.buffers import Buffers
from bftrainer.elastic.torch.state.training_state import Progress, TrainingState
from bftrainer.elastic.torch.state.transfer import Registry
from bftrainer.errors import InputError
from bftrainer.processes import exits

_END_OF_BATCHES = "the end of the batches"
_LEAVING_S = 0.5
_ENDING_S = 25.0
"""Seconds that the end of a script waits for a thread in which torch connects to a host that is gone."""


class Run:
    """One worker's handle on an elastic training. Made by `init`.

    Register the model and the optimizer with `register`, loop over `epochs` and `batches`, and call `step` after each
    backward pass. `step` replaces `optimizer.step()` and `optimizer.zero_grad()`. Do not wrap the model in
    DistributedDataParallel. In short:

        run = elastic.init()
        model = make_model().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters())
        run.register(model=model, optimizer=optimizer)
        for epoch in run.epochs(10):
            for inputs, targets in run.batches(dataset, batch_size=32):
                loss = loss_function(model(inputs.to(run.device)), targets.to(run.device))
                loss.backward()
                run.step(loss=loss)
    """

    def __init__(
        self,
        *,
        snapshots: Path | None,
        snapshot_every_s: float,
        snapshots_kept: int,
        backend: str | None,
        device: torch.device,
        seed: int,
    ) -> None:
        self.device = device
        self.seed = seed
        self._noted = ReportedMetrics()
        self._epochs_over = 0  # epochs whose batches are all done, on this rank
        self._registration = Registration()
        self._registry = Registry()
        self._stepper = Stepper()
        self._membership = Membership.connect()
        self._crew = Peers(self._membership, backend or default_backend(device), device)
        self._meter = Meter()
        self._pacer = self._paced()
        self._epochs: int | None = None
        self._course: tuple[Course, BatchPlan] | None = None
        self._redone = 0
        keeper = None
        if snapshots is not None:
            keeper = Snapshots(snapshots, every_s=snapshot_every_s, keep=snapshots_kept)
        self._standing = TrainingState(self._registry, self._stepper, self._noted, keeper)
        self._gradients = Gradients(self._stepper)
        self._buffers = Buffers()
        self._together = Together(self._standing, self._crew, self._recover_inside)
        self._joined = False
        self._finished = False
        self._left = False  # this worker is no longer a member
        self._forming = False  # between two groups
        self._fresh = False  # received the state from its peers, and made no step with them yet
        self._agreed = False  # all ranks know of a new generation
        self._place: Assignment | None = None  # this worker's rank and peers in the present generation
        self._inside = False  # a group is formed in the middle of the script's code
        self._looped: int | None = None  # the epoch whose batches have been looped over
        self._left_loop = False  # by `break`; the next call completes the loop
        self._counted = False  # left after the expected number of batches, with samples left
        self._taken_over = False  # the step lost here was complete on another rank, and is in the state
        self._waits = 0  # number of waits for the other ranks so far
        self._parts = 0  # calls of run.step(optimizer=…) for the present batch
        self._void = False  # the present batch will come again: further steps for it do not count
        self._pid = os.getpid()
        self._step: Step | None = None
        self._micro = 0
        self._tally = StepRiders()
        self._terminating = False
        self._loaders = Loaders()
        self._sum_watch = SumWatch()
        self._last_save = LastSave(
            self._save_within,
            needed=self._standing.can_save,
            someone_else_has_it=self._is_one_of_many,
            send=self._send,
            generation=lambda: self._meter.generation,
        )
        if self._membership is not None:
            self._membership.on_taken = self._last_save.taken
            self._membership.is_fresh = lambda: self._fresh
            self._membership.report = self._report
            self._membership.report_failures(self._crew.is_collateral)
            exits.watch()
        on_sigterm(self._on_sigterm)
        atexit.register(self._at_exit)

    # Interface for the script.

    @property
    def rank(self) -> int:
        """This worker's number in the present generation, from 0. It may change when nodes come or go."""
        return self._crew.rank

    @property
    def world(self) -> int:
        """Number of workers that train at present. It changes when nodes come or go."""
        return self._crew.world

    @property
    def generation(self) -> int:
        """Number of the present generation. It grows whenever the members change."""
        return self._meter.generation

    @property
    def is_main(self) -> bool:
        """Whether this worker is rank 0, which prints and saves. Another worker may become rank 0 later."""
        return self.rank == 0

    @property
    def progress(self) -> Progress:
        """Progress of the training: epochs, steps and samples done."""
        return self._standing.progress

    @property
    def metrics(self) -> dict[str, float]:
        """Values reported last, on this rank or by the ranks whose state it received."""
        return self._noted.values

    @property
    def model(self) -> Any:
        """The object registered as `model`."""
        if "model" not in self._registry.objects:
            raise InputError("nothing is registered as `model`; call run.register(model=…, optimizer=…)")
        return self._registry.objects["model"]

    @property
    def indices(self) -> tuple[int, ...]:
        """Dataset indices of the present batch that count for this rank.

        Empty for a stand-in, the batch of a rank for which a step has no samples.
        """
        if self._step is None:
            return ()
        micro = self._step.micros[self._micro] if self._step.micros else None
        return micro.indices if micro is not None and micro.samples else ()

    @property
    def folder(self) -> Path:
        """Folder for files that the script writes: this trainer's own under BFTrainer, else the current directory."""
        return output.output_folder()

    def save(self, thing: Any, name: str) -> Path | None:
        """Write `thing` with torch.save to the file `name` in `run.folder`, on the main rank only.

        Returns the file's path. The other ranks write nothing and return None. If the process is killed, the file has
        either its former content or all of the new content.
        """
        name = output.file_name(name)
        return output.save(thing, self.folder, name) if self.is_main else None

    def mean(self, name: str) -> float:
        """Return the mean of the loss given to `run.step` over the samples of the epoch so far.

        It is the same on all ranks. After the batches of an epoch it is the mean of the whole epoch, until the first
        step of the next epoch. `name` must be "loss".
        """
        return self._standing.mean.of(name)

    def register(
        self,
        *unnamed: object,
        lr_scaling: str | Callable[[float], float] = "none",
        lr_warmup_steps: int = 0,
        lr_base_batch: int | None = None,
        clip_norm: float | None = None,
        scheduler_every: str | None = None,
        **objects: Any,
    ) -> None:
        """Name the objects whose state survives when nodes come and go. Call it before the first epoch.

        Register modules, optimizers and any other object with `state_dict` and `load_state_dict`, each under a name:
        `run.register(model=model, optimizer=optimizer)`. Registered optimizers, and a registered GradScaler, are
        stepped by `run.step`.

        - `lr_scaling`: how the learning rate changes with the global batch: "linear", "sqrt", "none", or a function of
          the ratio of the global batch to `lr_base_batch`.
        - `lr_warmup_steps`: the number of steps over which a rise of the learning rate is spread.
        - `lr_base_batch`: the global batch that the learning rate was chosen for. Default: the batch of one node.
        - `clip_norm`: the norm to which the summed gradient is clipped.
        - `scheduler_every`: "step" or "epoch" steps the registered LR schedulers that often. Without it the script
          steps them.
        """
        if self._joined:
            raise InputError("register() must be called before the first epoch")
        if self.device.type == "cpu":
            refuse_sync_batch_norm(objects)
        given: dict[str, Any] = {
            "lr_scaling": lr_scaling,
            "lr_warmup_steps": lr_warmup_steps,
            "lr_base_batch": lr_base_batch,
            "clip_norm": clip_norm,
            "scheduler_every": scheduler_every,
        }
        objects, options = self._registration.add(unnamed, objects, given)
        self._stepper.configure(
            scheduler_every=options["scheduler_every"],
            clip_norm=options["clip_norm"],
            rule=options["lr_scaling"],
            warmup_steps=options["lr_warmup_steps"],
            base_batch=options["lr_base_batch"],
        )
        self._registry.add(objects)
        self._stepper.add(list(objects.values()))
        self._standing.hidden.add(objects)

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the epochs that are still to be trained, out of `count`.

        A worker that joins later, or a run that resumes from a snapshot, begins in the epoch that is in progress.
        """
        count = whole_number("count", count, 0)
        self._epochs = count
        self._join()
        undo: Callable[[], None] | None = None
        while self.progress.epoch < count:
            epoch = self.progress.epoch
            self._begin_epoch()
            yield epoch
            if self.progress.epoch == epoch:
                self._end_loop()
            if self.progress.epoch == epoch:
                self._standing.put_right()  # the script may have left the loop over batches early
                if undo is not None:
                    undo()  # so that the script's code after the last batch counts once
                if epoch + 1 == count and not self._unbroken_fence("the end of the last epoch"):
                    # A peer, perhaps rank 0, was lost during an evaluation: run the code after the last batch again.
                    undo = self._registry.keep_untrained(self._stepper.optimizers)
                    continue
                if self._stepper.scheduler_every == "epoch":
                    self._stepper.schedule()
                self.progress.epoch, self.progress.cursor, self.progress.part = epoch + 1, 0, 0
        self.finish()

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        max_batch: int | None = None,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        **loading: Any,
    ) -> Batches:
        """Return this rank's batches of the present epoch.

        Over all ranks each sample of the dataset is used exactly once. Give either `batch_size` or `global_batch`,
        unless `dataset` is a DataLoader.

        - `dataset`: a map-style dataset, or a torch DataLoader of one. A DataLoader's settings apply unless given here.
        - `batch_size`: samples per node and step.
        - `global_batch`: samples per step over all nodes. They are split over the nodes.
        - `max_batch`: the largest batch for one backward pass. A larger share comes in several batches whose gradients
          are accumulated; call `run.step` after each of them as usual.
        - `shuffle`: whether the samples are shuffled. Default: True.
        - `drop_last`: whether samples at the end of an epoch that do not fill a batch are left out.
        - `loading`: arguments for torch's DataLoader: num_workers, collate_fn, pin_memory, prefetch_factor,
          worker_init_fn, multiprocessing_context, timeout.
        """
        source = read(
            dataset,
            batch_size=batch_size,
            global_batch=global_batch,
            shuffle=shuffle,
            drop_last=drop_last,
            loading=loading,
        )
        plan = BatchPlan(
            source.length,
            batch_size=source.batch_size,
            global_batch=global_batch,
            max_batch=max_batch,
            shuffle=source.shuffle,
            seed=self.seed,
            drop_last=source.drop_last,
        )
        return Batches(self, source, plan, self._iterate)

    def _iterate(self, batches: Batches) -> Iterator[Any]:
        """Loop over batches. `Batches` starts it."""
        self._join()
        self._end_loop()
        plan = batches.plan
        epoch, place = self.progress.epoch, None
        if self._looped == epoch:
            raise InputError(
                f"run.batches() was looped over a second time in epoch {epoch}; there is one loop per epoch. Count "
                "epochs by `for epoch in run.epochs(n):`, evaluate on a DataLoader of your own, and join two training "
                "sets by torch.utils.data.ConcatDataset, or train on them in different epochs"
            )
        self._looped = epoch
        self._together.compare_data(plan.signature, epoch)
        loader = self._loaders.of(batches.dataset, plan, batches.loading)
        if not batches.persistent:
            loader.close()  # as in torch: workers see the dataset as it is when the epoch begins
        if self._epochs is not None:
            self._course = Course(self._epochs, plan.length, plan.drop_last), plan
        given, expected = 0, len(batches)
        while self._between(epoch):
            self._together.loop_begins()
            here = (self._meter.generation, self.progress.cursor)
            if here != place:
                batch_size_now = plan.global_batch_size(self.world)
                self._stepper.batch_is(self.progress.step, batch_size_now, plan.global_batch_size(1))
                loader.begin(epoch, self.progress.cursor, self.rank, self.world)
            found = loader.next()
            if found is None:
                self._fence(_END_OF_BATCHES)
                self._epoch_is_over(epoch)
                return
            self._step, self._micro, batch = found
            assert self._step is not None
            last = self._micro == len(self._step.micros) - 1
            stop = self._step.stop
            self._set_weight(self._step.micros[self._micro].weight, last)
            place = (self._meter.generation, stop if last else self.progress.cursor)
            given += 1
            try:
                yield batch
            except GeneratorExit:  # a `break`: the code after the loop must not be undone later
                self._finish_parts(stop)
                self._counted = given == expected and self._has_more(plan)
                self._standing.put_right()
                self._epoch_is_over(epoch)
                self._left_loop, self._step = True, None
                raise
            self._finish_parts(stop)
            if self._step is not None:
                raise InputError("run.step() must be called after each batch; it was not after the last one")
        # The other ranks are in a later epoch, and so is the state received from them.

    def steps(self, count: int) -> Iterator[int]:
        """Iterate over the numbers of the steps still to be made, out of `count`, for a script with its own data.

        Each rank chooses its data itself, by `run.rank` and `run.world`. The gradients of the ranks are averaged.
        """
        count = whole_number("count", count, 0)
        if self._epochs is not None:
            raise InputError("run.steps() does not go into a loop over run.epochs(): it counts all steps of a training")
        if self._stepper.scales_lr:
            raise InputError("`lr_scaling` needs run.batches(): in run.steps() the size of the batch is not known")
        self._join()
        while self._between(self.progress.epoch):
            if self.progress.cursor >= count:
                break
            number = self.progress.cursor
            self._step = Step(number, number + 1, ())
            self._micro = 0
            self._set_weight(1.0 / self.world, True)
            yield number
            self._finish_parts(number + 1)
            if self._step is not None:
                raise InputError("run.step() must be called in each step; it was not in the last one")
        self.finish()

    def step(
        self,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        samples: int | None = None,
        loss: Tensor | float | None = None,
        **metrics: float,
    ) -> bool:
        """Sum the gradients over all ranks, apply them and commit the step. Call it after each backward pass.

        Returns True when a step was committed. Returns False when the gradient is only accumulated (`max_batch`), or
        when a peer was lost and the batch will come again.

        - `loss`: the mean loss over the batch, which is reported.
        - `metrics`: other values to report.
        - `samples`: the number of samples, needed only in a loop over `run.steps`. Default there: one per step.
        - `optimizer`: step only this optimizer, or those in a list. Call `run.step` once for each loss of a batch, for
          example for the two networks of a GAN. All gradients are cleared each time.
        """
        step = self._step
        if step is None and optimizer is not None and self._void:
            self._parts += 1
            self._buffers.take_back()
            self._stepper.clear()  # a peer was lost: the whole batch comes again
            return False
        if step is None:
            raise InputError(
                "run.step() must be called once after each batch of run.batches() or in run.steps(); to step several "
                "optimizers one after the other, say which: run.step(optimizer=…)"
            )
        arguments.check_step(loss, samples)
        metrics = arguments.metric_values(metrics)
        count = step.micros[self._micro].samples if step.micros else (samples if samples is not None else 1)
        self._sum_watch.look(loss, count, alone=self._membership is None)
        last = not step.micros or self._micro == len(step.micros) - 1
        if not self._void and not self._standing.separate:
            self._gradients.check()
        if optimizer is not None:
            return self._part_step(self._stepper.chosen(optimizer), step, count, loss, metrics)
        if self._parts:
            raise InputError("run.step() was called with `optimizer` before for this batch: say it each time")
        self._gradients.refuse_mixed_losses()
        self._step = None
        if metrics:
            self.report(**metrics)
        if not last:
            self._tally.add(count, loss)
            return False
        total = self._sum(self._gradients.whole, step, count, loss)
        if total is None:
            return self._taken_over
        self._stepper.apply(self.progress.step)
        self.progress.cursor, self.progress.part = step.stop, 0
        self._commit(total, total.samples, metrics)
        return True

    def _part_step(
        self,
        chosen: list[Optimizer],
        step: Step,
        count: int,
        loss: Tensor | float | None,
        metrics: dict[str, float],
    ) -> bool:
        """Make one of several steps for one batch, each for different optimizers."""
        if len(step.micros) > 1:
            raise InputError("run.step(optimizer=…) does not go with `max_batch`: give a smaller batch")
        number, self._parts = self._parts, self._parts + 1
        if self._void or number < self.progress.part:  # these parts were done before the batch had to come again
            self._buffers.take_back()
            self._stepper.clear()
            self._together.step_is_over()
            return not self._void
        if not any(param.grad is not None for param in params_of(chosen)):
            raise InputError("run.step(optimizer=…) found no gradient for it: call its loss.backward() before")
        try:
            if not self._standing.separate:
                self._gradients.whole.complete()
            self._standing.separate = True
            self._agree_on(chosen, number)
        except GroupBroken as problem:
            self._lost_step(problem, count)
            return self._taken_over
        total = self._sum(self._gradients.part(chosen), step, count, loss)
        if total is None:
            return self._taken_over
        self._stepper.apply(self.progress.step, chosen)
        self.progress.part = number + 1
        self._commit(total, total.samples if number == 0 else 0, metrics)
        self._step = step
        return True

    def _agree_on(self, chosen: list[Optimizer], number: int) -> None:
        """Refuse to step other optimizers than the other ranks do."""
        mine = sum(1 << n for n, known in enumerate(self._stepper.optimizers) if known in chosen) + (number << 32)
        if self.world == 1:
            return
        self._waits += 1
        self._crew.waits_in = (repr(self.progress.key()), self._waits)
        try:
            row = [float(mine), float(mine if self.rank == 0 else 0)]
            reducer = self._gradients.whole
            total, first = reducer.agree(torch.tensor(row, dtype=torch.float64, device=self._crew.wire)).tolist()
            self._crew.check_whole()
        finally:
            self._crew.waits_in = None
        if first != mine or total != mine * self.world:
            raise InputError(
                "the ranks step different optimizers in the same batch: run.step(optimizer=…) must be called for the "
                "same optimizers in the same order on all ranks. Decide by run.share(…) or run.progress, not by "
                "the loss or random numbers of one rank"
            )

    def _sum(self, reducer: Reducer, step: Step, count: int, loss: Tensor | float | None) -> StepTotals | None:
        """Sum the gradients and their riders. Return None if a peer was lost; the group is then re-formed already."""
        share = sum(micro.weight for micro in step.micros) if step.micros else 1.0 / self.world
        if self._pacer is not None:
            self._pacer.hold(self.world)
        riders = self._tally.riders(count, loss, knows=self._crew.knows_of_newer, device=self.device)
        if self.world > 1 and self._buffers:
            riders[CHANGED] = self._buffers.changed()
            riders = torch.cat([riders, self._buffers.riders(share, self.rank, self.device)])
        settings = settings_of(self._stepper.optimizers) if self.world > 1 else 0
        if self.world > 1 and self.rank == 0:
            riders[SETTINGS] = settings
        put: Callable[[], None] = lambda: None  # noqa: E731 - nothing to put, so far
        self._waits += 1
        self._crew.waits_in = (repr(self.progress.key()), self._waits)
        try:
            sums = reducer.finish(riders)
            total = StepTotals.of(sums)
            self._crew.check_whole()
            if total.buffers_changed and self.world > 1:
                put = self._buffers.fetch(self.rank, self._crew, reducer.agree)
        except GroupBroken as problem:
            self._lost_step(problem, count)
            return None
        finally:
            self._crew.waits_in = None
        if settings and total.settings != settings:
            raise InputError(
                "the settings of the optimizers (learning rate, momentum, weight decay …) differ between this rank and "
                "rank 0: register the scheduler, and compute settings on all ranks from values that all have, such as "
                "run.progress.step or what run.evaluate(…) gave, not from a counter of your own"
            )
        self._last_save.at_rest = False
        if self.world > 1 and self._buffers:
            put()
            self._buffers.take(sums[RIDERS:])
        self._buffers.commit(others=total.buffers_changed or self.world == 1)
        return total

    def _lost_step(self, problem: GroupBroken, count: int) -> None:
        before = self.progress.key()
        self._step, self._void = None, True
        self._buffers.take_back()
        self._standing.take_batch_back()
        self._recover_inside(problem)  # "inside", because the script's code after the step runs next
        self._standing.repeats_code()
        self._taken_over = self.progress.key() > before  # some rank's sum was complete
        self._together.step_is_over()
        if not self._taken_over:
            self._redone += count + self._tally.samples

    def _commit(self, total: StepTotals, samples: int, metrics: dict[str, float]) -> None:
        self._fresh = False
        self._together.step_is_over()
        self._gradients.whole.forget_passes()
        self.progress.step += 1
        self.progress.samples += samples
        self._meter.stepped(samples)
        if samples:
            self._standing.mean.add(total.loss, total.loss_samples, self.progress.epoch)
        if total.loss is not None:
            metrics["loss"] = total.loss
        self.report(**metrics)
        self._agreed = total.all_know(self.world)

    # Values that are the same on all ranks.

    def share(self, value: Any = None) -> Any:
        """Return rank 0's `value` on every rank. All ranks must call it at the same point of the script.

        `value` is a number, text or tensor, or a list, tuple or dict of these. It is part of the state: when rank 0 is
        lost, either the next rank 0 provides its own value, or all ranks have the value of the lost one.
        """
        return self._meet("run.share()", lambda: value)

    def evaluate(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `function(*args, **kwargs)` on rank 0 and return its result on every rank. The other ranks wait for it.

        Use it for validation, so that early stopping, schedules and the choice of the best model depend on the same
        numbers on all ranks. If rank 0 is lost during the call, the next rank 0 calls the function again. Nodes that
        join during the call wait for the next step.
        """
        if not callable(function):
            raise InputError(f"run.evaluate() needs a function, but got {type(function).__name__}")
        return self._meet("run.evaluate()", lambda: function(*args, **kwargs))

    def _meet(self, what: str, offer: Callable[[], Any]) -> Any:
        """Meet the other ranks that hold the state. Return what `offer` returns on the first of them."""
        if not self._joined:
            raise InputError(f"{what} must be called in a loop over run.epochs() or run.steps(), not before it")
        if self._finished:
            raise InputError(f"the training is over, so {what} meets nobody; call it in the last epoch")
        if self._step is not None and not self._parts:
            raise InputError(f"{what} must be called after run.step(), not between a batch and its step")
        if what.startswith("run."):
            self._end_loop()
        return self._together.meet(what, offer)

    def _fence(self, what: str) -> None:
        """Wait until all ranks are at this point, and check that their states are the same."""

        def judge(notes: list[bytes]) -> bytes:
            refuse_drift(notes)
            return packed(None, what)

        self._together.meet(what, lambda: None, Note(Digest(self._registry.objects).written, judge))

    def _unbroken_fence(self, what: str) -> bool:
        """Wait until all ranks are at this point.

        Return False, on all of them, if a peer was lost while some waited.
        """
        entered = self._meter.generation

        def judge(notes: list[bytes]) -> bytes:
            return packed({int(note) for note in notes} == {self._meter.generation}, what)

        return bool(self._together.meet(what, lambda: None, Note(lambda: b"%d" % entered, judge)))

    def _has_more(self, plan: BatchPlan) -> bool:
        """Return whether the step of the present batch was made and samples of the epoch are left."""
        left = plan.step_at(self.progress.epoch, self.progress.cursor, self.rank, self.world)
        return self._step is None and left is not None

    def _end_loop(self) -> None:
        """Finish a loop over batches that the script left by `break`."""
        if self._left_loop:
            self._left_loop = False
            if self._counted:
                raise InputError(
                    "the loop over run.batches() was left after as many batches as len() had said, but samples of the "
                    "epoch are left, since nodes came or went meanwhile: loop to the end, do not count batches"
                )
            self._fence(_END_OF_BATCHES)

    def report(self, **metrics: float) -> None:
        """Report values such as the accuracy, for the present epoch and step. They are sent with the next report."""
        self._noted.note(arguments.metric_values(metrics), self._at())

    def finish(self) -> None:
        """Complete the training: wait for all ranks and take the last snapshot.

        `epochs` and `steps` call it when they end. After a `break` it is called when the script ends. Call it yourself
        to do something after a `break` that needs the complete training, such as saving the model.
        """
        if self._finished or not self._joined:
            return
        self._step = None  # a `break` before the step skips that batch, on all ranks
        self._end_loop()
        self._begin_epoch()
        self._give_owed()
        self._fence("the end of the training")
        self._standing.put_right()
        self._meet("the last snapshot", self._save_last)  # if rank 0 is lost during the save, the next rank 0 saves
        self._give_owed()
        self._crew.part()  # rank 0 hosts data that the others still have to read
        self._finished = True
        self._loaders.close()
        if self._membership is not None:
            self._membership.send(self._report())
            self._membership.send(Done(self.progress.step))

    def _save_last(self) -> None:
        self._standing.save(last=True)

    # Between two batches.

    def _begin_epoch(self) -> None:
        self._together.epoch_begins()
        self._looped, self._left_loop = None, False

    def _between(self, epoch: int) -> bool:
        """Do the work between two batches. All ranks have committed the same steps and run the script's code for them.

        Returns False if the state is that of a later epoch than `epoch`: the script has to get there first.
        """
        if self._agreed:
            self._reform()
        if self.progress.epoch != epoch:
            return False
        self._standing.put_right()
        self._last_save.end_if_taken()
        self._follow_trained()
        self._give_owed()
        self._void, self._parts = False, 0
        if self.world > 1:
            self._standing.batch_begins()
        else:
            self._standing.forget_batch()
        if self._terminating and self._membership is None:
            self._standing.save()
            raise SystemExit(128 + signal.SIGTERM)
        if self.is_main:
            self._standing.save_if_due()
        self._last_save.at_rest = True
        return True

    def _give_owed(self) -> None:
        """Send the state to newcomers that joined while the script's code was running."""
        while self._standing.owes:
            assert self._place is not None
            try:
                self._standing.give_owed(self._place, self._crew)
                self._crew.check_whole()
            except GroupBroken as problem:
                self._recover(problem)

    def _follow_trained(self) -> None:
        """Sum the gradients of layers that were unfrozen and of groups that were added to an optimizer."""
        while not self._standing.separate and self._gradients.is_behind:
            meetings = self._crew.meetings
            try:
                if meetings is not None:
                    meetings.meet("a change of the trained parameters")
            except GroupBroken as problem:
                self._recover(problem)
                continue
            self._gradients.follow()

    # Groups.

    def _join(self) -> None:
        """Become a member. A newcomer costs the other ranks nothing until they pause for it."""
        if self._joined:
            return
        if not self._stepper.optimizers:
            raise InputError("run.register() must be given at least one optimizer before training begins")
        self._standing.check_state(peers=self._membership is not None)
        self._joined = True
        self._buffers.find(self._registry.modules, self._stepper.params)
        self._gradients.follow(RIDERS + self._buffers.size)
        if self._membership is None:
            self._standing.begin()
            self._buffers.commit()
            self._gradients.follow()  # a snapshot may have unfrozen layers
            self._meter.formed(0, 1)
            if self._pacer is not None:
                self._pacer.begin()
            return
        self._crew.rehearse()
        self._membership.ready()
        self._reform()

    def _recover(self, problem: GroupBroken) -> None:
        """Continue training in the next group, because the present one is broken."""
        self._crew.give_up(problem)
        self._gradients.abandon()
        self._reform()
        self._last_save.at_rest = False

    def _recover_inside(self, problem: GroupBroken) -> None:
        """Continue in the next group after a break in the middle of the script's code. Newcomers have to wait."""
        self._inside = True
        try:
            self._recover(problem)
        finally:
            self._inside = False

    def _reform(self) -> None:
        """Continue training in the group of the newest generation."""
        membership = self._membership
        assert membership is not None
        self._forming = True
        self._last_save.at_rest = self._standing.has_state and not self._inside
        self._last_save.end_if_taken()
        paused_at = self._meter.last_at if self._standing.has_state else time.perf_counter()
        try:
            place, form_s, sync_s = self._crew.form_anew(self._sync)
        except Leave as leave:
            self._leave(leave.generation)
        self._agreed = self._forming = False
        self._place = place
        if self._gradients.is_behind:
            self._gradients.follow()  # the received state may train other parameters
        self._gradients.group_is(alone=place.world == 1, check=self._crew.check_whole, wait=self._crew.wait)
        pause_s = time.perf_counter() - paused_at
        self._meter.formed(place.generation, place.world)
        if self._pacer is not None:
            self._pacer.begin()
        membership.send(Formed(place.generation, place.world, round(pause_s, 6), round(form_s, 6), round(sync_s, 6)))

    def _sync(self, place: Assignment) -> None:
        self._last_save.at_rest = False
        before, had_state = self._standing.loads, self._standing.has_state
        self._standing.sync(place, self._crew, inside=self._inside)
        self._fresh = self._fresh or (self._standing.took_over and not had_state)
        if self._standing.loads != before or not self._buffers.committed:
            self._buffers.commit()

    def _leave(self, generation: Generation) -> NoReturn:
        """End this worker at a step boundary."""
        assert self._membership is not None
        self._last_save.end_if_taken()
        peers = self._place.members if self._place is not None else ()
        if self._standing.has_state and not set(generation.members) & set(peers):
            self._standing.save()  # no rank that has the state stays
        self._finished = self._left = True
        self._loaders.close()
        self._membership.leave(self.progress.step)
        raise SystemExit(0)

    # Steps.

    def _set_weight(self, weight: float, last: bool) -> None:
        reducer = self._gradients.whole
        reducer.forget_passes()
        if self._micro == 0:
            self._tally.begin()
            self._gradients.begin()
        elif weight != reducer.weight:
            # Micro-batches of one share can differ by a sample: rescale the sum so far to the weight of the next one.
            reducer.rescale(reducer.weight / weight)
        if self._micro > 0:
            self._gradients.keep()
        reducer.weight, reducer.active = weight, last and not self._standing.separate

    def _finish_parts(self, stop: int) -> None:
        """Complete the present batch: the script has made all of its steps that use `optimizer=`."""
        if self._parts and self._void and self._parts == self.progress.part:
            self._standing.put_right()  # the batch is done: this rank had only missed the last part
            self._void = False
        if self._parts and not self._void:
            self.progress.cursor, self.progress.part = stop, 0
        if self._parts:
            self._step = None

    # Reports, signals and the end of the process.

    def _report(self) -> Report:
        self._meter.look()
        progress = self.progress
        metrics, metrics_at = self._noted.both()
        interval = self._standing.snapshot_interval if self.is_main else None
        return Report(
            generation=self._meter.generation,
            step=progress.step,
            epoch=progress.epoch,
            samples=progress.samples,
            world=self._meter.world if self._standing.has_state else 0,
            rates={str(world): round(rate, 3) for world, rate in self._meter.rates().items()},
            metrics=metrics,
            metrics_at=metrics_at,
            snapshot_step=self._standing.snapshot_step,
            total=self._total(progress),
            epochs=self._epochs,
            redone=self._redone,
            windows=self._meter.windows(),
            snapshot_every_s=round(interval.interval_s, 3) if interval is not None else None,
            snapshot_stall_s=round(interval.stall_s, 6) if interval is not None else None,
        )

    def _at(self) -> Position:
        """Return the position in the training for values that are reported now."""
        return Position(max(self.progress.epoch, self._epochs_over), self.progress.step, self.progress.samples)

    def _epoch_is_over(self, epoch: int) -> None:
        self._last_save.at_rest = False
        self._epochs_over = epoch + 1
        self._noted.epoch_is_over(epoch + 1, self.progress.step)

    def _total(self, progress: Progress) -> int | None:
        """Return the samples of the whole training, if known."""
        if self._course is None:
            return None
        course, plan = self._course
        return course.total(progress.samples, progress.epoch, progress.cursor, plan.global_batch_size(self.world))

    def _paced(self) -> Pacer | None:
        """Return the pacer that delays the steps, if the environment asks for one. A lost peer ends the wait."""
        membership = self._membership
        return Pacer.from_environment(time.sleep if membership is None else membership.wait_for_cut)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self._terminating = True
        if self._last_save.interrupt():
            return
        if not self._standing.has_state:
            raise SystemExit(128 + signum)  # no other rank waits for this one yet
        if self._membership is not None:
            # In another thread, because this one may be interrupted while it sends.
            threading.Thread(target=self._membership.send, args=(Leaving(),), daemon=True).start()

    def _save_within(self, seconds: float) -> None:
        self._buffers.take_back()  # a batch that is being computed may have changed them
        self._standing.save_within(seconds)

    def _is_one_of_many(self) -> bool:
        """Return whether the group seems complete and another rank is the main rank, which then saves."""
        assert self._membership is not None
        return self.rank > 0 and not self._forming and not self._membership.cut

    def _send(self, message: Message) -> None:
        if self._membership is not None:
            self._membership.send(message)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        if self._membership is not None and exits.ended_well():
            self._finish_at_exit()
        self._loaders.close()
        self._standing.close(60.0)
        if not self._crew.close(within_s=_LEAVING_S if self._left else _ENDING_S) and self._left:
            exits.end_abruptly()

    def _finish_at_exit(self) -> None:
        """Complete the training when the script ends after a `break`.

        Rank 0 hosts data that the other ranks still have to read.
        """
        try:
            self.finish()
        except SystemExit:
            return  # this worker is no longer a member, which the manager knows
        except Exception as problem:
            sys.excepthook(type(problem), problem, problem.__traceback__)
