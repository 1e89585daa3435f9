"""Main jobs of a Slurm test cluster: a seeded schedule of them, its playing, and what Slurm's own log says of it.

`slurm_impact.py` plays the same schedule without pilots, with sleeping pilots and with BFTrainer;
`tests/slurm/test_slurm_live.py` plays a shorter one. Who held which node when is read from `jobcomp/filetxt`, whose
times are whole seconds, truncated at both ends.
"""

from __future__ import annotations

import math
import random
import re
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from bftrainer.core.hostlist import expand

SPELL_S = 5.0
"""Idle spells shorter than this are not worth a pilot, and do not count."""
NAME = "main-"
PILOT = "bftrainer-"
PROBE = "probe"
_SIZES = {1: 45, 2: 25, 3: 8, 4: 8, 5: 3, 6: 4, 8: 4, 10: 3}
"""How often a job asks for so many nodes, of 100: many small ones, powers of two, few wide ones."""
_BURST = 3.0
_MORE_S = 0.4
_LONGEST = 0.2
_LOOKS = 5
_PATIENCE_S = 120.0
"""How long the end of a job in a reservation is awaited at most, before the reservation is left alone."""
_WORD = re.compile(r"\b(Name|JobState|StartTime|EndTime|NodeList)=(\S*)")

Spans = Mapping[str, Sequence[tuple[float, float]]]
"""From when to when, by node."""


class Cluster(Protocol):
    """A Slurm cluster that jobs can be submitted to; see `slurmlab.Lab`."""

    def submit(self, *options: str, script: str = ...) -> str:
        """Submit a job; its id."""

    def run(self, *argv: str) -> str:
        """Run a command of Slurm; what it prints."""

    def jobs(self, *options: str) -> Mapping[str, str]:
        """The state of each job that has not ended, by its id."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes that are reserved for one job, from some seconds after its submission on."""

    nodes: tuple[str, ...]
    begins_s: float
    minutes: int = 1


@dataclass(frozen=True, slots=True)
class MainJob:
    """A job of somebody else."""

    at_s: float
    """When it is submitted, after the begin of the schedule."""
    nodes: int
    run_s: float
    kind: str = "plain"
    options: tuple[str, ...] = ()
    """More options of sbatch."""
    tasks: int = 1
    """More than one: a job array of so many tasks."""
    after: int | None = None
    """The number of a job that must have ended before."""
    reservation: Reservation | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """What has become of a job, or of a task of an array, in Unix time; None: it did not."""

    job: MainJob
    submitted: float
    started: float | None
    ended: float | None
    ready: float = 0.0
    """When it could have started at the earliest, if later: its predecessor ended, or its reservation began."""

    @property
    def wait_s(self) -> float | None:
        """From its submission, or from when it could start, to the first line of its script."""
        return None if self.started is None else self.started - max(self.submitted, self.ready)


def schedule(seed: int, jobs: int, nodes: int, span_s: float, load: float = 0.3) -> tuple[MainJob, ...]:
    """So many jobs within `span_s` that keep `load` of all nodes busy.

    They come in bursts, as users submit them; their run times are lognormal.
    """
    rng = random.Random(seed)
    bursts = [0.0, *sorted(rng.uniform(0.02, 0.92) for _ in range(round(jobs / _BURST)))]
    times = sorted(span_s * rng.choice(bursts) + rng.expovariate(1 / _MORE_S) for _ in range(jobs))
    sizes = [min(size, nodes) for size in rng.choices(list(_SIZES), list(_SIZES.values()), k=jobs)]
    sizes[rng.randrange(jobs)] = min(10, nodes)  # one of the widest, whatever was drawn
    lengths = [rng.lognormvariate(0.0, 0.9) for _ in range(jobs)]
    scale = load * nodes * span_s / sum(size * length for size, length in zip(sizes, lengths, strict=True))
    return tuple(
        MainJob(round(at, 3), size, round(min(max(1.0, length * scale), _LONGEST * span_s), 2))
        for at, size, length in zip(times, sizes, lengths, strict=True)
    )


