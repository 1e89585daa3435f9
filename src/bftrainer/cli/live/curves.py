"""`bftrainer curves` lists, shows, exports and forgets what was learned of scripts."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from bftrainer.cli.common.connection import Json, State, Url, connect, printable, say, screen
from bftrainer.cli.common.output import print_json
from bftrainer.cli.live.show_trainers import chart, figure
from bftrainer.errors import InputError

if TYPE_CHECKING:
    from bftrainer.cluster.wire.api import BeliefDetail, BeliefView


def curves(
    curve: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Id of a curve, such as c3; default: list all.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the curve to this .json file, for submit and simulate.")
    ] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Forget all that was learned of this script.")] = False,
    url: Url = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """List what was learned of your scripts: how fast they are on how many nodes, and what rescales cost.

    \b
    bftrainer curves
    bftrainer curves c3
    bftrainer curves c3 --export train.json
    bftrainer curves c3 --forget
    """
    if curve is None and (export is not None or forget):
        raise InputError("name a curve: `bftrainer curves` lists their ids")
    if export is not None and export.suffix.lower() != ".json":
        raise InputError(f"{export}: a curve is exported as .json")
    with connect(url, state) as client:
        if curve is None:
            rows = client.curves()
            print_json(rows) if as_json else _list(rows)
            return
        if forget and export is None:
            gone = client.forget_curve(curve)
            print_json(gone) if as_json else say(f"forgot {_name(gone)}")
            return
        found = client.curve(curve)
        if export is not None:
            _write(found, export)
        print_json(found) if as_json else _show(found, export)
        if forget:
            client.forget_curve(curve)


def _name(row: BeliefView) -> str:
    """A script as a person calls it."""
    script = row["script"]
    short = PurePath(script).name if script.startswith("/") else script
    return printable(f"{short} ({row['model']})" if row["model"] else short)


def _list(rows: list[BeliefView]) -> None:
    if not rows:
        say("nothing is learned yet: curves appear when trainers report their speed")
        return
    owners = len({row["owner"] for row in rows}) > 1
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("id", *(("owner",) * owners), "script"):
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    for title in ("measured on", "stays", "rescale up", "down", "start"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["id"], *((printable(row["owner"]),) * owners), _name(row), _sizes(row), f"{row['stays']:.3g}",
            *(_seconds(seconds) for seconds in (row["up_s"], row["down_s"], row["start_s"])),
        )  # fmt: skip
    screen().print(table)


def _sizes(row: BeliefView) -> str:
    sizes = row["sizes"]
    if not sizes:
        return "given" if row["is_given"] else ""
    most = sizes[-1]
    return f"{sizes[0]}-{most}" if most > sizes[0] else f"{most}"


def _show(row: BeliefDetail, export: Path | None) -> None:
    console = screen()
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("curve", f"{row['id']}, owner {printable(row['owner'])}")
    facts.add_row("script", printable(row["script"]) + (f", model {printable(row['model'])}" if row["model"] else ""))
    facts.add_row("python", printable(row["python"]))
    facts.add_row("measured", f"{row['stays']:.3g} stays; noise of a second {row['noise']:.1%}")
    known = {"up": row["up_s"], "down": row["down_s"], "start of a node": row["start_s"]}
    costs = ", ".join(f"{name} {_seconds(seconds) or 'not measured'}" for name, seconds in known.items())
    facts.add_row("costs", f"{costs}, from {row['rescales']:,} rescales")
    console.print(facts)
    if row["curve"]["nodes"]:
        console.print()
        console.print(chart(row["curve"], 0, console))
    if export is not None:
        say(f"wrote {export}: bftrainer submit --curve {export}")


def _write(row: BeliefDetail, path: Path) -> None:
    """Write the curve in the form that `profile` writes."""
    from bftrainer.traces.files import writing

    nodes, rates = row["curve"]["nodes"][1:], row["curve"]["rates"][1:]
    if not nodes:
        raise InputError(f"{row['id']}: its speed was not measured yet, so there is no curve to export")
    name = row["model"] or PurePath(row["script"]).stem
    points = {"nodes": nodes, "samples_per_s": [float(figure_of(rate)) for rate in rates]}
    with writing(path, "w") as out:
        out.write(json.dumps({name: points}, indent=2) + "\n")


def figure_of(rate: float) -> str:
    """A rate with six digits: more are noise."""
    return f"{rate:.6g}"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{figure(seconds)} s"


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("curves")(curves)
