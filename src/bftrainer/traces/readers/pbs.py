"""PBS reader for accounting files of PBS Professional and Torque: `date;type;job;name=value …`, one record per event.

End records say when a job started and where it ran. A start record without an end is a job that still runs when the
log ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from bftrainer.traces.readers import jobs
from bftrainer.traces.readers.jobs import Job, MachineFacts, ReaderOptions, Skip
from bftrainer.traces.times import Clock

_RECORD = re.compile(r"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d;([A-Za-z]{1,2});([^;]*);?(.*)", re.DOTALL)
_NUMBER = {name: re.compile(rf"(?:^| ){name}=(\S*)") for name in ("start", "end", "exec_host", "exec_vnode")}

STARTED = "S"
ENDED = frozenset("ER")  # R: rerun; the record has the times of the run that ended


class PbsReader:
    """Reader of PBS logs. The nodes of a job are the hosts of `exec_host` (`n1/0*13+n2/0-7`), else of `exec_vnode`."""

    name: ClassVar[str] = "pbs"
    facts = MachineFacts()
    notes: Sequence[str] = ()

    def __init__(self, options: ReaderOptions) -> None:
        self._clock = Clock(options.zone)

    @classmethod
    def recognises(cls, head: Sequence[str]) -> bool:
        """Whether lines hold a date, a one-letter record type and a job."""
        return any(_RECORD.match(line) for line in jobs.first_records(head))

    def read(self, lines: Iterable[tuple[int, str]]) -> Iterator[Job | Skip]:
        """See `JobLogReader`."""
        running: dict[str, Job] = {}
        for number, line in lines:
            if jobs.is_comment(line):
                yield Skip(number, jobs.COMMENT)
                continue
            match = _RECORD.match(line)
            if match is None:
                yield Skip(number, jobs.MALFORMED + ": no PBS record")
                continue
            kind, job, text = match.groups()
            if kind == STARTED:
                started = self._job(number, text, ended=False)
                if isinstance(started, Job):
                    if earlier := running.get(job):
                        yield Skip(earlier.line, jobs.START_RECORD + ", followed by another")
                    running[job] = started
                else:
                    yield started
                continue
            if kind not in ENDED:
                yield Skip(number, f"{jobs.OTHER_RECORD}: {kind}")
                continue
            if begun := running.pop(job, None):
                yield Skip(begun.line, jobs.START_RECORD + ", its end record is used")
            yield self._job(number, text, ended=True)
        yield from running.values()

    def _job(self, number: int, text: str, *, ended: bool) -> Job | Skip:
        found = {name: m[1] for name, pattern in _NUMBER.items() if (m := pattern.search(text))}
        hosts = found.get("exec_host") or found.get("exec_vnode", "")
        if "start" not in found or (ended and "end" not in found):
            return Skip(number, jobs.MALFORMED + ": no start or no end")
        if found["start"] in ("", "0"):
            return Skip(number, jobs.NEVER_STARTED)
        if not hosts:
            return Skip(number, jobs.NO_NODES)
        if ended and not found["end"]:
            return Skip(number, jobs.END_UNKNOWN)
        try:
            start = self._clock(found["start"])
            end = self._clock(found["end"]) if ended else None
        except ValueError:
            return Skip(number, jobs.BAD_TIME)
        if end is not None and end < start:
            return Skip(number, jobs.END_BEFORE_START)
        names = _hosts(hosts)
        if not names:
            return Skip(number, jobs.BAD_NODES)
        return Job(number, start, end, names)


def _hosts(text: str) -> tuple[str, ...]:
    """The host names of `n1/0*13+n2/0-7` or `(n1:ncpus=13)+(n2:ncpus=8)`, before the slash or the colon, each once."""
    names = (re.split(r"[/:]", part.strip("()"), maxsplit=1)[0] for part in text.split("+"))
    return tuple(dict.fromkeys(name for name in names if name))
