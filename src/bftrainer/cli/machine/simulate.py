"""`bftrainer simulate` shows what BFTrainer would have trained on a trace."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args

import typer

from bftrainer.allocate.registry import ALLOCATORS
from bftrainer.cli.common.output import print_json, warn
from bftrainer.cli.common.progress import share_progress, waiting
from bftrainer.cli.common.selection import some_nodes, some_time, some_window
from bftrainer.cli.machine.show_simulation import show_parts, show_result, show_rigid
from bftrainer.core.trace import Trace, Window
from bftrainer.errors import InputError
from bftrainer.simulate.accounting import Accounting
from bftrainer.simulate.gantt import GanttRecorder
from bftrainer.simulate.metrics import as_json
from bftrainer.simulate.replay import DecideOn
from bftrainer.simulate.report import write_report
from bftrainer.simulate.study import RATE_NOISE, SNAPSHOT_EVERY_S, Study, rigid_baseline, simulate, simulate_parts
from bftrainer.simulate.workload import Workload, load_curves, load_workload
from bftrainer.traces import files
from bftrainer.traces.times import time_zone
from bftrainer.util.provenance import file_hash, provenance

TraceFile = Annotated[Path, typer.Option("--trace", metavar="T", help="Trace file, .parquet or .csv.")]
WorkloadFile = Annotated[
    Path, typer.Option("--workload", metavar="W", help="Workload file of trainers, .csv or .yaml.")
]
CurvesFile = Annotated[
    Path | None, typer.Option("--curves", metavar="FILE", help="Scaling curves by model name, .json.")
]
Nodes = Annotated[
    str | None, typer.Option("--nodes", metavar="N|A:B", help="Only the first N nodes, or nodes A up to B.")
]
From = Annotated[str | None, typer.Option("--from", metavar="TIME", help="Start of the window.")]
To = Annotated[str | None, typer.Option("--to", metavar="TIME", help="End of the window.")]
Zone = Annotated[str, typer.Option("--tz", metavar="ZONE", help="Time zone of times without one.")]
AllocatorName = Annotated[
    str, typer.Option("--allocator", metavar="NAME", help=f"Allocator: {', '.join(ALLOCATORS)} or module:name.")
]
ObjectiveName = Annotated[
    str,
    typer.Option(
        "--objective", metavar="NAME", help="Objective: throughput, efficiency, weighted, … or module:function."
    ),
]
AccountingName = Annotated[
    str,
    typer.Option(
        "--accounting", metavar="paper|stall", help="Cost of rescaling: samples at once (paper), or time (stall)."
    ),
]
DecideOnName = Annotated[
    str,
    typer.Option("--decide-on", metavar="pool|all", help="Decide at pool changes, or at completions and arrivals too."),
]
SnapshotEvery = Annotated[
    float,
    typer.Option(
        "--snapshot-every",
        "--snapshot-s",
        metavar="S",
        help="Seconds between snapshots: what a trainer loses when all its nodes go. 0: nothing, as in the paper.",
    ),
]
StartS = Annotated[
    float | None,
    typer.Option(
        "--start-s",
        metavar="S",
        min=0,
        help="Seconds in which a node that is given to a trainer computes nothing yet, unless the workload says so.",
    ),
]
CurvesKnown = Annotated[
    bool,
    typer.Option(
        "--curves-known/--curves-learned",
        help="The scheduler knows curves and costs, or learns them from noisy reports as in the live system.",
    ),
]
RateNoise = Annotated[
    float,
    typer.Option(metavar="SIGMA", min=0, help="With --curves-learned: relative noise of a reported rate."),
]
Seed = Annotated[int, typer.Option(metavar="N", help="With --curves-learned: seed of that noise.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def simulate_command(
    trace_file: TraceFile,
    workload_file: WorkloadFile,
    curves: CurvesFile = None,
    nodes: Nodes = None,
    from_: From = None,
    to: To = None,
    tz: Zone = "UTC",
    allocator: AllocatorName = "exact",
    objective: ObjectiveName = "throughput",
    horizon: Annotated[str, typer.Option(metavar="S|auto", help="Forward-looking time in seconds.")] = "120",
    max_parallel: Annotated[str, typer.Option(metavar="P|auto", help="Number of trainers considered at once.")] = "10",
    parts: Annotated[
        int, typer.Option(metavar="K", min=1, help="Number of independent schedulers, each on a range of nodes.")
    ] = 1,
    accounting: AccountingName = "stall",
    decide_on: DecideOnName = "all",
    snapshot_every: SnapshotEvery = SNAPSHOT_EVERY_S,
    start_s: StartS = None,
    curves_known: CurvesKnown = True,
    rate_noise: RateNoise = RATE_NOISE,
    seed: Seed = 1,
    rigid: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Simulate jobs of exactly N nodes in a killable queue instead, as centres run today.",
        ),
    ] = None,
    checkpoint: Annotated[
        float | None,
        typer.Option(metavar="S", help="With --rigid: seconds between checkpoints, if not those of --snapshot-every."),
    ] = None,
    guarantee: Annotated[
        str | None,
        typer.Option(metavar="N:S,…", help="With --rigid: jobs of up to N nodes are not killed for S seconds."),
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="F.html", help="Write a report page with all results.")] = None,
    gantt_from: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="With --report: the day to show node by node."),
    ] = None,
    as_json_: Json = False,
) -> None:
    """Replay a machine's history: what would BFTrainer have trained on its idle nodes?"""
    for option, given in (("--checkpoint", checkpoint), ("--guarantee", guarantee)):
        if given is not None and rigid is None:
            raise InputError(f"{option} is for jobs of a fixed size: give --rigid N as well, or leave it out")
    if rigid is not None and not curves_known:
        raise InputError("--rigid starts jobs of a fixed size, which need no curves: leave out --curves-learned")
    if report is not None:
        check_report(report, parts, rigid)
    study = Study(
        allocator,
        objective,
        number_or_auto(horizon, "--horizon", float),
        number_or_auto(max_parallel, "--max-parallel", int),
        cast(Accounting, one_of(accounting, get_args(Accounting), "--accounting")),
        cast(DecideOn, one_of(decide_on, get_args(DecideOn), "--decide-on")),
        snapshot_every,
        "known" if curves_known else "learned",
        rate_noise,
        seed,
    )
    study.settings()
    study.knowledge()  # a wrong name should fail before the trace is read
    trace, workload = load(trace_file, workload_file, curves, nodes, from_, to, tz, start_s)
    origin = provenance({trace_file.name: file_hash(trace_file), workload_file.name: workload.sha256})
    if rigid is not None:
        with waiting("replaying"):
            baseline = rigid_baseline(trace, workload.trainers, study, rigid, checkpoint, _guarantees(guarantee))
        if as_json_:
            print_json({**asdict(baseline), "provenance": origin})
        else:
            show_rigid(baseline)
        return
    recorder = None if report is None else GanttRecorder(_day(trace, gantt_from, tz), trace.nodes)
    with share_progress("replaying") as progress:
        if parts > 1:
            results = simulate_parts(trace, workload.trainers, study, parts, progress)
        else:
            watch = None if recorder is None else recorder.watch
            results = [simulate(trace, workload.trainers, study, watch, progress)]
    if not all(result.metrics.finished for result in results):
        done = sum(result.metrics.completed for result in results)
        warn(f"the trace ended before the workload: {done} of {len(workload.trainers)} trainers are done")
    if report is not None and recorder is not None:
        write_report(
            report,
            title=f"{workload.name} on {trace_file.name}",
            replay=results[0].replay,
            metrics=results[0].metrics,
            gantt=recorder.finish(results[0].replay),
            settings={name: "auto" if value is None else str(value) for name, value in asdict(study).items()},
            provenance=origin,
            idle=trace,
        )
    if as_json_:
        print_json({**_json([as_json(r.metrics, r.replay) for r in results]), "provenance": origin})
    elif parts > 1:
        show_parts([result.metrics for result in results])
    else:
        show_result(results[0].metrics, results[0].replay)
        if report is not None:
            print(f"wrote {report}")


