"""`bftrainer trace` imports logs, measures idleness, and synthesises and records traces."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from bftrainer.cli.common.output import print_json, warn
from bftrainer.cli.common.progress import byte_progress, waiting
from bftrainer.cli.common.selection import some_nodes, some_time, some_window
from bftrainer.cli.machine.show_trace import show_import, show_stats
from bftrainer.core.trace import utc
from bftrainer.traces import files
from bftrainer.traces.plot import check_picture, plot_stats
from bftrainer.traces.readers.importing import FORMATS, import_trace
from bftrainer.traces.readers.options import ImportOptions
from bftrainer.traces.recorder.journal import Entry
from bftrainer.traces.recorder.record import INTERVAL_S, default_source, poll, record
from bftrainer.traces.recorder.recording import read_journal
from bftrainer.traces.stats import idle_stats
from bftrainer.traces.synthetic.synth import PROFILES, synthesise
from bftrainer.traces.times import time_zone
from bftrainer.util.provenance import file_hash, provenance

trace_app = typer.Typer(
    help="Import, measure, synthesise and record traces of idle nodes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

_FORMAT_NAMES = ", ".join(f.name for f in FORMATS)

Output = Annotated[Path, typer.Option("--output", "-o", help="Trace to write, .parquet or .csv.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Zone = Annotated[str, typer.Option("--tz", metavar="ZONE", help="Time zone of times without one, e.g. Europe/Berlin.")]
From = Annotated[str | None, typer.Option("--from", metavar="TIME", help="Start of the window.")]
To = Annotated[str | None, typer.Option("--to", metavar="TIME", help="End of the window.")]
MinIdle = Annotated[
    float, typer.Option("--min-idle", metavar="SECONDS", min=0, help="Drop fragments known to be shorter than this.")
]


@trace_app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Log to read; may be packed with gzip, bzip2 or xz.")],
    output: Output,
    format_name: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help=f"One of {_FORMAT_NAMES}; default: detected from the content."),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="Column names of sacct output that has no header line.")
    ] = None,
    tz: Zone = "UTC",
    from_: From = None,
    to: To = None,
    nodes_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of all nodes of the machine in order, one per line.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="NODES", help="Nodes to leave out: login[1-3],gpu01 or batch*. Repeatable."),
    ] = None,
    keep_edges: Annotated[
        bool,
        typer.Option(
            "--keep-edges", help="Count a node as idle before its first and after its last job in the log too."
        ),
    ] = False,
    min_idle: MinIdle = 0.0,
    as_json: Json = False,
) -> None:
    """Turn a scheduler's log into a trace of idle nodes."""
    files.check_output(output)
    zone = time_zone(tz)
    if columns is not None and format_name is None:
        format_name = "sacct"
    options = ImportOptions(
        zone=zone,
        columns=tuple(columns.split(",")) if columns else (),
        start=some_time(from_, zone, "--from"),
        end=some_time(to, zone, "--to"),
        nodes=tuple(files.read_node_names(nodes_file)) if nodes_file else None,
        exclude=tuple(exclude or ()),
        keep_edges=keep_edges,
        min_idle_s=min_idle,
    )
    with byte_progress(f"reading {file.name}") as progress:
        imported = import_trace(file, options, format_name, progress)
    if imported.ranges.window.end > time.time() + 60:
        warn(f"{file}: ends in the future, at {utc(imported.ranges.window.end)} UTC; is its time zone right (--tz)?")
    origin = provenance({file.name: imported.sha256})
    with waiting(f"writing {output.name}"):
        files.save_trace(imported.ranges, output, {**origin, "import": imported.report.as_dict()})
    if as_json:
        print_json({**imported.report.as_dict(), "fragments": imported.ranges.fragments, "provenance": origin})
    else:
        show_import(imported, output)


