"""`bftrainer owner` sets users' quotas. It edits the database file directly, as the owner of the state folder.

A running controller notices within a second and decides again.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from bftrainer.cli.common.connection import Json, State, live_packages, printable, say, screen, state_of
from bftrainer.cli.common.database import open_store
from bftrainer.cli.common.output import print_json, warn
from bftrainer.errors import InputError
from bftrainer.util.text import read_size, size_as_text

if TYPE_CHECKING:
    from bftrainer.cluster.store.rows import OwnerRow

NONE = "none"

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the owner, as in `bftrainer token create --owner`.")]


def set_(
    name: Name,
    max_nodes: Annotated[
        str | None, typer.Option(metavar="N|none", help="Most nodes for all of the owner's trainers together.")
    ] = None,
    max_trainers: Annotated[
        str | None, typer.Option(metavar="N|none", help="Most unfinished trainers of the owner.")
    ] = None,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="N|P%|none", help="Nodes, or part of the pool, reserved for the owner while they have work."
        ),
    ] = None,
    max_weight: Annotated[
        str | None,
        typer.Option(metavar="W|none", help="Largest weight of a trainer; none: policy.max_weight of the controller."),
    ] = None,
    max_disk: Annotated[
        str | None,
        typer.Option(metavar="SIZE|none", help="Most disk space for the files of all of the owner's trainers: 500GB."),
    ] = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Set an owner's limits. Limits that are not named stay as they are; `none` lifts a limit."""
    if all(limit is None for limit in (max_nodes, max_trainers, share, max_weight, max_disk)):
        raise InputError(
            "give at least one limit to set: --max-nodes, --max-trainers, --share, --max-weight or --max-disk"
        )
    with live_packages():
        from bftrainer.cluster.controller.owners import check_row, read_share
        from bftrainer.cluster.store.rows import OwnerRow
    changes: dict[str, Any] = {"changed": time.time()}
    if max_nodes is not None:
        changes["max_nodes"] = _whole(max_nodes, "--max-nodes")
    if max_trainers is not None:
        changes["max_trainers"] = _whole(max_trainers, "--max-trainers")
    if max_disk is not None:
        changes["max_disk_mb"] = _megabytes(max_disk)
    if share is not None:
        changes["share_nodes"], changes["share_percent"] = (None, None) if share == NONE else read_share(share)
    if max_weight is not None:
        changes["max_weight"] = _weight(max_weight)
    with open_store(state_of(state), make=True) as store, store.transaction():
        known = {row.owner: row for row in store.owners()}
        row = check_row(replace(known.get(name, OwnerRow(name)), **changes))
        store.put_owner(row)
        percent = sum(one.share_percent or 0.0 for one in {**known, name: row}.values())
    if percent > 100:
        warn(f"the shares of all owners add up to {percent:g}%: when all have work, each gets less than its share")
    if as_json:
        print_json(_shown(row))
    else:
        say(f"{printable(name)}: {_said(row)}")


def list_(state: State = None, as_json: Json = False) -> None:
    """List owners that have limits or trainers, with their limits and current use."""
    with open_store(state_of(state), read_only=True) as store:
        rows = {row.owner: row for row in store.owners()}
        held: dict[str, int] = {}
        for trainer in store.trainers(unfinished=True):
            held[trainer.owner] = held.get(trainer.owner, 0) + 1
        from bftrainer.cluster.retention.housekeeper import DISK_USED_KEY
        from bftrainer.cluster.store.rows import OwnerRow

        used: dict[str, int] = store.kept(DISK_USED_KEY) or {}
    shown = [
        {
            **_shown(rows.get(owner, OwnerRow(owner))),
            "trainers": held.get(owner, 0),
            "disk_bytes": used.get(owner, 0),
        }
        for owner in sorted({*rows, *held, *used})
    ]
    if as_json:
        print_json({"owners": shown})
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("owner", "max nodes", "share", "max trainers", "max weight", "trainers", "max disk", "disk"):
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    for row in shown:
        keys = ("max_nodes", "share", "max_trainers", "max_weight")
        limits = ("" if row[key] is None else f"{row[key]}" for key in keys)
        allowed = "" if row["max_disk_mb"] is None else size_as_text(row["max_disk_mb"] * 10**6)
        use = (str(row["trainers"]), allowed, size_as_text(row["disk_bytes"]))
        table.add_row(Text(printable(row["owner"])), *limits, *use)
    screen().print(table if shown else Text("no owners", style="dim"))


def remove(name: Name, state: State = None, as_json: Json = False) -> None:
    """Lift all limits of an owner. Their trainers and tokens stay."""
    with open_store(state_of(state)) as store:
        if not store.remove_owner(name):
            raise InputError(f"the owner {name!r} has no limits: see `bftrainer owner list`")
    if as_json:
        print_json({"removed": name})
    else:
        say(f"{printable(name)}: no limits")


def _whole(text: str, option: str) -> int | None:
    if text == NONE:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise InputError(f"{option} must be a whole number, 0 or more, or none, but got {text!r:.80}")
    return int(text)


def _weight(text: str) -> float | None:
    if text == NONE:
        return None
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--max-weight must be a number above 0, or none, but got {text!r:.80}") from None


def _megabytes(text: str) -> int | None:
    if text == NONE:
        return None
    size = read_size(text)
    if size is None or size < 10**6:
        raise InputError(f"--max-disk must be a size such as 500GB or 2TB, from 1MB, or none, but got {text!r:.80}")
    return size // 10**6


def _shown(row: OwnerRow) -> dict[str, Any]:
    from bftrainer.cluster.controller.owners import share_as_text

    found = asdict(row)
    kept = ("owner", "max_nodes", "max_trainers", "max_weight", "max_disk_mb")
    return {key: found[key] for key in kept} | {"share": share_as_text(row)}


def _said(row: OwnerRow) -> str:
    shown = _shown(row)
    parts = [
        f"at most {shown['max_nodes']} nodes" if shown["max_nodes"] is not None else "",
        f"at most {shown['max_trainers']} trainers" if shown["max_trainers"] is not None else "",
        f"at most {size_as_text(row.max_disk_mb * 10**6)} on disk" if row.max_disk_mb is not None else "",
        f"a share of {shown['share']}{'' if '%' in shown['share'] else ' nodes'}" if shown["share"] else "",
        f"weights up to {shown['max_weight']:g}" if shown["max_weight"] is not None else "",
    ]
    return ", ".join(part for part in parts if part) or "no limits"


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    group = typer.Typer(help="Manage owners' limits and shares.", no_args_is_help=True)
    group.command("set")(set_)
    group.command("list")(list_)
    group.command("remove")(remove)
    app.add_typer(group, name="owner")
