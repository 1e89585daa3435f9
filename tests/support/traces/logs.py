"""One schedule of jobs, written in every log format BFTrainer reads, so that all readers can be held to one result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

DAY = 1_600_000_000
"""The start of the schedule, in seconds since 1970."""


@dataclass(frozen=True)
class Run:
    start: int
    end: int
    nodes: tuple[str, ...]


SCHEDULE = (
    Run(0, 600, ("n1", "n2")),
    Run(300, 900, ("n2", "n3")),  # n2 is shared
    Run(1000, 1800, ("n1",)),
    Run(1200, 1500, ("n2", "n3", "n4")),
    Run(1500, 1700, ("n2",)),  # touches the one before
    Run(2000, 2400, ("n1", "n2", "n3", "n4")),
    Run(2100, 2100, ("n10",)),  # no length
    Run(2200, 3000, ("n10",)),
    Run(50, 2900, ("n9",)),
    Run(2950, 3600, ("n9", "n4")),
)
IDLE = {
    # From the first end in the log (600) on, after a node's first and before its last job.
    ("n1", 600, 1000),
    ("n1", 1800, 2000),
    ("n2", 900, 1200),
    ("n2", 1700, 2000),
    ("n3", 900, 1200),
    ("n3", 1500, 2000),
    ("n4", 1500, 2000),
    ("n4", 2400, 2950),
    ("n9", 2900, 2950),
    ("n10", 2100, 2200),
}


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(DAY + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def sacct(run: Run, job: int) -> str:
    return f"{job}|{iso(run.start)}|{iso(run.end)}|COMPLETED|{','.join(run.nodes)}"


def sacct_26(run: Run, job: int) -> str:
    fields = [str(job), str(job), "lab", "main", "q", "a", "g", "1", "u", "2", iso(run.start), iso(run.start),
              iso(run.start), iso(run.end), "00:10:00", "0:0", "COMPLETED", str(len(run.nodes)), "1", "1", "1G", "", "",
              "1:00:00", ",".join(run.nodes), "name|with|bars"]  # fmt: skip
    return "|".join(fields)


def sacct_pairs(run: Run, job: int) -> str:
    nodes = f'"NodeList={",".join(run.nodes)}"' if len(run.nodes) > 1 else f"NodeList={run.nodes[0]}"
    return (
        f"v=0.1.0,JobID={job},State=COMPLETED,Start={iso(run.start)}+00:00,End={iso(run.end)}+00:00,{nodes},JobName=x"
    )


def jobcomp(run: Run, job: int) -> str:
    return (
        f"JobId={job} UserId=u(1) GroupId=g(1) Name=two words JobState=COMPLETED Partition=main TimeLimit=60 "
        f"StartTime={iso(run.start)} EndTime={iso(run.end)} NodeList={','.join(run.nodes)} NodeCnt={len(run.nodes)} "
        f"ProcCnt=1 WorkDir=/home SubmitTime={iso(run.start)} ExitCode=0:0 "
    )


def swf(run: Run, job: int) -> str:
    return (
        f"{job} {run.start - 10 if run.start >= 10 else 0} {min(run.start, 10)} {run.end - run.start} {len(run.nodes)} "
        f"-1 -1 {len(run.nodes)} 900 -1 1 1 1 1 1 -1 -1 -1 {{{','.join(run.nodes)}}}"
    )


def lsf(run: Run, job: int) -> str:
    hosts = " ".join(f'"16*{node}"' for node in run.nodes)
    return (
        f'"JOB_FINISH" "9.11" {DAY + run.end} {job} 1 2 {16 * len(run.nodes)} {DAY} 0 0 {DAY + run.start} "user" "q" '
        f'"span[ptile=16]" "" "" "login" "/cwd" "" "out" "err" "file" 1 "asked" {len(run.nodes)} {hosts} 64 60.0 '
        f'"name" "#!/bin/sh;#BSUB -R ""span[ptile=16]"";run" 1.0 2.0 3'
    )


def pbs(run: Run, job: int) -> str:
    hosts = "+".join(f"{node}/0*16+{node}/1" for node in run.nodes)
    return (
        f"09/13/2020 12:26:40;E;{job}.server;user=u group=g jobname=j queue=q ctime={DAY} qtime={DAY} "
        f"etime={DAY} start={DAY + run.start} owner=u@h exec_host={hosts} Resource_List.nodect=1 session=1 "
        f"end={DAY + run.end} Exit_status=0"
    )


@dataclass(frozen=True)
class Dialect:
    """A format, its lines before the first job, and how it writes a job."""

    format: str
    write: Callable[[Run, int], str]
    header: tuple[str, ...] = ()

    def text(self, runs: tuple[Run, ...] = SCHEDULE) -> str:
        return "".join(f"{line}\n" for line in (*self.header, *map(self.write, runs, range(1, len(runs) + 1))))


DIALECTS = {
    "sacct": Dialect("sacct", sacct, ("JobID|Start|End|State|NodeList",)),
    "sacct-26": Dialect("sacct", sacct_26),
    "sacct-pairs": Dialect("sacct-pairs", sacct_pairs),
    "jobcomp": Dialect("jobcomp", jobcomp),
    "swf": Dialect("swf", swf, ("; Version: 2.2", f"; UnixStartTime: {DAY}", "; MaxNodes: 6", ";")),
    "lsf": Dialect("lsf", lsf),
    "pbs": Dialect("pbs", pbs),
}
