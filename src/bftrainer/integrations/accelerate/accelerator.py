"""Elastic Accelerator: an `Accelerator` whose training grows and shrinks while nodes come and go.

Accelerate itself works as for one process: it places objects on the device, and handles mixed precision and gradient
accumulation. BFTrainer shares out the batches and sums the gradients.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import concatenate, recursively_apply
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from bftrainer import elastic
from bftrainer.elastic.torch.prepare.loader import PreparedLoader
from bftrainer.elastic.torch.prepare.preparation import ranks_submitted_for
from bftrainer.errors import InputError
from bftrainer.integrations.accelerate.loader import ElasticLoader
from bftrainer.integrations.accelerate.stepping import ElasticOptimizer, ElasticScheduler
from bftrainer.integrations.process_state import follow_rank, refuse_launcher
from bftrainer.integrations.whole_folder import publish, unfinished_room
from bftrainer.util.files import replacing

_RESUME = (
    "cannot be used in an elastic script: BFTrainer goes on by itself, at the very batch at which the training was. "
    "Remove the code that resumes; to begin with weights from a file, load them into the model before prepare()"
)


class ElasticAccelerator(Accelerator):
    """The `Accelerator` of Accelerate, elastic. Use it in place of `Accelerator`.

    In evaluation every rank gets all batches, so `gather` and `gather_for_metrics` return what they are given: each
    sample counts once, whichever nodes come and go.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_launcher()
        _refuse(self)
        seed = self.dataloader_config.data_seed
        self._run = elastic.run_of_framework(device=self.device, **({} if seed is None else {"seed": seed}))
        self._training = self._run.preparation.training
        self._framework = self._run.preparation.framework
        self._ranks = ranks_submitted_for()
        self._tracking: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    # Where this process is.

    @property
    def num_processes(self) -> int:
        """Number of ranks that train at present; before training, of those the script was submitted for."""
        return self._run.world if self._framework.is_training else self._ranks

    @property
    def process_index(self) -> int:
        """This rank's number. It may change when nodes come or go."""
        return self._run.rank

    @property
    def local_process_index(self) -> int:
        """This rank's number among those on its node."""
        return self._run.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the main rank. Another one may become it later."""
        return self._run.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank on its node."""
        return self._run.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the rank with the highest number."""
        return self._run.rank == self._run.world - 1

    @property
    def completed_steps(self) -> int:
        """Steps that all ranks have made. A counter of one's own would count steps that were lost."""
        return self._run.progress.step

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that only the main rank runs it."""
        return _only_if(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that only the first rank of each node runs it."""
        return _only_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that only the last rank runs it."""
        return _only_if(lambda: self.is_last_process, function)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorate a function so that only one rank runs it."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _only_if(lambda: self.process_index == process_index, function)

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorate a function so that only one rank of each node runs it."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _only_if(lambda: self.local_process_index == local_process_index, function)

    # Objects of the script.

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model. Its state is that of all ranks."""
        if not evaluation_mode and not getattr(model, "_is_accelerate_prepared", False):
            if self.verify_device_map(model):
                raise InputError(
                    "the model is spread over several devices. Load it without device_map: there is one rank per GPU"
                )
            self._prepare(model)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer, whose steps are those of all ranks."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        new_scaler = self.scaler is not None and not self._optimizers
        self._prepare(optimizer, *([self.scaler] if new_scaler else []))
        placed = self.device_placement if device_placement is None else device_placement
        prepared = ElasticOptimizer(optimizer, self._run, device_placement=placed, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler, which is stepped with the optimizer."""
        if getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        self._prepare(scheduler)
        own = [opt for opt in self._optimizers if getattr(scheduler, "optimizer", None) in (opt, opt.optimizer)]
        prepared = ElasticScheduler(
            scheduler,
            own or self._optimizers,
            ranks=self._ranks,
            step_with_optimizer=self.step_scheduler_with_optimizer,
        )
        self._schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a DataLoader: each rank gets its share of every batch in training, all batches in evaluation."""
        if isinstance(data_loader, ElasticLoader):
            return data_loader
        placed = self.device_placement if device_placement is None else device_placement
        alone = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=placed,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
        )
        prepared = ElasticLoader(
            data_loader,
            alone,
            self._run,
            prepare=self._prepare_loader,
            ranks=self._ranks,
            place=(self.device if placed else None, self.non_blocking),
            on_batch=lambda: follow_rank(self._run),
        )
        self._dataloaders.append(prepared)
        return prepared

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have newcomers and resumed trainings get the state of these objects too."""
        super().register_for_checkpointing(*objects)
        self._prepare(*objects)

    def _prepare(self, *objects: Any) -> Any:
        steps = self.gradient_accumulation_steps
        return self._run.prepare(*objects, accumulate=steps if steps > 1 else None)

    def _prepare_loader(self, loader: DataLoader[Any]) -> PreparedLoader:
        prepared: PreparedLoader = self._prepare(loader)
        return prepared

    def _do_sync(self) -> None:
        """Decide whether a step follows this batch. `accumulate` calls it."""
        if not self._training.handed:
            super()._do_sync()
            return
        self._training.accumulate = self.gradient_accumulation_steps
        self.step += 1
        self.gradient_state._set_sync_gradients(self._training.completes_step)

    # Values of all ranks.

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of all ranks. In evaluation every rank has all samples, and keeps its tensor.

        Between a batch and its step the ranks have different numbers of parts to compute, and keep theirs too: use
        `run.mean("loss")` for the loss of all ranks.
        """
        values = self._of_all_ranks(tensor)
        if len(values) == 1:
            return values[0]
        return concatenate([recursively_apply(torch.atleast_1d, value) for value in values])

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors of all ranks, where `gather` gathers them."""
        if reduction == "none":
            return tensor
        if reduction not in ("sum", "mean", "max"):
            raise InputError(f"`reduction` must be 'sum', 'mean', 'max' or 'none', but got {reduction!r}")
        values = self._of_all_ranks(tensor)
        function = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[reduction]
        stacked = concatenate([recursively_apply(lambda one: one.unsqueeze(0), value) for value in values])
        return recursively_apply(lambda rows: function(rows, dim=0), stacked)

    def check_trigger(self) -> bool:
        """Return whether any rank has called `set_trigger`."""
        self._refuse_within_batch("check_trigger()")
        return bool(super().check_trigger())

    def wait_for_everyone(self) -> None:
        """Wait until all ranks are here."""
        if self._meets_others:
            self._refuse_within_batch("wait_for_everyone()")
            self._framework.on_main("wait_for_everyone()", lambda: None)
            follow_rank(self._run)

    @property
    def _meets_others(self) -> bool:
        """Whether the other ranks run the same code now. They do not for epochs that were over before this one came."""
        return self._framework.is_training and not self._run.preparation.repeats_epochs

    def _of_all_ranks(self, tensor: Any) -> list[Any]:
        evaluates = self.gradient_state.in_dataloader
        if evaluates or self._training.handed or not self._meets_others:
            return [tensor]
        values = self._framework.of_all_ranks("gather()", recursively_apply(lambda one: one.detach().cpu(), tensor))
        follow_rank(self._run)
        return [recursively_apply(lambda one: one.to(self.device), value) for value in values]

    def _refuse_within_batch(self, call: str) -> None:
        if self._training.handed:
            raise InputError(f"call {call} after optimizer.step(), not between a batch and its step")

    # Files and trackers.

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save to a file on the main rank. If that is lost before the next step, its successor saves it."""
        if not isinstance(f, str | os.PathLike) or self.project_configuration.save_on_each_node:
            follow_rank(self._run)
            super().save(obj, f, safe_serialization)
            return
        place, save = Path(os.path.abspath(f)), super().save  # noqa: PTH100 - as the script would find it

        def write() -> None:
            follow_rank(self._run)
            with replacing(place, "wb") as file:
                save(obj, file.name if safe_serialization else file, safe_serialization)

        if self._run.preparation.repeats_epochs:
            return
        if self.is_main_process:
            write()
        else:
            self._run.preparation.saves.leave_out(str(place), write)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Save a checkpoint on the main rank, as a whole. BFTrainer does not need it to resume."""
        if output_dir is None or self.project_configuration.automatic_checkpoint_naming:
            raise InputError(
                "name the folder of a checkpoint, because numbers of one's own differ between nodes that came at "
                "different times: accelerator.save_state(f'step_{accelerator.completed_steps}')"
            )
        place, save = Path(os.fspath(output_dir)), super().save_state

        def write(*, alone: bool = True) -> None:
            follow_rank(self._run)
            with unfinished_room(place.parent, alone=alone) as room:
                save(str(room / place.name), safe_serialization, **options)
                publish(room / place.name, place)

        if self._meets_others:
            self._refuse_within_batch("save_state()")
            self._framework.on_main("save_state()", write)
            follow_rank(self._run)
        elif self.is_main_process and not self._run.preparation.repeats_epochs:
            write(alone=False)
        return place

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: BFTrainer resumes by itself."""
        raise InputError(f"accelerator.load_state() {_RESUME}")

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Refuse: BFTrainer resumes by itself."""
        if num_batches:
            raise InputError(f"accelerator.skip_first_batches() {_RESUME}")
        return dataloader

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """Remember how to open the trackers. The main rank opens them with its first `log`."""
        self._tracking = args, kwargs

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log values on the main rank."""
        if not self.is_main_process or self._run.preparation.repeats_epochs:
            return
        self._open_trackers()
        super().log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker; on ranks other than the main one, a blank one."""
        if self.is_main_process and self._framework.is_training:
            self._open_trackers()
        return super().get_tracker(name, unwrap)

    def end_training(self) -> None:
        """Complete the training and close the trackers. The process group belongs to BFTrainer."""
        self._framework.finish()
        for tracker in self.trackers:
            tracker.finish()

    def _open_trackers(self) -> None:
        if not self.trackers and self._tracking is not None:
            args, kwargs = self._tracking
            super().init_trackers(*args, **kwargs)


def _refuse(accelerator: Accelerator) -> None:
    config, plugin = accelerator.dataloader_config, accelerator.gradient_state.plugin_kwargs
    if config.split_batches or config.dispatch_batches:
        raise InputError(
            "split_batches and dispatch_batches cannot be used in an elastic script: BFTrainer shares out the batches. "
            "A step takes the DataLoader's batch times the ranks that the script was submitted for (`--ranks`)"
        )
    if not plugin.get("sync_with_dataloader", True):
        raise InputError("sync_with_dataloader=False cannot be used: an elastic script steps at the end of each epoch")
    if accelerator.parallelism_config is not None:
        raise InputError("parallelism_config cannot be used in an elastic script: each rank must hold the whole model")


def _only_if(condition: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does nothing, and returns None, while the condition is not met."""

    @functools.wraps(function)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition() else None

    return decorated
