"""TensorBoard writer: event files in the folder `tensorboard` of the trainer's output folder, one subfolder per run."""

from __future__ import annotations

from typing import Any

from torch.utils.tensorboard import SummaryWriter

from bftrainer.elastic.torch.tracking.journal import LoggedValues
from bftrainer.elastic.torch.tracking.writers import Opening

FOLDER = "tensorboard"


class TensorBoardWriter:
    """Writes a run's event files. See `TrackerWriter`. Each process writes a file of its own; TensorBoard reads all."""

    def __init__(self, opening: Opening) -> None:
        options: dict[str, Any] = {"log_dir": str(opening.folder / FOLDER / opening.run), **opening.options}
        if not opening.journal.is_empty:
            # What a killed process wrote after its last entry in the journal will be written again.
            options["purge_step"] = opening.journal.newest_step + 1
        self._writer = SummaryWriter(**options)

    def write(self, logged: LoggedValues) -> None:
        """See `TrackerWriter`."""
        for name, value in logged.values.items():
            self._writer.add_scalar(name, value, logged.step, walltime=logged.time)
        self._writer.flush()  # it would keep them in memory for two minutes

    def close(self) -> None:
        """See `TrackerWriter`."""
        self._writer.close()

    def finish(self) -> None:
        """See `TrackerWriter`."""
        self.close()
