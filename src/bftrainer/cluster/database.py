"""One SQLite file, opened as the controller needs it: write-ahead log, newest schema, transactions that nest.

`store.py` speaks SQL through it; `history_rows.py`, `decisions.py` and `losses.py` read for the dashboard, and nobody
else does. What can go wrong with a file (a full disk, a file that is no database, one from a newer version) comes out
as one line that says what to do.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from bftrainer.cluster import schema
from bftrainer.errors import BFTrainerError, InputError

BUSY_S = 5.0
"""How long to wait for another process that is writing, such as `bftrainer token`."""


class DiskFullError(BFTrainerError):
    """There is no room left for the database."""


class Database:
    """A connection, for the thread that opened it.

    A commit outlives the death of this process at any instant. The newest ones may be lost when the whole machine loses
    power, but never in part.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, read_only: bool) -> None:
        self.path = path
        self.connection = connection
        self.read_only = read_only
        self._depth = 0

    @classmethod
    def open(cls, path: Path, *, read_only: bool) -> Database:
        """Open a file, and make it or bring it to the newest version unless it is only to be read."""
        try:
            if read_only and not path.is_file():
                raise InputError(
                    f"{path}: there is no database here; start `bftrainer serve`, or name the state folder with --state"
                )
            if not read_only:
                _make(path)
            mode = "ro" if read_only else "rw"
            connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}",
                uri=True,
                timeout=BUSY_S,
                isolation_level=None,  # no transaction but those that are asked for
                cached_statements=512,
            )
        except sqlite3.Error as problem:
            raise _explained(path, problem) from None
        except OSError as problem:
            raise _explained_os(path, problem) from None
        database = cls(path, connection, read_only)
        try:
            database._prepare()
        except BaseException:
            connection.close()
            raise
        return database

    def close(self) -> None:
        """Close the file; what is not committed is taken back."""
        with suppress(sqlite3.Error):
            self.connection.close()

    def run(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement that changes something: in the transaction that is open, or as one of its own."""
        return self._run(sql, values)[0]

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        return self._run(sql, values)[1]

    def row(self, sql: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """The first row of a query, if there is one."""
        rows = self._run(sql, values)[1]
        return rows[0] if rows else None

    def _run(self, sql: str, values: Sequence[Any]) -> tuple[sqlite3.Cursor, list[tuple[Any, ...]]]:
        if self._depth and not self.connection.in_transaction:
            raise BFTrainerError(f"{self.path}: an error has taken this transaction back; begin another one")
        try:
            cursor = self.connection.execute(sql, values)
            return cursor, cursor.fetchall()  # here, because a damaged page shows only when it is read
        except sqlite3.Error as problem:
            raise _explained(self.path, problem) from None
        except OverflowError:
            raise BFTrainerError(f"{self.path}: whole numbers must be below 2**63, but got {values!r:.200}") from None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is done within is done together or not at all. Never await within.

        One inside another is committed with the outer one; when it fails, only its own part is taken back. When the
        file is only read, all that is read within is of one instant.
        """
        inner = f"depth_{self._depth}" if self._depth else ""
        self.run(f"SAVEPOINT {inner}" if inner else "BEGIN" if self.read_only else "BEGIN IMMEDIATE")
        self._depth += 1
        try:
            yield
            self.run(f"RELEASE {inner}" if inner else "COMMIT")
        except BaseException:
            # SQLite takes a transaction back by itself after some errors, a full disk for one.
            if self.connection.in_transaction:
                with suppress(sqlite3.Error):
                    self.connection.execute(f"ROLLBACK TO {inner}" if inner else "ROLLBACK")
                if inner:
                    with suppress(sqlite3.Error):
                        self.connection.execute(f"RELEASE {inner}")
            raise
        finally:
            self._depth -= 1

    def problems(self) -> list[str]:
        """What SQLite itself finds wrong: damaged pages, indices that disagree, references to nothing."""
        lines = [" ".join(str(line).split()) for (line,) in self.rows("PRAGMA integrity_check(20)")]
        found = [line for line in lines if line != "ok"]
        for table, row, other, _ in self.rows("PRAGMA foreign_key_check")[:20]:
            found.append(f"row {row} of {table} refers to a row of {other} that does not exist")
        return found

    def copy_to(self, path: Path) -> None:
        """Write the whole database to another file, at once or not at all."""
        if self._depth:
            raise BFTrainerError(f"{self.path}: a back-up cannot be made within a transaction")
        if path.exists() and path.samefile(self.path):
            raise InputError(f"{path}: a back-up must be another file than the database itself")
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            beside.unlink(missing_ok=True)
            _make(beside)
            with closing(sqlite3.connect(beside)) as copy:
                self.connection.backup(copy)
                # One plain file, which can be read where nothing can be written beside it.
                copy.execute("PRAGMA journal_mode = DELETE")
            _sync(beside)
            beside.replace(path)
            _sync(path.parent)
        except sqlite3.Error as problem:
            raise _explained(path, problem) from None
        except OSError as problem:
            raise _explained_os(path, problem) from None
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)

    def _prepare(self) -> None:
        self.run(f"PRAGMA busy_timeout = {BUSY_S * 1000:.0f}")
        self.run("PRAGMA foreign_keys = ON")
        version = self._version()
        if self.read_only:
            if version < len(schema.MIGRATIONS):
                raise BFTrainerError(
                    f"{self.path}: schema version {version} is older than this BFTrainer's ({len(schema.MIGRATIONS)}); "
                    "`bftrainer serve` brings it up to date"
                )
            return
        ((journal,),) = self.rows("PRAGMA journal_mode = WAL")
        if journal != "wal":
            raise BFTrainerError(
                f"{self.path}: this file system cannot hold the database (journal {journal!r}); "
                "choose a state folder on another one with --state"
            )
        self.run("PRAGMA synchronous = NORMAL")
        while self._migrate():
            pass

    def _migrate(self) -> bool:
        """Go one version up; False when there was no need. It also shows whether the file can be written."""
        with self.transaction():
            version = self._version()
            if version == len(schema.MIGRATIONS):
                return False
            for statement in schema.MIGRATIONS[version]:
                self.run(statement)
            self.run(f"PRAGMA user_version = {version + 1}")
        return True

    def _version(self) -> int:
        """The file's version, once it is clear that it is one of ours."""
        version = int(self.rows("PRAGMA user_version")[0][0])
        ours = self.rows("PRAGMA application_id")[0][0] == schema.APPLICATION_ID
        if not ours and (version or self.row("SELECT 1 FROM sqlite_master LIMIT 1")):
            raise InputError(f"{self.path}: this is a database of another program; choose another --state")
        if version > len(schema.MIGRATIONS):
            raise InputError(
                f"{self.path}: written by a newer BFTrainer (schema version {version}, this one knows "
                f"{len(schema.MIGRATIONS)}); use that version, or another state folder (--state)"
            )
        return version


