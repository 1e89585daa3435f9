"""Configuration keys define all settings of the live system.

Each key has a default, a rule that its value must obey, and a description; a unit is part of its name. `load.py` reads
the values from files, the environment and the command line. The controller gets the result, a `Config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import Field, PlainValidator, TypeAdapter
from pydantic.fields import FieldInfo
from typing_extensions import Doc

from bftrainer.cluster.config.rules import (
    AUTO,
    NUMBER,
    Days,
    FilePath,
    Gigabytes,
    PositiveSeconds,
    Seconds,
    allocator_name,
    lifetime_text,
    log_file_path,
    name_or_nothing,
    placement_value,
    some_path,
    some_text,
)
from bftrainer.cluster.config.users import UsersSettings
from bftrainer.cluster.wire.messages import BEAT_S, GIVE_UP_S
from bftrainer.elastic.defaults import FINISH_GRACE_S, LEAVE_GRACE_S, MOST_BROKEN_GROUPS, SILENCE_S

UNMEASURED_S = 1.0
"""The assumed cost of a rescale in seconds, until one was measured."""
MOST_WEIGHT = 1_000_000
"""The largest weight that can be allowed to an owner."""


@dataclass(frozen=True, slots=True)
class Server:
    """The controller's address and state folder."""

    host: Annotated[
        str,
        PlainValidator(some_text),
        Field(description="the name or address of a network interface, or auto"),
        Doc("address to listen on; auto: 127.0.0.1, and with the slurm pool the address that its nodes can reach"),
    ] = "auto"
    port: Annotated[
        int,
        NUMBER,
        Field(ge=0, le=65535, description="a port from 0 to 65535"),
        Doc("port to listen on; 0: any free one"),
    ] = 8765
    state: Annotated[
        Path,
        PlainValidator(some_path),
        Field(description="the path of a folder"),
        Doc("folder of the database, snapshots and logs"),
    ] = Path()


