"""`bftrainer results` shows and copies what a trainer has written; `best` compares the trainers of a group."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bftrainer.cli.common.connection import Json, State, Url, connect, printable, say, screen
from bftrainer.cli.common.output import print_json, warn
from bftrainer.cli.live.show_trainers import STYLES, duration, moment
from bftrainer.cluster.wire.direction import default_direction
from bftrainer.errors import InputError
from bftrainer.util.text import size_as_text

if TYPE_CHECKING:
    from bftrainer.client import TrainerResults
    from bftrainer.cluster.wire.api import TrialView

_MOST_SHOWN = 1000


def results(
    ref: Annotated[str, typer.Argument(metavar="TRAINER", help="Id or name of the trainer.")],
    copy: Annotated[
        Path | None, typer.Option("--copy", metavar="FOLDER", help="Copy the files to this folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="With --copy: replace files that exist.")] = False,
    url: Url = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Show a trainer's state, its last metrics and the files in its output folder, and copy them out."""
    if force and copy is None:
        raise InputError("--force is for --copy: it replaces files there that exist")
    with connect(url, state) as client:
        found = client.results(ref)
    copies = found.copy(copy, force=force) if copy is not None else None
    if as_json:
        print_json(_as_json(found, copies))
    else:
        screen().print(_shown(found))
        if copies is not None:
            say(f"copied {_files(len(copies))} to {copy}" if copies else "there is nothing to copy")
    if found.problem:
        warn(printable(found.problem))


