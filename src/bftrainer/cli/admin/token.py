"""`bftrainer token` manages access to the controller. It edits the database, as owner of the state folder."""

from __future__ import annotations

import getpass
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from bftrainer.cli.common.connection import ConfigFile, Json, State, live_packages, printable, say, screen, state_of
from bftrainer.cli.common.database import open_store
from bftrainer.cli.common.output import print_json
from bftrainer.cli.live.show_trainers import moment
from bftrainer.errors import InputError
from bftrainer.util.files import replace_file

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the token.")]


def create(
    name: Name,
    owner: Annotated[
        str | None, typer.Option(metavar="USER", help="Owner of the trainers submitted with the token; default: you.")
    ] = None,
    role: Annotated[
        str,
        typer.Option(
            metavar="user|admin|monitor", help="Users control their own trainers, admins all; monitors read /metrics."
        ),
    ] = "user",
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="How long it is valid: 12h, 30d, 52w or never; default: api.token_lifetime, never."
        ),
    ] = None,
    client_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the controller's URL, its authority and the token to a new FILE instead. The user saves it as "
            "client.json in their state folder (~/.local/state/bftrainer), and all commands work.",
        ),
    ] = None,
    file: ConfigFile = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Create a token and print it, this once. Users set BFTRAINER_TOKEN to it."""
    with live_packages():
        from bftrainer.cluster.config.load import CONFIG, load_config
        from bftrainer.cluster.config.rules import lifetime_s
        from bftrainer.cluster.retention.stored import with_stored
        from bftrainer.cluster.store.tokens import LOCAL_TOKEN, ROLES
    owner = owner or _user()
    for what, text in (("NAME", name), ("--owner", owner)):
        if not text.strip() or not text.isprintable() or len(text) > 200:
            raise InputError(f"{what} must be one line of 1 to 200 printable characters, but got {text!r:.80}")
    if name == LOCAL_TOKEN:
        raise InputError(f"NAME must not be {name}, which is reserved for `bftrainer serve`: choose another name")
    if role not in ROLES:
        raise InputError(f"--role must be one of {', '.join(ROLES)}, but got {role!r}")
    config = load_config(file, overrides={"server.state": state})
    try:
        valid_s = None if expires is None else lifetime_s(expires)
    except ValueError:
        raise InputError(
            f"--expires must be a time such as 12h, 30d or 52w, or never, but got {expires!r:.80}"
        ) from None
    address = None if client_file is None else _address(config.state, client_file)
    with open_store(config.state, make=True) as store:
        now = time.time()
        if expires is None:
            named = file is not None or CONFIG in os.environ
            valid_s = lifetime_s(with_stored(config, store, named=named).api.token_lifetime)
        end = None if valid_s is None else now + valid_s
        token = store.tokens.create(name=name, owner=owner, role=role, time=now, expires=end)
        if client_file is not None:
            try:
                replace_file(client_file, json.dumps({**(address or {}), "token": token}) + "\n")
            except OSError as problem:
                store.tokens.revoke(name, now)
                raise InputError(f"cannot write {client_file}: {problem.strerror}") from None
    shown = {"client_file": str(client_file)} if client_file is not None else {"token": token}
    if as_json:
        print_json({"name": name, "owner": owner, "role": role, "expires": end, **shown})
    else:
        say(f"wrote {client_file}" if client_file is not None else token)


def list_(state: State = None, as_json: Json = False) -> None:
    """List the tokens, without their secret values."""
    with open_store(state_of(state), read_only=True) as store:
        rows = [{**_shown(row), "valid": row.valid(time.time())} for row in store.tokens.all()]
    if as_json:
        print_json({"tokens": rows})
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("name", "owner", "role", "created", "last used", "expires", "revoked"):
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    for row in rows:
        times = ["" if row.get(key) is None else moment(row[key]) for key in ("created", "last_used")]
        times.append("never" if row["expires"] is None else moment(row["expires"]))
        times.append("" if row["revoked"] is None else moment(row["revoked"]))
        names = (Text(printable(row[key])) for key in ("name", "owner", "role"))
        table.add_row(*names, *times, style="" if row["valid"] else "dim")
    screen().print(table if rows else Text("no tokens", style="dim"))


def revoke(name: Name, state: State = None, as_json: Json = False) -> None:
    """Revoke a token, effective at once."""
    with open_store(state_of(state)) as store:
        if not store.tokens.revoke(name, time.time()):
            raise InputError(f"there is no token {name!r}: see `bftrainer token list`")
    if as_json:
        print_json({"revoked": name})
    else:
        say(f"revoked {printable(name)}")


def _shown(row: Any) -> dict[str, Any]:
    """A row without the hash, which is never shown."""
    return {key: value for key, value in asdict(row).items() if key != "hash"}


def _address(state: Path, file: Path) -> dict[str, str]:
    """The controller's URL and the certificates to verify it with, for a user's client file."""
    from bftrainer.client.api import find_controller

    if file.exists():
        raise InputError(f"{file} exists already: choose another file")
    found = find_controller(state, env={})
    try:
        certificates = Path(found.authority).read_text() if found.authority else ""
    except (OSError, ValueError) as problem:
        raise InputError(f"cannot read the controller's authority: {found.authority}: {problem}") from None
    return {"url": found.url, **({"authority": certificates} if certificates else {})}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without an entry, as in containers
        raise InputError("give --owner: this user has no name on this machine") from None


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    group = typer.Typer(help="Manage access to the controller.", no_args_is_help=True)
    group.command("create")(create)
    group.command("list")(list_)
    group.command("revoke")(revoke)
    app.add_typer(group, name="token")