def varied(seed: int, jobs: int, nodes: int, span_s: float, load: float = 0.3) -> tuple[MainJob, ...]:
    """A schedule as `schedule`, of which some jobs are of other kinds.

    Bursts that want all nodes, arrays, `--exclusive`, `--nodelist`, dependencies, and a job in a reservation.
    """
    rng = random.Random(seed)
    plain = list(schedule(seed, jobs, nodes, span_s, load))
    names = [f"n{number:02}" for number in range(1, nodes + 1)]
    found = list[MainJob]()
    for number, job in enumerate(plain):
        kind = ("plain", "exclusive", "plain", "nodelist", "plain", "array", "plain", "dependency")[number % 8]
        if kind == "exclusive":
            job = replace(job, kind=kind, options=("--exclusive",))
        elif kind == "nodelist":
            size = min(job.nodes, 2)
            job = replace(job, kind=kind, nodes=size, options=(f"--nodelist={','.join(rng.sample(names, size))}",))
        elif kind == "array":
            tasks = min(4, nodes)
            job = replace(job, kind=kind, nodes=1, tasks=tasks, run_s=round(max(1.0, job.run_s / tasks), 2))
        elif kind == "dependency":
            job = replace(job, kind=kind, after=number - 1)
        found.append(job)
    for share_of_span in (0.2, 0.45):  # two users submit jobs that want everything, one after the other
        at_s = round(span_s * share_of_span, 3)
        found += [MainJob(at_s + gap_s, nodes, 2.0, "all nodes") for gap_s in (0.0, 0.2)]
    reserved = Reservation(tuple(names[-max(1, nodes // 6) :]), begins_s=round(0.08 * span_s, 1))
    found.append(MainJob(round(0.6 * span_s, 3), len(reserved.nodes), 3.0, "reservation", reservation=reserved))
    order = sorted(range(len(found)), key=lambda number: (found[number].at_s, number))
    places = {number: place for place, number in enumerate(order)}
    return tuple(
        replace(job, after=None if job.after is None else places[job.after])
        for job in (found[number] for number in order)
    )


def play(
    cluster: Cluster,
    jobs: Iterable[MainJob],
    folder: Path,
    tick: Callable[[], object] = lambda: None,
    phase: float | None = None,
) -> float:
    """Submit jobs when it is their time, calling `tick` between them; when the schedule began. `played` reads it.

    With a `phase`, it begins at this fraction of a second: see `cycle_phase`.
    """
    folder.mkdir()
    if phase is not None:
        time.sleep((phase - time.time()) % 1.0)
    begin = time.time()
    ids: list[str] = []
    reservations: list[int] = []
    for number, job in enumerate(jobs):
        while (left := begin + job.at_s - time.time()) > 0:
            tick()
            _release(cluster, reservations, folder)
            time.sleep(min(left, 0.5))
        options = [f"--nodes={job.nodes}", f"--time={int(job.run_s // 60) + 2}", f"--job-name={NAME}{number}"]
        options += job.options
        if job.tasks > 1:
            options.append(f"--array=0-{job.tasks - 1}")
        if job.after is not None:
            options.append(f"--dependency=afterany:{ids[job.after]}")
        if job.reservation is not None:
            options.append(f"--reservation={_reserve(cluster, job.reservation, number, folder)}")
            reservations.append(number)
        here = shlex.quote(str(folder / str(number))) + "-${SLURM_ARRAY_TASK_ID:-0}"
        script = f"date +%s.%N >{here}.started; sleep {job.run_s}; date +%s.%N >{here}.ended"
        (folder / f"{number}.submitted").write_text(f"{time.time()}")
        ids.append(cluster.submit(*options, script=script))
    until = time.time() + _PATIENCE_S
    while reservations and time.time() < until:
        tick()
        _release(cluster, reservations, folder)
        time.sleep(0.5)
    return begin


def cycle_phase(cluster: Cluster, folder: Path, node: str) -> float:
    """Return at which fraction of a second the test cluster's Slurm looks at its queue, once per second.

    It is chance for each slurmctld, and stays the same. A job that needs a pilot's node waits for this look, so two
    plays of one schedule differ by up to a second in most waits unless they begin at the same point of the cycle.
    Measured with jobs on a node that a pilot holds; the node is empty before and after.
    """
    folder.mkdir()
    found = []
    for number in range(_LOOKS):
        pilot = cluster.submit("-p", "scavenger", f"--nodelist={node}", "--exclusive", "--signal=B:TERM@1")
        _until(lambda: cluster.jobs("-p", "scavenger", "-t", "R"), "a pilot")
        started = folder / str(number)
        cluster.submit(f"--nodelist={node}", f"--job-name={PROBE}", script=f"date +%s.%N >{shlex.quote(str(started))}")
        _until(partial(_stamp, started), "a job that takes the pilot's node")
        cluster.run("scancel", pilot)
        _until(lambda: not cluster.jobs(), "an empty cluster")
        found.append((_stamp(started) or 0.0) % 1.0)
    # The median on a circle: the one that is nearest to all others.
    return min(found, key=lambda one: sum(abs((one - other + 0.5) % 1.0 - 0.5) for other in found))


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {_PATIENCE_S:g} s")
        time.sleep(0.1)


def _reserve(cluster: Cluster, wanted: Reservation, number: int, folder: Path) -> str:
    """Make a reservation as an administrator does where jobs run on the nodes; its name."""
    begins = int(time.time() + wanted.begins_s)
    (folder / f"{number}.ready").write_text(f"{begins}")
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(begins))
    cluster.run(
        "scontrol", "create", "reservation", f"ReservationName=r{number}", f"StartTime={when}",
        f"Duration={wanted.minutes}", f"Nodes={','.join(wanted.nodes)}", "Users=root", "Flags=IGNORE_JOBS",
    )  # fmt: skip
    return f"r{number}"


def _release(cluster: Cluster, numbers: list[int], folder: Path) -> None:
    """Delete reservations whose jobs have ended, and forget their numbers."""
    for number in list(numbers):
        if (_stamp(folder / f"{number}-0.ended") or math.inf) < time.time() - 2.0:
            cluster.run("scontrol", "delete", f"ReservationName=r{number}")
            (folder / f"{number}.released").write_text(f"{time.time()}")
            numbers.remove(number)


def reserved(jobs: Iterable[MainJob], folder: Path) -> Spans:
    """When nodes were reserved, by node."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number, job in enumerate(jobs):
        if job.reservation is not None:
            begin = _stamp(folder / f"{number}.ready") or 0.0
            end = _stamp(folder / f"{number}.released") or begin + 60.0 * job.reservation.minutes
            for node in job.reservation.nodes:
                found[node].append((begin, end))
    return found


def played(jobs: Sequence[MainJob], folder: Path) -> tuple[Played, ...]:
    """What has become of the jobs that `play` submitted, each task of an array by itself."""
    ends = [
        max((_stamp(folder / f"{number}-{task}.ended") or 0.0 for task in range(job.tasks)), default=0.0)
        for number, job in enumerate(jobs)
    ]
    found = list[Played]()
    for number, job in enumerate(jobs):
        ready = _stamp(folder / f"{number}.ready") or (0.0 if job.after is None else ends[job.after])
        submitted = _stamp(folder / f"{number}.submitted") or 0.0
        for task in range(job.tasks):
            here = folder / f"{number}-{task}"
            started, ended = (_stamp(here.with_name(f"{here.name}.{what}")) for what in ("started", "ended"))
            found.append(Played(job, submitted, started, ended, ready))
    return tuple(found)


def _stamp(path: Path) -> float | None:
    text = path.read_text().strip() if path.exists() else ""
    return float(text) if text else None


def held(log: Path, prefix: str) -> dict[str, list[tuple[float, float]]]:
    """From when to when jobs whose names begin so held each node, by Slurm's log of jobs that have ended."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in log.read_text().splitlines():
        words = dict(_WORD.findall(line))
        if words.get("Name", "").startswith(prefix) and words["StartTime"] != "Unknown":
            for node in expand(words["NodeList"]) if words["NodeList"] != "(null)" else ():
                found[node].append((_seconds(words["StartTime"]), _seconds(words["EndTime"])))
    return found


def failed(log: Path) -> int:
    """How many main jobs did not end well."""
    rows = [dict(_WORD.findall(line)) for line in log.read_text().splitlines()]
    return sum(row["Name"].startswith(NAME) and row["JobState"] != "COMPLETED" for row in rows)


def together(*spans: Spans) -> Spans:
    """Return the spans of several sources, joined where they overlap."""
    found: dict[str, list[tuple[float, float]]] = {}
    for node in {node for one in spans for node in one}:
        merged: list[tuple[float, float]] = []
        for first, last in sorted(span for one in spans for span in one.get(node, ())):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        found[node] = merged
    return found


def idle_spells(busy: Spans, nodes: Iterable[str], begin: float, end: float, least_s: float = SPELL_S) -> Spans:
    """When each node was held by no main job, between `begin` and `end`, for `least_s` or longer."""
    found: dict[str, list[tuple[float, float]]] = {}
    for node in nodes:
        edges = [begin]
        for first, last in sorted(busy.get(node, ())):
            edges += [min(max(first, begin), end), min(max(last, begin), end)]
        edges.append(end)
        pairs = zip(edges[::2], edges[1::2], strict=True)
        found[node] = [(first, last) for first, last in pairs if last - first >= least_s]
    return found


def share(spells: Spans, spans: Spans) -> float:
    """The share of the time in `spells` that lies in `spans`; those of a node must not overlap."""
    total = sum(last - first for pairs in spells.values() for first, last in pairs)
    both = sum(
        max(0.0, min(last, until) - max(first, since))
        for node, pairs in spells.items()
        for first, last in pairs
        for since, until in spans.get(node, ())
    )
    return both / total if total else 1.0


def joined(moments: Mapping[str, Iterable[float]], gap_s: float) -> Spans:
    """Spans of moments that follow each other within `gap_s`, by node."""
    found: dict[str, list[tuple[float, float]]] = {}
    for node, times in moments.items():
        spans: list[tuple[float, float]] = []
        for at in sorted(times):
            if spans and at - spans[-1][1] <= gap_s:
                spans[-1] = (spans[-1][0], at)
            else:
                spans.append((at, at))
        found[node] = spans
    return found


_GENTLE = """#!{python}
import os, runpy, sys
os.nice(10)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # virtual nodes have no GPUs, whatever the machine has
from bftrainer.processes import parent
idle = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); "
parent._MAIN = idle + parent._MAIN  # what workers are forked from, and so the workers
from bftrainer.cluster.agent.workers import AgentWorkers
taken = AgentWorkers.taken
async def taken_soon(self, within_s):
    workers = [process.pid for worker in self.processes.running for process in worker.processes]
    parents = [process.pid for launcher in self._scripts.values() for process in launcher.parents]
    for pid, nice in [*((pid, 0) for pid in workers), *((pid, 19) for pid in parents)]:
        try:
            for thread in os.listdir(f"/proc/{{pid}}/task"):
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, int(thread), nice)
        except OSError:  # it has ended
            pass
    await taken(self, within_s)
AgentWorkers.taken = taken_soon
while sys.argv[1] != "-m":  # flags of the interpreter
    del sys.argv[1]
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def gentle_python(folder: Path) -> Path:
    """A Python whose workers run only when nobody else wants the cores, for `pool.python`.

    A real pilot has the cores of its node: what its workers import and compute takes nothing from slurmctld, from the
    main jobs and from the pilots of other nodes. Here all of them share a few cores. So the workers are at idle
    priority, and the agents, whose end a main job waits for, between the two. When a node is taken, its workers may
    save state before they end: they do that at normal priority, as on a node with cores of its own. So does the warm
    parent, which tells the agent of their ends; it stays behind the agents, since nobody waits for its own end.
    """
    path = folder / "gentle-python"
    path.write_text(_GENTLE.format(python=sys.executable))
    path.chmod(0o755)
    return path


def behind_others(folder: Path) -> Path:
    """A Python that leaves the cores to Slurm and main jobs, for a controller that has a host of its own elsewhere."""
    path = folder / "python-behind-others"
    path.write_text(f'#!/bin/sh\nexec nice -n 10 {shlex.quote(sys.executable)} "$@"\n')
    path.chmod(0o755)
    return path


@contextmanager
def priorities_across_sessions() -> Iterator[None]:
    """Let priorities count between all processes of the machine.

    Where the kernel groups processes by session (`sched_autogroup_enabled`), each session gets an equal share, whatever
    the priorities of its processes. Every pilot and every worker is a session of its own here.
    """
    setting = Path("/proc/sys/kernel/sched_autogroup_enabled")
    before = setting.read_text() if setting.exists() else ""
    if before.strip() == "1":
        setting.write_text("0")
    try:
        yield
    finally:
        if before.strip() == "1":
            setting.write_text(before)


def _seconds(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
