"""PyTorch training that grows and shrinks: what `bftrainer.elastic.init()` returns.

A `Run` owns the rhythm of training. Within `step` the ranks sum their gradients, apply them and agree whether to
rescale; between two batches, when all of the script's own code for a step has run, the group is re-formed, state is
handed to newcomers and snapshots are taken (`standing.py`). A peer that dies in between is noticed as a broken group:
the step counts only for ranks whose sum was whole, and the most advanced rank's state becomes everyone's.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from bftrainer.elastic.crew import Crew
from bftrainer.elastic.group import GroupBroken, default_backend
from bftrainer.elastic.loader import Loaders, length_of
from bftrainer.elastic.measure import Course, Meter
from bftrainer.elastic.membership import Leave, Membership, Place
from bftrainer.elastic.noted import At, Noted
from bftrainer.elastic.pacing import Pacer
from bftrainer.elastic.protocol import Done, Formed, Generation, Leaving, Report
from bftrainer.elastic.reducer import Reducer
from bftrainer.elastic.sampler import BatchPlan, Step
from bftrainer.elastic.signals import on_sigterm
from bftrainer.elastic.snapshot import Snapshots
from bftrainer.elastic.standing import Progress, Standing
from bftrainer.elastic.state import Registry
from bftrainer.elastic.stepping import Statistics, Stepper
from bftrainer.elastic.tally import RIDERS, Tally, Total
from bftrainer.errors import InputError


class Run:
    """One worker's view of an elastic training. Made by `init`."""

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
        self._noted = Noted()
        self._epochs_over = 0  # whose batches are all done, here
        self._registry = Registry()
        self._stepper = Stepper()
        self._membership = Membership.connect()
        self._crew = Crew(self._membership, backend or default_backend(device), device)
        self._meter = Meter()
        self._pacer = self._paced()
        self._epochs: int | None = None
        self._course: tuple[Course, BatchPlan] | None = None
        self._redone = 0
        keeper = None
        if snapshots is not None:
            keeper = Snapshots(snapshots, every_s=snapshot_every_s, keep=snapshots_kept)
        self._standing = Standing(self._registry, self._stepper, self._noted, keeper)
        self._reducer: Reducer | None = None
        self._statistics = Statistics()
        self._joined = False
        self._finished = False
        self._agreed = False  # all ranks know of a new generation
        self._peers: tuple[str, ...] = ()  # the members of the present generation
        self._pid = os.getpid()
        self._step: Step | None = None
        self._micro = 0
        self._tally = Tally()
        self._terminating = False
        self._loaders = Loaders()
        if self._membership is not None:
            self._membership.report = self._report
            self._membership.report_failures(self._crew.is_collateral)
        on_sigterm(self._on_sigterm)
        atexit.register(self._at_exit)

    # What the script sees.

    @property
    def rank(self) -> int:
        """This worker's number in the present generation, from 0."""
        return self._crew.rank

    @property
    def world(self) -> int:
        """How many workers train at present."""
        return self._crew.world

    @property
    def generation(self) -> int:
        """The number of the present generation; it grows whenever the members change."""
        return self._meter.generation

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0: the one that prints and saves. Another worker may be tomorrow."""
        return self.rank == 0

    @property
    def progress(self) -> Progress:
        """How far the training is."""
        return self._standing.progress

    @property
    def metrics(self) -> dict[str, float]:
        """What was reported last, on this rank or by those whose state it took over."""
        return self._noted.values

    @property
    def model(self) -> Any:
        """The object registered as `model`."""
        if "model" not in self._registry.objects:
            raise InputError("nothing is registered as `model`; call run.register(model=…, optimizer=…)")
        return self._registry.objects["model"]

    @property
    def indices(self) -> tuple[int, ...]:
        """The dataset's indices in the batch at hand that count for this rank (none in a stand-in)."""
        if self._step is None:
            return ()
        micro = self._step.micros[self._micro]
        return micro.indices if micro.samples else ()

    def register(
        self,
        *,
        lr_scaling: str | Callable[[float], float] = "none",
        lr_warmup_steps: int = 0,
        lr_base_batch: int | None = None,
        clip_norm: float | None = None,
        scheduler_every: str | None = None,
        **objects: Any,
    ) -> None:
        """Name what survives: modules, optimizers, and anything else with `state_dict` and `load_state_dict`.

        Optimizers step in `run.step`, so does a GradScaler. `scheduler_every` ("step" or "epoch") has the registered
        LR schedulers stepped too; otherwise do so in the script. `lr_scaling` is the rule for the learning rate when
        the global batch changes (linear, sqrt, none, or a function of its ratio to `lr_base_batch`, which is one
        node's batch unless said otherwise), over `lr_warmup_steps` steps when it rises. `clip_norm` clips the summed
        gradient.
        """
        if self._joined:
            raise InputError("register() must be called before the first epoch")
        self._stepper.configure(
            scheduler_every=scheduler_every,
            clip_norm=clip_norm,
            rule=lr_scaling,
            warmup_steps=lr_warmup_steps,
            base_batch=lr_base_batch,
        )
        self._registry.add(objects)
        self._stepper.add(list(objects.values()))
        self._statistics.add(list(objects.values()))

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are still to be trained, of `count`. A newcomer begins in the one that is under way."""
        self._epochs = count
        self._join()
        undo: Callable[[], None] | None = None
        while self.progress.epoch < count:
            epoch = self.progress.epoch
            yield epoch
            if self.progress.epoch == epoch:
                self._standing.put_right()  # the loop over batches may have been left early
                if undo is not None:
                    undo()  # what the script's code after the last batch does is done once
                if epoch + 1 == count and not self._fence():
                    # A peer was lost while rank 0 evaluated, rank 0 perhaps: what follows the last batch is run again.
                    undo = self._standing.repair
                    continue
                if self._stepper.scheduler_every == "epoch":
                    self._stepper.schedule()
                self.progress.epoch, self.progress.cursor = epoch + 1, 0
        self.finish()

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        max_batch: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        **loading: Any,
    ) -> Iterator[Any]:
        """This rank's batches of the epoch under way: over all ranks each sample of the dataset exactly once.

        Give `batch_size`, per node, or `global_batch`, which is split over the nodes. A share larger than `max_batch`
        comes in several batches whose gradients are accumulated; call `run.step` after each all the same. `loading`
        goes to torch's DataLoader: num_workers, collate_fn, pin_memory, prefetch_factor, worker_init_fn, …
        """
        length = length_of(dataset)
        self._join()
        plan = BatchPlan(
            length,
            batch_size=batch_size,
            global_batch=global_batch,
            max_batch=max_batch,
            shuffle=shuffle,
            seed=self.seed,
            drop_last=drop_last,
        )
        loader = self._loaders.of(dataset, plan, (batch_size, global_batch, max_batch, shuffle, drop_last), loading)
        if self._epochs is not None:
            self._course = Course(self._epochs, length, drop_last), plan
        epoch, place = self.progress.epoch, None
        while self._between(epoch):
            here = (self._meter.generation, self.progress.cursor)
            if here != place:
                batch_size_now = plan.global_batch_size(self.world)
                self._stepper.batch_is(self.progress.step, batch_size_now, plan.global_batch_size(1))
                loader.begin(epoch, self.progress.cursor, self.rank, self.world)
            found = loader.next()
            if found is None:
                if self._fence():
                    self._epoch_is_over(epoch)
                    return
                place = None
                continue
            self._step, self._micro, batch = found
            assert self._step is not None
            last = self._micro == len(self._step.micros) - 1
            self._set_weight(self._step.micros[self._micro].weight, last)
            place = (self._meter.generation, self._step.stop if last else self.progress.cursor)
            try:
                yield batch
            except GeneratorExit:  # a `break`: what follows the loop must not be undone later
                self._standing.put_right()
                self._epoch_is_over(epoch)
                raise
            if self._step is not None:
                raise InputError("run.step() must be called after each batch; it was not after the last one")
        # The others are ahead in a later epoch, and so is the state taken over from them.

    def steps(self, count: int) -> Iterator[int]:
        """The numbers of the steps that are still to be made, of `count`, for a script with data of its own.

        Each rank draws its data as it sees fit (`run.rank`, `run.world`); their gradients are averaged.
        """
        if self._stepper.scales_lr:
            raise InputError("`lr_scaling` needs run.batches(): in run.steps() the size of the batch is not known")
        self._join()
        while self._between(self.progress.epoch):
            if self.progress.cursor >= count:
                if self._fence():
                    break
                continue
            number = self.progress.cursor
            self._step = Step(number, number + 1, ())
            self._micro = 0
            self._set_weight(1.0 / self.world, True)
            yield number
            if self._step is not None:
                raise InputError("run.step() must be called in each step; it was not in the last one")
        self.finish()

    def step(self, *, samples: int | None = None, loss: Tensor | float | None = None, **metrics: float) -> bool:
        """After the backward pass: sum the gradients over all ranks, apply them, commit.

        True when a step was committed; False when its gradient only accumulates, or when a peer was lost and the batch
        will come again. `loss` (a mean over the batch) and `metrics` are reported; `samples` is needed only in a loop
        over `steps`, where one a step is assumed.
        """
        step, reducer = self._step, self._reducer
        if step is None or reducer is None:
            raise InputError("run.step() must be called once after each batch of run.batches() or in run.steps()")
        count = step.micros[self._micro].samples if step.micros else (samples if samples is not None else 1)
        self._step = None
        if metrics:
            metrics = {name: float(value) for name, value in metrics.items()}
            self.report(**metrics)
        if step.micros and self._micro < len(step.micros) - 1:
            self._tally.add(count, loss)
            return False
        share = sum(micro.weight for micro in step.micros) if step.micros else 1.0 / self.world
        if self._pacer is not None:
            self._pacer.hold(self.world)
        riders = self._tally.riders(count, loss, knows=self._crew.knows_of_newer, device=self.device)
        if self._statistics and self.world > 1:
            riders = torch.cat([riders, self._statistics.weighted(share)])
        try:
            sums = reducer.finish(riders)
            total = Total.of(sums)
            self._crew.check_whole()
        except GroupBroken as problem:
            before = self.progress.key()
            self._recover(problem)
            if self.progress.key() <= before:  # nobody's sum was whole
                self._redone += count + self._tally.samples
            return False
        if self._statistics:
            if self.world > 1:
                self._statistics.take(sums[RIDERS:])
            self._statistics.commit()
        self._stepper.apply(self.progress.step)
        self.progress.cursor = step.stop
        self.progress.step += 1
        self.progress.samples += total.samples
        self._meter.stepped(total.samples)
        if total.loss is not None:
            metrics["loss"] = total.loss
        self.report(**metrics)
        self._agreed = total.all_know(self.world)
        return True

    def report(self, **metrics: float) -> None:
        """Have values (accuracy, …) travel with the next report, as those of the epoch and the step at hand."""
        self._noted.note({name: float(value) for name, value in metrics.items()}, self._at())

    def finish(self) -> None:
        """The training is complete: `epochs` and `steps` call it when they end."""
        if self._finished or not self._joined:
            return
        saved = False
        while not saved:
            while not self._fence():
                pass
            self._standing.put_right()
            if self.is_main:
                self._standing.save()
            saved = self._fence()  # if rank 0 is lost while it saves, the next one does
        self._finished = True
        self._loaders.close()
        if self._membership is not None:
            self._membership.send(self._report())
            self._membership.send(Done(self.progress.step))

    # Between two batches.

    def _between(self, epoch: int) -> bool:
        """All ranks have committed the same steps and run the script's code for them.

        False if the state is that of a later epoch than `epoch`: the script has to get there first.
        """
        if self._agreed:
            self._reform()
        if self.progress.epoch != epoch:
            return False
        self._standing.put_right()
        if self._terminating and self._membership is None:
            self._standing.save()
            raise SystemExit(128 + signal.SIGTERM)
        if self.is_main:
            self._standing.save_if_due()
        return True

    def _fence(self) -> bool:
        """Whether all ranks have come here, the end of an epoch. False: there is more to do first."""
        reducer, place = self._reducer, self.progress.key()
        assert reducer is not None
        try:
            flag = float(self._crew.knows_of_newer)
            values = reducer.agree(torch.tensor([flag], dtype=torch.float64, device=self.device)).tolist()
            self._crew.check_whole()
        except GroupBroken as problem:
            self._recover(problem)
            return False
        self._agreed = round(values[0]) >= self.world
        return self.progress.key() == place

    # Groups.

    def _join(self) -> None:
        """Become a member. Until the others pause for it, a newcomer costs them nothing."""
        if self._joined:
            return
        if not self._stepper.optimizers:
            raise InputError("run.register() must be given at least one optimizer before training begins")
        self._joined = True
        self._reducer = Reducer(self._stepper.params, RIDERS + self._statistics.size)
        if self._membership is None:
            self._standing.begin()
            self._statistics.commit()
            self._meter.formed(0, 1)
            if self._pacer is not None:
                self._pacer.begin()
            return
        self._crew.rehearse()
        self._membership.ready()
        self._reform()

    def _recover(self, problem: GroupBroken) -> None:
        """The group is broken in the midst of a step. What was not committed is dropped."""
        assert self._reducer is not None
        self._crew.give_up(problem)
        self._reducer.abandon()
        self._statistics.take_back()
        self._reform()
        self._standing.step_failed()

    def _reform(self) -> None:
        """Train on in the group of the newest generation."""
        membership, reducer = self._membership, self._reducer
        assert membership is not None
        assert reducer is not None
        paused_at = self._meter.last_at if self._standing.has_state else time.perf_counter()
        try:
            place, form_s, sync_s = self._crew.form_anew(self._sync)
        except Leave as leave:
            self._leave(leave.generation)
        self._agreed = False
        self._peers = place.members
        reducer.alone = place.world == 1
        pause_s = time.perf_counter() - paused_at
        self._meter.formed(place.generation, place.world)
        if self._pacer is not None:
            self._pacer.begin()
        membership.send(Formed(place.generation, place.world, round(pause_s, 6), round(form_s, 6), round(sync_s, 6)))

    def _sync(self, place: Place) -> None:
        self._standing.sync(place, self._crew.wire)
        self._statistics.commit()

    def _leave(self, generation: Generation) -> NoReturn:
        """End here, at a step boundary."""
        assert self._membership is not None
        if self._standing.has_state and not set(generation.members) & set(self._peers):
            self._standing.save()  # nobody who has the state stays
        self._finished = True
        self._loaders.close()
        self._membership.leave(self.progress.step)
        raise SystemExit(0)

    # Steps.

    def _set_weight(self, weight: float, last: bool) -> None:
        reducer = self._reducer
        assert reducer is not None
        if self._micro == 0:
            self._tally.begin()
        elif weight != reducer.weight:
            # Micro-batches of one share differ by a sample: bring what is accumulated to the weight of the next.
            reducer.rescale(reducer.weight / weight)
        reducer.weight, reducer.active = weight, last

    # The outside world.

    def _report(self) -> Report:
        self._meter.look()
        progress = self.progress
        metrics, metrics_at = self._noted.both()
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
        )

    def _at(self) -> At:
        """Where training is, for what is reported now."""
        return At(max(self.progress.epoch, self._epochs_over), self.progress.step, self.progress.samples)

    def _epoch_is_over(self, epoch: int) -> None:
        self._epochs_over = epoch + 1
        self._noted.epoch_is_over(epoch + 1, self.progress.step)

    def _total(self, progress: Progress) -> int | None:
        """Samples of the whole training, where that is known."""
        if self._course is None:
            return None
        course, plan = self._course
        return course.total(progress.samples, progress.epoch, progress.cursor, plan.global_batch_size(self.world))

    def _paced(self) -> Pacer | None:
        """What holds the steps back, if the environment says so. A lost peer ends the wait."""
        membership = self._membership
        return Pacer.from_environment(time.sleep if membership is None else membership.wait_for_cut)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self._terminating = True
        if not self._standing.has_state:
            raise SystemExit(128 + signum)  # nobody waits for it yet
        if self._membership is not None:
            # In a thread, because this one may be in the midst of sending.
            threading.Thread(target=self._membership.send, args=(Leaving(),), daemon=True).start()

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        self._loaders.close()
        self._standing.close(60.0)
        self._crew.close()
