"""`bftrainer agent`: one a node, it does there what the controller asks for."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from bftrainer.errors import BFTrainerError


def agent(
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Where the controller is. Default: the variable BFTRAINER_URL.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(metavar="NAME", help="This node's name. Default: BFTRAINER_NODE, else the host name.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="The address under which other nodes reach this one.")
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(metavar="F", help="The file with the secret to join with. Default: BFTRAINER_SECRET."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where workers print to. Default: a temporary folder.")
    ] = None,
    environment_from_stdin: Annotated[
        bool,
        typer.Option(
            "--environment-from-stdin",
            help="First read variables from standard input: lines NAME=value, then an empty one.",
        ),
    ] = False,
) -> None:
    """Join a controller with this node and run workers for it, until it is dismissed or gets SIGTERM."""
    if importlib.util.find_spec("websockets") is None:
        raise BFTrainerError("an agent needs websockets: install it by `pip install 'bftrainer[live]'`")
    from bftrainer.cluster.agent import run_agent
    from bftrainer.cluster.agent_options import Options, read_environment, resolve

    if environment_from_stdin:
        read_environment(sys.stdin, os.environ)
    run_agent(resolve(Options(url, node, host, secret_file, folder), os.environ))


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(agent)
