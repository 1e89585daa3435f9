"""`bftrainer serve`: the controller, in the foreground, until a signal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from bftrainer.cli.live import State, live_packages, say

Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of the configuration; may be repeated."),
]


def serve_command(
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The configuration; `bftrainer config` tells all keys."),
    ] = None,
    state: State = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address to listen on; server.host.")] = None,
    port: Annotated[int | None, typer.Option(metavar="N", help="Port to listen on, 0 for any; server.port.")] = None,
    pool: Annotated[str | None, typer.Option(metavar="KIND", help="Where nodes come from; pool.kind.")] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="With the local pool: how many virtual nodes; pool.nodes.")
    ] = None,
    settings: Setting = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Decide and log, but start nothing.")] = False,
    drain: Annotated[
        bool | None,
        typer.Option(
            "--drain/--keep",
            help="At the end, give all nodes back; or leave agents training until the next controller comes. "
            "Without either: give virtual nodes back, leave others.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Log what happens to stderr.")] = False,
) -> None:
    """Run the controller: find idle nodes, decide who gets them, have them train.

    Every setting is a key of a TOML file (--config) that the environment (BFTRAINER_SECTION__KEY) and --set override;
    `bftrainer config` lists them all with their defaults.
    """
    with live_packages():
        from bftrainer.cluster.config import load_config
        from bftrainer.cluster.logs import to_stderr
        from bftrainer.cluster.service import Running, serve
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

    asyncio.run(serve(found, dry_run=dry_run, drain=drain, up=up))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve_command)
