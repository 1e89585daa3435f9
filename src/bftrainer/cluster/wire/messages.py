"""Messages between agent and controller.

The agent reports the state of its node (`Join`, then every change); the controller gives orders (`Start`, `Stop`,
`Say`). A lost message has no lasting effect: at every connection the agent starts with all it knows, and it keeps the
end of a worker until the controller sends `Forget`. The types of the fields carry the bounds that `codec.decode`
checks. See `docs/live.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BeforeValidator, FailFast, Field

from bftrainer.cluster.wire.checks import (
    Flag,
    JsonObject,
    LastLines,
    LenientText,
    LenientWhole,
    Lines,
    Name,
    NaturalNumber,
    OptionalObject,
    Text,
    Whole,
    Words,
)
from bftrainer.elastic.defaults import MOST_RANKS, SILENCE_S

VERSION = 1
BEAT_S = 1.0
"""Seconds between two heartbeats of an agent, unless the controller says otherwise."""
GIVE_UP_S = 600.0
"""Seconds after which an agent without a controller ends, unless the controller said otherwise."""
MOST_GPUS = 256
"""Limit of GPUs of a node, and of ranks of a worker."""
MOST_MODULES = 1000
"""Limit of the modules that are imported ahead for a script."""
MOST_WORKERS = 1000
"""Limit of the workers that an agent joins with."""
PATH = "/v1/agents"
"""The URL path where agents connect. The secret is sent in the header `Authorization: Bearer SECRET`."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of a node that workers may use."""

    id: Name
    """Its number, UUID or MIG name, as it stands in `CUDA_VISIBLE_DEVICES` or `ROCR_VISIBLE_DEVICES`."""
    kind: Text = "cuda"
    """`cuda` or `rocm`."""
    name: LenientText = ""
    memory_mb: LenientWhole = 0
    """0: not known."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """How much of a GPU is in use at one moment."""

    id: Name
    percent: LenientWhole = 0
    memory_mb: LenientWhole = 0


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One process of a worker."""

    pid: Whole
    device: LenientText = ""
    """The id of its GPU; empty: the CPU."""


Gpus = Annotated[tuple[Gpu, ...], Field(max_length=MOST_GPUS), FailFast()]
GpuUses = Annotated[tuple[GpuUse, ...], Field(max_length=MOST_GPUS), FailFast()]
Ranks = Annotated[tuple[RankStatus, ...], Field(max_length=MOST_GPUS), FailFast()]
Modules = Annotated[tuple[Text, ...], Field(max_length=MOST_MODULES)]
RankCount = Annotated[int, Field(strict=True, ge=0, le=MOST_RANKS)]


def _few(reports: object) -> object:
    """Refuse too many reports before each is looked at."""
    if isinstance(reports, Mapping) and len(reports) > MOST_WORKERS:
        raise ValueError(f"must have at most {MOST_WORKERS} entries")
    return reports


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """All that an agent knows of one worker that runs, or has ended and is not forgotten yet.

    Fields that repeat what the worker said are lenient: the agent is not to blame for an invalid message of a script.
    """

    worker: Name
    trainer: Text
    pid: Whole = 0
    ready: Flag = False
    holds_state: Flag = False
    """It has formed a generation once, so it has the training state."""
    newest: LenientWhole = 0
    """The newest generation that it was told of."""
    formed: LenientWhole = 0
    """The generation that it trains in."""
    arrived: LenientWhole = 0
    """The generation in which it waits for the others."""
    address: LenientText = ""
    over: Flag = False
    """It has sent that it left, is done or has failed."""
    done: Flag = False
    failed: LenientText = ""
    """The error that it reported."""
    traceback: LenientText = ""
    status: Whole | None = None
    """Its exit status; None while it runs."""
    tail: LastLines = ""
    """The end of its output, once it has ended."""
    report: OptionalObject = None
    """Its last report, a `protocol.Report` as JSON."""
    speaks: Flag = True
    spoke: Flag = True
    """It has connected to its agent's channel. Set for ended workers only; older agents do not send it."""
    ranks: Ranks = ()
    """Its processes, one per rank. Older agents do not send them."""


Reports = Annotated[Mapping[Text, JsonObject], BeforeValidator(_few), Field(max_length=MOST_WORKERS)]
WorkerStatuses = Annotated[tuple[WorkerStatus, ...], Field(max_length=MOST_WORKERS), FailFast()]


# Messages from the agent.


