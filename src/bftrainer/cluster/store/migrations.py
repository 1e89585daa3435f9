"""Migrations define the database's tables and lead from every older version of them to the newest.

`database.py` migrates a file with them. A released migration is never changed: later changes are appended to
`MIGRATIONS`.
"""

from __future__ import annotations

APPLICATION_ID = 0x42465472
"""Mark in the header of the file ("BFTr") that distinguishes it from databases of other programs."""

TRIMMED_KEY = "store.events_trimmed"
"""Key in the store of the number of the last event that was dropped on purpose."""

# Events are a record: none is changed or removed.
_REFUSE_UPDATE = """
CREATE TRIGGER events_refuse_update BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are never changed'); END
"""
_REFUSE_DELETE = """
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
    _REFUSE_UPDATE,
    _REFUSE_DELETE,
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

_WEIGHTS = ("ALTER TABLE owners ADD COLUMN max_weight REAL",)

_EXPIRY = ("ALTER TABLE tokens ADD COLUMN expires REAL",)

_RETENTION = (
    # Events up to the number of `TRIMMED_KEY` may go. Trimming sets it and removes them in one transaction.
    "DROP TRIGGER events_refuse_delete",
    f"""
    CREATE TRIGGER events_refuse_delete BEFORE DELETE ON events
    WHEN OLD.seq > ifnull((SELECT CAST(value AS INTEGER) FROM kept WHERE key = '{TRIMMED_KEY}'), 0)
    BEGIN SELECT RAISE(ABORT, 'events are never removed'); END
    """,  # noqa: S608 - names from this program
    # Sums over trainers whose rows were removed: totals and counters never fall.
    """
    CREATE TABLE removed_sums (
        owner TEXT NOT NULL,
        state TEXT NOT NULL,
        trainers INTEGER NOT NULL,
        samples REAL NOT NULL,
        node_seconds REAL NOT NULL,
        rescales INTEGER NOT NULL,
        preemptions INTEGER NOT NULL,
        failures INTEGER NOT NULL,
        samples_redone REAL NOT NULL,
        PRIMARY KEY (owner, state)
    ) WITHOUT ROWID
    """,
    # For sums over ended trainers without reading their rows, which are large.
    """
    CREATE INDEX trainers_ended_sums ON trainers (ended, owner, samples, node_seconds, rescales)
    WHERE ended IS NOT NULL
    """,
    "ALTER TABLE owners ADD COLUMN max_disk_mb INTEGER",
    # The values of jobs that are over were set to null, not removed.
    "DELETE FROM kept WHERE key GLOB 'job.t[1-9]*' AND value = 'null'",
)

_GPUS = (
    "ALTER TABLE trainers ADD COLUMN gpu_seconds REAL NOT NULL DEFAULT 0",
    "ALTER TABLE removed_sums ADD COLUMN gpu_seconds REAL NOT NULL DEFAULT 0",
    # How many GPUs a node has, or had when it was last there.
    "ALTER TABLE nodes ADD COLUMN gpus INTEGER NOT NULL DEFAULT 0",
    # How many ranks its pool gave it; 0: none.
    "ALTER TABLE nodes ADD COLUMN slots INTEGER NOT NULL DEFAULT 0",
    "DROP INDEX trainers_ended_sums",
    """
    CREATE INDEX trainers_ended_sums ON trainers (ended, owner, samples, node_seconds, rescales, gpu_seconds)
    WHERE ended IS NOT NULL
    """,
)

_EXTREMES = ("ALTER TABLE trainers ADD COLUMN extremes TEXT NOT NULL DEFAULT '{}'",)

# What scripts import, so that agents can import it ahead.
_PRELOADS = (
    """
    CREATE TABLE preloads (
        script TEXT NOT NULL,
        python TEXT NOT NULL,
        modules TEXT NOT NULL,
        left_out TEXT NOT NULL,
        changed REAL NOT NULL,
        PRIMARY KEY (script, python)
    ) WITHOUT ROWID
    """,
)

# What was learned of scripts: rates, pauses, starts.
_BELIEFS = (
    """
    CREATE TABLE beliefs (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        owner TEXT NOT NULL,
        script TEXT NOT NULL,
        python TEXT NOT NULL,
        model TEXT NOT NULL,
        data TEXT NOT NULL,
        changed REAL NOT NULL,
        UNIQUE (owner, script, python, model)
    )
    """,
)

# For which owner a node's agent runs; empty: for all.
_NODE_OWNERS = ("ALTER TABLE nodes ADD COLUMN owner TEXT NOT NULL DEFAULT ''",)

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    *(_FIRST, _OWNERS, _POINTS, _PLACES, _WEIGHTS, _EXPIRY, _RETENTION, _GPUS),
    _EXTREMES,
    _PRELOADS,
    _BELIEFS,
    _NODE_OWNERS,
)
"""The statements that lead from version N to N + 1, in order. Each entry is one transaction."""
