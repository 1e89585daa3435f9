"""`Database` opens one SQLite file with write-ahead log, newest schema and nested transactions.

`store.py` runs its SQL through it; `history/` and `report/lost_samples.py` read through it for the dashboard. No other
module runs SQL. Problems of the file (a full disk, a file that is no database, a file of a newer version) become
one-line errors that say what to do.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from bftrainer.cluster.store import migrations
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.files import sync
from bftrainer.util.text import one_line

BUSY_S = 5.0
"""Seconds to wait for another process that is writing, such as `bftrainer token`."""
_CHECKPOINT_BYTES = 4 << 20
_MOST_WAL_PAGES = 20_000
"""Pages in the write-ahead log at which a commit makes a checkpoint itself."""
_INCREMENTAL = 2
"""SQLite's number for a file whose free pages are cut off in pieces."""


class DiskFullError(BFTrainerError):
    """The disk has no room left for the database."""


class OlderSchemaError(BFTrainerError):
    """The file is of an older version of BFTrainer, and was to be read without migrating it."""


class Database:
    """A connection, for the thread that opened it.

    A commit survives the death of this process at any instant. The newest commits may be lost when the whole machine
    loses power, but never in part.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, read_only: bool) -> None:
        self.path = path
        self.connection = connection
        self.read_only = read_only
        self._depth = 0

    @classmethod
    def open(cls, path: Path, *, read_only: bool, any_version: bool = False) -> Database:
        """Open a file. Unless `read_only`, create it if it is missing and migrate it to the newest version.

        `any_version`: open it even if its tables are of another version, only to copy it.
        """
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
                isolation_level=None,  # only explicit transactions
                cached_statements=512,
            )
        except sqlite3.Error as problem:
            raise _explained(path, problem) from None
        except OSError as problem:
            raise _explained_os(path, problem) from None
        database = cls(path, connection, read_only)
        try:
            database._prepare(any_version)
        except BaseException:
            connection.close()
            raise
        return database

    def close(self) -> None:
        """Close the file; changes that are not committed are rolled back."""
        with suppress(sqlite3.Error):
            self.connection.close()

    def run(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement that changes something, in the open transaction or in one of its own."""
        return self._run(sql, values)[0]

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        return self._run(sql, values)[1]

    def row(self, sql: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """Return the first row of a query, or None."""
        rows = self._run(sql, values)[1]
        return rows[0] if rows else None

    def _run(self, sql: str, values: Sequence[Any]) -> tuple[sqlite3.Cursor, list[tuple[Any, ...]]]:
        if self._depth and not self.connection.in_transaction:
            raise BFTrainerError(f"{self.path}: an error has rolled back this transaction; begin another one")
        try:
            cursor = self.connection.execute(sql, values)
            return cursor, cursor.fetchall()  # fetched here, because a damaged page shows only when it is read
        except sqlite3.Error as problem:
            raise _explained(self.path, problem) from None
        except OverflowError:
            raise BFTrainerError(f"{self.path}: whole numbers must be below 2**63, but got {values!r:.200}") from None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block as one transaction: all of it is committed, or none. Never await within.

        A nested transaction is committed with the outer one; if it fails, only its own part is rolled back. In a
        read-only file, everything read within is of one instant.
        """
        inner = f"depth_{self._depth}" if self._depth else ""
        self.run(f"SAVEPOINT {inner}" if inner else "BEGIN" if self.read_only else "BEGIN IMMEDIATE")
        self._depth += 1
        try:
            yield
            self.run(f"RELEASE {inner}" if inner else "COMMIT")
        except BaseException:
            # SQLite rolls a transaction back by itself after some errors, such as a full disk.
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
        """Return the problems that SQLite finds: damaged pages, inconsistent indices, dangling references."""
        lines = [one_line(line) for (line,) in self.rows("PRAGMA integrity_check(20)")]
        found = [line for line in lines if line != "ok"]
        for table, row, other, _ in self.rows("PRAGMA foreign_key_check")[:20]:
            found.append(f"row {row} of {table} refers to a row of {other} that does not exist")
        return found

    def erase_removed(self) -> None:
        """Write the file without anything that was removed or replaced: SQLite leaves it in unused pages otherwise."""
        self.run("VACUUM")
        self.run("PRAGMA wal_checkpoint(TRUNCATE)")

    def copy_to(self, path: Path) -> None:
        """Write the whole database to another file, completely or not at all."""
        if self._depth:
            raise BFTrainerError(f"{self.path}: a back-up cannot be made within a transaction")
        if path.exists() and path.samefile(self.path):
            raise InputError(f"{path}: a back-up must be another file than the database itself")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a file: name the file that the back-up is written to")
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            beside.unlink(missing_ok=True)
            _make(beside)
            with closing(sqlite3.connect(beside)) as copy:
                self.connection.backup(copy)
                # A single plain file can be read where no other file can be written beside it.
                copy.execute("PRAGMA journal_mode = DELETE")
            sync(beside)
            beside.replace(path)
            sync(path.parent)
        except sqlite3.Error as problem:
            raise _explained(path, problem) from None
        except OSError as problem:
            raise _explained_os(path, problem) from None
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)

    def size(self) -> tuple[int, int]:
        """Return the bytes of the file that hold data, and the bytes in it that are free."""
        ((page,),), ((pages,),) = self.rows("PRAGMA page_size"), self.rows("PRAGMA page_count")
        ((free,),) = self.rows("PRAGMA freelist_count")
        return (pages - free) * page, free * page

    def shrink(self, most_bytes: int) -> None:
        """Cut free pages off the file, at most so many bytes of them. A file that is not `shrinkable` stays."""
        if self._depth:
            raise BFTrainerError(f"{self.path}: the file cannot be cut within a transaction")
        ((page,),) = self.rows("PRAGMA page_size")
        try:
            # A script runs the statement to its end; `execute` stops after the first page.
            self.connection.executescript(f"PRAGMA incremental_vacuum({max(1, most_bytes // page)})")
        except sqlite3.Error as problem:
            raise _explained(self.path, problem) from None

    @property
    def shrinkable(self) -> bool:
        """Whether the file can give free pages back. Files of version 0.1.0 cannot until they are rewritten."""
        return bool(self.rows("PRAGMA auto_vacuum")[0][0] == _INCREMENTAL)

    def leave_checkpoints(self) -> None:
        """Let another thread call `checkpoint`: a commit here waits for the disk only if that does not happen."""
        self.run(f"PRAGMA wal_autocheckpoint = {_MOST_WAL_PAGES}")

    def rewrite(self) -> None:
        """Rewrite the whole file without free pages, and make it shrinkable. No other program may use the file.

        It needs as much room on the disk again as the data take, and blocks for about a second per 100 MB.
        """
        self.run(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
        self.run("VACUUM")
        self.run("PRAGMA wal_checkpoint(TRUNCATE)")

    def _prepare(self, any_version: bool) -> None:
        self.run(f"PRAGMA busy_timeout = {BUSY_S * 1000:.0f}")
        self.run("PRAGMA foreign_keys = ON")
        version, newest = self._version(any_version), len(migrations.MIGRATIONS)
        if self.read_only:
            if version < newest and not any_version:
                raise OlderSchemaError(
                    f"{self.path}: schema version {version} is older than this BFTrainer's ({newest}); "
                    "`bftrainer serve` brings it up to date"
                )
            return
        if self.rows("PRAGMA page_count")[0][0] == 0:  # only a file that is empty can be given this for nothing
            self.run(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
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
        """Migrate by one version; False if there was no need. It also shows whether the file can be written."""
        with self.transaction():
            version = self._version()
            if version == len(migrations.MIGRATIONS):
                return False
            for statement in migrations.MIGRATIONS[version]:
                self.run(statement)
            self.run(f"PRAGMA user_version = {version + 1}")
        return True

    def _version(self, any_version: bool = False) -> int:
        """Return the schema version of the file, after checking that the file is a BFTrainer database."""
        version = int(self.rows("PRAGMA user_version")[0][0])
        ours = self.rows("PRAGMA application_id")[0][0] == migrations.APPLICATION_ID
        if not ours and (version or self.row("SELECT 1 FROM sqlite_master LIMIT 1")):
            raise InputError(f"{self.path}: this is a database of another program; choose another --state")
        if version > len(migrations.MIGRATIONS) and not any_version:
            raise InputError(
                f"{self.path}: written by a newer BFTrainer (schema version {version}, this one knows "
                f"{len(migrations.MIGRATIONS)}); use that version, or another state folder (--state)"
            )
        return version


def checkpoint(path: Path) -> None:
    """Copy committed changes from the write-ahead log to the file, if there are many. Writers go on meanwhile.

    It waits for the disk, and so belongs into a thread.
    """
    try:
        if path.with_name(f"{path.name}-wal").stat().st_size < _CHECKPOINT_BYTES:
            return
        with closing(sqlite3.connect(path, timeout=BUSY_S)) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    except sqlite3.Error as problem:
        raise _explained(path, problem) from None
    except OSError as problem:
        raise _explained_os(path, problem) from None


def _make(path: Path) -> None:
    """Create the file if it is missing, readable and writable by its owner only.

    An existing file is not opened: closing it would drop the locks that SQLite holds on it in this process.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


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
