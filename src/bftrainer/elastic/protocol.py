"""What a worker and its manager say to each other: JSON objects, one a line, over a Unix socket.

A *worker* is one process of a training job on one node. Its *manager* (the agent of the node, or the coordinator of
`local.py`) starts it, tells it who else trains, and ends it. `docs/protocol.md` tells the story message by message;
this module is the vocabulary and its encoding. Fields that a reader does not know are ignored, and so are messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from bftrainer.errors import BFTrainerError

VERSION = 1
CHANNEL = "BFTRAINER_CHANNEL"
"""Environment: the path of the manager's socket. Not set: the script was started by hand and trains alone."""
WORKER = "BFTRAINER_WORKER"
"""Environment: the worker's name, given by the manager."""
HOST = "BFTRAINER_HOST"
"""Environment: the address under which the other workers reach this node."""
SNAPSHOTS = "BFTRAINER_SNAPSHOTS"
"""Environment: the folder for snapshots, where the script does not say one."""
SNAPSHOT_EVERY = "BFTRAINER_SNAPSHOT_EVERY_S"
"""Environment: seconds from one snapshot to the next, where the script does not say."""
OUTPUT = "BFTRAINER_OUTPUT"
"""Environment: the job's folder for what the script writes: models, figures. All workers share it."""
BACKEND = "BFTRAINER_BACKEND"
"""Environment: the communication backend of PyTorch, gloo or nccl, where the default does not fit."""
PACE = "BFTRAINER_PACE"
"""Environment: how long a step shall take, so that fake nodes scale as real ones do; see `pacing.py`."""
OUTPUT = "BFTRAINER_OUTPUT"
"""Environment: the folder for the files that the script writes, one per trainer."""
MOST_DEPTH = 16
"""How deeply a message may be nested; it never needs more than three."""
RESTART = 75
"""Exit status of a worker that lost its peers in the midst of its own communication and wants to be started again."""


class ProtocolError(BFTrainerError):
    """The other side said something that makes no sense."""


# From the worker.


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message: who speaks."""

    worker: str
    pid: int
    protocol: int = VERSION


@dataclass(frozen=True, slots=True)
class Ready:
    """All is imported, built and loaded; from now on the worker may be in a generation."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The worker has left its former generation and waits for the others of this one.

    `address` is where it can be reached in this generation; the address of rank 0 is the rendezvous.
    """

    generation: int
    address: str


@dataclass(frozen=True, slots=True)
class Formed:
    """The worker trains in this generation. The times are those of the change, in seconds."""

    generation: int
    world: int
    pause_s: float
    form_s: float
    sync_s: float


@dataclass(frozen=True, slots=True)
class Broken:
    """Communication within this generation failed, and the worker knows of no newer one."""

    generation: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Once a second: the worker is alive, and this is how far it is."""

    generation: int
    step: int = 0
    epoch: int = 0
    samples: int = 0
    world: int = 0
    rates: Mapping[str, float] = field(default_factory=dict)
    """Samples per second of the whole job, by world size."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the script reports: loss, accuracy, …"""
    snapshot_step: int | None = None
    total: int | None = None
    """Samples of the whole training, where that is known."""
    epochs: int | None = None
    """Epochs of the whole training, where that is known."""
    redone: int = 0
    """Samples this worker computed in vain, because a peer was lost before they counted."""
    windows: int = 0
    """How often the rate at the present world size was measured: it is the median of so many."""
    metrics_at: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """What each of the metrics is of: epochs done, steps, samples. Not said: of this report's own."""
    snapshot_every_s: float | None = None
    """Time between snapshots, said by the worker that takes them: as set, or more where they cost too much."""
    snapshot_stall_s: float | None = None
    """How long training stood still for the last one."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker was asked to end (SIGTERM) and wants to be left out of the next generation."""


@dataclass(frozen=True, slots=True)
class Left:
    """The worker has left at a step boundary and ends."""

    step: int


@dataclass(frozen=True, slots=True)
class Done:
    """The training is complete."""

    step: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The script raised an exception: the job has failed, or this worker's node has."""

    error: str
    traceback: str
    fresh: bool = False
    """The worker had taken over the state of others and not made a step with them: its node may be at fault."""


# From the manager.


@dataclass(frozen=True, slots=True)
class Generation:
    """Who trains from now on, in the order of ranks. A worker that is not among the members leaves."""

    id: int
    members: tuple[str, ...]
    cut: bool = False
    """A member of the present group is gone: do not wait for the next step boundary."""


@dataclass(frozen=True, slots=True)
class Go:
    """All members of the generation have arrived: form. The addresses are in the order of ranks."""

    generation: int
    addresses: tuple[str, ...]
    secret: str = ""
    """Only the members of this generation know it: whoever connects to one of them must show it."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The node is taken at once: the worker is killed after so many seconds. It saves what only it has, and ends."""

    within_s: float


FromWorker = Hello | Ready | Arrived | Formed | Broken | Report | Leaving | Left | Done | Failed
FromManager = Generation | Go | Taken
Message = FromWorker | FromManager

_KINDS: Mapping[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (Hello, Ready, Arrived, Formed, Broken, Report, Leaving, Left, Done, Failed, Generation, Go, Taken)
}
_NAMES = {kind: tuple(f.name for f in fields(kind)) for kind in _KINDS.values()}
_FIELDS = {kind: frozenset(f.name for f in fields(kind)) for kind in _KINDS.values()}


def encode(message: Message) -> bytes:
    """One line."""
    return json.dumps(as_json(message)).encode() + b"\n"


def decode(line: bytes) -> Message | None:
    """The message of a line; None if it is of a kind this version does not know."""
    try:
        found = json.loads(line)
        if _is_deeper(found, MOST_DEPTH):
            raise ValueError("it is nested too deeply")
        return from_json(found)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as problem:
        raise ProtocolError(
            f"a message must be a JSON object with a `type`, but got {line[:200]!r}: {problem}"
        ) from None


def _is_deeper(found: object, most: int) -> bool:
    """Whether it is nested too deeply to be passed on within another message."""
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return any(most == 0 or _is_deeper(value, most - 1) for value in inner)


def as_json(message: Message) -> dict[str, Any]:
    """The object that stands for a message."""
    kind = type(message)
    return {"type": kind.__name__.lower(), **{name: getattr(message, name) for name in _NAMES[kind]}}


def from_json(found: Mapping[str, Any]) -> Message | None:
    """The message that an object stands for; None if it is of a kind this version does not know."""
    kind = _KINDS.get(found["type"])
    if kind is None:
        return None
    known = _FIELDS[kind]
    message: Message = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in found.items() if k in known})
    return message
