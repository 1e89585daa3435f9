"""`bftrainer status`, `nodes` and `events` show the controller's state and what happened."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from bftrainer.cli.common.connection import (
    Json,
    JsonLines,
    State,
    Url,
    collected,
    connect,
    printable,
    say,
    say_json,
    screen,
)
from bftrainer.cli.common.output import print_json
from bftrainer.cli.live.show_groups import folded, group_of, groups_table, members_table
from bftrainer.cli.live.show_nodes import nodes_table
from bftrainer.cli.live.show_trainers import detail, duration, figure, header, pool_problem, trainers_table
from bftrainer.cluster.store.events import (
    Decided,
    LauncherChanged,
    NodeLeaving,
    NodeLeft,
    Rescaled,
    StateChanged,
    TrainerLearned,
    TrainerSubmitted,
)
from bftrainer.cluster.wire.api import EventView, StatusView
from bftrainer.errors import InputError

if TYPE_CHECKING:
    from bftrainer.client import Client, Row


def status(
    ref: Annotated[
        str | None, typer.Argument(metavar="[REF]", help="Id or name of a trainer to show in detail.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Show the trainers of a sweep or study, with the values chosen for each."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Include trainers that finished long ago.")] = False,
    url: Url = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Show the pool and the trainers, or one trainer in detail with its learned curve."""
    if ref is not None and (all_ or group is not None):
        what = "--all shows all trainers" if all_ else "--group shows the trainers of a group"
        raise InputError(f"{what}; leave out REF")
    console = screen()
    with connect(url, state) as client:
        if ref is not None:
            trainer = client.trainer(ref)
            print_json(trainer) if as_json else console.print(detail(trainer, console))
            return
        found = client.status()
        rows = found["trainers"]
        if group is not None:
            rows = _members(client, group)
        elif all_:
            rows = client.trainers(all=True)
        elif not as_json and any(group_of(row) for row in rows):
            # A group's line counts all its members, even those that finished long ago.
            here, groups = {row["id"] for row in rows}, {group_of(row) for row in rows} - {""}
            rows = [row for row in client.trainers(all=True) if row["id"] in here or group_of(row) in groups]
        found["trainers"] = rows
    if as_json:
        print_json(found)
    elif group is not None:
        console.print(groups_table(rows, console, found.get("groups") or ()))
        console.print()
        console.print(members_table(rows))
    else:
        _show(found, console)


def _members(client: Client, group: str) -> list[Row]:
    """The trainers of a group, even those that finished long ago."""
    rows = client.trainers(group=group)
    if not rows:
        from bftrainer.client.polling import unknown_group

        raise unknown_group(group)
    return rows


def _show(found: StatusView, console: Console) -> None:
    """Print the status as tables and lines."""
    console.print(header(found, console), soft_wrap=True)
    if (problem := pool_problem(found)) is not None:
        console.print(problem, soft_wrap=True)
    console.print()
    shown = folded(found["trainers"])
    if any(group_of(row) for row in found["trainers"]):
        console.print(groups_table(found["trainers"], console, found.get("groups") or ()))
        console.print()
    if shown or not found["trainers"]:
        console.print(trainers_table(shown, console))
    totals, last = found["totals"], found["last_decision"]
    share = totals["used_node_seconds"] / totals["node_seconds"] if totals["node_seconds"] else 0.0
    hours = totals["node_seconds"] / 3600
    used = "of them used" if totals.get("owner") is None else "of them yours"
    gpu_hours = f" ({totals['gpu_seconds'] / 3600:,.2f} GPU-hours)" if totals.get("gpu_seconds") else ""
    line = f"{figure(totals['samples'])} samples in {hours:,.2f} node-hours{gpu_hours}, {share:.0%} {used}; "
    line += f"rescales: {totals['rescales']:,}, decisions: {totals['decisions']:,}"
    console.print()
    console.print(Text(line, style="dim"))
    if last:
        age = duration(found["now"] - last["time"])
        reasons = "; ".join(map(printable, last["reasons"])) or "nothing to change"
        console.print(Text(f"last decision {age} ago: {reasons}", style="dim"))


def nodes(url: Url = None, state: State = None, as_json: Json = False) -> None:
    """List the nodes of the pool and what they do."""
    with connect(url, state) as client:
        found = client.nodes()
    if as_json:
        print_json({"nodes": found})
    else:
        screen().print(nodes_table(found, time.time()))


def events(
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing new events.")] = False,
    trainer: Annotated[str, typer.Option(metavar="REF", help="Only events of this trainer.")] = "",
    kind: Annotated[
        str, typer.Option(metavar="KIND", help="Only events of this kind, such as decision or node.left.")
    ] = "",
    after: Annotated[
        int | None, typer.Option(metavar="SEQ", min=0, help="Only events after this sequence number.")
    ] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", metavar="N", min=1, help="Most events to print.")] = 50,
    url: Url = None,
    state: State = None,
    as_json: JsonLines = False,
) -> None:
    """Show what happened: joins, leaves, decisions with their reasons, rescales, changes of state."""
    with connect(url, state) as client:
        found = client.events(after=after, limit=limit, trainer=trainer, kind=kind, follow=follow)
        if as_json and not follow:
            rows, last = collected(found)
            print_json({"events": rows, "last": last})
            return
        for row in found:
            if as_json:
                say_json(row)
            else:
                say(event_line(row))


def event_line(row: EventView) -> str:
    """An event as one line of text."""
    at = datetime.fromtimestamp(row["time"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{at}  {row['kind']:<17} {_told(row)}".rstrip()


def _told(row: EventView) -> str:
    kind, data = row["kind"], row.get("data") or {}
    trainer, node = printable(row.get("trainer") or ""), printable(row.get("node") or "")
    if kind == Decided.kind:
        return "; ".join(map(printable, data.get("reasons") or ())) or "nothing to change"
    if kind == StateChanged.kind:
        reason = f" ({printable(data['reason'])})" if data.get("reason") else ""
        return f"{trainer}: {data.get('from') or 'new'} -> {data.get('to')}{reason}"
    if kind == LauncherChanged.kind:
        return f"{trainer}: launcher {data.get('before')} -> {data.get('after')} ({printable(data.get('why') or '')})"
    if kind == Rescaled.kind:
        pause = "" if data.get("pause_s") is None else f", pause {data['pause_s']:.3g} s"
        sizes = f"{data.get('world_before', '?')} -> {data.get('world', '?')} nodes"
        return f"{trainer}: {sizes} ({data.get('why', '?')}){pause}"
    if kind == TrainerSubmitted.kind:
        spec = data.get("spec") or data
        return f"{trainer} {printable(spec.get('name') or '')} {printable(spec.get('script') or '')}".rstrip()
    if kind == TrainerLearned.kind:
        learned = data.get("trainer") or data
        costs = [f"{key} {learned[key]:.3g}" for key in ("up_s", "down_s") if isinstance(learned.get(key), int | float)]
        return f"{trainer}: {', '.join(costs)}".rstrip(": ")
    if kind == NodeLeft.kind:
        return f"{node} {printable(data.get('reason') or '')}".rstrip()
    if kind == NodeLeaving.kind:
        return f"{node} in {data.get('grace_s', 0):g} s"
    rest = " ".join(f"{printable(k)}={printable(v)}" for k, v in data.items() if isinstance(v, str | int | float))
    return " ".join(part for part in (trainer, node, rest[:200]) if part)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("status")(status)
    app.command("nodes")(nodes)
    app.command("events")(events)
