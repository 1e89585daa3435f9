"""Protocol between a worker and its manager: JSON objects, one per line, over a Unix socket.

A *worker* is a training job's part on one node: one process per *rank*, often one per GPU. Its *manager* (the agent of
the node, or the coordinator of `local/coordinator.py`) starts the processes, tells them who their peers are, and ends
them together. Each process has a connection of its own; `manager/ranks.py` merges what they say into one voice. This
module defines the messages and their encoding; `docs/protocol.md` explains them one by one. Readers ignore unknown
messages and unknown fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from bftrainer.errors import BFTrainerError
from bftrainer.processes import variables

VERSION = 1
CHANNEL = variables.CHANNEL
"""Environment: the path of the manager's socket. Not set: the script was started by hand and trains alone."""
WORKER = variables.WORKER
"""Environment: the worker's name, given by the manager."""
LOCAL_RANK = variables.LOCAL_RANK
"""Environment: the number of this process among those of its worker, from 0. Not set: 0."""
LOCAL_WORLD = variables.LOCAL_WORLD
"""Environment: how many processes the worker has on its node. Not set: 1."""
HOST = "BFTRAINER_HOST"
"""Environment: the address under which the other workers reach this node."""
SNAPSHOTS = "BFTRAINER_SNAPSHOTS"
"""Environment: the folder for snapshots, if the script does not name one."""
SNAPSHOT_EVERY = "BFTRAINER_SNAPSHOT_EVERY_S"
"""Environment: seconds from one snapshot to the next, if the script does not say."""
SNAPSHOT_OWNER = "BFTRAINER_SNAPSHOT_OWNER"
"""Environment: names the trainer whose snapshots these are. Only its newest generation may then write snapshots."""
CONTROLLER_START = "BFTRAINER_CONTROLLER_START"
"""Environment: the number of the controller's start that this worker comes from. Later starts have greater ones."""
OUTPUT = "BFTRAINER_OUTPUT"
"""Environment: the job's folder for files that the script writes: models, figures. All workers share it."""
RANKS = "BFTRAINER_RANKS"
"""Environment: how many ranks the script's batch size was chosen for. Not set: 1."""
CANNOT_STAND_IN = "cannot train in place"
"""The beginning of the error of a worker whose script the ddp launcher cannot run."""
TRAINER = "BFTRAINER_TRAINER"
"""Environment: the name of the trainer, under a controller."""
BACKEND = "BFTRAINER_BACKEND"
"""Environment: the communication backend of PyTorch, gloo or nccl, if the default does not fit."""
FOLLOW = "BFTRAINER_FOLLOW"
"""Environment: 1 if the manager answers `Follow`, so that a newcomer takes the state while the others train; 0 if the
user does not want it. With 1 only newcomers that train on the CPU follow, with `all` also those with a GPU.
"""
FOLLOW_RATE = "BFTRAINER_FOLLOW_MB_PER_S"
"""Environment: megabytes per second that a worker sends at most to each newcomer before it joins. Not set: no limit."""
PACE = "BFTRAINER_PACE"
"""Environment: the duration of a step, so that virtual nodes scale like real ones; see `pacing.py`."""
PAUSE_PARTS = ("wait", "form", "catch_up", "copy", "send")
"""What the time of a rescale is spent on: waiting until all members have come to it, connecting them, finding out who
has which state and waiting for newcomers that follow, taking the state apart and loading it, sending it.
"""
MOST_DEPTH = 16
"""Maximum nesting depth of a message. No message needs more than three levels."""
RESTART = 75
"""Exit status of a worker that lost its peers during its own communication and asks to be started again."""


class ProtocolError(BFTrainerError):
    """A message from the other side is invalid."""


# From the worker.


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a worker's process: the worker's name and the process id."""

    worker: str
    pid: int
    protocol: int = VERSION
    local_rank: int = 0


@dataclass(frozen=True, slots=True)
class Follow:
    """The worker is about to be ready and asks for the training state before it joins, while the others train on.

    It listens at `address`. Whoever connects must know `secret`.
    """

    address: str
    secret: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has imported, built and loaded everything; from now on it may be in a generation."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The worker has left its former generation and waits for the other members of this one.

    `address` is where it can be reached in this generation. The address of rank 0 is the rendezvous.
    """

    generation: int
    address: str
    addresses: tuple[str, ...] = ()
    """The address of each of its ranks, for a worker that has several."""


