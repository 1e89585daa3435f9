"""`bftrainer eta` says when trainers will be done, or would be if something were different."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bftrainer.cli.common.connection import Json, State, Url, connect, live_packages, printable, say
from bftrainer.cli.common.output import print_json
from bftrainer.cli.live.show_eta import deadline_text, eta_text
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.errors import InputError

if TYPE_CHECKING:
    from bftrainer.cluster.spec.trainer import TrainerSpec
    from bftrainer.cluster.wire.api import EtaAnswer

_MOST_LINES = 50


def eta(
    refs: Annotated[
        list[str] | None, typer.Argument(metavar="[REF]...", help="Trainers, by id or name; default: all.")
    ] = None,
    group: Annotated[str | None, typer.Option(metavar="NAME", help="All trainers of this group.")] = None,
    spec: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File of trainers or sweep file that is not submitted: when it would be done."
        ),
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="N|A-B", help="If these trainers had this number of nodes: N, or A to B.")
    ] = None,
    url: Url = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Say when trainers will be done: a time, and an interval that holds it with 80 % probability.

    \b
    bftrainer eta t12
    bftrainer eta t12 --nodes 1-16
    bftrainer eta --spec sweep.yaml
    """
    ways = (bool(refs), group is not None, spec is not None)
    if sum(ways) > 1:
        raise InputError("give trainers or --group or --spec, only one of them")
    with live_packages():
        from bftrainer.client import Client  # noqa: F401 - its packages may be missing
    specs = [] if spec is None else _specs(spec)
    with connect(url, state) as client:
        if not any(ways):
            refs = [row["id"] for row in client.trainers() if row["state"] not in FINISHED]
            if not refs:
                raise InputError("there are no unfinished trainers; --spec FILE asks about some that are not submitted")
        found = client.eta(*(refs or ()), group=group, specs=specs, nodes=nodes)
    print_json(found) if as_json else _tell(found)


def _specs(path: Path) -> list[TrainerSpec]:
    """The trainers of a file, or of a sweep."""
    from bftrainer.cluster.spec.files import load_spec, read_mapping
    from bftrainer.cluster.spec.sweep import load_sweep

    top = read_mapping(path)
    return load_sweep(path) if "grid" in top or "points" in top else load_spec(path)


def _tell(found: EtaAnswer) -> None:
    now = time.time()
    rows = list(found["trainers"].items())
    for name, one in rows[:_MOST_LINES] if len(rows) > 1 else []:
        _line(printable(name), eta_text(one, now), deadline_text(one))
    if len(rows) > _MOST_LINES:
        say(f"… and {len(rows) - _MOST_LINES:,} more")
    whole = found["eta"]
    _line("all of them" if len(rows) > 1 else printable(rows[0][0]), eta_text(whole, now), deadline_text(whole))
    if whole["futures"]:
        say(f"from {whole['futures']} futures, {printable(whole['basis'])}")


def _line(name: str, *parts: str) -> None:
    say(f"{name}: {'; '.join(part for part in parts if part)}")


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("eta")(eta)
