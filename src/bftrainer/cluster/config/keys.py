"""Configuration keys define all settings of the live system.

Each key has a default, a rule that its value must obey, and a description; a unit is part of its name. `load.py` reads
the values from files, the environment and the command line. The controller gets the result, a `Config`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bftrainer.cluster.wire.messages import BEAT_S, GIVE_UP_S
from bftrainer.elastic.defaults import FINISH_GRACE_S, LEAVE_GRACE_S, MOST_BROKEN_GROUPS, SILENCE_S
from bftrainer.util.plugins import is_named


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a value: the rule in words, and a reader that raises ValueError for any other value."""

    rule: str
    read: Callable[[object], object]
    number: bool = True
    """Whether text from the environment or the command line is read as a TOML value, such as a number."""


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _bounded(least: float, most: float = math.inf, *, above: bool = False) -> Callable[[object], float]:
    def read(value: object) -> float:
        number = _number(value)
        if not least <= number <= most or (above and number == least):
            raise ValueError
        return number

    return read


def _whole(least: int, most: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        number = _bounded(least, most)(value)
        if number != int(number):
            raise ValueError
        return int(number)

    return read


def _or_auto(read: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: None if value == "auto" else read(value)


def some_text(value: object) -> str:
    """Return the value if it is a non-blank text in one line. Raises ValueError otherwise."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError
    return value


def some_path(value: object) -> Path:
    """Return the value as an absolute path, with a leading `~` expanded. Raises ValueError if it is not a path."""
    return Path(os.path.expanduser(some_text(value))).absolute()  # noqa: PTH111 - pathlib's may raise


def _allocator(value: object) -> str:
    from bftrainer.allocate.registry import ALLOCATORS  # numpy takes time to load, and few calls set this

    text = some_text(value)
    if text not in ALLOCATORS and not is_named(text):
        raise ValueError
    return text


UNMEASURED_S = 1.0
"""The assumed cost of a rescale in seconds, until one was measured."""
PLACEMENTS = ("stable", "compact")
"""The words for `policy.placement`; any other value is a path."""


def _placement(value: object) -> str:
    if value in PLACEMENTS:
        return str(value)
    path = some_path(value)
    if not path.is_file():
        raise ValueError
    return str(path)


def _file(value: object) -> str:
    return "" if value == "" else str(some_path(value))


def _maybe_text(value: object) -> str:
    return "" if value == "" else some_text(value)


def _log_file(value: object) -> str:
    return "none" if value == "none" else _file(value)


def _yes(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _one_of(*words: str) -> Kind:
    def read(value: object) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return Kind(f"one of {', '.join(words)}", read, number=False)


_FILE = Kind("the path of a file, or empty", _file, number=False)
_NAME = Kind("the name of a host, or empty", _maybe_text, number=False)
_LOG_FILE = Kind("the path of a file, empty or none", _log_file, number=False)
_SECONDS = Kind("a number of seconds, 0 or more", _bounded(0))
_SOME_SECONDS = Kind("a number of seconds above 0", _bounded(0, above=True))
_HORIZON = Kind("a number of seconds above 0, or auto", _or_auto(_bounded(0, above=True)))
_PARALLEL = Kind("a whole number from 1, or auto", _or_auto(_whole(1, 1_000_000)))
_HOST = Kind("the name or address of a network interface", some_text, number=False)
_STATE = Kind("the path of a folder", some_path, number=False)
_ALLOCATOR = Kind("one of exact, milp, milp-nodes, equal, or module:name", _allocator, number=False)
_OBJECTIVE = Kind("the name of an objective, or module:function", some_text, number=False)
_PLACEMENT = Kind("stable, compact or the path of a Slurm topology.conf", _placement, number=False)
_POOL = Kind("the name of a pool", some_text, number=False)


def _key(default: Any, kind: Kind, doc: str) -> Any:
    return field(default=default, metadata={"kind": kind, "doc": doc})


@dataclass(frozen=True, slots=True)
class Server:
    """The controller's address and state folder."""

    host: str = _key("127.0.0.1", _HOST, "address to listen on; any but loopback needs tokens")
    port: int = _key(8765, Kind("a port from 0 to 65535", _whole(0, 65535)), "port to listen on; 0: any free one")
    state: Path = _key(Path(), _STATE, "folder of the database, snapshots and logs")  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class Api:
    """The API's certificate and name, and what it shows without a token."""

    certificate: str = _key("", _FILE, "certificate of the controller, PEM; with api.key: TLS for all connections")
    key: str = _key("", _FILE, "the certificate's private key, PEM, not encrypted")
    authority: str = _key("", _FILE, "certificates by which to know api.certificate; empty: the system's; nodes see it")
    name: str = _key("", _NAME, "host name in the controller's URL; empty: that of server.host")
    open_metrics: bool = _key(False, Kind("true or false", _yes), "/metrics needs no token, and names no trainer")
    metrics_trainers: int = _key(
        100, Kind("a whole number from 0", _whole(0, 100_000)), "trainers that /metrics has series for, the oldest"
    )


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The controller's own log."""

    format: str = _key("text", _one_of("text", "json"), "a line of text, or a JSON object a line")
    level: str = _key("info", _one_of("debug", "info", "warning", "error"), "what goes to the file: this and worse")
    file: str = _key("", _LOG_FILE, "file of the log; empty: serve.log in the state folder; none: none")
    max_mb: float = _key(10.0, Kind("a number of MB above 0", _bounded(0, 1e6, above=True)), "size that begins another")
    keep: int = _key(5, Kind("a whole number from 1 to 1000", _whole(1, 1000)), "older files kept: serve.log.1, .2, …")


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The allocation of nodes. None stands for auto."""

    allocator: str = _key("exact", _ALLOCATOR, "who decides: exact, milp, milp-nodes, equal or module:name")
    objective: str = _key(
        "weighted-efficiency",
        _OBJECTIVE,
        "what is maximised: throughput, efficiency, weighted, weighted-efficiency or module:function",
    )
    horizon_s: float | None = _key(120.0, _HORIZON, "forward-looking time; auto: the mean time between leaves")
    max_parallel: int | None = _key(10, _PARALLEL, "trainers considered at once, first come first served; or auto")
    placement: str = _key("stable", _PLACEMENT, "which nodes: stable, or near each other by Slurm's switches")


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Timeouts for agents and workers."""

    beat_s: float = _key(BEAT_S, _SOME_SECONDS, "time between two heartbeats of an agent")
    silence_s: float = _key(10.0, _SOME_SECONDS, "an agent that is silent for so long is lost, and its node with it")
    worker_silence_s: float = _key(SILENCE_S, _SOME_SECONDS, "a worker that is silent for so long is killed")
    reattach_s: float = _key(15.0, _SECONDS, "after a restart, time for agents to come back before they are lost")
    give_up_s: float = _key(GIVE_UP_S, _SOME_SECONDS, "an agent without a controller for so long ends its workers")
    pause_grace_s: float = _key(
        2.0, _SECONDS, "on `pause`, time for workers to leave before their nodes are given back"
    )
    leave_grace_s: float = _key(
        LEAVE_GRACE_S, _SECONDS, "time for a worker to leave at a step boundary before it is killed"
    )
    last_save_s: float = _key(
        1.0, _SECONDS, "on a node that is taken at once, time to save a training's state; a main job waits for it"
    )


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings for all trainers."""

    default_up_s: float = _key(UNMEASURED_S, _SECONDS, "cost of growing until one was measured")
    default_down_s: float = _key(UNMEASURED_S, _SECONDS, "cost of shrinking until one was measured")
    snapshot_every_s: float = _key(30.0, _SOME_SECONDS, "time between snapshots, where a script does not say")
    finish_grace_s: float = _key(
        FINISH_GRACE_S, _SECONDS, "time for a script's last words, after its training is complete"
    )
    stuck_after_s: float = _key(
        0.0, _SECONDS, "after a loss, a survivor that reports but does not rejoin for so long is killed; 0: never"
    )
    max_broken_groups: int = _key(
        MOST_BROKEN_GROUPS,
        Kind("a whole number from 1", _whole(1, 1000)),
        "a group that breaks so often in a row, with no member lost, fails",
    )
    restart_backoff_s: float = _key(1.0, _SECONDS, "first wait before a script that failed is started again; doubles")
    max_log_mb: int = _key(64, Kind("a whole number of MB from 1", _whole(1, 1_000_000)), "log kept of a trainer")
    keep_events: int = _key(
        1_000_000, Kind("a whole number from 1000", _whole(1000, 10**12)), "events kept in the database"
    )


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The kind of pool that supplies nodes, and the pool's own settings, which the pool itself checks."""

    kind: str = _key("local", _POOL, "where nodes come from: local, script, slurm or module:name")
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration."""

    server: Server = field(default_factory=Server)
    api: Api = field(default_factory=Api)
    log: LogSettings = field(default_factory=LogSettings)
    policy: PolicySettings = field(default_factory=PolicySettings)
    agents: AgentSettings = field(default_factory=AgentSettings)
    trainers: TrainerSettings = field(default_factory=TrainerSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)
    file: Path | None = None
    """The file it was read from."""
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The source of each value that is not a default, by `section.key`."""

    @property
    def state(self) -> Path:
        """The state folder."""
        return self.server.state


DEFAULTS = Config()
"""The configuration where nothing is set."""
SECTIONS: Mapping[str, type[Any]] = MappingProxyType(
    {"server": Server, "api": Api, "log": LogSettings, "policy": PolicySettings, "agents": AgentSettings}
    | {"trainers": TrainerSettings, "pool": PoolSettings}
)


def keys_of(section: type[Any]) -> dict[str, Field[Any]]:
    """Return the keys of a section, each with its `kind` and its `doc` as metadata."""
    return {key.name: key for key in fields(section) if "kind" in key.metadata}
