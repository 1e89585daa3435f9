"""The seam between a trainer and the way its program learns who trains along.

The cluster decides which nodes a trainer has; its launcher says what runs there and what runs beside the controller, on
the *head*: an agent named `@head` that no pool gives or takes. Every launcher passes
`tests/cluster/launcher_conformance.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bftrainer.cluster import wire
from bftrainer.cluster.wire import Start
from bftrainer.elastic import protocol

if TYPE_CHECKING:
    from bftrainer.cluster.live import Live

HEAD = "@head"
"""The agent on the controller's machine. It is no node: nobody decides about it, and it runs any number of workers."""
TRAINER = "BFTRAINER_TRAINER"
"""Environment of workers: the name of their trainer."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What the cluster must know of a launcher."""

    speaks: bool = False
    """Its workers speak `elastic.protocol`; otherwise all that is known of one is that it runs and how it ended."""
    on_nodes: bool = True
    """There is a worker on each node."""
    on_head: bool = True
    """There is a worker on the head, and those on nodes need it."""
    retries: bool = False
    """What runs on a node of a settled trainer starts a script that failed again, `max_restarts` times, then ends."""
    rescale_s: float | None = None
    """What a change of the nodes costs, where nobody measures it; None: what the configuration says."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is to be started."""

    worker: str
    node: str
    host: str
    """The address of the node."""
    head: str = ""
    """The worker on the head, if there is one."""
    background: bool = False
    """Others train meanwhile."""
    settled: bool = False
    """Its program has run for a while before: what fails now may be retried on the spot."""


class Launcher(Protocol):
    """One way to start trainers."""

    @property
    def traits(self) -> Traits:
        """What it is like."""

    def start(self, live: Live, place: Place) -> Start:
        """The message that has a worker started, on a node or on the head."""

    def given(self, live: Live, hosts: Sequence[str]) -> None:
        """The trainer has nodes at these addresses from now on.

        Called at every change before anything is started, and after a restart. An `OSError` fails the trainer.
        """

    def said(self, tail: str) -> str:
        """Of the end of a worker's output, what the user's program printed."""


@dataclass(frozen=True, slots=True)
class Home:
    """The state folder, as far as trainers are concerned."""

    state: Path
    state_id: str
    snapshot_every_s: float = 30.0

    def folder(self, trainer: str) -> Path:
        """Where a trainer's snapshots, logs and host lists are."""
        return self.state / "trainers" / trainer

    def last_number(self) -> int:
        """The highest number of a trainer that has a folder here, also of those that the database does not know."""
        names = (path.name for path in (self.state / "trainers").glob("t*"))
        return max((int(name[1:]) for name in names if name[1:].isdecimal() and name.isascii()), default=0)

    def prepare(self, trainer: str) -> None:
        """Make its folders."""
        (self.folder(trainer) / "snapshots").mkdir(parents=True, exist_ok=True)
        self.output(trainer).mkdir(exist_ok=True)

    def output(self, trainer: str) -> Path:
        """Where a trainer's script writes what it makes."""
        return self.folder(trainer) / "output"

    def environment(self, live: Live) -> Mapping[str, str]:
        """What every worker of a trainer gets, what its user has set on top."""
        snapshots = str(self.folder(live.id) / "snapshots")
        ours = {protocol.SNAPSHOTS: snapshots, protocol.SNAPSHOT_EVERY: f"{self.snapshot_every_s:g}"}
        ours[protocol.OUTPUT] = str(self.output(live.id))
        return {**ours, wire.STATE_ID: self.state_id, TRAINER: live.name, **live.spec.env}


def last_line(tail: str) -> str:
    """The last line with anything in it."""
    return next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "")
