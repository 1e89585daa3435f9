"""`bftrainer agent` runs one agent per node, which carries out the controller's requests there."""

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
        str | None, typer.Option(metavar="URL", help="URL of the controller; default: $BFTRAINER_URL.")
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of this node; default: $BFTRAINER_NODE, else the host name."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address at which other nodes reach this one.")
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(metavar="F", help="File with the secret to join with; default: $BFTRAINER_SECRET."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the workers' output; default: a temporary folder.")
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Certificates to verify the controller with; default: $BFTRAINER_CA, else tls/ca.pem beside the "
            "secret's file, else the system's.",
        ),
    ] = None,
    slots: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Processes of a worker on this node by default; default: $BFTRAINER_SLOTS, else one per GPU.",
        ),
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
    from bftrainer.cluster.agent.agent import run_agent
    from bftrainer.cluster.agent.options import AgentOptions, read_environment, resolve

    if environment_from_stdin:
        read_environment(sys.stdin, os.environ)
    run_agent(resolve(AgentOptions(url, node, host, secret_file, folder, ca, slots), os.environ))


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(agent)
