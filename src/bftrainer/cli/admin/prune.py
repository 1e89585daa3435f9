"""`bftrainer prune` removes files of finished trainers: a user's own, or by age and settings for an administrator."""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from bftrainer.cli.common.connection import (
    ConfigFile,
    Json,
    State,
    Url,
    connect,
    live_packages,
    printable,
    say,
    screen,
)
from bftrainer.cli.common.output import print_json, warn
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes import variables
from bftrainer.util import locks
from bftrainer.util.text import read_span, size_as_text

if TYPE_CHECKING:
    from bftrainer.cluster.config.keys import Config
    from bftrainer.cluster.store.store import Store


def prune(
    refs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TRAINER]...", help="Ids or names of finished trainers: all their files go."),
    ] = None,
    mine: Annotated[
        bool, typer.Option("--mine", help="All files of your finished trainers; needs --older-than.")
    ] = False,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Only trainers that ended so long ago: 12h, 30d, 52w; 0d for all."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    file: ConfigFile = None,
    url: Url = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Remove snapshots, logs and output of finished trainers, and say how many bytes that frees.

    Trainers that are not finished are never touched. Without TRAINER and --mine, an administrator removes what the
    settings below [retention] say, for all owners, or with --older-than all files of older trainers. Works beside a
    running controller, by its settings. Where none runs, the settings are those of the last one unless --config or the
    environment gives others, and the database is trimmed and made smaller, too.
    """
    named = refs or []
    if named and mine:
        raise InputError("--mine chooses all your finished trainers; leave out TRAINER")
    age_s = None if older_than is None else read_span(older_than)
    if older_than is not None and age_s is None:
        raise InputError(f"--older-than must be an age such as 12h, 30d or 52w, but got {older_than!r:.80}")
    if mine and age_s is None:
        raise InputError(
            "--mine removes all files of your finished trainers: add --older-than 30d, or 0d for all of them"
        )
    found = _pruned(_Request(named, mine, age_s, dry_run), file, url, state)
    if as_json:
        print_json(found)
    else:
        _show(found)
    if found["problems"]:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Request:
    """What the user asks for."""

    trainers: Sequence[str]
    mine: bool
    older_than_s: float | None
    dry_run: bool


def _pruned(request: _Request, file: Path | None, url: str | None, state: Path | None) -> dict[str, Any]:
    """Remove files, by the controller if one runs, and return what was removed."""
    with live_packages():
        from bftrainer.cluster.config.load import CONFIG, load_config
        from bftrainer.cluster.store.state_folder import LOCK_FILE
        from bftrainer.cluster.store.store import FILE, Store
    config = load_config(file, overrides={"server.state": state})
    elsewhere = url is not None or (state is None and variables.URL in os.environ)
    if not elsewhere and (config.state / FILE).is_file():
        try:
            lock = locks.take_lock(config.state / LOCK_FILE)
        except OSError as problem:
            raise BFTrainerError(f"{config.state}: {problem.strerror}; prune as the owner of this folder") from None
        if lock is not None:
            try:
                locks.write_pid(lock, os.getpid())
                with closing(Store.open(config.state / FILE, read_only=request.dry_run)) as store:
                    if _is_own(config.state, store):
                        named = file is not None or CONFIG in os.environ
                        return _without_controller(store, config, request, named=named)
            finally:
                os.close(lock)
    if file is not None:
        raise InputError("--config is for the folder of a controller that does not run: a running one has its own")
    with connect(url, state) as client:
        return client.prune(
            *request.trainers, mine=request.mine, older_than_s=request.older_than_s, dry_run=request.dry_run
        )


def _is_own(folder: Path, store: Store) -> bool:
    """Whether the commands in a state folder speak to the controller of its database, and not to another one."""
    from bftrainer.cluster.config.load import CLIENT_FILE

    try:
        token = json.loads((folder / CLIENT_FILE).read_text())["token"]
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return isinstance(token, str) and store.tokens.check(token) is not None


def _without_controller(store: Store, config: Config, request: _Request, *, named: bool) -> dict[str, Any]:
    """Remove files of a state folder whose lock this process holds. `named`: the user named a configuration file."""
    from bftrainer.cluster.retention.prune import as_json, check_finished, prune
    from bftrainer.cluster.retention.stored import with_stored

    user, dry_run = getpass.getuser(), request.dry_run
    ids = None
    if request.trainers:
        rows = {ref: store.trainer(ref) for ref in request.trainers}
        for ref, row in rows.items():
            if row is None:
                raise InputError(f"there is no trainer {ref!r:.80}")
            check_finished(row)
        ids = {row.id for row in rows.values() if row is not None}
    before = sum(store.size())
    config = with_stored(config, store, named=named)
    done, note = prune(store, config, ids, user if request.mine else None, request.older_than_s, user, dry_run=dry_run)
    after = sum(store.size())
    if note:
        warn(note)
    return {**as_json(done, dry_run=dry_run), "database_bytes": after, "database_bytes_before": before}


def _show(found: dict[str, Any]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("trainer", "name", "owner", "removed" if not found["dry_run"] else "would remove", "size"):
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    for row in found["removed"]:
        names = (Text(printable(row[key])) for key in ("trainer", "name", "owner", "part"))
        table.add_row(*names, size_as_text(row["bytes"]))
    if found["removed"]:
        screen().print(table)
    for row in found["problems"]:
        warn(f"{row['trainer']}: {printable(row['problem'])}")
    what = "would be freed" if found["dry_run"] else "freed"
    say(f"{size_as_text(found['bytes'])} {what}" if found["removed"] else "nothing to remove")
    smaller = found.get("database_bytes_before", 0) - found.get("database_bytes", 0)
    if smaller > 0:
        say(f"the database is {size_as_text(smaller)} smaller")


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("prune")(prune)