def check_report(path: Path, parts: int, rigid: int | None) -> None:
    """Refuse early a report that could not be written later."""
    if parts > 1 or rigid is not None:
        raise InputError("--report shows one scheduler: it cannot be combined with --parts or --rigid")
    if path.suffix != ".html":
        raise InputError(f"{path}: a report must end in .html")
    files.check_writable(path)


def _day(trace: Trace, start: str | None, tz: str) -> Window:
    """The day of the replay that the report shows node by node."""
    first = some_time(start, time_zone(tz), "--gantt-from")
    first = trace.window.start if first is None else first
    if not trace.window.start <= first < trace.window.end:
        raise InputError(f"--gantt-from must be within the replayed window, {trace.window}, but got {start}")
    return Window(first, min(first + 86400, trace.window.end))


def load(
    trace_file: Path,
    workload_file: Path,
    curves: Path | None,
    nodes: str | None,
    from_: str | None,
    to: str | None,
    tz: str,
    start_s: float | None = None,
) -> tuple[Trace, Workload]:
    """The selected part of a trace, and the workload. `start_s` is the start of nodes where the workload has none."""
    zone = time_zone(tz)
    start, end = some_time(from_, zone, "--from"), some_time(to, zone, "--to")
    trace = files.load_trace(trace_file, zone)
    if nodes is not None:
        trace = trace.select(some_nodes(trace, nodes))
    trace = trace.clip(some_window(trace, start, end))
    known = load_curves(curves) if curves is not None else None
    workload = load_workload(workload_file, known, zone, trace.window.start)
    if start_s:
        trainers = (trainer if trainer.start_s else replace(trainer, start_s=start_s) for trainer in workload.trainers)
        workload = replace(workload, trainers=tuple(trainers))
    return trace, workload


