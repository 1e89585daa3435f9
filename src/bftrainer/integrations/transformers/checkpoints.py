"""Checkpoints of an elastic Trainer: the main rank writes them, each as a whole, while the others wait.

If the main rank is lost before a checkpoint is complete, the next one writes it again. A folder `checkpoint-…` is
always complete: it is written under another name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, rotate_checkpoints

from bftrainer.integrations.whole_folder import publish, unfinished_room


class CheckpointWriter:
    """Writes checkpoints of a Trainer on the main rank."""

    def __init__(self, trainer: Trainer) -> None:
        self.room: Path | None = None
        """Where a checkpoint is being written, in place of the output folder."""
        self.pushes = False
        """Whether the Trainer wants to upload the checkpoint that it writes, which waits until it is in its place."""
        self._trainer = trainer

    def write(self, folder: Path, save: Callable[[], None], push: Callable[[str], None]) -> str | None:
        """Write a checkpoint into `folder`, by the Trainer's own `save`. Return the path of the best one so far."""
        trainer = self._trainer
        name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        best: str | None = trainer.state.best_model_checkpoint
        self.pushes = False
        with unfinished_room(folder) as room:
            self.room = room
            try:
                save()
            finally:
                self.room = None
            if trainer.state.best_model_checkpoint not in (None, best):  # it is this one
                trainer.state.best_model_checkpoint = best = str(folder / name)
                trainer.state.save_to_json(str(room / name / TRAINER_STATE_NAME))
            publish(room / name, folder / name)
        if self.pushes:
            push(str(folder / name))
        rotate_checkpoints(
            output_dir=str(folder),
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=best,
            use_mtime=True,
        )
        return best


def checkpoint_to_start_from(given: str | bool | None, output_dir: str) -> str | None:
    """Return the folder that `resume_from_checkpoint` means."""
    if given is None or given is False:
        return None
    if given is True:
        found = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
        if found is None:
            raise ValueError(f"No valid checkpoint found in output directory ({output_dir})")
        return str(found)
    return str(given)
