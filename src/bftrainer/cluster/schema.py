"""What the controller's database holds: its tables, the way there from every older version, and its rows as values.

`database.py` brings a file to the newest version, `store.py` reads and writes it. A migration that has been released is
never changed: what comes later is added to the end of `MIGRATIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

APPLICATION_ID = 0x42465472
"""In the header of the file ("BFTr"), so that nobody else's database is taken for ours."""

STATES = ("queued", "starting", "running", "rescaling", "waiting", "done", "failed", "cancelled")
FINISHED = ("done", "failed", "cancelled")
LOCAL_TOKEN = "local"  # noqa: S105 - the name of a token
"""That of `client.json`, which `serve` makes."""
ROLES = ("user", "admin", "monitor")
"""Users have their own trainers, admins all, monitors the metrics alone."""

# Events are a record: nothing changes or removes one. Only `Store.trim_events` lifts this, for its own transaction.
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
    # Names are each owner's own: nobody shall find out what others call theirs, nor take names away.
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
    """A trainer as the controller knows it."""

    id: str
    """`t` and its number, the first is t1."""
    name: str
    owner: str
    spec: Mapping[str, Any]
    state: str
    reason: str
    submitted: float
    started: float | None
    ended: float | None
    generation: int
    """The newest generation that was made."""
    next_worker: int
    """The number that its next worker gets; the first worker is number 1."""
    samples: int
    total: int | None
    epoch: int
    step: int
    metrics: dict[str, Any]
    metrics_at: dict[str, Any]
    """What each of the metrics is of: epochs done, steps, samples."""
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
        """Whether nothing more will come of it."""
        return self.state in FINISHED


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One process of a trainer on one node. It runs, as far as is known, until `ended` is set."""

    worker: str
    trainer: str
    node: str
    agent: str
    started: float
    ended: float | None
    status: int | None
    """Its exit status; None where nobody saw it end."""
    outcome: str


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node that is here, or the last that is known of one that is gone."""

    node: str
    host: str
    agent: str
    pid: int
    joined: float
    left: float | None
    leaving: float | None
    """Set once it is known that it will be taken."""


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
    """Who may use the API. The token itself is not stored."""

    id: int
    name: str
    owner: str
    role: str
    created: float
    revoked: float | None
    last_used: float | None


@dataclass(frozen=True, slots=True)
class OwnerRow:
    """What an owner of trainers may have; None: as much as there is, and no right to any of it."""

    owner: str
    max_nodes: int | None = None
    max_trainers: int | None = None
    """That are not finished."""
    share_nodes: int | None = None
    share_percent: float | None = None
    changed: float = 0.0


@dataclass(frozen=True, slots=True)
class Sums:
    """What all trainers of one owner that are in one state made together."""

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
    """Which events there are."""

    first: int
    """0 where there are none."""
    last: int
    count: int
    ever: int
    """The number of the last event that was ever written."""
    trimmed: int
    """The number of the last event that was dropped on purpose."""
