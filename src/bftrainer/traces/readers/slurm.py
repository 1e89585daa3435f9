"""Slurm reader for logs of finished jobs: `sacct -P` (with or without a header) and the `jobcomp/filetxt` file.

Both name the nodes of each job. Their times are local to the cluster unless Slurm was told otherwise.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from bftrainer.core.hostlist import expand
from bftrainer.errors import InputError
from bftrainer.traces.readers import jobs
from bftrainer.traces.readers.jobs import Job, MachineFacts, ReaderOptions, Skip
from bftrainer.traces.times import Clock, parse_elapsed

NEEDED = ("start", "end", "state", "nodelist")
COLUMNS_26 = (
    "jobid",
    "jobidraw",
    "cluster",
    "partition",
    "qos",
    "account",
    "group",
    "gid",
    "user",
    "uid",
    "submit",
    "eligible",
    "start",
    "end",
    "elapsed",
    "exitcode",
    "state",
    "nnodes",
    "ncpus",
    "reqcpus",
    "reqmem",
    "reqtres",
    "alloctres",
    "timelimit",
    "nodelist",
    "jobname",
)
"""A common headerless dump (the columns Open XDMoD asks for)."""

# Jobs in these states hold nodes when the log is written, whatever the end column says.
RUNNING = frozenset(
    ["RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"]
)
WAITING = frozenset(["PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REVOKED"])
UNKNOWN = frozenset({"", "unknown", "none", "none assigned", "(null)", "n/a", "invalid"})
NO_TIME_BEFORE = 2 * 86400.0
"""Slurm writes time 0 for a start that did not happen. In local time that is within a day of 1970-01-01."""

_ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d|Unknown")


def held(row: Mapping[str, str], clock: Clock, line: int) -> Job | Skip:
    """The nodes that a job held, from the columns start, end, state, nodelist and, if present, jobid and elapsed."""
    if "." in row.get("jobid", ""):
        return Skip(line, jobs.JOB_STEP)
    state = row["state"].split(" ", 1)[0].rstrip("+").upper()
    start_text, end_text = row["start"], row["end"]
    if state in WAITING:
        return Skip(line, jobs.PENDING)
    if start_text.lower() in UNKNOWN:
        return Skip(line, jobs.NEVER_STARTED)
    if row["nodelist"].lower() in UNKNOWN:
        return Skip(line, jobs.NO_NODES + ": never got a node")
    try:
        nodes = expand(row["nodelist"])
    except ValueError:
        return Skip(line, jobs.BAD_NODES)
    try:
        if clock(start_text) < NO_TIME_BEFORE:
            return Skip(line, jobs.NEVER_STARTED)
        if state in RUNNING:
            return Job(line, clock(start_text), None, nodes)
        if end_text.lower() not in UNKNOWN:
            start, end = clock.span(start_text, end_text)
        elif row.get("elapsed", "").lower() not in UNKNOWN:
            start = clock(start_text)
            end = start + parse_elapsed(row["elapsed"])
        else:
            return Skip(line, jobs.END_UNKNOWN)
    except ValueError:
        return Skip(line, jobs.BAD_TIME)
    if end < start:
        return Skip(line, jobs.END_BEFORE_START)
    return Job(line, start, end, nodes)


class SacctReader:
    """Reader of `sacct -P`: columns separated by `|`, named by a header line or by `--columns`."""

    name: ClassVar[str] = "sacct"
    facts = MachineFacts()
    notes: Sequence[str] = ()

    def __init__(self, options: ReaderOptions) -> None:
        self._clock = Clock(options.zone)
        self._columns = tuple(c.strip().lower() for c in options.columns)

    @classmethod
    def recognises(cls, head: Sequence[str]) -> bool:
        """Whether there is a header with Slurm's column names, or 26 columns with times in the right places."""
        lines = jobs.first_records(head)
        if not lines:
            return False
        names = {name.strip().lower() for name in lines[0].split("|")}
        return len(names & {*NEEDED, "jobid", "jobidraw", "submit", "elapsed"}) >= 3 or any(map(_is_26, lines))

    def read(self, lines: Iterable[tuple[int, str]]) -> Iterator[Job | Skip]:
        """See `JobLogReader`."""
        columns = self._columns
        where: dict[str, int] = {}
        if columns:
            where = _positions(columns, "--columns")
        for number, line in lines:
            if jobs.is_comment(line):
                yield Skip(number, jobs.COMMENT)
                continue
            fields = line.split("|")
            if not where:
                if _is_26(line):
                    columns, where = COLUMNS_26, _positions(COLUMNS_26, "")
                else:
                    columns = tuple(field.strip().lower() for field in fields)
                    if not columns[-1]:
                        columns = columns[:-1]
                    where = _positions(columns, f"line {number}, taken as the column names,")
                    yield Skip(number, jobs.HEADER)
                    continue
            if len(fields) == len(columns) + 1 and not fields[-1]:
                fields.pop()  # sacct -p ends every line with the separator
            elif len(fields) > len(columns) and columns[-1] == "jobname":
                fields[len(columns) - 1 :] = ["|".join(fields[len(columns) - 1 :])]
            if len(fields) != len(columns):
                yield Skip(number, jobs.BAD_COLUMNS)
                continue
            yield held({name: fields[i].strip() for name, i in where.items()}, self._clock, number)


