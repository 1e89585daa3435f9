"""PyTorch `Run`: the object that `bftrainer.elastic.init()` returns and a training script uses.

It is the interface of four parts: the rank as a member of the training (`member.py`), the loops that the script runs
in (`loop.py`), the batch it computes and the steps for it (`present_batch.py`), and what is reported (`reports.py`).
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bftrainer.elastic import protocol
from bftrainer.elastic.torch import arguments, output
from bftrainer.elastic.torch.data.batch_plan import BatchPlan, whole_number
from bftrainer.elastic.torch.data.batches import Batches
from bftrainer.elastic.torch.data.fingerprint import fingerprint
from bftrainer.elastic.torch.data.source import read
from bftrainer.elastic.torch.loop import TrainingLoop
from bftrainer.elastic.torch.member import TrainingMember
from bftrainer.elastic.torch.prepare.preparation import Preparation
from bftrainer.elastic.torch.present_batch import PresentBatch
from bftrainer.elastic.torch.registration import Registration, refuse_sync_batch_norm
from bftrainer.elastic.torch.reports import ProgressReports
from bftrainer.elastic.torch.snapshots.snapshot import Snapshots
from bftrainer.elastic.torch.state.training_state import Progress
from bftrainer.elastic.torch.tracking.tracker import TrackedRun, Tracker, Trackers
from bftrainer.errors import InputError
from bftrainer.processes import exits

_LEAVING_S = 0.5
_ENDING_S = 25.0
"""Seconds that the end of a script waits for a thread in which torch connects to a host that is gone."""


class Run:
    """One rank's handle on an elastic training. Made by `init`.

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
        keeper = None
        if snapshots is not None:
            owner = os.environ.get(protocol.SNAPSHOT_OWNER, "")
            start = int(os.environ.get(protocol.CONTROLLER_START) or 0)
            keeper = Snapshots(snapshots, every_s=snapshot_every_s, keep=snapshots_kept, owner=owner, start=start)
        self._registration = Registration()
        self._member = TrainingMember(device, backend, keeper)
        self._reports = ProgressReports(self._member)
        self._batch = PresentBatch(self._member, self._reports)
        self._loop = TrainingLoop(self._member, self._batch, self._reports)
        self._preparation = Preparation(self._member, self._batch, self._loop, self._reports, self.register, self.seed)
        self._trackers = Trackers(
            TrackedRun(
                has_begun=lambda: self._member.joined,
                is_main=lambda: self.is_main,
                step=lambda: self.progress.step,
                folder=lambda: self.folder,
                has_resumed=lambda: self._member.state.resumed_step > 0,
            )
        )
        self._pid = os.getpid()
        if self._member.membership is not None:
            self._member.membership.report = self._reports.report
            exits.watch()
        atexit.register(self._at_exit)

    @property
    def rank(self) -> int:
        """This rank's number among all ranks, from 0. It may change when nodes come or go."""
        return self._member.rank

    @property
    def world(self) -> int:
        """Number of ranks that train at present, on all nodes. It changes when nodes come or go."""
        return self._member.world

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks on its node, from 0. It never changes."""
        return self._member.local_rank

    @property
    def local_world(self) -> int:
        """Number of ranks on this rank's node. Other nodes may have another number."""
        return self._member.local_world

    @property
    def node_rank(self) -> int:
        """Number of this rank's node among all nodes, from 0. It may change when nodes come or go."""
        return self._member.node_rank

    @property
    def nodes(self) -> int:
        """Number of nodes that train at present."""
        return self._member.nodes

    @property
    def generation(self) -> int:
        """Number of the present generation. It grows whenever the members change."""
        return self._member.meter.generation

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and saves. Another one may become rank 0 later."""
        return self.rank == 0

    @property
    def progress(self) -> Progress:
        """Progress of the training: epochs, steps and samples done."""
        return self._member.progress

    @property
    def metrics(self) -> dict[str, float]:
        """Values reported last, on this rank or by the ranks whose state it received."""
        return self._member.metrics.values

    @property
    def model(self) -> Any:
        """The object registered as `model`."""
        if "model" not in self._member.registry.objects:
            raise InputError("nothing is registered as `model`; call run.register(model=…, optimizer=…)")
        return self._member.registry.objects["model"]

    @property
    def indices(self) -> tuple[int, ...]:
        """Dataset indices of the present batch that count for this rank.

        Empty for a stand-in, the batch of a rank for which a step has no samples.
        """
        return self._batch.indices

    @property
    def is_done_alone(self) -> bool:
        """Whether this run has trained in a process of its own, so that another one may begin there."""
        return self._member.joined and self._member.membership is None

    @property
    def folder(self) -> Path:
        """Folder for files that the script writes: this trainer's own under BFTrainer, else the current directory."""
        return output.output_folder()

    def save(self, name: str, thing: Any) -> Path | None:
        """Write `thing` with torch.save to the file `name` in `run.folder`, on the main rank only.

        Returns the file's path. The other ranks write nothing and return None. If the process is killed, the file has
        either its former content or all of the new content. `bftrainer results` lists the files.
        """
        name = output.file_name(name, thing)
        return output.save(self.folder, name, thing) if self.is_main else None

    def tracker(self, kind: str, **options: Any) -> Tracker:
        """Return a tracker, to which every rank may log values: "tensorboard", "wandb" or "mlflow".

        Only the main rank writes. The training is one run of the tracker, with rising steps, also when rank 0 changes
        or all nodes were lost. `options` are those of torch's SummaryWriter (`log_dir`, …) or of `wandb.init`
        (`project`, `mode`, `config`, …); for MLflow `tracking_uri`, `experiment`, `name`, `params` and `tags`.
        """
        return self._trackers.get(kind, options)

    def mean(self, name: str) -> float:
        """Return the mean of the loss given to `run.step` over the samples of the epoch so far.

        It is the same on all ranks. After the batches of an epoch it is the mean of the whole epoch, until the first
        step of the next epoch. `name` must be "loss".
        """
        return self._member.state.mean.of(name)

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
        - `lr_base_batch`: the global batch that the learning rate was chosen for. Default: the batch of one rank.
        - `clip_norm`: the norm to which the summed gradient is clipped.
        - `scheduler_every`: "step" or "epoch" steps the registered LR schedulers that often. Without it the script
          steps them.
        """
        if self._member.joined:
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
        self._member.stepper.configure(
            scheduler_every=options["scheduler_every"],
            clip_norm=options["clip_norm"],
            rule=options["lr_scaling"],
            warmup_steps=options["lr_warmup_steps"],
            base_batch=options["lr_base_batch"],
        )
        self._member.registry.add(objects)
        self._member.stepper.add(list(objects.values()))
        self._member.state.hidden.add(objects)

    def prepare(self, *objects: Any, carry: str | Collection[str] = (), **options: Any) -> Any:
        """Make a script's own objects elastic. See `elastic.prepare`, which has the same options."""
        return self._preparation.prepare(objects, carry=carry, **options)

    @property
    def preparation(self) -> Preparation:
        """What integrations of training frameworks build on. Scripts use `prepare`."""
        return self._preparation

    def micro_steps(self, count: int) -> Iterator[int]:
        """Iterate over this rank's share of the `count` micro-steps of a step. See `elastic.micro_steps`."""
        return self._preparation.micro_steps(count)

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the epochs that are still to be trained, out of `count`.

        A rank that joins later, or a run that resumes from a snapshot, begins in the epoch that is in progress.
        """
        return self._loop.epochs(whole_number("count", count, 0))

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
        - `batch_size`: samples per rank and step.
        - `global_batch`: samples per step over all ranks. They are split over the ranks.
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
            samples=fingerprint(source.dataset),
        )
        return Batches(self, source, plan, self._loop.batches)

    def steps(self, count: int) -> Iterator[int]:
        """Iterate over the numbers of the steps still to be made, out of `count`, for a script with its own data.

        Each rank chooses its data itself, by `run.rank` and `run.world`. The gradients of the ranks are averaged.
        """
        count = whole_number("count", count, 0)
        return self._preparation.steps(count) if self._preparation.is_used else self._loop.steps(count)

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
        return self._batch.make_step(optimizer, samples, loss, metrics)

    def share(self, value: Any = None) -> Any:
        """Return rank 0's `value` on every rank. All ranks must call it at the same point of the script.

        `value` is a number, text or tensor, or a list, tuple or dict of these. It is part of the state: when rank 0 is
        lost, either the next rank 0 provides its own value, or all ranks have the value of the lost one.
        """
        return self._loop.meet("run.share()", lambda: value)

    def evaluate(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `function(*args, **kwargs)` on rank 0 and return its result on every rank. The other ranks wait for it.

        Use it for validation, so that early stopping, schedules and the choice of the best model depend on the same
        numbers on all ranks. If rank 0 is lost during the call, the next rank 0 calls the function again. Nodes that
        join during the call wait for the next step.
        """
        if not callable(function):
            raise InputError(f"run.evaluate() needs a function, but got {type(function).__name__}")
        return self._loop.meet("run.evaluate()", lambda: function(*args, **kwargs))

    def report(self, **metrics: float) -> None:
        """Report values such as the accuracy, for the present epoch and step. They are sent with the next report."""
        self._reports.note(arguments.metric_values(metrics))

    def finish(self) -> None:
        """Complete the training: wait for all ranks and take the last snapshot.

        `epochs` and `steps` call it when they end. After a `break` it is called when the script ends. Call it yourself
        to do something after a `break` that needs the complete training, such as saving the model.
        """
        self._preparation.refuse_end_in_repeat()
        self._loop.finish()
        self._preparation.finished()

    def _at_exit(self) -> None:
        member = self._member
        if os.getpid() != self._pid:
            return
        if member.membership is not None and exits.ended_well():
            self._finish_at_exit()
        member.loaders.close()
        member.state.close(60.0)
        if not member.peers.close(within_s=_LEAVING_S if member.left else _ENDING_S) and member.left:
            exits.end_abruptly()

    def _finish_at_exit(self) -> None:
        """Complete the training when the script ends after a `break`.

        Rank 0 hosts data that the other ranks still have to read.
        """
        try:
            self.finish()
        except SystemExit:
            return  # this node is no longer a member, which the manager knows
        except Exception as problem:
            sys.excepthook(type(problem), problem, problem.__traceback__)
