"""Callbacks on a main rank that changes: another process becomes the main one when its node is lost.

Callbacks of Transformers open their progress bar, or their run at a tracking service, when training begins, on the main
process. A process that becomes the main one later has to open them then.
"""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback
from transformers.integrations import integration_utils
from transformers.trainer_callback import ProgressCallback


class ElasticProgressCallback(ProgressCallback):
    """Progress bar on whichever process is the main one."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar."""
        self._follow(state)
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write logs above the bar."""
        self._follow(state)
        super().on_log(args, state, control, logs=logs, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar."""
        self._follow(state)
        super().on_train_end(args, state, control, **kwargs)

    def _follow(self, state: Any) -> None:
        if state.is_world_process_zero and self.training_bar is None:
            self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, dynamic_ncols=True)
            self.current_step = state.global_step
        elif not state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None


def follow_main_rank(trainer: Trainer) -> None:
    """Put a progress bar in place that follows the main rank."""
    callbacks: list[TrainerCallback] = trainer.callback_handler.callbacks
    for number, callback in enumerate(callbacks):
        if type(callback) is ProgressCallback:
            callbacks[number] = ElasticProgressCallback(callback.max_str_len)


def became_main(trainer: Trainer) -> None:
    """Have the tracking services of this process begin, because it has become the main one.

    On other processes they consider themselves set up, without having opened a run. With the next log they open it.
    """
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__module__ == integration_utils.__name__ and getattr(callback, "_initialized", False):
            callback._initialized = False
