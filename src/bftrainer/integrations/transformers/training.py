"""Elastic training of a Trainer: connects the Trainer with the run.

It prepares the Trainer's objects, joins the training and finds where the Trainer's own loop has to begin. It also has
Transformers and Accelerate follow the rank of this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Trainer
from transformers.utils import logging

from bftrainer import elastic
from bftrainer.elastic.torch.prepare.loader import PreparedLoader
from bftrainer.elastic.torch.prepare.preparation import ranks_submitted_for
from bftrainer.integrations.process_state import follow_rank, refuse_launcher
from bftrainer.integrations.transformers import callbacks
from bftrainer.integrations.transformers.checkpoints import CheckpointWriter
from bftrainer.integrations.transformers.loaders import GlobalBatches, plain_loader
from bftrainer.integrations.transformers.record import TrainerRecord
from bftrainer.integrations.transformers.steps import TrainerSteps
from bftrainer.integrations.transformers.tracking import use_run_trackers

_logger = logging.get_logger(__name__)
_OWN_NAMES = ("loss", "epoch", "step", "total_flos")
"""Logs that are not reported: BFTrainer reports the loss of each step, and counts epochs and steps, itself."""


class TrainerConnection:
    """Connection of one Trainer with the run of its script."""

    def __init__(self, trainer: Trainer) -> None:
        refuse_launcher()
        args = trainer.args
        seed = args.seed if args.data_seed is None else args.data_seed
        self.run = elastic.run_of_framework(device=args.device, seed=seed)
        self.loop = self.run.preparation.framework
        self.record = TrainerRecord(trainer, self._log_missed)
        self.steps = TrainerSteps(trainer, self.loop, self.run.seed, self.follow_ranks)
        self.checkpoints = CheckpointWriter(trainer)
        self.checkpoint: str | None = None
        """The checkpoint that a new training begins with."""
        self.ranks = ranks_submitted_for()
        self.model: Any = None
        """The model as Accelerate has prepared it."""
        self.is_used = False
        """Whether train() was called."""
        self.is_in_epoch = False
        self._trainer = trainer
        self._batches: GlobalBatches | None = None
        self._loader: PreparedLoader | None = None
        callbacks.follow_main_rank(trainer)
        use_run_trackers(trainer, self.run)

    @property
    def batches(self) -> GlobalBatches:
        """The training loader as the Trainer sees it."""
        assert self._batches is not None
        return self._batches

    def count_batches(self, loader: Any) -> GlobalBatches:
        """Return the script's training loader as one that counts the batches of all ranks together."""
        self._batches = GlobalBatches(plain_loader(loader), self.ranks)
        return self._batches

    def prepare_model(self) -> None:
        """Prepare the model, the optimizer and the loader, before Accelerate wraps them."""
        trainer = self._trainer
        scaler = trainer.accelerator.scaler
        objects = [trainer.model, trainer.optimizer, self.batches.loader, *([scaler] if scaler is not None else [])]
        self._loader = self.run.prepare(*objects, accumulate=trainer.args.gradient_accumulation_steps)[2]

    def prepare_rest(self) -> None:
        """Prepare the scheduler and what the Trainer counts."""
        self.run.prepare(self._trainer.lr_scheduler, self.record)

    def join(self, epochs: int, load_checkpoint: Callable[[str], tuple[int, int]]) -> tuple[int, int]:
        """Join the training. Return the epoch in which the Trainer has to begin, and the batches of it that are done.

        `load_checkpoint` has the Trainer load one of its checkpoints, and returns the same of that.
        """
        progress = self.loop.join(epochs)
        self.follow_ranks()
        if self.checkpoint is not None and progress.step == 0:
            epoch, batches = load_checkpoint(self.checkpoint)
            cursor = min(batches * self.batches.samples, len(self.batches.dataset))
            self.loop.start_at(epoch, cursor, self._trainer.state.global_step)
        elif self.checkpoint is not None:
            _logger.warning(
                f"resume_from_checkpoint={self.checkpoint!r} is not needed: BFTrainer goes on at step {progress.step}, "
                "which it has from other nodes or from its own snapshot."
            )
        if self.record.is_complete:
            return epochs, 0
        done = self._batches_done()
        return (progress.epoch + 1, 0) if done >= len(self.batches) else (progress.epoch, done)

    def begin_epoch(self, epoch: int) -> int:
        """Begin an epoch, or go on in it. Return the number of its batches that are done."""
        assert self._loader is not None
        self.loop.begin_epoch(self._loader, epoch)
        self.steps.begin_epoch(epoch)
        self.is_in_epoch = True
        return self._batches_done()

    def end_epoch(self) -> None:
        """End an epoch, also one that the Trainer leaves early."""
        self.is_in_epoch = False
        self.loop.end_epoch()

    def finish(self) -> None:
        """Complete the training: after this, the ranks work on their own."""
        self.loop.finish()
        self.follow_ranks()

    def follow_ranks(self) -> None:
        """Have the Trainer know whether this is the main rank. Ranks change only within calls of the run."""
        trainer = self._trainer
        changed = follow_rank(self.run)
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        if changed:
            logging.set_verbosity(trainer.args.get_process_log_level())
            if self.run.is_main:
                callbacks.became_main(trainer)

    def report(self, logs: dict[str, Any]) -> None:
        """Report what the Trainer logs, so that `bftrainer status` shows it."""
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        self.run.report(**{name: value for name, value in numbers.items() if name not in _OWN_NAMES})

    def _batches_done(self) -> int:
        return -(-self.run.progress.cursor // self.batches.samples)

    def _log_missed(self, missed: list[dict[str, Any]]) -> None:
        """Have the callbacks log what another rank has logged while this one, the main rank, had lost the step."""
        trainer = self._trainer
        self.follow_ranks()
        for entry in missed if self.run.is_main else ():
            logs = {name: value for name, value in entry.items() if name != "step"}
            trainer.control = trainer.callback_handler.on_log(trainer.args, trainer.state, trainer.control, logs)
