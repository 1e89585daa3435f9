"""What an agent and the controller say to each other: JSON objects, one a frame, over a websocket.

The agent of a node says what is (`Join`, then whatever changes), the controller what shall be (`Start`, `Stop`, `Say`).
A lost message costs nothing for long: at every connection the agent begins with all it knows, and what it has to say
of a worker that ended it keeps until the controller says `Forget`. `docs/live.md` tells the story. Fields and messages
that a reader does not know are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from bftrainer.cluster.columns import text
from bftrainer.elastic.protocol import ProtocolError

VERSION = 1
MOST_WHOLE = 1 << 62
MOST_NAME = 256
URL = "BFTRAINER_URL"
"""Environment: where the controller is, such as http://127.0.0.1:8765."""
SECRET = "BFTRAINER_SECRET"  # noqa: S105 - the name of a variable, not a secret
"""Environment of an agent: the secret by which it joins. Workers never see it."""
TOKEN = "BFTRAINER_TOKEN"  # noqa: S105 - the same
"""Environment of commands: a user's token. What a controller starts never sees its own."""
NODE = "BFTRAINER_NODE"
"""Environment of agents and workers: the name of the node they are on."""
STATE_ID = "BFTRAINER_STATE_ID"
"""Environment of agents and workers: which controller's they are, so that a stray one is recognised."""
PATH = "/v1/agents"
"""Where agents connect. The secret travels in the header `Authorization: Bearer SECRET`."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """All that an agent knows of one worker, alive or not yet forgotten."""

    worker: str
    trainer: str
    pid: int = 0
    ready: bool = False
    holds_state: bool = False
    """It has formed a generation once, and so has the job's state."""
    newest: int = 0
    """The newest generation it was told of."""
    formed: int = 0
    """The generation it trains in."""
    arrived: int = 0
    """The generation it waits for the others of."""
    address: str = ""
    over: bool = False
    """It has said that it left, is done or has failed."""
    done: bool = False
    failed: str = ""
    """The error it has told of."""
    traceback: str = ""
    status: int | None = None
    """Its exit status; None while it runs."""
    tail: str = ""
    """The end of what it printed, once it has ended."""
    report: Mapping[str, Any] | None = None
    """What it reported last, a `protocol.Report`."""
    speaks: bool = True
    spoke: bool = True
    """It has connected to its agent's channel. Said of one that has ended; older agents do not say."""


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What agents and commands that a controller starts get of its environment: all but tokens and secrets."""
    return {name: value for name, value in environment.items() if name not in (TOKEN, SECRET)}


# From the agent.


@dataclass(frozen=True, slots=True)
class Join:
    """The first message of every connection: who is here, and what runs."""

    node: str
    host: str
    """The address under which other nodes reach this one."""
    agent: str
    """A name for this very process, so that a restarted agent is not taken for its predecessor."""
    workers: tuple[WorkerStatus, ...] = ()
    pid: int = 0
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Beat:
    """About once a second: the agent is alive, and this is what its workers reported since the last one."""

    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Heard:
    """A worker said something: `message` is one of `protocol`'s, as JSON."""

    worker: str
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Started:
    """A worker runs."""

    worker: str
    pid: int
    warning: str = ""
    """What is not as its user may think. Older agents do not say."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker has ended, or could not be started (`error` then says why). Told again until it is forgotten."""

    worker: str
    status: int
    tail: str = ""
    error: str = ""
    spoke: bool = True
    """It had connected to its agent's channel. Older agents do not say."""


@dataclass(frozen=True, slots=True)
class Log:
    """What a worker printed, from byte `offset` of its output on. The next comes when this one was `Logged`."""

    worker: str
    offset: int
    text: str
    size: int
    """How many bytes of the output `text` stands for."""


@dataclass(frozen=True, slots=True)
class Going:
    """The node is being taken: its workers are being killed, and the agent ends."""

    reason: str = ""


# From the controller.


@dataclass(frozen=True, slots=True)
class Welcome:
    """The agent is known. What it said of its workers was heard."""

    beat_s: float = 1.0
    silence_s: float = 10.0
    """A worker that says nothing for so long is to be killed."""
    give_up_s: float = 600.0
    """An agent that has not found a controller for so long ends."""
    logged: Mapping[str, int] = field(default_factory=dict)
    """How much of each worker's output the controller has."""
    last_save_s: float = 0.0
    """When the node is taken, workers have so long to save what only they may have."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker."""

    worker: str
    trainer: str
    argv: tuple[str, ...]
    """A Python script (or `-m` and a module) with its arguments; with `program` any program."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What to set on top of the agent's own environment."""
    cwd: str = ""
    python: str = ""
    """The interpreter; empty: `submitted_python`, else the agent's own."""
    program: bool = False
    background: bool = False
    """Others train meanwhile: start at low priority."""
    speaks: bool = True
    """The worker speaks `elastic.protocol`, so it gets a channel and shall not be silent."""
    submitted_python: str = ""
    """The interpreter to use where it is there and can be run. Older agents take their own."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End a worker: SIGTERM, and SIGKILL to its group `grace_s` later (at once when 0)."""

    worker: str
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Say:
    """Tell a worker something: `message` is one of `protocol`'s, as JSON."""

    worker: str
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Forget:
    """The end of a worker was heard and stored."""

    worker: str