def _make(path: Path) -> None:
    """Make sure that the file is there; a new one is for its owner alone.

    One that exists is not opened: closing it would drop the locks that SQLite holds on it in this process.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explained(path: Path, problem: sqlite3.Error) -> BFTrainerError:
    code = getattr(problem, "sqlite_errorcode", 0) & 0xFF
    match code:
        case sqlite3.SQLITE_FULL:
            return _full(path)
        case sqlite3.SQLITE_NOTADB:
            return InputError(f"{path}: this is not a database; move the file away, or choose another --state")
        case sqlite3.SQLITE_CORRUPT:
            return BFTrainerError(
                f"{path}: the database is damaged ({problem}); stop the controller and put a back-up in its place"
            )
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return BFTrainerError(
                f"{path}: the database cannot be written ({problem}); make the file and its folder writable"
            )
        case sqlite3.SQLITE_CANTOPEN:
            return BFTrainerError(
                f"{path}: cannot be opened ({problem}); its folder must exist, and both be readable and writable"
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return BFTrainerError(f"{path}: another program holds the database; end it, or choose another --state")
        case sqlite3.SQLITE_IOERR:
            return BFTrainerError(f"{path}: cannot be read or written ({problem}); check the disk and its quota")
        case _:
            return BFTrainerError(f"{path}: {problem}")


def _explained_os(path: Path, problem: OSError) -> BFTrainerError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(path)
    return BFTrainerError(f"{path}: {problem.strerror or problem}; its folder must exist and be writable")


def _full(path: Path) -> DiskFullError:
    return DiskFullError(f"{path}: the disk is full; free some space in {path.parent} and try again")
