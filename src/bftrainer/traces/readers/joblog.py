"""Job logs: reads a whole log, accounts for each line, and returns the machine's idle time as a trace.

`importing.py` calls this with the reader of the log's format. Logs that list nodes and logs that only count processors
take different paths to the same result.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from bftrainer.core.trace import Indices, Window, utc
from bftrainer.errors import InputError
from bftrainer.traces.ranges import NodeSpans, RangeTrace
from bftrainer.traces.readers import jobs
from bftrainer.traces.readers.first_fit import lay_first_fit
from bftrainer.traces.readers.idle import BusyTimes, Numbering
from bftrainer.traces.readers.jobs import Job, JobLogReader
from bftrainer.traces.readers.options import ImportOptions, choose_window, without_nodes
from bftrainer.traces.readers.report import ImportReport
from bftrainer.traces.source import Source
from bftrainer.util.text import natural

LARGEST_MACHINE = 1_000_000
STRAY_SHARE = 0.005
"""Share of jobs at each end of a log that may have wrong times."""
STRAY_FACTOR = 5
"""A log is this many times longer than the time in which the other jobs start: some of its times look wrong."""


class _Jobs:
    """Jobs of a log while it is read: those with nodes as `BusyTimes`, those without as columns."""

    def __init__(self) -> None:
        self.number = Numbering()
        self.occupancy = BusyTimes()
        self.starts, self.ends = array("d"), array("d")
        self.processors: list[int] = []
        self.lines = array("q")
        self.first_start = self.first_end = np.inf
        self.latest = -np.inf
        self.all_starts = array("d")

    def add(self, job: Job) -> None:
        end = np.inf if job.end is None else job.end
        self.first_start = min(self.first_start, job.start)
        self.latest = max(self.latest, job.start)
        self.all_starts.append(job.start)
        if job.end is not None:
            self.first_end = min(self.first_end, end)
            self.latest = max(self.latest, end)
        if job.nodes:
            self.occupancy.add(self.number(job.nodes), job.start, end)
        else:
            self.starts.append(job.start)
            self.ends.append(end)
            self.processors.append(job.processors)
            self.lines.append(job.line)


def read_jobs(source: Source, reader: JobLogReader, options: ImportOptions) -> tuple[RangeTrace, ImportReport]:
    """The idle time that the jobs of `source` leave, and the report on each line."""
    report = ImportReport(reader.name)
    found = _Jobs()
    for outcome in reader.read(source.lines()):
        if isinstance(outcome, Job):
            report.used += 1
            found.add(outcome)
        else:
            report.skip(outcome.line, outcome.reason)
    if found.number.index and found.processors:
        report.used -= len(found.processors)
        for line in found.lines:
            report.skip(line, jobs.NO_NODES)
    _refuse_useless(report)
    report.notes += reader.notes
    _note_strays(found, report)
    if found.number.index:
        trace = _from_node_lists(found, options, report)
    else:
        trace = _from_counts(found, reader, options, report)
    return trace, report


def _refuse_useless(report: ImportReport) -> None:
    if report.jobs == 0:
        raise InputError("has no job in it")
    if 2 * report.malformed > report.jobs:
        raise InputError(
            f"{report.malformed} of {report.jobs} lines are broken as {report.format}: {report.reasons()}. "
            "Is it the right --format (and are --columns right)?"
        )
    if report.used == 0:
        raise InputError(f"no job in it held a node for a known time: {report.reasons()}")


def _note_strays(found: _Jobs, report: ImportReport) -> None:
    """Note a few jobs far from all others: one wrong year makes a machine look idle for decades."""
    starts = np.sort(np.frombuffer(found.all_starts))
    stray = int(STRAY_SHARE * len(starts))
    if stray == 0:
        return
    first, last = float(starts[stray]), float(starts[-1 - stray])
    if found.latest - found.first_start > STRAY_FACTOR * (last - first):
        report.notes.append(
            f"the log covers {Window(found.first_start, found.latest)}, but all but a few of its jobs start from "
            f"{utc(first)} to {utc(last)}. If the others have wrong times, cut the log with --from and --to"
        )


def _from_node_lists(found: _Jobs, options: ImportOptions, report: ImportReport) -> RangeTrace:
    # Such logs list jobs by end time. Before the first end, jobs that ended earlier are missing.
    first = min(found.first_end, found.latest)
    window = choose_window(first if first < found.latest else found.first_start, found.latest, options)
    seen = sorted(found.number.index, key=natural)
    nodes = list(options.nodes) if options.nodes is not None else seen
    if options.nodes is not None:
        listed = set(options.nodes)
        strangers = [name for name in seen if name not in listed]
        if strangers:
            report.notes.append(
                f"{len(strangers)} nodes of the log are not in the nodes file and are left out, for example "
                f"{strangers[0]}"
            )
    nodes = without_nodes(nodes, options.exclude)
    _check_machine(len(nodes))
    idle = found.occupancy.idle_times(_places(found.number.index, nodes), len(nodes))
    edges = idle.edges()
    edge_seconds = edges.seconds(window)
    all_seconds = len(nodes) * window.seconds
    report.busy_share = (all_seconds - idle.between.seconds(window) - edge_seconds) / all_seconds
    if options.nodes is None:
        report.notes.append(
            f"the machine is assumed to have the {len(nodes)} nodes in the log; name all with --nodes-file"
        )
    if options.keep_edges:
        spans = NodeSpans.joined([idle.between, edges])
    else:
        # Nothing shows that a node was up before its first and after its last job.
        spans = idle.between
        report.trimmed_node_hours = edge_seconds / 3600
    return RangeTrace.cut(nodes, spans, window, nodes_known=options.nodes is not None)


def _from_counts(found: _Jobs, reader: JobLogReader, options: ImportOptions, report: ImportReport) -> RangeTrace:
    facts = reader.facts
    if options.nodes is not None:
        names = list(options.nodes)
    else:
        size = facts.nodes or facts.processors
        if size is None:
            raise InputError(
                "has no node lists and no MaxNodes or MaxProcs in its header, so the machine's size is unknown. "
                "Name its nodes with --nodes-file"
            )
        _check_machine(size)
        width = len(str(size))
        names = [f"node{i:0{width}}" for i in range(1, size + 1)]
    processors = facts.processors or len(names)
    window = choose_window(found.first_start, found.latest, options)
    starts = np.frombuffer(found.starts)
    ends = np.minimum(np.frombuffer(found.ends), found.latest)
    layout = lay_first_fit(starts, ends, found.processors, len(names), max(processors, len(names)))
    report.notes.append(
        f"the log names no nodes: jobs were laid onto {len(names)} nodes first-fit in order of their start, so the "
        "number of idle nodes is real, but which ones, and for how long each, is not"
    )
    if layout.clipped_jobs:
        report.notes.append(
            f"{layout.clipped_jobs} jobs ({layout.clipped_jobs / report.used:.1%}) found more processors in use than "
            f"the machine's {processors}: {layout.clipped_share:.2%} of all processor-time was clipped"
        )
    kept = without_nodes(names, options.exclude)
    idle = layout.idle
    if len(kept) < len(names):
        idle = idle.renumbered(_places({name: i for i, name in enumerate(names)}, kept))
    # These nodes are invented, so no job shows when they were up: the whole machine counts.
    all_seconds = len(kept) * window.seconds
    report.busy_share = (all_seconds - idle.seconds(window)) / all_seconds
    return RangeTrace.cut(kept, idle, window, nodes_known=True)


def _places(index: dict[str, int], nodes: Sequence[str]) -> Indices:
    """For each number in `index` the position of that node in `nodes`; -1 if it is not there."""
    place = np.full(len(index), -1, dtype=np.int32)
    for i, name in enumerate(nodes):
        if (old := index.get(name)) is not None:
            place[old] = i
    return place


def _check_machine(size: int) -> None:
    if size > LARGEST_MACHINE:
        raise InputError(f"has {size} nodes, more than the {LARGEST_MACHINE} that are supported")
