"""Importing turns any file that says when nodes were idle or in use into a trace: `bftrainer trace import`.

It opens the file, detects its format from its content, lets the format's reader account for every line, and applies the
user's options (window, nodes, exclusions). `FORMATS` lists the formats; a new one is done when it is listed there and
passes the conformance suite in `tests/traces/test_readers.py`.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, cast

from bftrainer.core.trace import Trace
from bftrainer.errors import InputError
from bftrainer.traces import files
from bftrainer.traces.ranges import RangeTrace
from bftrainer.traces.readers import summit
from bftrainer.traces.readers.joblog import read_jobs
from bftrainer.traces.readers.jobs import JobLogReader, ReaderOptions
from bftrainer.traces.readers.lsf import LsfReader
from bftrainer.traces.readers.options import ImportOptions, choose_window, without_nodes
from bftrainer.traces.readers.pbs import PbsReader
from bftrainer.traces.readers.report import ImportReport
from bftrainer.traces.readers.slurm import JobcompReader, SacctPairsReader, SacctReader
from bftrainer.traces.readers.swf import SwfReader
from bftrainer.traces.recorder import journal
from bftrainer.traces.recorder.recording import read_journal
from bftrainer.traces.source import Progress, Source, opened


@dataclass(frozen=True)
class Imported:
    """A trace, as ranges of nodes, and the report of its import."""

    ranges: RangeTrace
    report: ImportReport
    sha256: str

    @cached_property
    def trace(self) -> Trace:
        """The trace with one row per fragment."""
        return self.ranges.trace()


@dataclass(frozen=True, slots=True)
class Format:
    """A file format: how to recognise it and how to read it."""

    name: str
    about: str
    recognises: Callable[[bytes], bool]
    read: Callable[[Source, ImportOptions], tuple[RangeTrace, ImportReport]] = field(repr=False)


def import_trace(
    path: Path,
    options: ImportOptions | None = None,
    format_name: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Imported:
    """Read `path` in the format detected from its content, or in the named one."""
    options = options or ImportOptions()
    with opened(path, progress) as source:
        chosen = _by_name(format_name) if format_name else _detect(source)
        ranges, report = chosen.read(source, options)
        ranges = ranges.without_transients(options.min_idle_s)
        report.nodes, report.window = len(ranges.nodes), ranges.window
        return Imported(ranges, report, source.sha256())


def _by_name(name: str) -> Format:
    for known in FORMATS:
        if known.name == name:
            return known
    raise InputError(f"format must be one of {', '.join(f.name for f in FORMATS)}, but got {name!r}")


def _detect(source: Source) -> Format:
    head = source.head()
    if not head.strip():
        raise InputError("is empty")
    for known in FORMATS:
        if known.recognises(head):
            return known
    raise InputError(
        f"is in none of the known formats ({', '.join(f.name for f in FORMATS)}). If it is one of them, say which with "
        "--format; for sacct output without a header line, name its columns with --columns"
    )


def _job_log(reader_class: type[JobLogReader], about: str) -> Format:
    """The format of a log of jobs, read line by line."""

    def recognises(head: bytes) -> bool:
        if b"\0" in head:
            return False
        return reader_class.recognises(head.decode("utf-8", "replace").splitlines())

    def read(source: Source, options: ImportOptions) -> tuple[RangeTrace, ImportReport]:
        return read_jobs(source, reader_class(ReaderOptions(options.zone, options.columns)), options)

    return Format(reader_class.name, about, recognises, read)


def _of_idleness(
    name: str, read: Callable[[Source, ImportOptions], tuple[Trace, list[str]]]
) -> Callable[[Source, ImportOptions], tuple[RangeTrace, ImportReport]]:
    """Reader for formats that already hold idle fragments: only the user's options are applied."""

    def reader(source: Source, options: ImportOptions) -> tuple[RangeTrace, ImportReport]:
        trace, notes = read(source, options)
        report = ImportReport(name, notes=notes)
        if options.nodes is not None:
            strangers = set(trace.nodes).difference(options.nodes)
            if strangers:
                notes.append(
                    f"{len(strangers)} nodes are not in the nodes file and are left out, for example {min(strangers)}"
                )
            trace = trace.on_machine(options.nodes)
        trace = trace.select(without_nodes(trace.nodes, options.exclude))
        if options.start is not None or options.end is not None:
            trace = trace.clip(choose_window(trace.window.start, trace.window.end, options))
        return RangeTrace.of(trace), report

    return reader


def _read_native(source: Source, options: ImportOptions) -> tuple[Trace, list[str]]:
    return files.read_trace(source, options.zone), []


def _read_journal(source: Source, options: ImportOptions) -> tuple[Trace, list[str]]:
    recording = read_journal(cast(BinaryIO, source.stream))
    return recording.trace, recording.notes


def _read_summit(source: Source, options: ImportOptions) -> tuple[Trace, list[str]]:
    if not _is_tar(source.head()):
        return summit.read_matrix(cast(BinaryIO, source.stream)), []
    try:
        with tarfile.open(fileobj=source.stream, mode="r|") as archive:
            for member in archive:
                if member.isfile() and member.name.endswith((".pkl", ".pickle")):
                    inside = archive.extractfile(member)
                    assert inside is not None
                    return summit.read_matrix(cast(BinaryIO, inside)), []
    except tarfile.TarError as problem:
        raise InputError(f"truncated or damaged tar archive ({problem})") from None
    raise InputError("has no .pkl file in it")


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def _is_pickle_or_tar(head: bytes) -> bool:
    return _is_tar(head) or (head[:1] == b"\x80" and b"pandas" in head)


FORMATS: tuple[Format, ...] = (
    Format(
        "trace",
        "a trace of BFTrainer's own, Parquet or CSV",
        lambda head: files.is_parquet(head) or files.is_csv(head),
        _of_idleness("trace", _read_native),
    ),
    Format(
        "journal",
        "the journal of bftrainer trace record",
        journal.looks_like_journal,
        _of_idleness("journal", _read_journal),
    ),
    Format(
        "summit",
        "the BFTrainer authors' event matrix, .pkl or .tar.gz",
        _is_pickle_or_tar,
        _of_idleness("summit", _read_summit),
    ),
    _job_log(LsfReader, "LSF lsb.acct"),
    _job_log(PbsReader, "PBS or Torque accounting"),
    _job_log(JobcompReader, "Slurm jobcomp/filetxt"),
    _job_log(SacctPairsReader, "Slurm sacct as Name=value pairs"),
    _job_log(SacctReader, "Slurm sacct -P"),
    _job_log(SwfReader, "Standard Workload Format"),
)
"""Every format that can be imported, in the order of detection.

SWF comes last: other logs too may begin with comments that look like its header.
"""