@trace_app.command()
def stats(
    file: Annotated[Path, typer.Argument(metavar="T", help="Trace file, .parquet or .csv.")],
    from_: From = None,
    to: To = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="N|A:B", help="Only the machine's first N nodes, or nodes A up to B.")
    ] = None,
    tz: Zone = "UTC",
    min_idle: MinIdle = 0.0,
    plot: Annotated[Path | None, typer.Option(metavar="F", help="Draw a figure: .png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Show how much of the machine is idle, in what pieces, and how long the pieces last."""
    if plot is not None:
        check_picture(plot)
    zone = time_zone(tz)
    start, end = some_time(from_, zone, "--from"), some_time(to, zone, "--to")
    with waiting(f"measuring {file.name}"):
        trace = files.load_trace(file, zone)
        if nodes is not None:
            trace = trace.select(some_nodes(trace, nodes))
        trace = trace.without_transients(min_idle)
        window = some_window(trace, start, end)
        result = idle_stats(trace, window)
        if plot is not None:
            plot_stats(trace, window, result, plot)
    if not trace.nodes_known:
        warn(
            f"{file}: the machine's nodes are not known, so the ratio divides by the {len(trace.nodes)} nodes seen; "
            "name all in a nodes.txt beside it"
        )
    if as_json:
        print_json({**result.as_dict(), "provenance": provenance({file.name: file_hash(file)})})
    else:
        show_stats(result, plot)


@trace_app.command()
def synth(
    profile: Annotated[str, typer.Option(metavar="|".join(PROFILES), help="Machine to imitate.")],
    output: Output,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Number of nodes; default: the machine's own number.")
    ] = None,
    hours: Annotated[float, typer.Option(metavar="H", help="Length of the trace in hours.")] = 336.0,
    seed: Annotated[int, typer.Option(metavar="S", help="Random seed; the same seed gives the same trace.")] = 0,
) -> None:
    """Synthesise a trace that resembles a real machine's, for users without a log."""
    files.check_output(output)
    with waiting(f"synthesising {profile}"):
        trace = synthesise(profile, nodes=nodes, hours=hours, seed=seed)
        files.save_trace(trace, output, provenance(seed=seed))
    print(f"wrote {output}: {len(trace):,} fragments of {len(trace.nodes):,} nodes in {trace.window.hours:,g} h")


@trace_app.command("record")
def record_(
    source: Annotated[str, typer.Option(metavar="slurm|pbs|script", help="Source of the nodes' states.")],
    output: Output,
    command: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="For --source script: command that prints idle nodes, one per line, or a scheduler's JSON.",
        ),
    ] = None,
    idle_partition: Annotated[
        str,
        typer.Option(
            metavar="PARTITION",
            help="For --source slurm: nodes with jobs of this partition only (such as BFTrainer's) count as idle.",
        ),
    ] = "",
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.01, help="Seconds between polls.")] = INTERVAL_S,
    duration: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Stop after this time; default: on Ctrl-C or SIGTERM.")
    ] = None,
) -> None:
    """Watch a live machine and record which nodes are idle.

    Every poll is appended to OUTPUT.journal at once; the trace is written at the end. The same command continues an
    existing journal, and `trace import` reads it at any time.
    """
    files.check_output(output)
    journal = output.with_name(output.name + ".journal")
    asked = default_source(source, command, idle_partition)
    if not journal.exists():
        poll(asked)  # a command that cannot work should fail now, not in the journal
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    print(f"recording every {interval:g} s into {journal}; stop with Ctrl-C", file=sys.stderr)
    tally = record(asked, journal, stop, interval_s=interval, duration_s=duration, watch=_warn_of_miss)
    recording = read_journal(journal)
    files.save_trace(recording.trace, output, provenance({journal.name: file_hash(journal)}))
    for note in recording.notes:
        print(f"note: {note}")
    print(f"wrote {output}: {len(recording.trace):,} fragments from {recording.polls:,} polls, {tally.polls:,} new")


def _warn_of_miss(entry: Entry) -> None:
    if entry.missed is not None:
        warn(f"missed a poll: {entry.missed}")


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.add_typer(trace_app, name="trace")
