"""`bftrainer serve` runs the controller in the foreground until a signal arrives."""

from __future__ import annotations

import asyncio
import getpass
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from bftrainer.cli.common.connection import State, live_packages, say
from bftrainer.cli.common.output import warn

Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of the configuration; repeatable."),
]


def serve_command(
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Configuration file; `bftrainer config` lists all keys."),
    ] = None,
    state: State = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address to listen on (server.host).")] = None,
    port: Annotated[int | None, typer.Option(metavar="N", help="Port to listen on, 0 for any (server.port).")] = None,
    pool: Annotated[str | None, typer.Option(metavar="KIND", help="Source of nodes (pool.kind).")] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="With the local pool: number of virtual nodes (pool.nodes).")
    ] = None,
    settings: Setting = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Decide and log, but start nothing.")] = False,
    drain: Annotated[
        bool | None,
        typer.Option(
            "--drain/--keep",
            help="At exit, give all nodes back, or leave agents training until the next controller starts. "
            "Without either: give virtual nodes back, leave others.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Log events to stderr.")] = False,
) -> None:
    """Run the controller: find idle nodes, assign them to trainers, and train on them.

    Every setting is a key of a TOML file (--config) that the environment (BFTRAINER_SECTION__KEY) and --set override;
    `bftrainer config` lists them all with their defaults.
    """
    with live_packages():
        from bftrainer.cluster.config.load import load_config
        from bftrainer.cluster.owners.modes import ROOT_ADVICE, missing_accounts, mode_in_words, root_risk
        from bftrainer.cluster.serve import Running, serve
        from bftrainer.cluster.store.event_logging import to_stderr
        from bftrainer.cluster.store.store import FILE, Store
    overrides: dict[str, object] = {
        "server.state": state,
        "server.host": host,
        "server.port": port,
        "pool.kind": pool,
        "pool.nodes": nodes,
    }
    for given in settings or ():
        key, equals, value = given.partition("=")
        if not equals or "." not in key:
            raise typer.BadParameter(f"must be SECTION.KEY=VALUE, but got {given!r}", param_hint="--set")
        overrides[key.strip()] = value
    found = load_config(config, overrides={key: value for key, value in overrides.items() if value is not None})
    to_stderr(found.log, verbose=verbose)

    def up(running: Running) -> None:
        what = "dry run: nothing is started" if dry_run else f"pool {running.pool}"
        say(f"bftrainer serves at {running.url} ({what}; state in {running.state})")
        with Store.open(running.state / FILE, read_only=True) as store:
            owners = store.tokens.owners(time.time()) | {row.owner for row in store.trainers(unfinished=True)}
        account = getpass.getuser()
        if risk := root_risk(found.users.mode, owners, account, os.geteuid()):
            warn(f"{risk}: {ROOT_ADVICE}")
        else:
            say(mode_in_words(found.users.mode, owners, account))
        for problem in missing_accounts(found.users.as_accounts()) if found.users.own else ():
            warn(problem)

    asyncio.run(serve(found, dry_run=dry_run, drain=drain, up=up))


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("serve")(serve_command)