N = TypeVar("N", int, float)


def number_or_auto(text: str, what: str, kind: type[N]) -> N | None:
    """A number, or None for `auto`."""
    if text == "auto":
        return None
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{what} must be a number or auto, but got {text!r}") from None


def _guarantees(text: str | None) -> list[tuple[int, float]]:
    """Parse `45:7200,90:3600` into pairs of nodes and seconds."""
    try:
        pairs = [part.split(":") for part in text.split(",")] if text else []
        return [(int(nodes), float(seconds)) for nodes, seconds in pairs]
    except ValueError:
        raise InputError(f"--guarantee must be NODES:SECONDS pairs such as 45:7200, but got {text!r}") from None


def one_of(text: str, known: tuple[str, ...], what: str) -> str:
    """Check that `text` is one of the known words."""
    if text not in known:
        raise InputError(f"{what} must be one of {', '.join(known)}, but got {text!r}")
    return text


def _json(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One result, or the sum of several with the parts beside it. Shares are weighted by node-hours."""
    if len(parts) == 1:
        return parts[0]
    hours = [part["resource_integral_node_hours"] for part in parts]
    total = sum(hours) or 1.0
    sums = (
        *("outcome_samples", "resource_integral_node_hours", "completed", "events", "decisions"),
        *("preemption_cost_samples", "rescale_cost_samples", "waiting_cost_samples", "wall_s"),
    )
    means = ("efficiency", "bound", "unoccupied_share")
    combined = {key: sum(part[key] for part in parts) for key in sums}
    combined |= {key: sum(part[key] * h for part, h in zip(parts, hours, strict=True)) / total for key in means}
    combined["hours"] = max(part["hours"] for part in parts)
    combined["eq_nodes"] = sum(part["eq_nodes"] for part in parts)
    combined["finished"] = all(part["finished"] for part in parts)
    combined["decision_ms"] = {key: max(part["decision_ms"][key] for part in parts) for key in parts[0]["decision_ms"]}
    combined["trainers"] = [row for part in parts for row in part["trainers"]]
    return {**combined, "parts": [{k: v for k, v in part.items() if k != "trainers"} for part in parts]}


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("simulate")(simulate_command)