@dataclass(frozen=True, slots=True)
class Join:
    """The first message of every connection: the node and its workers."""

    node: Name
    host: Name
    """The address under which other nodes reach this one."""
    agent: Name
    """A unique name of the agent process, so that a restarted agent is not taken for its predecessor."""
    workers: WorkerStatuses = ()
    pid: Whole = 0
    version: Whole = VERSION
    gpus: Gpus = ()
    """The GPUs that workers may use. Older agents do not send them."""
    slots: RankCount = 0
    """How many ranks a worker has here by default, as the pool said; 0: one per GPU, or one if there is none."""
    knows_ranks: Flag = False
    """Its workers can be in a generation with workers that have several ranks. Those of older agents cannot."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat, sent about once a second, with the reports of workers since the last one."""

    reports: Reports = field(default_factory=dict)
    gpus: GpuUses = ()
    """The use of the node's GPUs, in some of the heartbeats. Older agents do not send it."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A worker sent `message`, one of those in `protocol`, as JSON."""

    worker: Name
    message: JsonObject


@dataclass(frozen=True, slots=True)
class Started:
    """A worker runs."""

    worker: Name
    pid: Whole
    warning: Words = ""
    """Tells its user about an unexpected setup. Older agents do not send it."""
    ranks: Ranks = ()
    """Its processes, one per rank; `pid` is the first one's. Older agents do not send them."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker has ended, or could not be started (`error` then says why). Repeated until it is forgotten."""

    worker: Name
    status: Whole
    tail: LastLines = ""
    error: Lines = ""
    spoke: Flag = True
    """It had connected to its agent's channel. Older agents do not send it."""


@dataclass(frozen=True, slots=True)
class Log:
    """A worker's output from byte `offset` on. The next `Log` is sent once this one was answered with `Logged`."""

    worker: Name
    offset: NaturalNumber
    text: Text
    size: NaturalNumber
    """How many bytes of the output `text` covers."""


@dataclass(frozen=True, slots=True)
class Going:
    """The node is being taken: its workers are being killed, and the agent ends."""

    reason: Words = ""


# Messages from the controller.


@dataclass(frozen=True, slots=True)
class Welcome:
    """The controller has accepted the agent and the status of its workers."""

    beat_s: float = BEAT_S
    silence_s: float = SILENCE_S
    """A worker that sends nothing for this long is killed."""
    give_up_s: float = GIVE_UP_S
    """An agent that has not found a controller for this long ends."""
    logged: Mapping[Text, NaturalNumber] = field(default_factory=dict)
    """How many bytes of each worker's output the controller has."""
    last_save_s: float = 0.0
    """When the node is taken, how long workers have to save state that only they may have."""
    secret: Text = ""
    """Where agents have owners: the secret with which this agent, and no other, connects from now on."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker."""

    worker: Name
    trainer: Text
    argv: tuple[Text, ...]
    """A Python script (or `-m` and a module) with its arguments; with `program`, any program."""
    env: Mapping[Text, Text] = field(default_factory=dict)
    """Variables that override the agent's own environment."""
    cwd: Text = ""
    python: Text = ""
    """The interpreter; empty: `submitted_python`, else the agent's own."""
    program: Flag = False
    background: Flag = False
    """Other workers train meanwhile, so this one starts at low priority."""
    speaks: Flag = True
    """The worker speaks `elastic.protocol`, so it gets a channel and must not be silent."""
    submitted_python: Text = ""
    """The interpreter to use where it exists and can be run. Older agents use their own."""
    ranks: RankCount = 0
    """How many processes it has; 0: one, as controllers of version 0.1.0 expect it. Older agents start one."""
    log_all_ranks: Flag = False
    """The output of all ranks is sent, not only that of the first one on the node."""
    preload: Modules = ()
    """Modules that the script imports, in order: the agent may have imported them ahead. Older agents do not."""
    spec: OptionalObject = None
    """Where agents have owners: the whole specification, with the signature of the owner (`owners.signatures`)."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Import ahead what a script imports that may be started here later. The fields are those of its `Start`.

    Older agents ignore it.
    """

    argv: tuple[Text, ...]
    preload: Modules
    env: Mapping[Text, Text] = field(default_factory=dict)
    cwd: Text = ""
    python: Text = ""
    submitted_python: Text = ""
    ranks: RankCount = 0
    spec: OptionalObject = None
    """As in `Start`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End a worker: SIGTERM, then SIGKILL to its group `grace_s` seconds later (at once if 0)."""

    worker: Name
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Say:
    """Send `message`, one of those in `protocol`, as JSON, to a worker."""

    worker: Name
    message: JsonObject


@dataclass(frozen=True, slots=True)
class Forget:
    """The controller has stored the end of a worker, so the agent may forget the worker."""

    worker: Name


@dataclass(frozen=True, slots=True)
class Logged:
    """The controller has stored the output of a worker up to byte `offset`."""

    worker: Name
    offset: NaturalNumber


@dataclass(frozen=True, slots=True)
class Bye:
    """The agent is dismissed: it kills its workers and ends."""

    reason: Words = ""


FromAgent = Join | Beat | Heard | Started | Ended | Log | Going
FromController = Welcome | Start | Prepare | Stop | Say | Forget | Logged | Bye
Message = FromAgent | FromController