@dataclass(frozen=True, slots=True)
class Logged:
    """The output of a worker is stored up to byte `offset`."""

    worker: str
    offset: int


@dataclass(frozen=True, slots=True)
class Bye:
    """The node is not wanted any more: kill what runs and end."""

    reason: str = ""


FromAgent = Join | Beat | Heard | Started | Ended | Log | Going
FromController = Welcome | Start | Stop | Say | Forget | Logged | Bye
Message = FromAgent | FromController

_KINDS: Mapping[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (Join, Beat, Heard, Started, Ended, Log, Going, Welcome, Start, Stop, Say, Forget, Logged, Bye)
}
_NAMES: Mapping[type[Any], tuple[str, tuple[str, ...]]] = {
    kind: (name, tuple(f.name for f in fields(kind))) for name, kind in _KINDS.items()
}
_STATUS_FIELDS = tuple(f.name for f in fields(WorkerStatus))


def encode(message: Message) -> str:
    """One frame."""
    name, names = _NAMES[type(message)]
    return json.dumps({"type": name, **{key: getattr(message, key) for key in names}}, default=_plain)


def _plain(value: object) -> Any:
    if isinstance(value, WorkerStatus):
        return {name: getattr(value, name) for name in _STATUS_FIELDS}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"cannot send {value!r}")


def decode(frame: str | bytes) -> Message | None:
    """The message of a frame; None if it is of a kind this version does not know."""
    try:
        found = json.loads(frame)
        kind = _KINDS.get(found.pop("type"))
        if kind is None:
            return None
        values = {name: found[name] for name in _NAMES[kind][1] if name in found}
        if kind is Join:
            values["workers"] = tuple(_status(row) for row in values.get("workers", ()))
        elif kind is Start:
            values["argv"] = tuple(values["argv"])
        for name in values.keys() & _CHECKS.keys():
            values[name] = _CHECKS[name](name, values[name])
        message: Message = kind(**values)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as problem:
        raise ProtocolError(
            f"a frame must be a JSON object with a `type`, but got {frame[:200]!r}: {problem}"
        ) from None
    return message


def _status(row: Mapping[str, Any]) -> WorkerStatus:
    """What an agent knows of a worker. Some of it the worker said, and nonsense of a script is not its agent's."""
    values = {name: row[name] for name in _STATUS_FIELDS if name in row}
    for name in values.keys() & _STATUS_CHECKS.keys():
        values[name] = _STATUS_CHECKS[name](name, values[name])
    for name in values.keys() & {"newest", "formed", "arrived"}:
        values[name] = values[name] if _is_whole(values[name]) else -1
    for name in values.keys() & {"address", "failed", "traceback"}:
        values[name] = text(values[name]) if isinstance(values[name], str) else "nonsense"
    for name in values.keys() & {"ready", "holds_state", "over", "done", "speaks", "spoke"}:
        values[name] = bool(values[name])
    if not isinstance(values.get("report"), Mapping):
        values["report"] = None
    return WorkerStatus(**values)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < MOST_WHOLE


def _whole(name: str, value: Any) -> int:
    if not _is_whole(value):
        raise TypeError(f"{name} must be a whole number")
    return int(value)


def _count(name: str, value: Any) -> int:
    if _whole(name, value) < 0:
        raise ValueError(f"{name} must be 0 or more")
    return int(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text")
    return value


def _words(name: str, value: Any) -> str:
    """Text for people, which may hold anything."""
    return text(_text(name, value))


def _name(name: str, value: Any) -> str:
    """What things are called: it is stored, shown, and written into files of names."""
    if not _text(name, value).isprintable() or not value or len(value) > MOST_NAME:
        raise ValueError(f"{name} must have 1 to {MOST_NAME} characters that can be printed")
    return str(value)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be an object")
    return value


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("node", "host", "agent", "worker"), _name),
    **dict.fromkeys(("reason", "tail", "error", "warning"), _words),
    **dict.fromkeys(("status", "pid", "version"), _whole),
    **dict.fromkeys(("offset", "size"), _count),
    **dict.fromkeys(("message", "reports"), _mapping),
    "text": _text,
    "spoke": lambda _, value: bool(value),
}
_STATUS_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "worker": _name,
    "trainer": _text,
    "pid": _whole,
    "tail": _words,
    "status": lambda name, value: None if value is None else _whole(name, value),
}
