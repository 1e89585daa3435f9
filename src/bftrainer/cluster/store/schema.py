"""The schema defines the database's tables, the migrations from every older version, and row classes.

`database.py` migrates a file to the newest version; `store.py` reads and writes it. A released migration is never
changed: later changes are appended to `MIGRATIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bftrainer.cluster.spec.states import FINISHED

APPLICATION_ID = 0x42465472
"""Mark in the header of the file ("BFTr") that distinguishes it from databases of other programs."""

LOCAL_TOKEN = "local"  # noqa: S105 - the name of a token
"""Name of the token in `client.json`, which `serve` creates."""
ROLES = ("user", "admin", "monitor")
"""Users see their own trainers, admins see all, monitors see only the metrics."""

# Events are a record: none is changed or removed. Only `Store.trim_events` lifts this, for its own transaction.
REFUSE_UPDATE = """
CREATE TRIGGER events_refuse_update BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are never changed'); END
"""
REFUSE_DELETE = """
CREATE TRIGGER events_refuse_delete BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events are never removed'); END
"""

_FIRST = (
    """
    CREATE TABLE trainers (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL,
        owner TEXT NOT NULL,
        spec TEXT NOT NULL,
        state TEXT NOT NULL DEFAULT 'queued',
        reason TEXT NOT NULL DEFAULT '',
        submitted REAL NOT NULL,
        started REAL,
        ended REAL,
        generation INTEGER NOT NULL DEFAULT 0,
        next_worker INTEGER NOT NULL DEFAULT 1,
        samples INTEGER NOT NULL DEFAULT 0,
        total INTEGER,
        epoch INTEGER NOT NULL DEFAULT 0,
        step INTEGER NOT NULL DEFAULT 0,
        metrics TEXT NOT NULL DEFAULT '{}',
        learned TEXT NOT NULL DEFAULT '{}',
        rescales INTEGER NOT NULL DEFAULT 0,
        preemptions INTEGER NOT NULL DEFAULT 0,
        failures INTEGER NOT NULL DEFAULT 0,
        samples_redone INTEGER NOT NULL DEFAULT 0,
        node_seconds REAL NOT NULL DEFAULT 0,
        error TEXT NOT NULL DEFAULT '',
        traceback TEXT NOT NULL DEFAULT ''
    )
    """,
    "CREATE INDEX trainers_by_state ON trainers (state)",
    "CREATE INDEX trainers_by_name ON trainers (name)",
    """
    CREATE UNIQUE INDEX trainers_unfinished_name ON trainers (name)
    WHERE state NOT IN ('done', 'failed', 'cancelled')
    """,
    """
    CREATE TABLE nodes (
        node TEXT PRIMARY KEY,
        host TEXT NOT NULL,
        agent TEXT NOT NULL,
        pid INTEGER NOT NULL,
        joined REAL NOT NULL,
        left REAL,
        leaving REAL
    )
    """,
    """
    CREATE TABLE workers (
        worker TEXT PRIMARY KEY,
        trainer INTEGER NOT NULL REFERENCES trainers (number),
        node TEXT NOT NULL REFERENCES nodes (node),
        agent TEXT NOT NULL,
        started REAL NOT NULL,
        ended REAL,
        status INTEGER,
        outcome TEXT NOT NULL DEFAULT ''
    )
    """,
    "CREATE INDEX workers_by_trainer ON workers (trainer)",
    "CREATE INDEX workers_by_node ON workers (node)",
    "CREATE INDEX workers_running ON workers (worker) WHERE ended IS NULL",
    """
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        time REAL NOT NULL,
        kind TEXT NOT NULL,
        trainer TEXT NOT NULL DEFAULT '',
        node TEXT NOT NULL DEFAULT '',
        data TEXT NOT NULL DEFAULT '{}'
    )
    """,
    "CREATE INDEX events_by_trainer ON events (trainer)",
    "CREATE INDEX events_by_kind ON events (kind)",
    REFUSE_UPDATE,
    REFUSE_DELETE,
    """
    CREATE TABLE tokens (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL,
        owner TEXT NOT NULL,
        role TEXT NOT NULL,
        hash TEXT NOT NULL UNIQUE,
        created REAL NOT NULL,
        revoked REAL,
        last_used REAL
    )
    """,
    "CREATE UNIQUE INDEX tokens_valid_name ON tokens (name) WHERE revoked IS NULL",
    "CREATE TABLE kept (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
)

_OWNERS = (
    """
    CREATE TABLE owners (
        owner TEXT PRIMARY KEY,
        max_nodes INTEGER,
        max_trainers INTEGER,
        share_nodes INTEGER,
        share_percent REAL,
        changed REAL NOT NULL
    )
    """,
    "CREATE INDEX trainers_by_owner ON trainers (owner)",
    # Names are unique per owner: no owner can find out the names that others use, or take them away.
    "DROP INDEX trainers_unfinished_name",
    """
    CREATE UNIQUE INDEX trainers_unfinished_name ON trainers (owner, name)
    WHERE state NOT IN ('done', 'failed', 'cancelled')
    """,
)

_POINTS = (
    """
    CREATE TABLE points (
        trainer INTEGER NOT NULL,
        time REAL NOT NULL,
        samples INTEGER NOT NULL,
        metrics TEXT NOT NULL,
        PRIMARY KEY (trainer, time)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX workers_by_end ON workers (ended)",
    "CREATE INDEX trainers_by_end ON trainers (ended)",
)

