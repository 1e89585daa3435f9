"""Trackers of an elastic Trainer: `report_to` TensorBoard and W&B gives one run, whichever rank is the main one.

The callbacks of Transformers for these two open a run in each process that becomes the main one, and a step that is
made again is logged again. So they are replaced: what the Trainer logs goes to `run.tracker`, on every rank.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback, WandbCallback, rewrite_logs
from transformers.utils import logging

from bftrainer.elastic import Run
from bftrainer.elastic.torch.tracking.tracker import Tracker
from bftrainer.errors import InputError

_logger = logging.get_logger(__name__)


def use_run_trackers(trainer: Trainer, run: Run) -> None:
    """Replace the callbacks of Transformers for TensorBoard and W&B. Subclasses of them, and own writers, stay."""
    callbacks: list[TrainerCallback] = trainer.callback_handler.callbacks
    for number, callback in enumerate(callbacks):
        if type(callback) is TensorBoardCallback and callback.tb_writer is None:
            callbacks[number] = RunTrackerCallback(run, "tensorboard")
        elif type(callback) is WandbCallback:
            _refuse_wandb_options()
            callbacks[number] = RunTrackerCallback(run, "wandb")


class RunTrackerCallback(TrainerCallback):
    """Logs the numbers of a Trainer to a tracker of the run."""

    def __init__(self, run: Run, kind: str) -> None:
        self._run = run
        self._kind = kind
        self._tracker: Tracker | None = None
        self._early: list[tuple[dict[str, float], int]] = []
        """Logs from before the training, such as those of an evaluation. Until then it is not known which rank logs."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a run that the script has opened itself."""
        if self._kind == "wandb" and getattr(sys.modules.get("wandb"), "run", None) is not None:
            raise InputError(
                "the script called wandb.init(), but every process that becomes the main one would then have a run of "
                "its own. Remove the call: report_to='wandb' opens one run. Name it by run_name and $WANDB_PROJECT"
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        """Log numbers for the present step."""
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        for name in (logs or {}).keys() - numbers.keys():
            _logger.warning_once(f"{name!r} is not logged to {self._kind}, which gets numbers only")
        self._early.append((rewrite_logs(numbers), state.global_step))
        if not self._run.preparation.framework.has_begun:
            return
        early, self._early = self._early, []
        for values, step in early:
            self._opened(args, model).log(
                {**values, **({"train/global_step": step} if self._kind == "wandb" else {})}, step=step
            )

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Mark the run as complete. A later evaluation opens it again."""
        self._opened(args, model).finish()

    def _opened(self, args: TrainingArguments, model: Any) -> Tracker:
        if self._tracker is None:
            self._tracker = self._run.tracker(self._kind, **self._options(args, model))
        return self._tracker

    def _options(self, args: TrainingArguments, model: Any) -> dict[str, Any]:
        """Return what the callbacks of Transformers would open the run with."""
        if self._kind == "tensorboard":
            folder = os.environ.get("TENSORBOARD_LOGGING_DIR")
            return {"log_dir": os.path.expanduser(folder)} if folder else {}  # noqa: PTH111 - as Transformers does
        config = getattr(model, "config", None)
        known = config if isinstance(config, dict) else config.to_dict() if config is not None else {}
        options = {"project": os.environ.get("WANDB_PROJECT", "huggingface"), "config": {**known, **args.to_dict()}}
        return options | ({"name": args.run_name} if args.run_name is not None else {})


def _refuse_wandb_options() -> None:
    for name in ("WANDB_LOG_MODEL", "WANDB_WATCH"):
        value = os.environ.get(name, "false").lower()
        if value not in ("", "0", "false"):
            raise InputError(
                f"{name}={value} cannot be used with an elastic Trainer: W&B gets the logged numbers only. Leave it "
                "out; checkpoints are in output_dir"
            )
