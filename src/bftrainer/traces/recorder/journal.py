"""Journal of the recorder: stores every poll in a text file that survives a kill at any instant.

It holds JSON lines and is only ever appended to: a header, then one line per poll with what changed, or why the poll
failed. The recorder (`record`) writes it through `Journal`; `recording` turns it into a trace.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from bftrainer import __version__
from bftrainer.core.pool import Node
from bftrainer.core.trace import utc
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.traces.recorder.states import NodeStates
from bftrainer.util.locks import try_lock
from bftrainer.util.text import one_line

FORMAT = 1

_MARK = '{"bftrainer_journal":'
_HEADER_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Header:
    """First line of a journal: the source of its polls and the interval between them."""

    source: Mapping[str, object]
    interval_s: float
    version: str = __version__


@dataclass(frozen=True, slots=True)
class Entry:
    """One poll: what changed since the last successful one, or why it failed."""

    t: float
    joined: tuple[Node, ...] = ()
    left: tuple[Node, ...] = ()
    seen: tuple[Node, ...] = ()
    """Nodes reported for the first time, idle or not."""
    missed: str | None = None


@dataclass(slots=True)
class View:
    """Known state of the nodes after some entries. Entries are checked and added up only here."""

    t: float = -math.inf
    idle: set[Node] = field(default_factory=set)
    nodes: dict[Node, None] = field(default_factory=dict)
    polls: int = 0
    missed: int = 0

    def add(self, entry: Entry) -> None:
        """Apply `entry`; raises ValueError if it cannot follow the entries before it."""
        if not entry.t > self.t:
            raise ValueError(f"its time {entry.t} is not after that of the entry before")
        self.t = entry.t
        if entry.missed is not None:
            self.missed += 1
            return
        self.polls += 1
        self.nodes.update(dict.fromkeys(entry.seen))
        for node in entry.left:
            if node not in self.idle:
                raise ValueError(f"node {node!r} leaves but was not idle")
            self.idle.remove(node)
        for node in entry.joined:
            if node in self.idle or node not in self.nodes:
                raise ValueError(f"node {node!r} joins but was {'idle already' if node in self.idle else 'never seen'}")
            self.idle.add(node)

    def change(self, t: float, states: NodeStates) -> Entry:
        """The entry that leads from this view to `states`."""
        reported = dict.fromkeys(states.nodes)
        return Entry(
            t,
            joined=tuple(node for node in reported if node in states.idle and node not in self.idle),
            left=tuple(sorted(self.idle - states.idle)),
            seen=tuple(node for node in reported if node not in self.nodes),
        )


class Journal:
    """A journal open for appending. Every entry is on the disk when its call returns."""

    def __init__(self, path: Path, file: io.FileIO, header: Header, view: View) -> None:
        self.path = path
        self.header = header
        self._file = file
        self._view = view

    @classmethod
    def open(cls, path: str | Path, source: Mapping[str, object], interval_s: float) -> Journal:
        """Start a journal, or continue the one at `path` if it has the same source and interval."""
        path = Path(path)
        if not (math.isfinite(interval_s) and interval_s > 0):
            raise InputError(f"the polling interval must be a positive number of seconds, but got {interval_s}")
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: a journal must be a file; choose another path")
        header = Header(json.loads(json.dumps(source)), float(interval_s))
        try:
            file = io.FileIO(path, "a+")
        except OSError as error:
            raise InputError(f"{path}: cannot write a journal there: {error.strerror}") from None
        try:
            _lock(file, path)
            journal = cls(path, file, header, _resume(file, path, header))
            if file.seek(0, os.SEEK_END) == 0:
                journal._write(_header_line(header))
        except BaseException:
            file.close()
            raise
        return journal

    @property
    def last_t(self) -> float:
        """Time of the last entry; minus infinity before the first."""
        return self._view.t

    @property
    def idle(self) -> frozenset[Node]:
        """The nodes idle at the last successful poll."""
        return frozenset(self._view.idle)

    def saw(self, t: float, states: NodeStates) -> Entry:
        """Append a successful poll made at `t`."""
        return self._append(self._view.change(t, states))

    def missed(self, t: float, why: str) -> Entry:
        """Append a failed poll made at `t`."""
        return self._append(Entry(t, missed=why))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, entry: Entry) -> Entry:
        if not entry.t > self._view.t:
            raise BFTrainerError(
                f"{self.path}: the clock says {utc(entry.t)}, but the last entry is of {utc(self._view.t)}; "
                "set the clock or start a new journal"
            )
        self._write(_entry_line(entry))
        self._view.add(entry)
        return entry

    def _write(self, line: bytes) -> None:
        try:
            written = self._file.write(line)
            if written != len(line):  # a full disk: the next write raises, the next start cuts off the torn line
                self._file.write(line[written:])
            os.fsync(self._file.fileno())
        except OSError as error:
            raise BFTrainerError(f"{self.path}: cannot append to the journal: {error.strerror}") from None


def looks_like_journal(head: bytes) -> bool:
    """Whether a file that begins with `head` is a journal."""
    return head.startswith(_MARK.encode())


def read_header(stream: BinaryIO, name: str) -> Header:
    """Read the first line of a journal."""
    line = stream.readline(_HEADER_LIMIT)
    if not looks_like_journal(line):
        raise InputError(f"{name}: this is not a journal of `bftrainer trace record`")
    if not line.endswith(b"\n"):
        raise InputError(f"{name}: the journal's first line is cut short and nothing follows; record again")
    try:
        value = json.loads(line)
        if value["bftrainer_journal"] != FORMAT:
            raise InputError(
                f"{name}: the journal has format {str(value['bftrainer_journal'])[:20]}, but this BFTrainer "
                f"({__version__}) reads format {FORMAT}; use the BFTrainer that wrote it"
            )
        source, interval_s = value["source"], _number(value["interval_s"], "interval_s")
        if not isinstance(source, dict) or interval_s <= 0:
            raise ValueError
        return Header(source, interval_s, str(value.get("version")))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise InputError(f"{name}:1: the journal's header is damaged; restore the line or record again") from None


def follow(stream: BinaryIO, name: str, view: View) -> Iterator[Entry]:
    """Yield the entries after the header, each once `view` has applied it. An unfinished last line is no entry."""
    for number, line in enumerate(iter(stream.readline, b""), 2):
        if not line.endswith(b"\n"):
            return
        try:
            entry = _parse_entry(line)
            view.add(entry)
        except (ValueError, OverflowError, RecursionError) as error:
            raise InputError(
                f"{name}:{number}: the journal is damaged there: {one_line(error)[:200]}; "
                "keep the lines before it to save what they hold"
            ) from None
        yield entry


def _parse_entry(line: bytes) -> Entry:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("the line is not a JSON object")
    t, missed = _number(value.get("t"), "t"), value.get("missed")
    if missed is not None:
        if not isinstance(missed, str):
            raise ValueError("missed must be a text")
        return Entry(t, missed=missed)
    return Entry(t, _names(value, "joined"), _names(value, "left"), _names(value, "seen"))


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} must be a number")
    return float(value)


def _names(entry: dict[str, object], key: str) -> tuple[Node, ...]:
    names = entry.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{key} must be a list of node names")
    return tuple(names)


def _header_line(header: Header) -> bytes:
    value = {
        "bftrainer_journal": FORMAT,
        "version": header.version,
        "source": dict(header.source),
        "interval_s": header.interval_s,
    }
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _entry_line(entry: Entry) -> bytes:
    value = {"t": entry.t, "missed": entry.missed, "joined": entry.joined, "left": entry.left, "seen": entry.seen}
    said = {key: item for key, item in value.items() if item not in (None, ())}
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def _lock(file: io.FileIO, path: Path) -> None:
    """Keep a second recorder off the journal; the kernel releases the lock however this process ends."""
    try:
        free = try_lock(file.fileno())
    except OSError:
        free = True  # a file system without locks: recording without a lock is better than none
    if not free:
        raise InputError(f"{path}: another recorder is writing this journal; stop it or choose another path")


def _resume(file: io.FileIO, path: Path, header: Header) -> View:
    """The view of the journal at `path`. An unfinished line is cut off."""
    view = View()
    with path.open("rb") as stream:
        head = stream.readline(_HEADER_LIMIT)
        if not head or (looks_like_journal(head) and not head.endswith(b"\n")):
            file.truncate(0)  # empty, or killed while writing the header: nothing is lost
            return view
        stream.seek(0)
        _check_same(path, read_header(stream, str(path)), header)
        end = stream.tell()
        for _ in follow(stream, str(path), view):
            end = stream.tell()
    file.truncate(end)
    return view


def _check_same(path: Path, old: Header, new: Header) -> None:
    """Check that source and interval are the same: a trace of a mixture would be meaningless."""
    if old.source != new.source:
        was, now = (json.dumps(dict(header.source)) for header in (old, new))
        raise InputError(f"{path}: the journal was recorded from {was}, not from {now}; choose another path")
    if old.interval_s != new.interval_s:
        raise InputError(
            f"{path}: the journal was recorded every {old.interval_s:g} s, not every {new.interval_s:g} s; "
            "give the same interval or choose another path"
        )
