"""`bftrainer lend` lets the controller submit pilots as the user who runs it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bftrainer.cli.common.connection import Json, State, Url, live_packages, say
from bftrainer.errors import BFTrainerError, InputError

if TYPE_CHECKING:
    from bftrainer.cluster.lend.daemon import LenderOptions
    from bftrainer.cluster.lend.rules import LendRules

_PASSED_ON = ("SLURM_CONF", "PATH", "BFTRAINER_STATE", "BFTRAINER_URL", "BFTRAINER_CA", "XDG_STATE_HOME")
"""Variables that the unit needs: systemd does not give it those of the login shell."""


def _several(text: str) -> Any:
    return typer.Option(metavar="NAME", help=text)


def lend(
    partition: Annotated[list[str] | None, _several("Partition in which pilots may be submitted; repeatable.")] = None,
    account: Annotated[
        list[str] | None, _several("Account that pilots may be charged to, besides Slurm's default; repeatable.")
    ] = None,
    qos: Annotated[list[str] | None, _several("QOS that pilots may have, besides none; repeatable.")] = None,
    constraint: Annotated[
        list[str] | None, _several("Constraint that pilots may have, besides none; repeatable.")
    ] = None,
    max_pilots: Annotated[int, typer.Option(metavar="N", help="The most pilots at a time.")] = 100,
    max_minutes: Annotated[int, typer.Option(metavar="N", help="The longest time limit of a pilot.")] = 240,
    per_minute: Annotated[int, typer.Option(metavar="N", help="The most pilots submitted per minute.")] = 300,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Option of sbatch for each pilot, such as --licenses=lustre; repeatable."),
    ] = None,
    url: Url = None,
    state: State = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the lender, which the nodes must see; default: ~/.local/state/bftrainer-lend.",
        ),
    ] = None,
    python: Annotated[
        str,
        typer.Option(metavar="FILE", help="Python that runs agents, on the nodes; default: the one of this command."),
    ] = "",
    install: Annotated[
        bool, typer.Option("--install", help="Write a systemd user unit that runs this command.")
    ] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Say whether the lender runs, and with how many pilots.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be submitted, ask Slurm whether it may be, and end.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Lend this user's account: submit pilots for the controller as this user, until SIGTERM.

    Run it on a login node. Nothing that the controller sends is run: the lender submits its own script to the
    partitions that you name, for as many pilots and as long as you allow, and cancels pilots of its own.
    """
    with live_packages():
        from bftrainer.cluster.lend.daemon import read_status, run_lender
        from bftrainer.cluster.lend.rules import LendRules
    where = _folder(folder)
    if status:
        facts = read_status(where)
        say(json.dumps(facts) if as_json else _shown(facts))
        raise typer.Exit(0 if facts["pid"] else 1)
    rules = LendRules(
        frozenset(partition or ()),
        frozenset(("", *(account or ()))),
        frozenset(("", *(qos or ()))),
        frozenset(("", *(constraint or ()))),
        max_minutes,
        max_pilots,
        per_minute,
        tuple(option or ()),
    )
    options = _options(where, rules, url, state, python)
    if install:
        _install(options.folder)
    elif dry_run:
        _try(options)
    else:
        logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
        logging.getLogger("bftrainer").setLevel(logging.INFO)
        logging.getLogger("websockets").setLevel(logging.ERROR)  # it would log headers, one of which has the token
        asyncio.run(run_lender(options))


def _folder(option: Path | None) -> Path:
    if option is not None:
        return option.absolute()
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base).absolute() / "bftrainer-lend"


def _options(folder: Path, rules: LendRules, url: str | None, state: Path | None, python: str) -> LenderOptions:
    from bftrainer.client.api import find_controller
    from bftrainer.cluster.config.load import state_folder
    from bftrainer.cluster.lend.daemon import LenderOptions
    from bftrainer.cluster.wire.tls import is_text

    address = find_controller(state_folder(os.environ, state), url)
    if not address.token:
        raise InputError(
            "a lender needs a token of its user: save the file of `bftrainer token create --client-file` as "
            "client.json in the state folder, or set BFTRAINER_TOKEN"
        )
    authority = address.authority
    if authority and not is_text(authority) and Path(authority).is_file():  # nodes may not see the file
        authority = Path(authority).read_text()

    def read_token() -> str:
        """Return the token that the client file or the environment has now for the same controller."""
        with suppress(BFTrainerError):
            now = find_controller(state_folder(os.environ, state), url)
            return now.token if now.url == address.url else ""
        return ""

    return LenderOptions(
        folder, address.url, address.token, authority, rules, python or sys.executable, read_token=read_token
    )


def _install(folder: Path) -> None:
    """Write the unit of this call, without `--install`."""
    from bftrainer.cluster.lend.install import UNIT, unit_path, unit_text
    from bftrainer.processes import variables
    from bftrainer.util.files import replace_file

    if os.environ.get(variables.TOKEN):
        raise InputError(
            "a unit must not hold a token: save the file of `bftrainer token create --client-file` as client.json in "
            "the state folder, and unset BFTRAINER_TOKEN"
        )
    words = [word for word in sys.argv[1:] if word != "--install"]
    environment = {name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)}
    path = unit_path(Path.home())
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, unit_text((sys.executable, "-m", "bftrainer", *words), environment), 0o644)
    say(f"wrote {path}; the lender's folder is {folder}")
    say(f"start it:  systemctl --user daemon-reload && systemctl --user enable --now {UNIT}")
    say("keep it when you log out:  loginctl enable-linger")


def _try(options: LenderOptions) -> None:
    """Show what a request would lead to, and ask Slurm whether it may be. Changes nothing."""
    from bftrainer.client.api import Address, ApiClient
    from bftrainer.cluster.lend.trial import try_out

    with ApiClient(Address(options.url, options.token, "", options.authority)) as api:
        me = api.me()
    say(f"controller {options.url}: the token is {me['owner']}'s")
    for line in asyncio.run(try_out(options)):
        say(line)


def _shown(facts: dict[str, Any]) -> str:
    line = f"lender: {facts['state']}"
    if facts["pid"]:
        line += (
            f"; {facts['pilots']} of at most {facts['max_pilots']} pilots; {facts['controller']} (pid {facts['pid']})"
        )
    return line


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(lend)
