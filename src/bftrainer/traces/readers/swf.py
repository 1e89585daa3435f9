"""SWF reader for the Parallel Workloads Archive's Standard Workload Format: 18 numbers per job, header in comments.

SWF counts processors and names no nodes, so its jobs are laid onto nodes afterwards. An exception is the extension
`{node,node,…}` after the 18 numbers. Other columns beyond the 18 are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from bftrainer.core.hostlist import expand
from bftrainer.errors import InputError
from bftrainer.traces.readers import jobs
from bftrainer.traces.readers.jobs import Job, MachineFacts, ReaderOptions, Skip
from bftrainer.traces.times import LATEST

UNKNOWN_STARTS_LIMIT = 0.05
"""Above this share of jobs without a known start, apparent idle time is meaningless."""

START_UNKNOWN = "start unknown (wait time is -1)"
NEGATIVE_RUN = jobs.MALFORMED + ": negative run time"
NEGATIVE_WAIT = jobs.MALFORMED + ": negative wait time"

_FIELD = re.compile(r";\s*(\w+)\s*:\s*(.*?)\s*$")


class SwfReader:
    """Reader of one SWF log. Start = UnixStartTime + submit + wait; end = start + run time."""

    name: ClassVar[str] = "swf"

    def __init__(self, options: ReaderOptions) -> None:
        self._header: dict[str, str] = {}
        self._requested = 0

    @classmethod
    def recognises(cls, head: Sequence[str]) -> bool:
        """Whether there are comment lines with SWF's fields, or rows of 18 numbers and more."""
        if any((m := _FIELD.match(line)) and m[1] in _HEADER_NAMES for line in head):
            return True
        rows = [line.split() for line in jobs.first_records(head)[:5]]
        return bool(rows) and all(len(row) >= 18 and all(map(_is_number, row[:18])) for row in rows)

    @property
    def facts(self) -> MachineFacts:
        """MaxNodes and MaxProcs from the header."""
        return MachineFacts(self._count("MaxNodes"), self._count("MaxProcs"))

    @property
    def notes(self) -> Sequence[str]:
        """A note if allocated processors were unknown."""
        if not self._requested:
            return ()
        return (f"{self._requested} jobs do not say how many processors they got: taken as many as they asked for",)

    def read(self, lines: Iterable[tuple[int, str]]) -> Iterator[Job | Skip]:
        """See `JobLogReader`. Refuses a log that does not know when its jobs started."""
        ran = unknown = 0
        origin: float | None = None
        for number, line in lines:
            if jobs.is_comment(line):
                if match := _FIELD.match(line):
                    self._header.setdefault(match[1], match[2])
                yield Skip(number, jobs.COMMENT)
                continue
            if origin is None:
                origin = self._origin()
            outcome = self._row(number, line, origin)
            if isinstance(outcome, Job):
                ran += 1
            elif outcome.reason == START_UNKNOWN:
                unknown += 1
            yield outcome
        if unknown > UNKNOWN_STARTS_LIMIT * (ran + unknown):
            raise InputError(
                f"{unknown} of {ran + unknown} jobs have no wait time (-1), so it is unknown when they started "
                "and nothing can be said about idle nodes. Use a log that has wait times"
            )

    def _row(self, number: int, line: str, origin: float) -> Job | Skip:
        words = line.split()
        if len(words) < 18:
            return Skip(number, jobs.BAD_COLUMNS)
        try:
            submit, wait, run, got, asked = (float(words[i]) for i in (1, 2, 3, 4, 7))
        except ValueError:
            return Skip(number, jobs.MALFORMED + ": not a number")
        if not all(-LATEST <= value <= LATEST for value in (submit, wait, run, got, asked)):
            return Skip(number, jobs.MALFORMED + ": number out of range")
        if run < 0 and run != -1:
            return Skip(number, NEGATIVE_RUN)
        if run < 0:
            return Skip(number, "run time unknown" if words[10] == "1" else jobs.NEVER_STARTED)
        if run == 0 and got <= 0:
            return Skip(number, jobs.NEVER_STARTED)
        if wait < 0:
            return Skip(number, START_UNKNOWN if wait == -1 else NEGATIVE_WAIT)
        start = origin + submit + wait
        if not (start >= 0 and start + run <= LATEST):
            return Skip(number, jobs.BAD_TIME)
        try:
            nodes = _listed_nodes("".join(words[18:])) if len(words) > 18 else ()
        except ValueError:
            return Skip(number, jobs.BAD_NODES)
        processors = int(got)
        if processors <= 0 and not nodes:
            processors = int(asked)
            self._requested += processors > 0
        if processors <= 0 and not nodes:
            return Skip(number, "number of processors unknown")
        return Job(number, start, start + run, nodes, processors)

    def _origin(self) -> float:
        """UnixStartTime; 0 if the submit times are absolute."""
        text = self._header.get("UnixStartTime", "0")
        try:
            origin = float(text)
        except ValueError:
            origin = -1
        if not 0 <= origin <= LATEST:
            raise InputError(f"UnixStartTime in the header must be seconds since 1970, but got {text!r}")
        return origin

    def _count(self, field: str) -> int | None:
        match = re.match(r"\d+", self._header.get(field, ""))
        count = int(match[0]) if match and len(match[0]) < 10 else 0
        return count or None


_HEADER_NAMES = frozenset(
    ["Version", "Computer", "MaxJobs", "MaxRecords", "UnixStartTime", "MaxNodes", "MaxProcs", "MaxQueues"]
)


def _listed_nodes(columns: str) -> tuple[str, ...]:
    """The nodes of the first `{node,node,…}` in the columns beyond the 18th; none without braces.

    Raises ValueError for a list that is unreadable or not closed.
    """
    _, brace, rest = columns.partition("{")
    if not brace:
        return ()
    listed, closed, _ = rest.partition("}")
    if not closed:
        raise ValueError("the list of nodes is not closed")
    listed = listed.removesuffix(",")
    return expand(listed) if listed else ()


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
