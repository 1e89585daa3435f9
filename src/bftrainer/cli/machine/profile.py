"""`bftrainer profile` runs a script at several node counts on this machine and writes its scaling curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bftrainer.cli.common.output import print_json
from bftrainer.errors import InputError

if TYPE_CHECKING:
    from bftrainer.profiling import ScriptProfile

_SUFFIXES = (".json", ".csv")


def profile_command(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Training script.", show_default=False)],
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]…", help="Arguments of the script. Everything after -- is passed to it."),
    ] = None,
    nodes: Annotated[str, typer.Option(metavar="1,2,4|1-8", help="Node counts to measure.")] = "1,2,4,8",
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Least training time at each node count, in seconds.")
    ] = 20.0,
    pace: Annotated[
        str | None,
        typer.Option(
            metavar="S|N:S,…", help="Stretch each step to S seconds, so that fake nodes scale as real ones do."
        ),
    ] = None,
    ranks_per_node: Annotated[int, typer.Option(metavar="N", help="Processes on each node.")] = 1,
    threads: Annotated[int, typer.Option(metavar="T", min=1, help="Threads per process.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="F", help="Write the curve to this .json or .csv file, for simulate and submit."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure how a training script scales: run it on fake nodes of this machine, at one size after the other."""
    import asyncio

    from bftrainer.elastic.pacing import Pace
    from bftrainer.profiling import check_ranks, parse_sizes, profile
    from bftrainer.traces.files import check_writable

    sizes = parse_sizes(nodes)
    check_ranks(ranks_per_node, sizes)
    if not 0 < seconds < 1e6:
        raise InputError(f"`--seconds` must be a number of seconds above 0, but got {seconds:g}")
    if pace is not None:
        Pace.parse(pace, "`--pace`")
    if not script.is_file():
        raise InputError(f"there is no script {script}")
    if output is not None:
        if output.suffix.lower() not in _SUFFIXES:
            raise InputError(f"{output}: a curve file must end in {' or '.join(_SUFFIXES)}")
        check_writable(output)
    command = (str(script), *(args or ()))
    found = asyncio.run(
        profile(
            command,
            sizes,
            seconds=seconds,
            pace=pace,
            threads=threads,
            ranks_per_node=ranks_per_node,
            progress=_tell(len(sizes)),
        )
    )
    if output is not None:
        _write(found, script.stem, output)
    if as_json:
        print_json(_figures(found, script, seconds, pace) | {"ranks_per_node": ranks_per_node})
    else:
        _show(found, output)


def _tell(total: int) -> Any:
    """Print the progress, on a terminal only."""
    from rich.console import Console

    console, done = Console(stderr=True, highlight=False), 0

    def tell(size: int) -> None:
        nonlocal done
        done += 1
        if console.is_terminal:
            console.print(f"measuring on {size} node{'s' if size > 1 else ''} ({done} of {total})", style="dim")

    return tell


def _figures(found: ScriptProfile, script: Path, seconds: float, pace: str | None) -> dict[str, Any]:
    from bftrainer.util.provenance import file_hash, provenance

    return {
        "name": script.stem,
        "points": [
            {
                "nodes": point.nodes,
                "samples_per_s": round(point.rate, 3),
                "efficiency": round(found.efficiency(point), 4),
                "pause_s": point.pause_s,
            }
            for point in found.points
        ],
        "up_s": found.up_s,
        "down_s": found.down_s,
        "seconds": seconds,
        "pace": pace,
        "provenance": provenance({script.name: file_hash(script)}),
    }


def _write(found: ScriptProfile, name: str, output: Path) -> None:
    """Write the curve in the form that `simulate --curves` and `submit --curve` read. Its JSON holds nothing else."""
    from bftrainer.traces.files import writing
    from bftrainer.util.provenance import provenance

    if output.suffix.lower() == ".csv":
        origin = provenance()
        remarks = [f"bftrainer {origin['version']}: {origin['command']}", *_pauses(found)]
        rows = [f"{point.nodes},{point.rate:.3f}" for point in found.points]
        text = "\n".join([*(f"# {' '.join(line.split())}" for line in remarks), "nodes,samples_per_s", *rows, ""])
    else:
        rates = [round(point.rate, 3) for point in found.points]
        curve = {name: {"nodes": [point.nodes for point in found.points], "samples_per_s": rates}}
        text = json.dumps(curve, indent=2) + "\n"
    with writing(output, "w") as out:
        out.write(text)


def _pauses(found: ScriptProfile) -> list[str]:
    """The cost of rescales, in one line, if there were any."""
    pauses = [("growing", found.up_s), ("shrinking", found.down_s)]
    known = [f"{what} {pause_s:.2f} s" for what, pause_s in pauses if pause_s is not None]
    return [f"rescale costs: {', '.join(known)}"] if known else []


def _show(found: ScriptProfile, output: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("nodes", "samples/s", "efficiency", "pause s"):
        table.add_column(title, justify="right")
    for point in found.points:
        pause = "–" if point.pause_s is None else f"{point.pause_s:.2f}"
        table.add_row(str(point.nodes), f"{point.rate:,.1f}", f"{found.efficiency(point):.0%}", pause)
    console.print(table)
    for line in _pauses(found):
        console.print(line)
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("profile", context_settings={"ignore_unknown_options": True})(profile_command)