class SacctPairsReader:
    """Reader of `sacct` columns as `Name=value` pairs separated by commas, as log shippers write them."""

    name: ClassVar[str] = "sacct-pairs"
    facts = MachineFacts()
    notes: Sequence[str] = ()

    def __init__(self, options: ReaderOptions) -> None:
        self._clock = Clock(options.zone)

    @classmethod
    def recognises(cls, head: Sequence[str]) -> bool:
        """Whether there are pairs with a JobID and a Start early in the line."""
        return any("JobID=" in line and "Start=" in line and line.count(",") >= 3 for line in jobs.first_records(head))

    def read(self, lines: Iterable[tuple[int, str]]) -> Iterator[Job | Skip]:
        """See `JobLogReader`."""
        for number, line in lines:
            if jobs.is_comment(line):
                yield Skip(number, jobs.COMMENT)
                continue
            try:
                pairs = next(csv.reader([line]))
            except (csv.Error, StopIteration):
                yield Skip(number, jobs.MALFORMED + ": unreadable pairs")
                continue
            row = {name.strip().lower(): value.strip() for name, _, value in (p.partition("=") for p in pairs)}
            if "start" not in row or "state" not in row:
                yield Skip(number, jobs.BAD_COLUMNS)
                continue
            row.setdefault("elapsed", row.get("elapsedraw", ""))
            yield held({"end": "", "nodelist": "", **row}, self._clock, number)


class JobcompReader:
    """Reader of Slurm's `jobcomp/filetxt` log: `Name=value` words, one line per finished job."""

    name: ClassVar[str] = "jobcomp"
    facts = MachineFacts()
    notes: Sequence[str] = ()
    # Names may hold spaces, so the words are searched for instead of splitting the line.
    _WANTED = re.compile(r"\b(JobId|JobState|StartTime|EndTime|NodeList)=(\S*)")

    def __init__(self, options: ReaderOptions) -> None:
        self._clock = Clock(options.zone)

    @classmethod
    def recognises(cls, head: Sequence[str]) -> bool:
        """Whether a line starts with JobId and names a state."""
        return any(line.startswith("JobId=") and " JobState=" in line for line in jobs.first_records(head))

    def read(self, lines: Iterable[tuple[int, str]]) -> Iterator[Job | Skip]:
        """See `JobLogReader`."""
        for number, line in lines:
            if jobs.is_comment(line):
                yield Skip(number, jobs.COMMENT)
                continue
            words = dict(self._WANTED.findall(line))
            if len(words) < 5:
                yield Skip(number, jobs.BAD_COLUMNS)
                continue
            row = {
                "jobid": words["JobId"],
                "state": words["JobState"],
                "start": words["StartTime"],
                "end": words["EndTime"],
                "nodelist": words["NodeList"],
            }
            yield held(row, self._clock, number)


def _is_26(line: str) -> bool:
    fields = line.split("|")
    return len(fields) >= len(COLUMNS_26) and all(_ISO.fullmatch(f) for f in (fields[10], fields[12], fields[13]))


def _positions(columns: Sequence[str], where: str) -> dict[str, int]:
    """The index of each column that is used."""
    index = {name: i for i, name in reversed(list(enumerate(columns)))}
    missing = [name for name in NEEDED if name not in index]
    if missing:
        raise InputError(
            f"{where} must name the columns {', '.join(NEEDED)}, but {', '.join(missing)} is missing. "
            "Write the log with: sacct -aPX -o JobID,Start,End,Elapsed,State,NodeList"
        )
    if "elapsed" not in index and "elapsedraw" in index:
        index["elapsed"] = index["elapsedraw"]
    return {name: index[name] for name in (*NEEDED, "jobid", "elapsed") if name in index}
