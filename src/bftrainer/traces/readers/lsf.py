"""LSF reader for `lsb.acct`: one JOB_FINISH record per finished job, quoted words separated by blanks.

Its times are seconds since 1970. Jobs that still run when the log is cut are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from bftrainer.traces.readers import jobs
from bftrainer.traces.readers.jobs import Job, MachineFacts, ReaderOptions, Skip
from bftrainer.traces.times import LATEST

_WORD = re.compile(r'"((?:[^"]|"")*)"|(\S+)')
_FINISH = '"JOB_FINISH"'
# Words of a JOB_FINISH record by position; two counted lists of hosts follow, the requested hosts first.
_EVENT_TIME, _START_TIME, _ASKED_HOSTS = 2, 10, 22


class LsfReader:
    """Reader of LSF logs. The nodes of a job are its execution hosts; `16*host1` is sixteen slots on one host."""

    name: ClassVar[str] = "lsf"
    facts = MachineFacts()
    notes: Sequence[str] = ()

    def __init__(self, options: ReaderOptions) -> None: ...

    @classmethod
    def recognises(cls, head: Sequence[str]) -> bool:
        """Whether records start with a quoted event name and a quoted LSF version."""
        return any(re.match(r'"[A-Z_]+" "[\d.]+" \d{9,}', line) for line in jobs.first_records(head))

    def read(self, lines: Iterable[tuple[int, str]]) -> Iterator[Job | Skip]:
        """See `JobLogReader`."""
        for number, line in lines:
            if jobs.is_comment(line):
                yield Skip(number, jobs.COMMENT)
            elif line.startswith(_FINISH):
                yield _finish(number, line)
            elif event := re.match(r'"([A-Z_]{3,40})"', line):
                yield Skip(number, f"{jobs.OTHER_RECORD}: {event[1]}")
            else:
                yield Skip(number, jobs.MALFORMED + ": no LSF record")


def _finish(number: int, line: str) -> Job | Skip:
    words = _words(line)
    try:
        head = [next(words) for _ in range(_ASKED_HOSTS)]
        end, start = float(head[_EVENT_TIME]), float(head[_START_TIME])
        for _ in range(_count(next(words))):
            next(words)
        hosts = [next(words) for _ in range(_count(next(words)))]
    except StopIteration:
        return Skip(number, jobs.BAD_COLUMNS)
    except ValueError:
        return Skip(number, jobs.MALFORMED + ": not a number")
    if start == 0:
        return Skip(number, jobs.NEVER_STARTED)
    if not (0 < start <= LATEST and 0 < end <= LATEST):
        return Skip(number, jobs.BAD_TIME)
    if not hosts:
        return Skip(number, jobs.NO_NODES)
    if end < start:
        return Skip(number, jobs.END_BEFORE_START)
    names = tuple(dict.fromkeys(host.rpartition("*")[2] for host in hosts))
    if not all(names):
        return Skip(number, jobs.BAD_NODES)
    return Job(number, start, end, names)


def _words(line: str) -> Iterator[str]:
    """Yield the words one by one: scripts in later fields are long, and hosts come before them."""
    for match in _WORD.finditer(line):
        yield match[2] if match[1] is None else match[1].replace('""', '"')


def _count(word: str) -> int:
    count = int(word)
    if not 0 <= count <= 1_000_000:
        raise ValueError(f"not a number of hosts: {word}")
    return count
