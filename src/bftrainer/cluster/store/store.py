"""The store keeps trainers, workers, nodes, tokens and events in one SQLite file.

The controller calls it from the thread of its event loop, with one `transaction` for each thing that happens. So the
current state and the event log change together, and a kill at any instant leaves them consistent. `bftrainer doctor`
reads it beside a running controller.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bftrainer.cluster.config.load import DATABASE_FILE
from bftrainer.cluster.spec.states import FINISHED, STATES
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.environments import FOLDER, EnvironmentFiles
from bftrainer.cluster.store.event_log import EventLog
from bftrainer.cluster.store.events import LogEvent
from bftrainer.cluster.store.json_columns import decoded, decoded_object, encoded, plain
from bftrainer.cluster.store.rows import EventRow, EventSpan, NodeRow, OwnerRow, TrainerRow, WorkerRow
from bftrainer.cluster.store.scripts.beliefs import BeliefTable
from bftrainer.cluster.store.scripts.preloads import PreloadTable
from bftrainer.cluster.store.tokens import TokenTable
from bftrainer.cluster.store.trainer_totals import TrainerTotals
from bftrainer.cluster.store.trimming import DatabaseLimits, Trimmer
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.text import size_as_text, text

FILE = DATABASE_FILE
"""Name of the file in the state folder."""

ID = re.compile(r"t([1-9][0-9]{0,17})")
_UNFINISHED = f"state NOT IN {FINISHED}"


def _columns(row: type[Any]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(row))


_TRAINER = _columns(TrainerRow)[1:]
_TRAINER_SQL = f"SELECT number, {', '.join(_TRAINER)} FROM trainers"  # noqa: S608 - names from this program
_BRIEF_SQL = _TRAINER_SQL.replace(" learned,", " '{}',").replace(" extremes,", " '{}',")
_JSON = ("metrics", "metrics_at", "extremes", "learned")
_TRAINER_JSON = tuple(_TRAINER.index(name) + 1 for name in _JSON)
_TRAINER_SPEC = _TRAINER.index("spec") + 1
_WORKER_SQL = f"SELECT {', '.join(_columns(WorkerRow))} FROM workers"  # noqa: S608
_NODE = _columns(NodeRow)
_NODE_SQL = f"SELECT {', '.join(_NODE)} FROM nodes"  # noqa: S608
_OWNER = _columns(OwnerRow)
_OWNER_SQL = f"SELECT {', '.join(_OWNER)} FROM owners ORDER BY owner"  # noqa: S608


class Store:
    """Reads and writes the controller's database. A change outside of a `transaction` is one of its own."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self.event_log = EventLog(database)
        self.tokens = TokenTable(database)
        self.environments = EnvironmentFiles(database.path.parent / FOLDER)
        self.totals = TrainerTotals(database)
        self.preloads = PreloadTable(database)
        self.beliefs = BeliefTable(database)

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> Store:
        """Open the file at `path`; unless it is only read, create it or migrate it to the newest version first."""
        return cls(Database.open(path, read_only=read_only))

    @classmethod
    def copy(cls, path: Path, copy: Path) -> None:
        """Copy the file at `path`, of any version of BFTrainer; see `backup`."""
        with cls(Database.open(path, read_only=True, any_version=True)) as store:
            store.backup(copy)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._db.path

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Run a block as one transaction, committed completely or not at all; see `Database.transaction`."""
        return self._db.transaction()

    def problems(self) -> list[str]:
        """Return the problems that SQLite finds in the file."""
        return self._db.problems()

    def backup(self, path: Path) -> None:
        """Write a copy as one plain file, completely or not at all. It blocks; a second process may do it meanwhile."""
        self._db.copy_to(path)

    def make_shrinkable(self, most_bytes: int | None = None) -> str:
        """Rewrite a file of an older version, once, so that it can shrink. No controller may be using it.

        Returns why it was not done, or an empty text. A file of more than `most_bytes` stays as it is.
        """
        if self._db.shrinkable:
            return ""
        size = sum(self._db.size())
        if most_bytes is not None and size > most_bytes:
            return f"it has {size_as_text(size)}, which takes long to rewrite"
        if shutil.disk_usage(self.path.parent).free < 2 * size:
            return f"the disk has no room for a copy of {size_as_text(size)}"
        try:
            self._db.rewrite()
        except BFTrainerError as problem:
            return str(problem)
        return ""

    def leave_checkpoints(self) -> None:
        """Let another thread write committed changes to the file; see `database.checkpoint`."""
        self._db.leave_checkpoints()

    def size(self) -> tuple[int, int]:
        """Return the bytes of the file that hold data, and the bytes in it that are free."""
        return self._db.size()

    # Events.

    def log(self, time: float, event: LogEvent) -> int:
        """Add an event and return its number."""
        return self.event_log.log(time, event)

    def events(
        self, *, after: int | None = None, limit: int = 100, trainer: str = "", kind: str = ""
    ) -> list[EventRow]:
        """Return events in order: those after number `after`, or the newest; at most `limit`."""
        return self.event_log.events(after, limit, trainer, kind)

    def all_events(self, kinds: Collection[str] = ()) -> Iterator[EventRow]:
        """Yield every event up to now, in order, or those of some kinds. Only one page is held in memory."""
        return self.event_log.all_events(kinds)

    def event_span(self) -> EventSpan:
        """Return the range of the events."""
        return self.event_log.span()

    def trim_events(self, keep_newest: int) -> int:
        """Drop all but the newest events, at once, and return how many were dropped."""
        return self.event_log.trim_to(keep_newest)

    # Trainers.

    def add_trainer(
        self, *, name: str, owner: str, spec: Mapping[str, Any], time: float, staged: Path | None = None
    ) -> TrainerRow:
        """Add a trainer to the queue. The values of its environment go to a file, unless they are `staged` already."""
        spec, staged = self.environments.split(spec, staged)
        with self.transaction():
            known = (text(owner), text(name))
            if found := self._db.row(f"{_TRAINER_SQL} WHERE owner = ? AND name = ? AND {_UNFINISHED}", known):
                raise InputError(f"the name {name!r} is taken by trainer t{found[0]}, which is not finished yet")
            done = self._db.run(
                "INSERT INTO trainers (name, owner, spec, submitted) VALUES (?, ?, ?, ?)",
                (text(name), text(owner), encoded(spec), time),
            )
            (row,) = self._db.rows(f"{_TRAINER_SQL} WHERE number = ?", (done.lastrowid,))
            self.environments.adopt(staged, f"t{row[0]}")
        return _trainer(row)

    def number_after(self, number: int) -> None:
        """Give no trainer a number up to this one: a database restored from a copy has forgotten later numbers."""
        with self.transaction():
            if self._db.row("SELECT 1 FROM sqlite_sequence WHERE name = 'trainers'") is None:
                self._db.run("INSERT INTO sqlite_sequence (name, seq) VALUES ('trainers', 0)")
            self._db.run("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'trainers'", (plain(number),))

    def update_trainer(self, id: str, **columns: Any) -> None:  # noqa: A002 - the name used everywhere
        """Change columns of a trainer."""
        if columns.get("state", "queued") not in STATES:
            raise BFTrainerError(
                f"trainer {id}: state must be one of {', '.join(STATES)}, but got {columns['state']!r}"
            )
        for name in ("spec", *_JSON):
            if name in columns:
                columns[name] = encoded(columns[name])
        self._update("trainers", _TRAINER, "number", _number(id), columns, f"trainer {id}")

    def trainer(self, ref: str, owner: str | None = None) -> TrainerRow | None:
        """Return the trainer with that id, or the newest with that name; with an `owner`, among that owner's."""
        row = None
        mine, whose = ("", ()) if owner is None else ("AND owner = ?", (text(owner),))
        if ID.fullmatch(ref):
            row = self._db.row(f"{_TRAINER_SQL} WHERE number = ? {mine}", (_number(ref), *whose))
        if row is None:
            sql = f"{_TRAINER_SQL} WHERE name = ? {mine} ORDER BY number DESC LIMIT 1"
            row = self._db.row(sql, (text(ref), *whose))
        return None if row is None else _trainer(row)

    def trainers(
        self,
        *,
        unfinished: bool = False,
        ended_after: float | None = None,
        brief: bool = False,
        owner: str | None = None,
    ) -> list[TrainerRow]:
        """Return trainers in order of submission: all, the unfinished, or these and those ended after a time.

        `brief`: without the learned and the extreme values, which are most of the data. `owner`: only that owner's.
        """
        where, values = list[str](), list[Any]()
        if ended_after is not None:
            where.append("(ended IS NULL OR ended > ?)")
            values.append(ended_after)
        elif unfinished:
            where.append(f"({_UNFINISHED})")
        if owner is not None:
            where.append("owner = ?")
            values.append(text(owner))
        start = _BRIEF_SQL if brief else _TRAINER_SQL
        sql = f"{start} {'WHERE ' + ' AND '.join(where) if where else ''} ORDER BY number"
        return [_trainer(row) for row in self._db.rows(sql, tuple(values))]

    # Values that trainers reported over time; see `MetricHistory`.

    def add_point(
        self, trainer: str, time: float, samples: int, metrics: Mapping[str, float], at: Mapping[str, Any]
    ) -> None:
        """Store what a trainer reported at a time."""
        sql = "INSERT OR REPLACE INTO points (trainer, time, samples, metrics, metrics_at) VALUES (?, ?, ?, ?, ?)"
        self._db.run(sql, (_number(trainer), time, plain(samples), encoded(metrics), encoded(at)))

    def point_span(self, trainer: str) -> tuple[int, float, float]:
        """Return the number of points, and the times of the first and the last."""
        sql = "SELECT count(*), ifnull(min(time), 0.0), ifnull(max(time), 0.0) FROM points WHERE trainer = ?"
        ((count, first, last),) = self._db.rows(sql, (_number(trainer),))
        return count, first, last

    def thin_points(self, trainer: str) -> int:
        """Drop every second point and return how many are left."""
        self._db.run(
            "DELETE FROM points WHERE trainer = ?1 AND time IN (SELECT time FROM (SELECT time, row_number() "
            "OVER (ORDER BY time) AS place FROM points WHERE trainer = ?1) WHERE place % 2 = 0)",
            (_number(trainer),),
        )
        return self.point_span(trainer)[0]

    def points(self, trainer: str) -> list[tuple[float, int]]:
        """Return the samples that a trainer had made at some times, in order."""
        sql = "SELECT time, samples FROM points WHERE trainer = ? ORDER BY time"
        return [(time, samples) for time, samples in self._db.rows(sql, (_number(trainer),))]

    def reports(self, trainer: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the metrics that a trainer had reported at some times, and their positions, in order."""
        sql = "SELECT metrics, metrics_at FROM points WHERE trainer = ? ORDER BY time"
        return ((decoded(metrics), decoded(at)) for metrics, at in self._db.rows(sql, (_number(trainer),)))

    def trimmer(self, limits: DatabaseLimits) -> Trimmer:
        """Return the object that keeps this database within limits."""
        return Trimmer(self._db, self.event_log, self.totals, limits)

    # Workers and nodes.

    def put_worker(self, worker: str, *, trainer: str, node: str, agent: str, started: float) -> None:
        """Add a worker that is started. Its id must be new; its trainer and its node must be known."""
        self._db.run(
            "INSERT INTO workers (worker, trainer, node, agent, started) VALUES (?, ?, ?, ?, ?)",
            (text(worker), _number(trainer), text(node), text(agent), started),
        )

    def end_worker(self, worker: str, *, ended: float, status: int | None, outcome: str) -> None:
        """Record the end of a worker. The first record stays."""
        self._db.run(
            "UPDATE workers SET ended = ?, status = ?, outcome = ? WHERE worker = ? AND ended IS NULL",
            (ended, status, text(outcome), text(worker)),
        )

    def workers(self, *, running: bool = False, trainer: str = "", worker: str = "") -> list[WorkerRow]:
        """Return workers in the order in which they were started: all, or those that fit."""
        where = ["ended IS NULL"] if running else []
        where += ["trainer = ?"] if trainer else []
        where += ["worker = ?"] if worker else []
        values = (*((_number(trainer),) if trainer else ()), *((text(worker),) if worker else ()))
        sql = f"{_WORKER_SQL} {'WHERE ' + ' AND '.join(where) if where else ''} ORDER BY rowid"
        rows = self._db.rows(sql, values)
        return [WorkerRow(row[0], f"t{row[1]}", *row[2:]) for row in rows]

    def put_node(
        self,
        node: str,
        *,
        host: str,
        agent: str,
        pid: int,
        joined: float,
        gpus: int = 0,
        slots: int = 0,
        owner: str = "",
    ) -> None:
        """Add a node that has joined, for the first time or again."""
        self._db.run(
            "INSERT INTO nodes (node, host, agent, pid, joined, gpus, slots, owner) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (node) DO UPDATE SET host = excluded.host, "
            "agent = excluded.agent, pid = excluded.pid, joined = excluded.joined, gpus = excluded.gpus, "
            "slots = excluded.slots, owner = excluded.owner, left = NULL, leaving = NULL",
            (text(node), text(host), text(agent), pid, joined, gpus, slots, text(owner)),
        )

    def update_node(self, node: str, **columns: Any) -> None:
        """Change columns of a node: `left` when it has gone, `leaving` when it will go."""
        self._update("nodes", _NODE[1:], "node", text(node), columns, f"node {node}")

    def nodes(self, *, here: bool = True) -> list[NodeRow]:
        """Return the nodes in the pool by name; with `here=False`, also those that have left."""
        return [
            NodeRow(*row) for row in self._db.rows(f"{_NODE_SQL} {'WHERE left IS NULL' if here else ''} ORDER BY node")
        ]

    # Owners.

    def put_owner(self, row: OwnerRow) -> None:
        """Set the limits of an owner, in place of earlier ones."""
        self._db.run(
            f"INSERT OR REPLACE INTO owners ({', '.join(_OWNER)}) VALUES ({', '.join('?' * len(_OWNER))})",  # noqa: S608
            (text(row.owner), *(plain(getattr(row, name)) for name in _OWNER[1:])),
        )

    def remove_owner(self, owner: str) -> bool:
        """Remove the limits of an owner; False if there are none."""
        return self._db.run("DELETE FROM owners WHERE owner = ?", (text(owner),)).rowcount > 0

    def owners(self) -> list[OwnerRow]:
        """Return the owners that have limits set, by name."""
        return [OwnerRow(*row) for row in self._db.rows(_OWNER_SQL)]

    # Values by key.

    def keep(self, key: str, value: Any) -> None:
        """Store a JSON value by key."""
        self._db.run(
            "INSERT INTO kept (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (text(key), encoded(value)),
        )

    def kept(self, key: str, default: Any = None) -> Any:
        """Return the value of a key."""
        row = self._db.row("SELECT value FROM kept WHERE key = ?", (text(key),))
        return default if row is None else decoded(row[0])

    def kept_keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a text."""
        return [row[0] for row in self._db.rows("SELECT key FROM kept WHERE key GLOB ?", (f"{prefix}*",))]

    def forget(self, key: str) -> None:
        """Remove the value of a key."""
        self._db.run("DELETE FROM kept WHERE key = ?", (text(key),))

    def _update(
        self, table: str, known: Sequence[str], key: str, at: Any, columns: Mapping[str, Any], what: str
    ) -> None:
        if unknown := [name for name in columns if name not in known]:
            raise TypeError(f"{table} have no column {', '.join(unknown)}")
        if not columns:
            return
        values = [plain(value) for value in columns.values()]
        changes = ", ".join(f"{name} = ?" for name in columns)
        if not self._db.run(f"UPDATE {table} SET {changes} WHERE {key} = ?", (*values, at)).rowcount:  # noqa: S608
            raise BFTrainerError(f"{self.path}: there is no {what}")


def _trainer(row: tuple[Any, ...]) -> TrainerRow:
    values = list(row)
    values[_TRAINER_SPEC] = _spec(values[_TRAINER_SPEC])
    for at in _TRAINER_JSON:
        values[at] = decoded_object(values[at]) if values[at] != "{}" else {}
    return TrainerRow(f"t{row[0]}", *values[1:])


@functools.lru_cache(4096)
def _spec(stored: str) -> Mapping[str, Any]:
    """Return a stored spec. Cached: a spec never changes, and the API reads every spec several times a second."""
    return decoded_object(stored)


def _number(trainer: str) -> int:
    found = ID.fullmatch(trainer)
    if found is None:
        raise BFTrainerError(f"a trainer's id must be `t` and a number, but got {trainer!r}")
    return int(found[1])
