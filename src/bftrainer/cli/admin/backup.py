"""`bftrainer backup` copies the controller's database while the controller runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bftrainer.cli.common.connection import Json, State, live_packages, say, state_of
from bftrainer.cli.common.output import print_json
from bftrainer.errors import InputError


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Target file; an existing file is replaced.")],
    state: State = None,
    as_json: Json = False,
) -> None:
    """Copy the controller's database to one file, completely or not at all, readable by its owner alone.

    Works beside a running controller, and before an upgrade: the copy has the version of the database. Snapshots are
    not included: they are in the state folder below trainers/.
    """
    with live_packages():
        from bftrainer.cluster.store.store import FILE, Store
    source = state_of(state) / FILE
    if not source.is_file():
        raise InputError(f"{source}: there is no database: name the state folder with --state")
    Store.copy(source, file)
    size = file.stat().st_size
    if as_json:
        print_json({"file": str(file), "bytes": size})
    else:
        say(f"wrote {file}: {size / 1e6:,.1f} MB")


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("backup")(backup)
