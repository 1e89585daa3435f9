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

from bftrainer.cluster import logs
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
    OwnerRow,
    Sums,
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
ID = _ID = re.compile(r"t([1-9][0-9]{0,17})")
_UNFINISHED = f"state NOT IN {FINISHED}"


def _columns(row: type[Any]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(row))


_TRAINER = _columns(TrainerRow)[1:]
_TRAINER_SQL = f"SELECT number, {', '.join(_TRAINER)} FROM trainers"  # noqa: S608 - names from this program
_BRIEF_SQL = _TRAINER_SQL.replace(" learned,", " '{}',")
_TRAINER_JSON = tuple(_TRAINER.index(name) + 1 for name in ("metrics", "metrics_at", "learned"))
_TRAINER_SPEC = _TRAINER.index("spec") + 1
_WORKER_SQL = f"SELECT {', '.join(_columns(WorkerRow))} FROM workers"  # noqa: S608
_NODE = _columns(NodeRow)
_NODE_SQL = f"SELECT {', '.join(_NODE)} FROM nodes"  # noqa: S608
_EVENT_SQL = f"SELECT {', '.join(_columns(EventRow))} FROM events"  # noqa: S608
_USE_SQL = (
    # total(), not sum(): what workers claim may be absurd, and must not be an error for everybody.
    "SELECT owner, count(*), total(node_seconds), CAST(total(samples) AS INTEGER) FROM trainers "  # noqa: S608
    f"WHERE NOT ({_UNFINISHED})"
)
_OWNER = _columns(OwnerRow)
_OWNER_SQL = f"SELECT {', '.join(_OWNER)} FROM owners ORDER BY owner"  # noqa: S608
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
        logs.event(kind, trainer, node, data)
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
            known = (text(owner), text(name))
            if found := self._db.row(f"{_TRAINER_SQL} WHERE owner = ? AND name = ? AND {_UNFINISHED}", known):
                raise InputError(f"the name {name!r} is taken by trainer t{found[0]}, which is not finished yet")
            done = self._db.run(
                "INSERT INTO trainers (name, owner, spec, submitted) VALUES (?, ?, ?, ?)",
                (text(name), text(owner), encoded(spec), time),
            )
            (row,) = self._db.rows(f"{_TRAINER_SQL} WHERE number = ?", (done.lastrowid,))
        return _trainer(row)

    def number_after(self, number: int) -> None:
        """Give no trainer a number up to this one: a database put back from a copy has forgotten those it gave."""
        with self.transaction():
            if self._db.row("SELECT 1 FROM sqlite_sequence WHERE name = 'trainers'") is None:
                self._db.run("INSERT INTO sqlite_sequence (name, seq) VALUES ('trainers', 0)")
            self._db.run("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'trainers'", (plain(number),))

    def update_trainer(self, id: str, **columns: Any) -> None:  # noqa: A002 - what it is called everywhere
        """Change what is known of a trainer."""
        if columns.get("state", "queued") not in STATES:
            raise BFTrainerError(
                f"trainer {id}: state must be one of {', '.join(STATES)}, but got {columns['state']!r}"
            )
        for name in ("spec", "metrics", "metrics_at", "learned"):
            if name in columns:
                columns[name] = encoded(columns[name])
        self._update("trainers", _TRAINER, "number", _number(id), columns, f"trainer {id}")

    def trainer(self, ref: str, owner: str | None = None) -> TrainerRow | None:
        """The trainer with that id, or the newest with that name; with an `owner`, of theirs."""
        row = None
        mine, whose = ("", ()) if owner is None else ("AND owner = ?", (text(owner),))
        if _ID.fullmatch(ref):
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
        """Trainers in order of submission: all, the unfinished, or the unfinished and those that ended after a time.

        `brief`: without what was learned of them, which is most of what there is to read. `owner`: theirs alone.
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
        only = f"WHERE {' AND '.join(where)}" if where else ""
        sql = f"{_BRIEF_SQL if brief else _TRAINER_SQL} {only} ORDER BY number"
        return [_trainer(row) for row in self._db.rows(sql, tuple(values))]

    # What trainers reported over time; see `points.py`.

    def add_point(
        self, trainer: str, time: float, samples: int, metrics: Mapping[str, float], at: Mapping[str, Any]
    ) -> None:
        """Keep what a trainer reported at a time."""
        sql = "INSERT OR REPLACE INTO points (trainer, time, samples, metrics, metrics_at) VALUES (?, ?, ?, ?, ?)"
        self._db.run(sql, (_number(trainer), time, plain(samples), encoded(metrics), encoded(at)))

    def point_span(self, trainer: str) -> tuple[int, float, float]:
        """How many points there are, and the times of the first and the last."""
        sql = "SELECT count(*), ifnull(min(time), 0.0), ifnull(max(time), 0.0) FROM points WHERE trainer = ?"
        ((count, first, last),) = self._db.rows(sql, (_number(trainer),))
        return count, first, last

    def thin_points(self, trainer: str) -> int:
        """Drop every second point; how many are left."""
        self._db.run(
            "DELETE FROM points WHERE trainer = ?1 AND time IN (SELECT time FROM (SELECT time, row_number() "
            "OVER (ORDER BY time) AS place FROM points WHERE trainer = ?1) WHERE place % 2 = 0)",
            (_number(trainer),),
        )
        return self.point_span(trainer)[0]

    def points(self, trainer: str) -> list[tuple[float, int]]:
        """How many samples a trainer had made at some times, in order."""
        sql = "SELECT time, samples FROM points WHERE trainer = ? ORDER BY time"
        return [(time, samples) for time, samples in self._db.rows(sql, (_number(trainer),))]

    def sums(self) -> list[Sums]:
        """What trainers made, by owner and state, in order of the owners' first trainers."""
        rows = self._db.rows(
            "SELECT owner, state, count(*), CAST(total(samples) AS INTEGER), total(node_seconds), sum(rescales), "
            "sum(preemptions), sum(failures), CAST(total(samples_redone) AS INTEGER) "
            "FROM trainers GROUP BY owner, state ORDER BY min(number)"
        )
        return [Sums(*row) for row in rows]

    def ended_sums(self, after: float, upto: float) -> list[tuple[str, int, float, int]]:
        """Samples, node-seconds and rescales of the trainers that ended after a time and up to another, by owner."""
        return self._db.rows(
            "SELECT owner, CAST(total(samples) AS INTEGER), total(node_seconds), sum(rescales) FROM trainers "
            "WHERE ended > ? AND ended <= ? GROUP BY owner",
            (after, upto),
        )

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

    # Owners.

    def put_owner(self, row: OwnerRow) -> None:
        """Say what an owner may have, in the place of what was said before."""
        self._db.run(
            f"INSERT OR REPLACE INTO owners ({', '.join(_OWNER)}) VALUES ({', '.join('?' * len(_OWNER))})",  # noqa: S608
            (text(row.owner), *(plain(getattr(row, name)) for name in _OWNER[1:])),
        )

    def remove_owner(self, owner: str) -> bool:
        """An owner may have as much as anybody; False if nothing was said of them."""
        return self._db.run("DELETE FROM owners WHERE owner = ?", (text(owner),)).rowcount > 0

    def owners(self) -> list[OwnerRow]:
        """Those of whom something was said, by name."""
        return [OwnerRow(*row) for row in self._db.rows(_OWNER_SQL)]

    def past_use(self, owner: str | None = None) -> dict[str, tuple[int, float, int]]:
        """By owner, or of one: of their trainers that are finished, how many, node-seconds, samples."""
        only = "" if owner is None else "AND owner = ?"
        rows = self._db.rows(f"{_USE_SQL} {only} GROUP BY owner", () if owner is None else (text(owner),))
        return {owner: (count, seconds, samples) for owner, count, seconds, samples in rows}

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