_PLACES = (
    "ALTER TABLE trainers ADD COLUMN metrics_at TEXT NOT NULL DEFAULT '{}'",
    "ALTER TABLE points ADD COLUMN metrics_at TEXT NOT NULL DEFAULT '{}'",
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (_FIRST, _OWNERS, _POINTS, _PLACES)
"""The statements that lead from version N to N + 1, in order. Each entry is one transaction."""


@dataclass(frozen=True, slots=True)
class TrainerRow:
    """A trainer as the store knows it."""

    id: str
    """`t` and the trainer's number; the first is t1."""
    name: str
    owner: str
    spec: Mapping[str, Any]
    state: str
    reason: str
    submitted: float
    started: float | None
    ended: float | None
    generation: int
    """The newest generation that was created."""
    next_worker: int
    """Number of the trainer's next worker; the first worker is number 1."""
    samples: int
    total: int | None
    epoch: int
    step: int
    metrics: dict[str, Any]
    metrics_at: dict[str, Any]
    """Position that each metric belongs to: epochs done, steps, samples."""
    learned: dict[str, Any]
    rescales: int
    preemptions: int
    failures: int
    samples_redone: int
    node_seconds: float
    error: str
    traceback: str

    @property
    def finished(self) -> bool:
        """Whether the trainer has reached a final state."""
        return self.state in FINISHED


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One process of a trainer on one node. As far as is known, it runs until `ended` is set."""

    worker: str
    trainer: str
    node: str
    agent: str
    started: float
    ended: float | None
    status: int | None
    """Exit status; None if the end of the process was not observed."""
    outcome: str


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node that is in the pool, or the last known facts of a node that has left."""

    node: str
    host: str
    agent: str
    pid: int
    joined: float
    left: float | None
    leaving: float | None
    """Set once it is known that the node will be taken."""


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that happened. Numbers rise by one, without gaps."""

    seq: int
    time: float
    kind: str
    trainer: str
    node: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Owner and role of a token for the API. The token itself is not stored."""

    id: int
    name: str
    owner: str
    role: str
    created: float
    revoked: float | None
    last_used: float | None


@dataclass(frozen=True, slots=True)
class OwnerRow:
    """Limits of an owner of trainers. None: no upper limit, or no guaranteed share."""

    owner: str
    max_nodes: int | None = None
    max_trainers: int | None = None
    """Limit of unfinished trainers."""
    share_nodes: int | None = None
    share_percent: float | None = None
    changed: float = 0.0


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over all trainers of one owner in one state."""

    owner: str
    state: str
    trainers: int
    samples: int
    node_seconds: float
    rescales: int
    preemptions: int
    failures: int
    samples_redone: int


@dataclass(frozen=True, slots=True)
class EventSpan:
    """Range of the events in the store."""

    first: int
    """Number of the first event; 0 if there is none."""
    last: int
    count: int
    ever: int
    """Number of the last event that was ever written."""
    trimmed: int
    """Number of the last event that was dropped on purpose."""
