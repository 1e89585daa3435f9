"""`bftrainer cancel`, `pause`, `resume`, `drain` and `wait` control trainers or wait for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, cast

import typer

from bftrainer.cli.common.connection import Json, State, Url, connect, printable, say
from bftrainer.cli.common.output import print_json
from bftrainer.cli.live.show_trainers import duration, percent
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.errors import InputError

if TYPE_CHECKING:
    from bftrainer.client import Client, Row
    from bftrainer.cluster.wire.api import TrainerDetail

Refs = Annotated[list[str] | None, typer.Argument(metavar="REF...", help="Trainers, by id or name.")]


def cancel(
    refs: Refs = None,
    all_: Annotated[bool, typer.Option("--all", help="All trainers that are not finished.")] = False,
    group: Annotated[str | None, typer.Option(metavar="NAME", help="All trainers of this group.")] = None,
    url: Url = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Cancel trainers permanently. Their nodes go to others."""
    ways = (bool(refs), all_, group is not None)
    if sum(ways) != 1:
        raise InputError(
            "give trainers or --all or --group, only one of them"
            if any(ways)
            else "cancel needs the trainers to cancel, or --all, or --group NAME"
        )
    rows = []
    with connect(url, state) as client:
        for row in _cancelled(client, refs or (), all_, group):
            rows.append(row)
            if not as_json:
                # A trainer that is done or failed by now stays so.
                ended = row["state"] if row["state"] in ("done", "failed") else "cancelled"
                say(f"{ended if ended == 'cancelled' else f'already {ended}'} {row['id']} {printable(row['name'])}")
    if as_json:
        print_json({"trainers": rows})
    elif not rows:
        say("nothing to cancel")


def _cancelled(client: Client, refs: Sequence[str], everything: bool, group: str | None) -> Iterator[Row]:
    """End trainers and yield their rows."""
    if group is not None:
        yield from client.cancel_group(group)
    elif everything:
        for row in client.trainers():
            if row["state"] not in FINISHED:
                yield client.cancel(row)
    else:
        for ref in refs:
            client.trainer(ref)  # a wrong reference must stop us before the first trainer is cancelled
        for ref in refs:
            yield client.cancel(ref)


def pause(url: Url = None, state: State = None, as_json: Json = False) -> None:
    """Stop harvesting: give back all nodes at once. Trainers wait, and lose nothing."""
    with connect(url, state) as client:
        found = client.pause()
    if as_json:
        print_json(found)
    else:
        say("paused; continue with `bftrainer resume`")


def resume(url: Url = None, state: State = None, as_json: Json = False) -> None:
    """Harvest nodes again after `pause`."""
    with connect(url, state) as client:
        found = client.resume()
    if as_json:
        print_json(found)
    else:
        say("resumed")


def drain(url: Url = None, state: State = None, as_json: Json = False) -> None:
    """Give all nodes back and end the controller. Trainers continue when the next one starts."""
    with connect(url, state) as client:
        found = client.drain()
    if as_json:
        print_json(found)
    else:
        say("all nodes are given back, then the controller ends; start it again with `bftrainer serve`")


def wait(
    refs: Refs = None,
    group: Annotated[str | None, typer.Option(metavar="NAME", help="All trainers of this group.")] = None,
    url: Url = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Wait until trainers are finished. Exit status 0: all are done; 1: one failed or was cancelled."""
    if bool(refs) == (group is not None):
        what = "wait needs the trainers to wait for, by id or name, or --group NAME"
        raise InputError("give trainers or --group, not both" if refs else what)
    with connect(url, state) as client:
        rows = wait_for(client, refs, group=group, quiet=as_json)
    if as_json:
        print_json({"trainers": rows})
    if any(row["state"] != "done" for row in rows):
        raise typer.Exit(1)


def wait_for(client: Client, refs: Sequence[str] | None, *, group: str | None = None, quiet: bool) -> list[Row]:
    """Wait until trainers are finished, printing a line at each change of state. Returns their last rows."""
    last: dict[str, Row] = {}

    def on_change(row: Row) -> None:
        last[row["id"]] = row
        if not quiet:
            _tell(row)

    try:
        return client.wait_all(refs or None, group=group, on_change=on_change)
    except KeyboardInterrupt:
        going = [row["id"] for row in last.values() if row["state"] not in FINISHED]
        if going:
            print(f"bftrainer: {', '.join(going)} keep running; end them with `bftrainer cancel`", file=sys.stderr)
        raise


def _tell(row: Row) -> None:
    """Print the state of a trainer in a line; for one that failed, also the reason."""
    line = f"{row['id']} {printable(row['name'])} {row['state']}"
    if row["state"] in ("running", "rescaling", "starting"):
        line += f" on {len(row['nodes'])} nodes"
    if row["progress"] is not None and row["state"] not in FINISHED:
        line += f", {percent(row['progress'])}"
    if row["state"] == "done" and row["started"] and row["ended"]:
        line += f" after {duration(row['ended'] - row['started'])}, {row['samples']:,} samples"
    if row.get("reason") and row["state"] not in ("running", "done"):
        line += f": {printable(row['reason'])}"
    say(line)
    if row["state"] == "failed":
        for text in cast("TrainerDetail", row).get("log_tail") or ():
            print(f"  {printable(text)}", file=sys.stderr)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("cancel")(cancel)
    app.command("pause")(pause)
    app.command("resume")(resume)
    app.command("drain")(drain)
    app.command("wait")(wait)
