"""W&B writer: a run on the server, or offline in the folder `wandb` of the trainer's output folder.

W&B keeps the newest values in memory, in a process of its own that ends with the rank. So when another process goes on
with the run, it first writes what may be missing, from the journal. Online that is what the server does not have.
Offline nothing can be added to what another process has written: each process begins a folder of its own, with all
values from the first one on. The newest folder is the run.
"""

from __future__ import annotations

from typing import Any

from bftrainer.elastic.torch.tracking.journal import LoggedValues
from bftrainer.elastic.torch.tracking.writers import Opening


class WandbWriter:
    """Writes to a run of W&B. See `TrackerWriter`."""

    def __init__(self, opening: Opening) -> None:
        import wandb

        options: dict[str, Any] = {"dir": str(opening.folder), **opening.options}
        if opening.name:
            options.setdefault("name", opening.name)
        self._run = wandb.init(id=opening.run, resume="allow", **options)
        self._first = self._run.step  # the server has the steps before it
        for logged in opening.journal.entries():
            if logged.step >= self._first:
                self.write(logged)

    def write(self, logged: LoggedValues) -> None:
        """See `TrackerWriter`. A value for a step that the server has already goes to the next step."""
        values = {**logged.values, "_timestamp": logged.time}
        self._run.log(values, step=max(logged.step, self._first))

    def close(self) -> None:
        """See `TrackerWriter`. W&B shows the run as finished until another process opens it."""
        self._run.finish()

    def finish(self) -> None:
        """See `TrackerWriter`."""
        self._run.finish()
