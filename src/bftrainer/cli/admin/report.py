"""`bftrainer report` shows what was harvested in a span of time, by owner. It reads a controller's database."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from bftrainer.cli.common.connection import Json, State, live_packages, printable, say, screen
from bftrainer.cli.common.output import print_json, warn
from bftrainer.errors import InputError
from bftrainer.util.files import replacing
from bftrainer.util.provenance import provenance

if TYPE_CHECKING:
    from bftrainer.cluster.report.efficiency import Efficiency
    from bftrainer.cluster.report.usage import UsageReport

MOST_ROWS = 20
EARLIEST = 1e8
"""1973: a lower number is a year or a typing error, not seconds since 1970."""
"""Most trainers in the table on the screen."""


def report(
    start: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Start of the span; default: start of the event log.")
    ] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="TIME", help="End of the span; default: now.")] = None,
    tz: Annotated[str, typer.Option("--tz", metavar="ZONE", help="Time zone of times without one.")] = "UTC",
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML page, as one file.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write a table, one row per trainer.")
    ] = None,
    efficient: Annotated[
        bool | None,
        typer.Option("--efficiency/--no-efficiency", help="Compute U and the bound; default: only if that is quick."),
    ] = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Report what was harvested: node-hours and GPU-hours by owner and trainer, samples, efficiency.

    The node-hours of all owners and the unused node-hours add up to the pool's. Works beside a running controller and
    on the state folder of a stopped one.
    """
    with live_packages():
        from bftrainer.cluster.config.load import load_config
        from bftrainer.cluster.config.policy import policy_of
        from bftrainer.cluster.doctor.doctor import controller_runs
        from bftrainer.cluster.report import output
        from bftrainer.cluster.report.efficiency import Efficiency, efficiency_of
        from bftrainer.cluster.report.usage import account
        from bftrainer.cluster.store.store import FILE, Store
        from bftrainer.traces.times import parse_time, time_zone

    zone = time_zone(tz)

    def moment(text: str, option: str) -> float:
        found = parse_time(text, zone, option)
        if found < EARLIEST and text.strip().replace(".", "", 1).isdecimal():
            raise InputError(f"{option} must be a time such as 2026-11-01, but got {text!r}")
        return found

    since = None if start is None else moment(start, "--from")
    until = None if end is None else moment(end, "--to")
    for path in (page, table):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"{path}: there is no folder {path.absolute().parent}")
    config = load_config(overrides={"server.state": state})
    with Store.open(config.state / FILE, read_only=True) as store:
        found = account(store, since, until, now=time.time() if controller_runs(config.state) else None)
        judged = Efficiency(why="it was not asked for")
        if efficient is not False:
            judged = efficiency_of(store, found, policy_of(config), at_any_cost=bool(efficient))
        span = store.event_span()
    origin = provenance({FILE: f"events {span.first} to {span.last}"})
    if page is not None:
        _write(page, output.as_page(found, judged))
    if table is not None:
        _write(table, output.as_csv(found))
    if as_json:
        print_json(output.as_json(found, judged, origin))
    else:
        _show(found, judged)
    for note in found.notes:
        warn(note)


def _show(found: UsageReport, judged: Efficiency) -> None:
    from bftrainer.cluster.report.output import shown_window
    from bftrainer.cluster.report.usage import hours

    pool = max(found.pool_us, 1)
    say(f"{shown_window(found)}, {found.window.hours:,.1f} hours")
    say(
        f"{hours(found.pool_us):,.2f} node-hours harvested ({hours(found.pool_us) / found.window.hours:,.1f} nodes on "
        f"average, {found.most_nodes} at most), {found.used_us / pool:.1%} of them given to trainers, "
        f"{found.computing_us / pool:.1%} computing; {found.samples:,.0f} samples"
    )
    with_gpus = found.pool_gpu_us > 0
    if with_gpus:
        share = found.gpu_us / found.pool_gpu_us
        say(f"{hours(found.pool_gpu_us):,.2f} GPU-hours harvested, {share:.1%} of them given to trainers")
    if judged.efficiency is not None and judged.bound is not None:
        say(f"makespan ratio U {judged.efficiency:.3f}, bound {judged.bound:.3f}")
        say(f"work done {judged.work:.3f} of the best possible; equal shares: {judged.equal_work:.3f}")
    elif judged.why:
        say(f"efficiency: {judged.why}")
    console = screen()
    for title, rows in (("owner", found.owners()), ("trainer", sorted(found.trainers, key=lambda one: -one.used_us))):
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        gpu_column = ("GPU-hours",) * with_gpus
        for name in (
            title,
            "node-hours",
            *gpu_column,
            "of the pool",
            "computing",
            "samples",
            "rescales",
            "preemptions",
        ):
            table.add_column(name, justify="left" if name == title else "right", overflow="fold")
        for one in rows[:MOST_ROWS]:
            who = one.owner if title == "owner" else f"{getattr(one, 'trainer', '')} {getattr(one, 'name', '')}"
            table.add_row(
                Text(printable(who)),
                f"{hours(one.used_us):,.2f}",
                *(f"{hours(one.gpu_us):,.2f}" for _ in gpu_column),
                f"{one.used_us / pool:.1%}",
                f"{one.computing_us / one.used_us:.0%}" if one.used_us else "",
                f"{one.samples:,.0f}",
                str(one.rescales),
                str(one.preemptions),
            )
        if title == "owner":
            unused_gpus = (f"{hours(found.unused_gpu_us):,.2f}" for _ in gpu_column)
            unused = (f"{hours(found.unused_us):,.2f}", *unused_gpus, f"{found.unused_us / pool:.1%}")
            table.add_row(Text("(unused)", "dim"), *unused, "", "", "", "")
        console.print()
        console.print(table)
        if len(rows) > MOST_ROWS:
            say(f"… and {len(rows) - MOST_ROWS} more; --csv and --json have all")


def _write(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    try:
        with replacing(path.resolve()) as out:  # what a link names is written, the link stays
            out.write(text)
    except OSError as problem:
        raise InputError(f"{path}: {problem.strerror}") from None


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("report")(report)
