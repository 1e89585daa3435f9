"""Main jobs of a Slurm test cluster: a seeded schedule of them, its playing, and what Slurm's own log says of it.

`slurm_impact.py` plays the same schedule without and with BFTrainer; `tests/slurm/test_slurm_live.py` plays a shorter
one. Who held which node when is read from `jobcomp/filetxt`, whose times are whole seconds, truncated at both ends.
"""

from __future__ import annotations

import random
import re
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bftrainer.core.hostlist import expand

SPELL_S = 5.0
"""Idle spells shorter than this are not worth a pilot, and do not count."""
NAME = "main-"
PILOT = "bftrainer-"
_SIZES = {1: 45, 2: 25, 3: 8, 4: 8, 5: 3, 6: 4, 8: 4, 10: 3}
"""How often a job asks for so many nodes, of 100: many small ones, powers of two, few wide ones."""
_BURST = 3.0
_MORE_S = 0.4
_LONGEST = 0.2
_WORD = re.compile(r"\b(Name|JobState|StartTime|EndTime|NodeList)=(\S*)")

Spans = Mapping[str, Sequence[tuple[float, float]]]
"""From when to when, by node."""


class Cluster(Protocol):
    """A Slurm cluster that jobs can be submitted to; see `slurmlab.Lab`."""

    def submit(self, *options: str, script: str = ...) -> str:
        """Submit a job; its id."""


@dataclass(frozen=True, slots=True)
class MainJob:
    """A job of somebody else."""

    at_s: float
    """When it is submitted, after the begin of the schedule."""
    nodes: int
    run_s: float


@dataclass(frozen=True, slots=True)
class Played:
    """What has become of a job, in Unix time; None: it did not."""

    job: MainJob
    submitted: float
    started: float | None
    ended: float | None

    @property
    def wait_s(self) -> float | None:
        """From its submission to the first line of its script."""
        return None if self.started is None else self.started - self.submitted


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


def play(cluster: Cluster, jobs: Iterable[MainJob], folder: Path, tick: Callable[[], object] = lambda: None) -> float:
    """Submit jobs when it is their time, calling `tick` between them; when the schedule began. `played` reads it."""
    folder.mkdir()
    begin = time.time()
    for number, job in enumerate(jobs):
        while (left := begin + job.at_s - time.time()) > 0:
            tick()
            time.sleep(min(left, 0.5))
        here = shlex.quote(str(folder / str(number)))
        script = f"date +%s.%N >{here}.started; sleep {job.run_s}; date +%s.%N >{here}.ended"
        (folder / f"{number}.submitted").write_text(f"{time.time()}")
        cluster.submit(f"--nodes={job.nodes}", "--time=10", f"--job-name={NAME}{number}", script=script)
    return begin


def played(jobs: Iterable[MainJob], folder: Path) -> tuple[Played, ...]:
    """What has become of the jobs that `play` submitted."""

    def stamp(number: int, what: str) -> float | None:
        path = folder / f"{number}.{what}"
        text = path.read_text().strip() if path.exists() else ""
        return float(text) if text else None

    return tuple(
        Played(job, stamp(number, "submitted") or 0.0, stamp(number, "started"), stamp(number, "ended"))
        for number, job in enumerate(jobs)
    )


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


def gentle_python(folder: Path) -> Path:
    """A Python that lets all others go first, for `pool.python`.

    A real pilot has the cores of its node. Here all nodes, slurmctld and the main jobs share a few: what a pilot's
    start takes from them would be measured as a wait.
    """
    path = folder / "gentle-python"
    path.write_text(f'#!/bin/sh\nexec nice -n 10 {shlex.quote(sys.executable)} "$@"\n')
    path.chmod(0o755)
    return path


def _seconds(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
