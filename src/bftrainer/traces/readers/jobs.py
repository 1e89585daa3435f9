"""Jobs that held nodes for a time: the common form of every scheduler log.

A `JobLogReader` turns each line of its log into one `Job` or one `Skip` with the reason, so that every line is
accounted for. `importing.py` drives readers; `idle.py` turns jobs into idle times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, tzinfo
from itertools import islice
from typing import ClassVar, Protocol

# Reasons that several readers share. Each has one wording, so that reports of different logs can be compared.
JOB_STEP = "job step (its job has a line of its own)"
PENDING = "pending"
NEVER_STARTED = "never started"
NO_NODES = "no node list"
END_UNKNOWN = "end unknown"
END_BEFORE_START = "malformed: ends before it starts"
BAD_TIME = "malformed: unreadable time"
BAD_COLUMNS = "malformed: wrong number of columns"
BAD_NODES = "malformed: unreadable node list"
COMMENT = "comment or blank line"
HEADER = "column names"
START_RECORD = "start record"
OTHER_RECORD = "other record"
MALFORMED = "malformed"
"""The prefix of every reason that means the line itself is broken."""
NOT_A_JOB = (COMMENT, HEADER, JOB_STEP, START_RECORD, OTHER_RECORD)
"""Prefixes of the reasons for lines that do not stand for a job."""


def is_comment(line: str) -> bool:
    """Whether a line is blank or starts with `;` or `#`. No format starts a job's line so."""
    return not line or line.isspace() or line.startswith((";", "#"))


def first_records(head: Sequence[str]) -> list[str]:
    """The first twenty lines of a file's head that are not comments: enough to recognise a format."""
    return list(islice((line for line in head if not is_comment(line)), 20))


@dataclass(frozen=True, slots=True)
class Job:
    """Nodes held from `start` to `end`; `end` None: still held when the log ends.

    Logs that name no nodes give `processors` instead, and the job is laid onto nodes later.
    """

    line: int
    start: float
    end: float | None
    nodes: tuple[str, ...] = ()
    processors: int = 0


@dataclass(frozen=True, slots=True)
class Skip:
    """A line that gave no job, and the reason."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about the machine from a log's header."""

    nodes: int | None = None
    processors: int | None = None


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """Options that a reader may need to understand a log."""

    zone: tzinfo = UTC
    columns: tuple[str, ...] = ()


class JobLogReader(Protocol):
    """Reader of one log format. An instance reads one log, once."""

    name: ClassVar[str]

    def __init__(self, options: ReaderOptions) -> None: ...

    @classmethod
    def recognises(cls, head: Sequence[str]) -> bool:
        """Whether the first lines of a file look like this format."""
        ...

    def read(self, lines: Iterable[tuple[int, str]]) -> Iterator[Job | Skip]:
        """Yield one outcome for every numbered line. Raises InputError if the log as a whole cannot be used."""
        ...

    @property
    def facts(self) -> MachineFacts:
        """Facts from the header, known once the log has been read."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user about how this log was read."""
        ...
