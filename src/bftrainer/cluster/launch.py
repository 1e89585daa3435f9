"""From a trainer and a node to the message that has its worker started there."""

from __future__ import annotations

from pathlib import Path

from bftrainer.cluster import wire
from bftrainer.cluster.cluster import Live
from bftrainer.cluster.wire import Start
from bftrainer.elastic import protocol

TRAINER = "BFTRAINER_TRAINER"
"""Environment of workers: the name of their trainer."""


class Launch:
    """Starts the workers of scripts that speak `elastic.protocol`."""

    def __init__(self, folder: Path, state_id: str) -> None:
        self._folder = folder
        self._state_id = state_id

    def folder(self, trainer: str) -> Path:
        """Where a trainer's snapshots and logs are."""
        return self._folder / "trainers" / trainer

    def __call__(self, live: Live, worker: str, node: str, background: bool) -> Start:
        """The message."""
        spec = live.spec
        snapshots = self.folder(live.id) / "snapshots"
        snapshots.mkdir(parents=True, exist_ok=True)
        ours = {protocol.SNAPSHOTS: str(snapshots), wire.STATE_ID: self._state_id, TRAINER: live.name}
        return Start(worker, live.id, spec.argv, {**ours, **spec.env}, spec.cwd, spec.python, background=background)
