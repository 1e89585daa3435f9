"""The controller's memory: trainers, workers, nodes, tokens and the log of all that happened, in one SQLite file.

The controller calls it from the thread of its event loop, with one `transaction` for each thing that happens, so that
the current state and the event log change together and a kill at any instant leaves them in agreement. `bftrainer
doctor` reads it beside a running controller.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bftrainer.cluster.columns import decoded, decoded_object, encoded, plain, text
from bftrainer.cluster.database import Database
from bftrainer.cluster.schema import (
    FINISHED,
    REFUSE_DELETE,
    REFUSE_UPDATE,
    ROLES,
    STATES,
    EventRow,
    EventSpan,
    NodeRow,
    TokenRow,
    TrainerRow,
    WorkerRow,
)
from bftrainer.errors import BFTrainerError, InputError

FILE = "bftrainer.db"
"""The name of the file in the state folder."""

LEAST_TOKEN = 32
"""Characters. Shorter ones could be guessed."""

USED_EVERY_S = 60.0
"""How often it is noted that a token is in use: to write at every request would cost more than the request."""

_TRIMMED = "store.events_trimmed"
_PAGE = 1000
_ID = re.compile(r"t([1-9][0-9]{0,17})")
_UNFINISHED = f"state NOT IN {FINISHED}"


def _columns(row: type[Any]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(row))


_TRAINER = _columns(TrainerRow)[1:]
_TRAINER_SQL = f"SELECT number, {', '.join(_TRAINER)} FROM trainers"  # noqa: S608 - names from this program
_BRIEF_SQL = _TRAINER_SQL.replace(" learned,", " '{}',")
_TRAINER_JSON = tuple(_TRAINER.index(name) + 1 for name in ("metrics", "learned"))
_TRAINER_SPEC = _TRAINER.index("spec") + 1
_WORKER_SQL = f"SELECT {', '.join(_columns(WorkerRow))} FROM workers"  # noqa: S608
_NODE = _columns(NodeRow)
_NODE_SQL = f"SELECT {', '.join(_NODE)} FROM nodes"  # noqa: S608
_EVENT_SQL = f"SELECT {', '.join(_columns(EventRow))} FROM events"  # noqa: S608
_TOKEN_SQL = f"SELECT {', '.join(_columns(TokenRow))} FROM tokens"  # noqa: S608


class Store:
    """See the module. Every change outside of a `transaction` is one of its own."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> Store:
        """Open the file at `path`; unless it is only read, make it or bring it to the newest version first."""
        return cls(Database.open(path, read_only=read_only))

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self._db.path

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def transaction(self) -> AbstractContextManager[None]:
        """What is done within is done together or not at all; see `Database.transaction`."""
        return self._db.transaction()

    def problems(self) -> list[str]:
        """What SQLite itself finds wrong with the file."""
        return self._db.problems()

    def backup(self, path: Path) -> None:
        """Write a copy, one plain file, whole or not at all. It blocks; a second process may do it meanwhile."""
        self._db.copy_to(path)

    # Events.

    def log(
        self, time: float, kind: str, *, trainer: str = "", node: str = "", data: Mapping[str, Any] | None = None
    ) -> int:
        """Add an event; its number."""
        done = self._db.run(
            "INSERT INTO events (time, kind, trainer, node, data) VALUES (?, ?, ?, ?, ?)",
            (time, text(kind), text(trainer), text(node), encoded(data or {})),
        )
        return int(done.lastrowid or 0)

    def events(
        self, *, after: int | None = None, limit: int = 100, trainer: str = "", kind: str = ""
    ) -> list[EventRow]:
        """Events in order: those after number `after`, or the newest; at most `limit`."""
        wanted: list[tuple[str, Any]] = [("trainer = ?", text(trainer))] if trainer else []
        wanted += [("kind = ?", text(kind))] if kind else []
        wanted += [("seq > ?", plain(after))] if after is not None else []
        where = f"WHERE {' AND '.join(sql for sql, _ in wanted)}" if wanted else ""
        order = "DESC" if after is None else "ASC"
        rows = self._db.rows(
            f"{_EVENT_SQL} {where} ORDER BY seq {order} LIMIT ?",
            (*(value for _, value in wanted), plain(max(0, limit))),
        )
        return [_event(row) for row in (reversed(rows) if after is None else rows)]

    def all_events(self, kinds: Collection[str] = ()) -> Iterator[EventRow]:
        """Every event up to now, in order, or those of some kinds. However many there are, few are held in memory."""
        # The `+` keeps SQLite from going by kind and sorting all of them for every page.
        among = f"AND +kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
        sql = f"{_EVENT_SQL} WHERE seq > ? AND seq <= ? {among} ORDER BY seq LIMIT {_PAGE}"
        at, last = 0, self.event_span().last
        while rows := self._db.rows(sql, (at, last, *kinds)):
            at = rows[-1][0]
            for row in rows:
                yield _event(row)

    def event_span(self) -> EventSpan:
        """Which events there are."""
        ((first, last, count),) = self._db.rows("SELECT min(seq), max(seq), count(*) FROM events")
        ever = self._db.row("SELECT seq FROM sqlite_sequence WHERE name = 'events'")
        return EventSpan(first or 0, last or 0, count, ever[0] if ever else 0, int(self.kept(_TRIMMED, 0)))

    def trim_events(self, keep_newest: int) -> int:
        """Drop all but the newest events; how many went. The one exception to a log that is only added to."""
        if keep_newest < 0:
            raise InputError(f"`keep_newest` must be 0 or more, but got {keep_newest}")
        with self.transaction():
            ((first, last),) = self._db.rows("SELECT min(seq), max(seq) FROM events")
            if first is None or first > last - keep_newest:
                return 0
            self._db.run("DROP TRIGGER events_refuse_delete")
            self._db.run("DROP TRIGGER events_refuse_update")
            gone = self._db.run("DELETE FROM events WHERE seq <= ?", (last - keep_newest,)).rowcount
            self._db.run(REFUSE_UPDATE)
            self._db.run(REFUSE_DELETE)
            self.keep(_TRIMMED, last - keep_newest)
        return gone

    # Trainers.

    def add_trainer(self, *, name: str, owner: str, spec: Mapping[str, Any], time: float) -> TrainerRow:
        """Put a trainer into the queue."""
        with self.transaction():
            if found := self._db.row(f"{_TRAINER_SQL} WHERE name = ? AND {_UNFINISHED}", (text(name),)):
                raise InputError(f"the name {name!r} is taken by trainer t{found[0]}, which is not finished yet")
            done = self._db.run(
                "INSERT INTO trainers (name, owner, spec, submitted) VALUES (?, ?, ?, ?)",
                (text(name), text(owner), encoded(spec), time),
            )
            (row,) = self._db.rows(f"{_TRAINER_SQL} WHERE number = ?", (done.lastrowid,))
        return _trainer(row)

    def update_trainer(self, id: str, **columns: Any) -> None:  # noqa: A002 - what it is called everywhere
        """Change what is known of a trainer."""
        if columns.get("state", "queued") not in STATES:
            raise BFTrainerError(
                f"trainer {id}: state must be one of {', '.join(STATES)}, but got {columns['state']!r}"
            )
        for name in ("spec", "metrics", "learned"):
            if name in columns:
                columns[name] = encoded(columns[name])
        self._update("trainers", _TRAINER, "number", _number(id), columns, f"trainer {id}")

    def trainer(self, ref: str) -> TrainerRow | None:
        """The trainer with that id, or the newest with that name."""
        row = None
        if _ID.fullmatch(ref):
            row = self._db.row(f"{_TRAINER_SQL} WHERE number = ?", (_number(ref),))
        if row is None:
            sql = f"{_TRAINER_SQL} WHERE name = ? ORDER BY number DESC LIMIT 1"
            row = self._db.row(sql, (text(ref),))
        return None if row is None else _trainer(row)

    def trainers(
        self, *, unfinished: bool = False, ended_after: float | None = None, brief: bool = False
    ) -> list[TrainerRow]:
        """Trainers in order of submission: all, the unfinished, or the unfinished and those that ended after a time.

        `brief`: without what was learned of them, which is most of what there is to read.
        """
        sql = _BRIEF_SQL if brief else _TRAINER_SQL
        if ended_after is not None:
            found = self._db.rows(f"{sql} WHERE {_UNFINISHED} OR ended > ? ORDER BY number", (ended_after,))
        else:
            found = self._db.rows(f"{sql} {f'WHERE {_UNFINISHED}' if unfinished else ''} ORDER BY number")
        return [_trainer(row) for row in found]

    # Workers and nodes.

    def put_worker(self, worker: str, *, trainer: str, node: str, agent: str, started: float) -> None:
        """A worker is started. Its id must be new, its trainer and its node known."""
        self._db.run(
            "INSERT INTO workers (worker, trainer, node, agent, started) VALUES (?, ?, ?, ?, ?)",
            (text(worker), _number(trainer), text(node), text(agent), started),
        )

    def end_worker(self, worker: str, *, ended: float, status: int | None, outcome: str) -> None:
        """A worker has ended. What was said of its end first stays."""
        self._db.run(
            "UPDATE workers SET ended = ?, status = ?, outcome = ? WHERE worker = ? AND ended IS NULL",
            (ended, status, text(outcome), text(worker)),
        )

    def workers(self, *, running: bool = False, trainer: str = "") -> list[WorkerRow]:
        """Workers in the order they were started."""
        where = ["ended IS NULL"] if running else []
        where += ["trainer = ?"] if trainer else []
        sql = f"{_WORKER_SQL} {'WHERE ' + ' AND '.join(where) if where else ''} ORDER BY rowid"
        rows = self._db.rows(sql, (_number(trainer),) if trainer else ())
        return [WorkerRow(row[0], f"t{row[1]}", *row[2:]) for row in rows]

    def put_node(self, node: str, *, host: str, agent: str, pid: int, joined: float) -> None:
        """A node is here, for the first time or again."""
        self._db.run(
            "INSERT INTO nodes (node, host, agent, pid, joined) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (node) DO UPDATE SET host = excluded.host, "
            "agent = excluded.agent, pid = excluded.pid, joined = excluded.joined, "
            "left = NULL, leaving = NULL",
            (text(node), text(host), text(agent), pid, joined),
        )

    def update_node(self, node: str, **columns: Any) -> None:
        """Change what is known of a node: `left` when it has gone, `leaving` when it will."""
        self._update("nodes", _NODE[1:], "node", text(node), columns, f"node {node}")

    def nodes(self, *, here: bool = True) -> list[NodeRow]:
        """The nodes that are here by name; with `here=False` those that are gone too."""
        return [
            NodeRow(*row) for row in self._db.rows(f"{_NODE_SQL} {'WHERE left IS NULL' if here else ''} ORDER BY node")
        ]

    # Values by key.

    def keep(self, key: str, value: Any) -> None:
        """Remember a JSON value."""
        self._db.run(
            "INSERT INTO kept (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (text(key), encoded(value)),
        )

    def kept(self, key: str, default: Any = None) -> Any:
        """What was remembered."""
        row = self._db.row("SELECT value FROM kept WHERE key = ?", (text(key),))
        return default if row is None else decoded(row[0])

    # Tokens. Only hashes are stored. A salt and a slow hash protect passwords, which people choose from few; a token
    # is 256 random bits, so that there is no table of likely ones to try.

    def create_token(self, *, name: str, owner: str, role: str, time: float) -> str:
        """Make a token. It can be read this once."""
        token = f"bft_{secrets.token_urlsafe(32)}"
        with self.transaction():
            if self._db.row("SELECT 1 FROM tokens WHERE name = ? AND revoked IS NULL", (text(name),)):
                raise InputError(f"there is a token named {name!r} already; revoke it first, or choose another name")
            self._insert_token(token, name, owner, role, time)
        return token

    def adopt_token(self, token: str, *, name: str, owner: str, role: str, time: float) -> bool:
        """Make a given token valid, in place of an older one of that name; False if it was revoked once."""
        if len(token) < LEAST_TOKEN:
            raise InputError(f"a token must have {LEAST_TOKEN} characters or more, but got {len(token)}")
        with self.transaction():
            known = self._db.row("SELECT revoked FROM tokens WHERE hash = ?", (_hash(token),))
            if known:
                return known[0] is None
            self._db.run("UPDATE tokens SET revoked = ? WHERE name = ? AND revoked IS NULL", (time, text(name)))
            self._insert_token(token, name, owner, role, time)
        return True

    def check_token(self, token: str, time: float | None = None) -> TokenRow | None:
        """Whose token this is; None if it is unknown or revoked. With a `time` its use is noted now and then.

        It is found by its hash: how long that takes says nothing about a token that could be found out bit by bit.
        """
        row = self._db.row(f"{_TOKEN_SQL} WHERE hash = ? AND revoked IS NULL", (_hash(token),))
        if row is None:
            return None
        found = TokenRow(*row)
        if time is not None and (found.last_used is None or time - found.last_used >= USED_EVERY_S):
            self._db.run("UPDATE tokens SET last_used = ? WHERE id = ?", (time, found.id))
        return found

    def tokens(self) -> list[TokenRow]:
        """All tokens, revoked ones too, oldest first."""
        return [TokenRow(*row) for row in self._db.rows(f"{_TOKEN_SQL} ORDER BY id")]

    def revoke_token(self, name_or_id: str, time: float) -> bool:
        """Make a token invalid, found by its name or else by its id; False if no valid one is called so."""
        sql = "UPDATE tokens SET revoked = ? WHERE revoked IS NULL AND"
        if self._db.run(f"{sql} name = ?", (time, text(name_or_id))).rowcount:
            return True
        number = int(name_or_id) if re.fullmatch(r"[0-9]{1,18}", name_or_id) else 0
        return self._db.run(f"{sql} id = ?", (time, number)).rowcount > 0

    def _insert_token(self, token: str, name: str, owner: str, role: str, time: float) -> None:
        if role not in ROLES:
            raise InputError(f"role must be one of {', '.join(ROLES)}, but got {role!r}")
        self._db.run(
            "INSERT INTO tokens (name, owner, role, hash, created) VALUES (?, ?, ?, ?, ?)",
            (text(name), text(owner), role, _hash(token), time),
        )

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
    """A spec never changes, and the API asks for that of every trainer several times a second."""
    return decoded_object(stored)


def _event(row: tuple[Any, ...]) -> EventRow:
    seq, time, kind, trainer, node, data = row
    return EventRow(seq, time, kind, trainer, node, decoded_object(data))


def _number(trainer: str) -> int:
    found = _ID.fullmatch(trainer)
    if found is None:
        raise BFTrainerError(f"a trainer's id must be `t` and a number, but got {trainer!r}")
    return int(found[1])


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()
