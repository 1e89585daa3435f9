"""`bftrainer report`: what was harvested in a span of time, and for whom. Reads the database of a controller."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from bftrainer.cli.live import Json, State, live_packages, printable, say, screen
from bftrainer.cli.output import print_json, warn
from bftrainer.errors import InputError
from bftrainer.provenance import provenance

if TYPE_CHECKING:
    from bftrainer.cluster.accounting import Account
    from bftrainer.cluster.excerpt import Efficiency

MOST_ROWS = 20
EARLIEST = 1e8
"""1973: a lower number is a year or a slip, not seconds since 1970."""
"""Trainers in the table on the screen."""


def report(
    start: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Its start; else that of the log.")
    ] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="TIME", help="Its end; else now.")] = None,
    tz: Annotated[str, typer.Option("--tz", metavar="ZONE", help="The zone of times that name none.")] = "UTC",
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page, one file.")] = None,
    table: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write a row a trainer.")] = None,
    efficient: Annotated[
        bool | None,
        typer.Option(
            "--efficiency/--no-efficiency", help="Work out U and the bound; without either, if it is soon done."
        ),
    ] = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Say what was harvested: node-hours by owner and trainer, samples, efficiency.

    The node-hours of all owners and those that nobody used add up to the pool's. Works beside a running controller and
    on a dead one's state folder.
    """
    with live_packages():
        from bftrainer.cluster import harvest
        from bftrainer.cluster.accounting import account
        from bftrainer.cluster.config import load_config
        from bftrainer.cluster.doctor import controller_runs
        from bftrainer.cluster.excerpt import Efficiency, efficiency_of
        from bftrainer.cluster.service import policy_of
        from bftrainer.cluster.store import FILE, Store
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
        _write(page, harvest.as_page(found, judged))
    if table is not None:
        _write(table, harvest.as_csv(found))
    if as_json:
        print_json(harvest.as_json(found, judged, origin))
    else:
        _show(found, judged)
    for note in found.notes:
        warn(note)


def _show(found: Account, judged: Efficiency) -> None:
    from bftrainer.cluster.accounting import hours
    from bftrainer.cluster.harvest import shown_window

    pool = max(found.pool_us, 1)
    say(f"{shown_window(found)}, {found.window.hours:,.1f} hours")
    say(
        f"{hours(found.pool_us):,.2f} node-hours harvested ({hours(found.pool_us) / found.window.hours:,.1f} nodes on "
        f"average, {found.most_nodes} at most), {found.used_us / pool:.1%} of them given to trainers, "
        f"{found.computing_us / pool:.1%} computing; {found.samples:,.0f} samples"
    )
    if judged.efficiency is not None and judged.bound is not None:
        say(f"efficiency U {judged.efficiency:.3f}, bound {judged.bound:.3f}")
    elif judged.why:
        say(f"efficiency: {judged.why}")
    console = screen()
    for title, rows in (("owner", found.owners()), ("trainer", sorted(found.trainers, key=lambda one: -one.used_us))):
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name in (title, "node-hours", "of the pool", "computing", "samples", "rescales", "preemptions"):
            table.add_column(name, justify="left" if name == title else "right", overflow="fold")
        for one in rows[:MOST_ROWS]:
            who = one.owner if title == "owner" else f"{getattr(one, 'trainer', '')} {getattr(one, 'name', '')}"
            table.add_row(
                Text(printable(who)),
                f"{hours(one.used_us):,.2f}",
                f"{one.used_us / pool:.1%}",
                f"{one.computing_us / one.used_us:.0%}" if one.used_us else "",
                f"{one.samples:,.0f}",
                str(one.rescales),
                str(one.preemptions),
            )
        if title == "owner":
            unused = (f"{hours(found.unused_us):,.2f}", f"{found.unused_us / pool:.1%}")
            table.add_row(Text("(unused)", "dim"), *unused, "", "", "", "")
        console.print()
        console.print(table)
        if len(rows) > MOST_ROWS:
            say(f"… and {len(rows) - MOST_ROWS} more; --csv and --json have all")


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as problem:
        raise InputError(f"{path}: {problem.strerror}") from None
    finally:
        beside.unlink(missing_ok=True)


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("report")(report)
