"""`bftrainer cancel`, `pause`, `resume` and `wait` control trainers or wait for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from bftrainer.cli.common.connection import Json, Patient, State, Url, connect, printable, say
from bftrainer.cli.common.output import print_json
from bftrainer.cli.live.show_trainers import duration, percent
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.errors import InputError

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
        what = "give trainers or --all or --group" if any(ways) else "cancel needs the trainers to cancel, or --all"
        raise InputError(what if any(ways) else f"{what}, or --group NAME")
    with connect(url, state) as client:
        rows: list[dict[str, Any]] = []
        if all_ or group is not None:
            found = client.trainers() if group is None else members(client.trainers(all=True), group)
            refs = [row["id"] for row in found if row["state"] not in FINISHED]
        else:
            for ref in refs or ():
                client.trainer(ref)  # a wrong reference must stop us before the first trainer is cancelled
        for ref in refs or ():
            row = client.cancel(ref)
            rows.append(row)
            if not as_json:
                # A trainer that is done or failed by now stays so.
                ended = row["state"] if row["state"] in ("done", "failed") else "cancelled"
                say(f"{ended if ended == 'cancelled' else f'already {ended}'} {row['id']} {printable(row['name'])}")
    if as_json:
        print_json({"trainers": rows})
    elif not rows:
        say("nothing to cancel")


def pause(url: Url = None, state: State = None, as_json: Json = False) -> None:
    """Stop harvesting: give back all nodes at once. Trainers wait, and lose nothing."""
    with connect(url, state) as client:
        found = client.pause()
    if as_json:
        print_json(found)
    else:
        say("paused; go on with `bftrainer resume`")


def resume(url: Url = None, state: State = None, as_json: Json = False) -> None:
    """Harvest nodes again after `pause`."""
    with connect(url, state) as client:
        found = client.resume()
    if as_json:
        print_json(found)
    else:
        say("resumed")


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
        raise InputError("give trainers or --group" if refs else what)
    with Patient(url, state) as controller:
        if group is not None:
            refs = [row["id"] for row in members(controller.ask(lambda c: c.trainers(all=True)), group)]
        assert refs
        rows = follow(controller, refs, quiet=as_json)
    if as_json:
        print_json({"trainers": rows})
    if any(row["state"] != "done" for row in rows):
        raise typer.Exit(1)


def members(rows: Sequence[dict[str, Any]], group: str) -> list[dict[str, Any]]:
    """The trainers of a group."""
    found = [row for row in rows if row.get("group") and row["group"] == group]
    if not found:
        raise InputError(f"there is no group {group!r:.80}: `bftrainer status` lists those there are")
    return found


def follow(controller: Patient, refs: Sequence[str], *, quiet: bool) -> list[dict[str, Any]]:
    """Wait until trainers are finished, printing a line at each change of state. Returns their last rows."""
    # By id from now on: another trainer may get the name of one that is finished.
    ids = [controller.ask(lambda c: c.trainer(ref))["id"] for ref in refs]  # noqa: B023
    last: dict[str, dict[str, Any]] = {}
    try:
        while len(last) < len(set(ids)) or any(row["state"] not in FINISHED for row in last.values()):
            if last:
                controller.rest()
            for ref in dict.fromkeys(ids):
                before = last.get(ref, {})
                if before.get("state") in FINISHED:
                    continue
                row = last[ref] = controller.ask(lambda c: c.trainer(ref))  # noqa: B023
                if row["state"] != before.get("state") and not quiet:
                    _tell(row)
    except KeyboardInterrupt:
        going = [row["id"] for row in last.values() if row["state"] not in FINISHED]
        if going:
            print(f"bftrainer: {', '.join(going)} go on; end them with `bftrainer cancel`", file=sys.stderr)
        raise
    return [last[ref] for ref in ids]


def _tell(row: dict[str, Any]) -> None:
    """Print the state of a trainer in a line; for one that failed, also the reason."""
    line = f"{row['id']} {printable(row['name'])} {row['state']}"
    if row["state"] in ("running", "rescaling", "starting"):
        line += f" on {len(row['nodes'])} nodes"
    if row.get("progress") is not None and row["state"] not in FINISHED:
        line += f", {percent(row['progress'])}"
    if row["state"] == "done" and row.get("started") and row.get("ended"):
        line += f" after {duration(row['ended'] - row['started'])}, {row['samples']:,} samples"
    if row.get("reason") and row["state"] not in ("running", "done"):
        line += f": {printable(row['reason'])}"
    say(line)
    if row["state"] == "failed":
        for text in row.get("log_tail") or ():
            print(f"  {printable(text)}", file=sys.stderr)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("cancel")(cancel)
    app.command("pause")(pause)
    app.command("resume")(resume)
    app.command("wait")(wait)