def _files(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


def _as_json(found: TrainerResults, copies: list[Path] | None) -> dict[str, Any]:
    values = asdict(found)
    return {
        **{key: values[key] for key in ("id", "name", "state", "reason", "started", "ended")},
        **{key: values[key] for key in ("epoch", "step", "samples")},
        "metrics": {name: value if math.isfinite(value) else None for name, value in found.metrics.items()},
        "metrics_at": {name: at._asdict() for name, at in found.at.items()},
        "host": found.host,
        "folder": str(found.folder),
        "exists": found.exists,
        "reachable": found.exists and not found.problem,
        "files": list(values["files"]),
        "complete": found.complete,
        "problem": found.problem,
        "copied": None if copies is None else [str(path) for path in copies],
    }


def _shown(found: TrainerResults) -> RenderableType:
    ran = ""
    if found.started is not None and found.ended is not None:
        ran = f" after {duration(found.ended - found.started)}"
    head = Text.assemble(
        (f"{printable(found.name)} ({found.id})", "bold"),
        "  ",
        (found.state, STYLES.get(found.state, "")),
        f"{ran}: {printable(found.reason)}" if found.reason else ran,
    )
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    epochs = f", {found.epoch:,} whole epoch{'s' * (found.epoch != 1)}" if found.epoch else ""
    facts.add_row("trained", f"{found.samples:,} samples, {found.step:,} step{'s' * (found.step != 1)}{epochs}")
    facts.add_row("metrics", Text(_metrics(found) or "none reported"))
    facts.add_row("folder", Text(f"{printable(found.host)}:{printable(found.folder)}"))
    parts: list[RenderableType] = [head, facts, Text()]
    if not found.files:
        return Group(*parts, Text(_nothing(found)))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("file", overflow="fold")
    table.add_column("size", no_wrap=True, justify="right")
    table.add_column("written (UTC)", no_wrap=True)
    for file in found.files[:_MOST_SHOWN]:
        table.add_row(Text(printable(file.name)), size_as_text(file.bytes), moment(file.time))
    parts.append(table)
    left_out = len(found.files) - _MOST_SHOWN
    if left_out > 0 or not found.complete:
        more = f"{left_out:,} or more" if not found.complete else f"{left_out:,} more"
        parts.append(Text(f"… and {more if left_out > 0 else 'more'} in the folder", style="dim"))
    return Group(*parts)


def _metrics(found: TrainerResults) -> str:
    told = []
    for name, value in found.metrics.items():
        at = found.at.get(name)
        where = f" (at step {at.step:,})" if at is not None else ""
        told.append(f"{printable(name)} {_number(value)}{where}")
    return ", ".join(told)


def _nothing(found: TrainerResults) -> str:
    """Why there are no files."""
    if found.problem:
        return "its files cannot be listed"
    if found.started is None and not found.finished:
        return "no files: it has not begun to train"
    if not found.exists:
        return (
            f"no files: there is no folder {printable(found.folder)} on {printable(found.host)}. It was removed "
            "(`bftrainer prune`, or by age), or only the nodes see it"
        )
    return f"no files{' yet' if not found.finished else ''}: the script has written nothing to run.folder"


def best(
    group: Annotated[str, typer.Option("--group", metavar="NAME", help="The sweep or study.")],
    by: Annotated[str, typer.Option("--by", metavar="METRIC", help="The metric to compare, as the script reports it.")],
    least: Annotated[bool, typer.Option("--min", help="Smaller values are better.")] = False,
    most: Annotated[bool, typer.Option("--max", help="Greater values are better.")] = False,
    limit: Annotated[
        int | None, typer.Option("-n", "--limit", metavar="N", min=1, help="Only the N best trainers.")
    ] = None,
    url: Url = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Compare the trainers of a sweep or study by a metric, the best first.

    Without --min or --max, smaller values are better for a metric with loss, error, perplexity, mae or mse in its name,
    and greater values for any other.
    """
    if least and most:
        raise InputError("--min and --max exclude each other: give one of them")
    with connect(url, state) as client:
        direction = "min" if least else "max" if most else default_direction(by)
        rows = client.best(group, by=by, direction=direction, limit=limit)
    if as_json:
        print_json({"group": group, "by": by, "direction": direction, "trainers": rows})
        return
    words = "least" if direction == "min" else "greatest"
    say(f"{printable(group)}: {len(rows):,} trainer{'' if len(rows) == 1 else 's'}, {words} {printable(by)} first")
    screen().print(_compared(rows[:_MOST_SHOWN]))
    if len(rows) > _MOST_SHOWN:
        say(f"… and {len(rows) - _MOST_SHOWN:,} more")
    if not any(row["best"] is not None for row in rows):
        say(f"no trainer of {printable(group)} has reported {printable(by)} yet")


def _compared(rows: Sequence[TrialView]) -> RenderableType:
    """A table with one line per trainer, in the order given."""
    names = list(dict.fromkeys(name for row in rows for name in row["params"]))
    base = _common_folder([row["folder"] for row in rows])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    table.add_column("id", no_wrap=True)
    table.add_column("name", no_wrap=True, overflow="ellipsis", max_width=30)
    table.add_column("state", no_wrap=True)
    for name in names:
        table.add_column(Text(printable(name)), no_wrap=True, overflow="ellipsis", max_width=20)
    for title in ("best", "epoch", "step", "last", "time", "node time"):
        table.add_column(title, no_wrap=True, justify="right")
    table.add_column("folder", overflow="fold")
    for row in rows:
        at = row["best_at"]
        table.add_row(
            row["id"],
            Text(printable(row["name"])),
            Text(row["state"], style=STYLES.get(row["state"], "")),
            *(Text(printable(row["params"].get(name, ""))) for name in names),
            Text(_number(row["best"]), style="bold"),
            "" if at is None else str(at["epoch"]),
            "" if at is None else f"{at['step']:,}",
            _number(row["value"]),
            duration(row["run_s"]) if row["run_s"] else "",
            duration(row["node_seconds"]) if row["node_seconds"] else "",
            Text(printable(os.path.relpath(row["folder"], base) if base else row["folder"])),
        )
    return Group(table, Text(f"folders are below {printable(base)}", style="dim")) if base else table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def _common_folder(folders: list[str]) -> str:
    """The folder that all of several folders are in; empty if there is none but the root."""
    if len(set(folders)) < 2:
        return ""
    common = os.path.commonpath(folders)
    return "" if common == os.sep else common


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("results")(results)
    app.command("best")(best)