@dataclass(frozen=True, slots=True)
class Api:
    """The API's certificate and name, its tokens, and what it shows without a token."""

    tls: Annotated[
        bool,
        Field(strict=True, description="true or false"),
        Doc("encrypt beyond loopback, with users.mode own everywhere; without api.certificate by an own authority"),
    ] = True
    certificate: Annotated[
        FilePath, Doc("certificate of the controller, PEM; with api.key: TLS for all connections")
    ] = ""
    key: Annotated[FilePath, Doc("the certificate's private key, PEM, not encrypted")] = ""
    authority: Annotated[
        FilePath,
        Doc("certificates that clients verify api.certificate with; empty: the system's; nodes must see the file"),
    ] = ""
    name: Annotated[
        str,
        PlainValidator(name_or_nothing),
        Field(description="the name of a host, or empty"),
        Doc("host name in the controller's URL; empty: taken from server.host"),
    ] = ""
    token_lifetime: Annotated[
        str,
        PlainValidator(lifetime_text),
        Field(description="a time such as 12h, 30d or 52w, or never"),
        Doc("how long new tokens are valid, such as 12h, 30d or 52w; never: until they are revoked"),
    ] = "never"  # noqa: S105 - not a token
    open_metrics: Annotated[
        bool,
        Field(strict=True, description="true or false"),
        Doc("serve /metrics without a token, and then without names of trainers"),
    ] = False
    metrics_trainers: Annotated[
        int,
        NUMBER,
        Field(ge=0, le=100_000, description="a whole number from 0"),
        Doc("how many trainers /metrics has series for, the oldest first"),
    ] = 100


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The controller's own log."""

    format: Annotated[Literal["text", "json"], Doc("text: a line of text per event; json: a JSON object per line")] = (
        "text"
    )
    level: Annotated[
        Literal["debug", "info", "warning", "error"], Doc("least severe level that is written to the file")
    ] = "info"
    file: Annotated[
        str,
        PlainValidator(log_file_path),
        Field(description="the path of a file, empty or none"),
        Doc("file of the log; empty: serve.log in the state folder; none: no file"),
    ] = ""
    max_mb: Annotated[
        float,
        NUMBER,
        Field(gt=0, le=1e6, description="a number of MB above 0"),
        Doc("size in MB at which a new file is begun"),
    ] = 10.0
    keep: Annotated[
        int,
        NUMBER,
        Field(ge=1, le=1000, description="a whole number from 1 to 1000"),
        Doc("how many older files are kept: serve.log.1, .2, …"),
    ] = 5


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The allocation of nodes. None stands for auto."""

    allocator: Annotated[
        str,
        PlainValidator(allocator_name),
        Field(description="one of exact, milp, milp-nodes, equal, or module:name"),
        Doc("the allocator: exact, milp, milp-nodes, equal or module:name"),
    ] = "exact"
    objective: Annotated[
        str,
        PlainValidator(some_text),
        Field(description="the name of an objective, or module:function"),
        Doc("the objective: throughput, efficiency, weighted, weighted-efficiency or module:function"),
    ] = "weighted-efficiency"
    horizon_s: Annotated[
        PositiveSeconds | None,
        AUTO,
        Field(description="a number of seconds above 0, or auto"),
        Doc("forward-looking time; auto: the mean time between leaves"),
    ] = 120.0
    max_parallel: Annotated[
        Annotated[int, Field(ge=1, le=1_000_000)] | None,
        AUTO,
        Field(description="a whole number from 1, or auto"),
        Doc("how many trainers are considered at once, first come first served; auto: as many as can use the pool"),
    ] = None
    placement: Annotated[
        str,
        PlainValidator(placement_value),
        Field(description="stable, compact or the path of a Slurm topology.conf"),
        Doc("which nodes a trainer gets: stable, compact (near each other by Slurm's switches), or a topology.conf"),
    ] = "stable"
    max_weight: Annotated[
        float,
        NUMBER,
        Field(gt=0, le=MOST_WEIGHT, description=f"a number above 0, up to {MOST_WEIGHT:,}"),
        Doc("largest weight of a trainer; `bftrainer owner set --max-weight` sets another one for an owner"),
    ] = 1.0


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Timeouts for agents and workers."""

    beat_s: Annotated[PositiveSeconds, Doc("time between two heartbeats of an agent")] = BEAT_S
    silence_s: Annotated[
        PositiveSeconds, Doc("an agent that sends nothing for this long is lost, and its node with it")
    ] = 10.0
    worker_silence_s: Annotated[PositiveSeconds, Doc("a worker that sends nothing for this long is killed")] = SILENCE_S
    reconnect_s: Annotated[
        Seconds, Doc("when a connection breaks, time for the agent to come back before its node is lost")
    ] = 5.0
    reattach_s: Annotated[Seconds, Doc("after a restart, time for agents to come back before they are lost")] = 15.0
    give_up_s: Annotated[PositiveSeconds, Doc("an agent that finds no controller for this long ends its workers")] = (
        GIVE_UP_S
    )
    pause_grace_s: Annotated[
        Seconds, Doc("on `pause`, time for workers to leave before their nodes are given back")
    ] = 2.0
    leave_grace_s: Annotated[Seconds, Doc("time for a worker to leave at a step boundary before it is killed")] = (
        LEAVE_GRACE_S
    )
    last_save_s: Annotated[
        Seconds,
        Doc(
            "on a node that is taken at once, time to save the training state; the job that takes the node waits for it"
        ),
    ] = 1.0


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings for all trainers."""

    default_up_s: Annotated[Seconds, Doc("assumed cost of growing, until one was measured")] = UNMEASURED_S
    default_down_s: Annotated[Seconds, Doc("assumed cost of shrinking, until one was measured")] = UNMEASURED_S
    snapshot_every_s: Annotated[PositiveSeconds, Doc("time between snapshots of scripts that set none")] = 30.0
    finish_grace_s: Annotated[Seconds, Doc("time for a script to end after its training is complete")] = FINISH_GRACE_S
    stuck_after_s: Annotated[
        Seconds, Doc("after a loss, a survivor that reports but does not rejoin for this long is killed; 0: never")
    ] = 0.0
    max_broken_groups: Annotated[
        int,
        NUMBER,
        Field(ge=1, le=1000, description="a whole number from 1"),
        Doc("a group that breaks this often in a row, with no member lost, fails"),
    ] = MOST_BROKEN_GROUPS
    restart_backoff_s: Annotated[
        Seconds, Doc("first wait before a failed script is started again; it doubles each time")
    ] = 1.0
    max_log_mb: Annotated[
        int,
        NUMBER,
        Field(ge=1, le=1_000_000, description="a whole number of MB from 1"),
        Doc("size in MB of the log that is kept per trainer"),
    ] = 64
    max_log_kb_per_s: Annotated[
        int,
        NUMBER,
        Field(ge=1, le=1_000_000, description="a whole number of kB per second from 1"),
        Doc("output in kB per second that the log takes per trainer, on average; more is left out"),
    ] = 256
    max_log_lines_per_s: Annotated[
        int,
        NUMBER,
        Field(ge=1, le=1_000_000, description="a whole number of lines per second from 1"),
        Doc("lines of output per second that the log takes per trainer, on average; more are left out"),
    ] = 2000
    keep_events: Annotated[
        int,
        NUMBER,
        Field(ge=1000, le=10**12, description="a whole number from 1000"),
        Doc("how many events are kept in the database"),
    ] = 1_000_000


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """How long the events and the files of finished trainers are kept. Unfinished trainers keep everything."""

    events_days: Annotated[Days, Doc("age at which events are dropped; 0: no limit; also trainers.keep_events")] = 365.0
    database_mb: Annotated[
        int,
        NUMBER,
        Field(ge=50, le=1_000_000, description="a whole number of MB from 50"),
        Doc("size of the database in MB above which the oldest events are dropped"),
    ] = 400
    snapshots_days: Annotated[Days, Doc("after its end, how long a trainer keeps snapshots other than the last")] = 1.0
    logs_days: Annotated[Days, Doc("after its end, how long a trainer keeps its log; 0: no limit")] = 90.0
    results_days: Annotated[
        Days, Doc("after its end, how long a trainer keeps its last snapshot and its output folder; 0: no limit")
    ] = 365.0
    finished_gb: Annotated[
        Gigabytes, Doc("size of all finished trainers' logs and older snapshots above which the oldest go; 0: no limit")
    ] = 100.0
    compiled_gb: Annotated[
        Gigabytes, Doc("size of the code that scripts have compiled above which the oldest goes; 0: no limit")
    ] = 20.0
    owner_gb: Annotated[
        Gigabytes, Doc("disk quota of an owner for whom `bftrainer owner set --max-disk` sets none; 0: no limit")
    ] = 0.0


@dataclass(frozen=True, slots=True)
class EtaSettings:
    """Predictions of when trainers will be done."""

    cpu_share: Annotated[
        float,
        NUMBER,
        Field(ge=0, le=1, allow_inf_nan=False, description="a share of a core from 0 to 1"),
        Doc("share of one core that predictions of finishing times may use over time; 0: no predictions"),
    ] = 0.1
    profile: Annotated[
        Literal["auto", "steady", "summit", "theta", "mira"],
        Doc(
            "what the pool is assumed to be like while its own past is too short; steady: its nodes stay; "
            "auto: summit for the slurm pool, else steady"
        ),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The kind of pool that supplies nodes, and the pool's own settings, which the pool itself checks."""

    kind: Annotated[
        str,
        PlainValidator(some_text),
        Field(description="the name of a pool"),
        Doc("where nodes come from: local, script, slurm or module:name"),
    ] = "local"
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
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    eta: EtaSettings = field(default_factory=EtaSettings)
    users: UsersSettings = field(default_factory=UsersSettings)
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
    | {"trainers": TrainerSettings, "retention": RetentionSettings, "eta": EtaSettings, "users": UsersSettings}
    | {"pool": PoolSettings}
)


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A key of the configuration, apart from its value."""

    default: Any
    doc: str
    rule: str
    """What a value must be, for error messages."""
    is_text: bool
    """Whether text from the environment or the command line is the value itself, and not a TOML value."""
    type: TypeAdapter[Any]


def _keys(section: type[Any]) -> dict[str, ConfigKey]:
    keys, defaults = {}, section()
    for name, hint in get_type_hints(section, include_extras=True).items():
        kind, *notes = get_args(hint)
        doc = next((note.documentation for note in notes if isinstance(note, Doc)), None)
        if doc is None:
            continue
        words = [note.description for note in notes if isinstance(note, FieldInfo)]
        rule = words[-1] if words else f"one of {', '.join(get_args(kind))}"
        is_text = kind in (str, Path) or not words
        keys[name] = ConfigKey(getattr(defaults, name), doc, rule or "", is_text, TypeAdapter(hint))
    return keys


KEYS: Mapping[str, Mapping[str, ConfigKey]] = {name: _keys(section) for name, section in SECTIONS.items()}
"""All keys by section and name."""
