"""Messages travel between agent and controller as JSON objects, one per websocket frame.

The agent reports the state of its node (`Join`, then every change); the controller gives orders (`Start`, `Stop`,
`Say`). A lost message has no lasting effect: at every connection the agent starts with all it knows, and it keeps the
end of a worker until the controller sends `Forget`. Unknown fields and messages are ignored. See `docs/live.md`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from bftrainer.elastic.protocol import ProtocolError
from bftrainer.util.text import text

VERSION = 1
MOST_WHOLE = 1 << 62
MOST_NAME = 256
PATH = "/v1/agents"
"""The URL path where agents connect. The secret is sent in the header `Authorization: Bearer SECRET`."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """All that an agent knows of one worker that runs, or has ended and is not forgotten yet."""

    worker: str
    trainer: str
    pid: int = 0
    ready: bool = False
    holds_state: bool = False
    """It has formed a generation once, so it has the training state."""
    newest: int = 0
    """The newest generation that it was told of."""
    formed: int = 0
    """The generation that it trains in."""
    arrived: int = 0
    """The generation in which it waits for the others."""
    address: str = ""
    over: bool = False
    """It has sent that it left, is done or has failed."""
    done: bool = False
    failed: str = ""
    """The error that it reported."""
    traceback: str = ""
    status: int | None = None
    """Its exit status; None while it runs."""
    tail: str = ""
    """The end of its output, once it has ended."""
    report: Mapping[str, Any] | None = None
    """Its last report, a `protocol.Report` as JSON."""
    speaks: bool = True
    spoke: bool = True
    """It has connected to its agent's channel. Set for ended workers only; older agents do not send it."""


# Messages from the agent.


@dataclass(frozen=True, slots=True)
class Join:
    """The first message of every connection: the node and its workers."""

    node: str
    host: str
    """The address under which other nodes reach this one."""
    agent: str
    """A unique name of the agent process, so that a restarted agent is not taken for its predecessor."""
    workers: tuple[WorkerStatus, ...] = ()
    pid: int = 0
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat, sent about once a second, with the reports of workers since the last one."""

    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Heard:
    """A worker sent `message`, one of those in `protocol`, as JSON."""

    worker: str
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Started:
    """A worker runs."""

    worker: str
    pid: int
    warning: str = ""
    """Tells its user about an unexpected setup. Older agents do not send it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker has ended, or could not be started (`error` then says why). Repeated until it is forgotten."""

    worker: str
    status: int
    tail: str = ""
    error: str = ""
    spoke: bool = True
    """It had connected to its agent's channel. Older agents do not send it."""


@dataclass(frozen=True, slots=True)
class Log:
    """A worker's output from byte `offset` on. The next `Log` is sent once this one was answered with `Logged`."""

    worker: str
    offset: int
    text: str
    size: int
    """How many bytes of the output `text` covers."""


@dataclass(frozen=True, slots=True)
class Going:
    """The node is being taken: its workers are being killed, and the agent ends."""

    reason: str = ""


# Messages from the controller.


@dataclass(frozen=True, slots=True)
class Welcome:
    """The controller has accepted the agent and the status of its workers."""

    beat_s: float = 1.0
    silence_s: float = 10.0
    """A worker that sends nothing for this long is killed."""
    give_up_s: float = 600.0
    """An agent that has not found a controller for this long ends."""
    logged: Mapping[str, int] = field(default_factory=dict)
    """How many bytes of each worker's output the controller has."""
    last_save_s: float = 0.0
    """When the node is taken, how long workers have to save state that only they may have."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker."""

    worker: str
    trainer: str
    argv: tuple[str, ...]
    """A Python script (or `-m` and a module) with its arguments; with `program`, any program."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that override the agent's own environment."""
    cwd: str = ""
    python: str = ""
    """The interpreter; empty: `submitted_python`, else the agent's own."""
    program: bool = False
    background: bool = False
    """Other workers train meanwhile, so this one starts at low priority."""
    speaks: bool = True
    """The worker speaks `elastic.protocol`, so it gets a channel and must not be silent."""
    submitted_python: str = ""
    """The interpreter to use where it exists and can be run. Older agents use their own."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End a worker: SIGTERM, then SIGKILL to its group `grace_s` seconds later (at once if 0)."""

    worker: str
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Say:
    """Send `message`, one of those in `protocol`, as JSON, to a worker."""

    worker: str
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Forget:
    """The controller has stored the end of a worker, so the agent may forget the worker."""

    worker: str


@dataclass(frozen=True, slots=True)
class Logged:
    """The controller has stored the output of a worker up to byte `offset`."""

    worker: str
    offset: int


@dataclass(frozen=True, slots=True)
class Bye:
    """The agent is dismissed: it kills its workers and ends."""

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
    """Return the frame of a message."""
    name, names = _NAMES[type(message)]
    return json.dumps({"type": name, **{key: getattr(message, key) for key in names}}, default=_plain)


def _plain(value: object) -> Any:
    if isinstance(value, WorkerStatus):
        return {name: getattr(value, name) for name in _STATUS_FIELDS}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"cannot send {value!r}")


def decode(frame: str | bytes) -> Message | None:
    """Return the message of a frame; None if this version does not know its kind. Raises `ProtocolError`."""
    try:
        data = json.loads(frame)
        kind = _KINDS.get(data.pop("type"))
        if kind is None:
            return None
        values = {name: data[name] for name in _NAMES[kind][1] if name in data}
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
    """Read a worker's status. Fields that come from the worker itself are replaced if invalid, not refused.

    An agent is not to blame for an invalid message of a script.
    """
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
    """Check text for people, which may contain any character."""
    return text(_text(name, value))


def _name(name: str, value: Any) -> str:
    """Check a name. Names are stored, shown, and written into files."""
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