@dataclass(frozen=True, slots=True)
class Formed:
    """The worker trains in this generation, which has `world` members.

    `pause_s`, `form_s` and `sync_s` are the durations of the change, in seconds.
    """

    generation: int
    world: int
    pause_s: float
    form_s: float
    sync_s: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each of the `PAUSE_PARTS`, which are `pause_s` together. Empty if the worker does not know them."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Communication within this generation failed, and the worker knows of no newer one."""

    generation: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Progress report, sent once a second. It also shows that the worker is alive."""

    generation: int
    step: int = 0
    epoch: int = 0
    samples: int = 0
    world: int = 0
    """Number of members, that is of nodes, in the generation."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Samples per second of the whole job, by number of members."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values that the script reports: loss, accuracy, …"""
    snapshot_step: int | None = None
    total: int | None = None
    """Samples of the whole training, if known."""
    epochs: int | None = None
    """Epochs of the whole training, if known."""
    redone: int = 0
    """Samples this worker computed in vain, because a peer was lost before they counted."""
    windows: int = 0
    """Number of measurements of the rate at the present number of members. The rate is that of all of them."""
    metrics_at: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Position of each metric: epochs done, steps, samples. A metric without one has the position of this report."""
    snapshot_every_s: float | None = None
    """Time between snapshots, sent by the worker that takes them: as set, or longer if they cost too much."""
    snapshot_stall_s: float | None = None
    """How long training stood still for the last snapshot."""
    stay_windows: int = 0
    """Number of measurements of the rate in this generation."""
    stay_rate: float = 0.0
    """The rate in all of them, in samples per second."""
    stay_scatter: float | None = None
    """The sum of the squared deviations of their logarithms; None if the worker does not say it."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker received SIGTERM and asks to be left out of the next generation."""


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
    """The script raised an exception: either the job is at fault or this worker's node."""

    error: str
    traceback: str
    fresh: bool = False
    """The worker had received the state from its peers but made no step with them: its node may be at fault."""


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The worker has made its first step.

    `parts` has the seconds of each part of its start: start, imports, device, build, join, first_step. `modules` has
    the installed modules that the script imported, in order, with the seconds of each.
    """

    parts: Mapping[str, float] = field(default_factory=dict)
    modules: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreloadRefused:
    """The script set an environment variable that modules imported ahead of it have read: it must import them itself.

    The worker ends with the status `RESTART`.
    """

    variable: str
    modules: tuple[str, ...] = ()


# From the manager.


@dataclass(frozen=True, slots=True)
class Generation:
    """Members that train from now on, in the order of their ranks. A worker that is not among them leaves."""

    id: int
    members: tuple[str, ...]
    cut: bool = False
    """A member of the present group is gone: do not wait for the next step boundary."""


@dataclass(frozen=True, slots=True)
class Go:
    """All members of the generation have arrived and form it now. The addresses are in the order of ranks."""

    generation: int
    addresses: tuple[str, ...]
    secret: str = ""
    """Secret of this generation: a peer that connects to a member must present it."""
    ranks: tuple[int, ...] = ()
    """Number of ranks of each member; empty: one each. The ranks of one member follow each other."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The node is taken at once: the worker saves what only it has, and ends. It is killed after `within_s` seconds."""

    within_s: float


@dataclass(frozen=True, slots=True)
class Donate:
    """A newcomer takes the state before it joins: send it share number `share` of `shares` while training goes on."""

    worker: str
    address: str
    secret: str
    share: int = 0
    shares: int = 1


@dataclass(frozen=True, slots=True)
class Donors:
    """Answer to `Follow`: so many workers were asked to send the state. With 0 there is no state to follow.

    It is sent again, with a smaller number, when one of them is lost or leaves.
    """

    count: int


FromWorker = (
    Hello
    | Follow
    | Ready
    | Arrived
    | Formed
    | Broken
    | Report
    | Leaving
    | Left
    | Done
    | Failed
    | FirstStep
    | PreloadRefused
)
FromManager = Generation | Go | Taken | Donate | Donors
Message = FromWorker | FromManager

_KINDS: Mapping[str, type[Any]] = {
    kind.__name__.lower(): kind for kind in (*get_args(FromWorker), *get_args(FromManager))
}
_NAMES = {kind: tuple(f.name for f in fields(kind)) for kind in _KINDS.values()}
_FIELDS = {kind: frozenset(f.name for f in fields(kind)) for kind in _KINDS.values()}
_OPTIONAL: Mapping[type[Any], str] = {Hello: "local_rank", Arrived: "addresses", Go: "ranks", Formed: "parts"}
"""Fields that are not sent where they are empty: messages of workers that do not use them stay as they were."""


def encode(message: Message) -> bytes:
    """Encode a message as one line."""
    return json.dumps(as_json(message)).encode() + b"\n"


def decode(line: bytes) -> Message | None:
    """Decode a line. Return None if this version does not know the kind of message."""
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
    """Return whether a value is nested too deeply to be passed on inside another message."""
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return any(most == 0 or _is_deeper(value, most - 1) for value in inner)


def as_json(message: Message) -> dict[str, Any]:
    """Return a message as a JSON object."""
    kind = type(message)
    made = {"type": kind.__name__.lower(), **{name: getattr(message, name) for name in _NAMES[kind]}}
    if kind in _OPTIONAL and not made[_OPTIONAL[kind]]:
        del made[_OPTIONAL[kind]]
    return made


def from_json(found: Mapping[str, Any]) -> Message | None:
    """Return the message that a JSON object stands for; None if this version does not know its kind."""
    kind = _KINDS.get(found["type"])
    if kind is None:
        return None
    known = _FIELDS[kind]
    message: Message = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in found.items() if k in known})
    return message
