"""The launcher interface defines what runs on nodes and on the head.

The `Reconciler` decides which nodes a trainer has. The trainer's launcher decides which program runs there and how it
learns about its peers. The *head* is the controller's machine; its agent is named `@head`, and no pool gives or takes
it. Every launcher passes `tests/support/cluster/launcher_conformance.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bftrainer.cluster.config.keys import DEFAULTS
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.wire.messages import Start
from bftrainer.elastic import protocol
from bftrainer.processes import variables
from bftrainer.util import ids

HEAD = "@head"
"""The name of the agent on the controller's machine. It is not a node: it is never assigned to a trainer, and it runs
any number of workers.
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """The description of a trainer that its launcher gets."""

    id: str
    name: str
    spec: TrainerSpec


@dataclass(frozen=True, slots=True)
class LauncherTraits:
    """The properties of a launcher that the `Reconciler` depends on."""

    speaks: bool = False
    """Its workers speak `elastic.protocol`. Otherwise only their start and their exit status are known."""
    on_nodes: bool = True
    """There is a worker on each node."""
    on_head: bool = True
    """There is a worker on the head, and the workers on nodes need it."""
    retries: bool = False
    """A worker on a node of a settled trainer restarts a failed script `max_restarts` times before it ends."""
    needs_new_agents: bool = False
    """Agents of version 0.1.0 cannot start its workers."""
    rescale_s: float | None = None
    """The cost of a change of nodes in seconds, where it cannot be measured; None: as configured."""


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """The place where a worker is started, and the circumstances."""

    worker: str
    node: str
    host: str
    """The address of the node."""
    head: str = ""
    """The id of the worker on the head, if there is one."""
    background: bool = False
    """Other workers of the trainer train meanwhile."""
    settled: bool = False
    """The program has run for a while before, so a failure now may be retried on the node itself."""
    ranks: int = 1
    """How many ranks the trainer has on the node."""


class Launcher(Protocol):
    """Makes the start messages for a trainer's workers and records the trainer's nodes."""

    @property
    def traits(self) -> LauncherTraits:
        """The launcher's properties."""

    def start(self, launch: Launch, place: WorkerSlot) -> Start:
        """Return the message that starts a worker, on a node or on the head."""

    def given(self, launch: Launch, hosts: Sequence[tuple[str, int]]) -> None:
        """Record that the trainer now has nodes at these addresses, each with this number of ranks.

        Called at every change before anything is started, and after a restart. An `OSError` fails the trainer.
        """

    def said(self, tail: str) -> str:
        """Return the part of `tail`, the end of a worker's output, that the user's program printed."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The folders of trainers within the state folder, and the environment that points to them."""

    state: Path
    state_id: str
    snapshot_every_s: float = DEFAULTS.trainers.snapshot_every_s
    start: int = 0
    """The number of the controller's start: greater at each, also after the restore of a back-up."""

    def folder(self, trainer: str) -> Path:
        """Return the folder of a trainer's snapshots, logs and host lists."""
        return self.state / "trainers" / trainer

    def last_number(self) -> int:
        """Return the highest trainer number that has a folder here, even if the database does not know the trainer.

        A folder with an absurd number does not count: no id would be left for the trainers after it.
        """
        numbers = (ids.trainer_number(path.name) or 0 for path in (self.state / "trainers").glob("t*"))
        return max((number for number in numbers if number <= ids.MOST_PLAUSIBLE), default=0)

    def prepare(self, trainer: str) -> None:
        """Make the folders of a trainer."""
        (self.folder(trainer) / "snapshots").mkdir(parents=True, exist_ok=True)
        self.output(trainer).mkdir(exist_ok=True)

    def output(self, trainer: str) -> Path:
        """Return the folder for the output files of a trainer's script."""
        return self.folder(trainer) / "output"

    @property
    def compiled(self) -> Path:
        """Return the folder of compiled code, which has one folder per script and interpreter."""
        return self.state / "compiled"

    def environment(self, launch: Launch) -> Mapping[str, str]:
        """Return the environment of a trainer's workers. The user's own variables override the others."""
        snapshots = str(self.folder(launch.id) / "snapshots")
        ours = {protocol.SNAPSHOTS: snapshots, protocol.SNAPSHOT_EVERY: f"{self.snapshot_every_s:g}"}
        ours[protocol.SNAPSHOT_OWNER] = f"{self.state_id}/{launch.id}"
        ours[protocol.CONTROLLER_START] = str(self.start)
        ours[protocol.OUTPUT] = str(self.output(launch.id))
        if launch.spec.chosen_ranks is not None:
            ours[protocol.RANKS] = str(launch.spec.chosen_ranks)
        ours[variables.COMPILED] = str(self.compiled / _digest(*launch.spec.identity))
        return {**ours, variables.STATE_ID: self.state_id, protocol.TRAINER: launch.name, **launch.spec.env}


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:16]
