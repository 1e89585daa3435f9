"""`bftrainer submit`: hand a script, or a file of trainers, to the controller; all is checked before it is queued."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from bftrainer.cli.control import follow
from bftrainer.cli.live import Json, Patient, State, Url, connect, live_packages, printable, say
from bftrainer.cli.output import print_json
from bftrainer.errors import BFTrainerError, InputError

if TYPE_CHECKING:
    from bftrainer.cluster.spec import TrainerSpec


class _LikePython(TyperCommand):
    """Options of `submit` end where the script begins, or at `-m`: what follows is the script's, as with `python`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep `-m` and all after it from being taken for options."""
        at = self._module_at(args)
        return super().parse_args(ctx, args if at is None else [*args[:at], "--", *args[at:]])

    def _module_at(self, args: Sequence[str]) -> int | None:
        flags = {name for p in self.params if getattr(p, "is_flag", False) for name in (*p.opts, *p.secondary_opts)}
        flags |= {"-h", "--help"}
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            if args[at] == "-m":
                return at
            takes_next = args[at] not in flags and "=" not in args[at]
            at += 2 if takes_next else 1
        return None


def submit(
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGS]", help="The script, or -m MODULE; all that follows is passed to it."),
    ] = None,
    spec: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead: trainers described in a .toml or .yaml file.")
    ] = None,
    nodes: Annotated[str | None, typer.Option(metavar="N|A-B", help="How many nodes: exactly N, or A to B.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Its name; else made of the script's.")] = None,
    weight: Annotated[float | None, typer.Option(metavar="W", help="Priority; 1 if not given.")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V|K", help="Set a variable; K alone copies it, which keeps secrets out of sight."),
    ] = None,
    cwd: Annotated[str | None, typer.Option(metavar="DIR", help="Where it runs; else here.")] = None,
    python: Annotated[str | None, typer.Option(metavar="EXE", help="Its interpreter; else the agents' own.")] = None,
    launcher: Annotated[
        str | None, typer.Option(metavar="elastic|torchrun|hosts", help="How it learns who trains along.")
    ] = None,
    curve: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its scaling curve, .csv or .json as `profile` writes it.")
    ] = None,
    up_s: Annotated[float | None, typer.Option(metavar="S", help="Seconds that growing costs it.")] = None,
    down_s: Annotated[float | None, typer.Option(metavar="S", help="Seconds that shrinking costs it.")] = None,
    work: Annotated[int | None, typer.Option(metavar="SAMPLES", help="Samples in all, if it does not tell.")] = None,
    model: Annotated[str | None, typer.Option(metavar="LABEL", help="A label for the model it trains.")] = None,
    max_restarts: Annotated[
        int | None, typer.Option(metavar="N", help="How often it may fail and be started again; 5 if not given.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it is finished; exit status 1 if it failed.")
    ] = False,
    url: Url = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Queue a training script. Options of submit come before the script, as they do for python.

    bftrainer submit --nodes 1-8 train.py --epochs 3
    """
    given: dict[str, Any] = {"nodes": nodes, "name": name, "weight": weight, "env": env or None, "cwd": cwd}
    given |= {"python": python, "launcher": launcher, "curve": curve, "up_s": up_s, "down_s": down_s}
    given |= {"work": work, "model": model, "max_restarts": max_restarts}
    said = {key: value for key, value in given.items() if value is not None}
    with live_packages():
        from bftrainer.cluster.spec_file import check_here, load_spec
    if (spec is None) == (not script):
        raise InputError("submit needs either a script or --spec FILE (see: bftrainer submit --help)")
    if spec is not None:
        if said:
            option = next(iter(said)).replace("_", "-")
            raise InputError(f"--{option} belongs into {spec}: beside --spec there are only --wait and --json")
        specs = load_spec(spec)
    else:
        specs = [_from_options(script or [], said)]
    for one in specs:
        check_here(one)
    rows = _queue(specs, url, state, quiet=as_json)
    failed = False
    if wait:
        with Patient(url, state) as controller:
            rows = follow(controller, [row["id"] for row in rows], quiet=as_json)
        failed = any(row["state"] != "done" for row in rows)
    if as_json:
        print_json(rows[0] if spec is None else {"trainers": rows})
    if failed:
        raise typer.Exit(1)


def _from_options(words: Sequence[str], said: dict[str, Any]) -> TrainerSpec:
    """The spec that a command line describes."""
    from bftrainer.cluster.spec import parse_spec
    from bftrainer.cluster.spec_file import load_curve, located

    if words[0] == "-m":
        if len(words) < 2:
            raise InputError("-m must be followed by the name of a module")
        script, args = f"-m {words[1]}", words[2:]
    else:
        script, args = words[0], words[1:]
    values: dict[str, Any] = {**said, "script": script, "args": list(args)}
    if "env" in said:
        values["env"] = dict(_variable(text) for text in said["env"])
    if "curve" in said:
        values["curve"] = load_curve(said["curve"], said.get("model", "")).model_dump()
    # The script is meant from here, as a shell would; `cwd` is where it will run.
    return located(parse_spec(values), Path.cwd())


def _variable(text: str) -> tuple[str, str]:
    """`K=V`, or `K` with the value that it has here."""
    name, equals, value = text.partition("=")
    if equals:
        return name, value
    if name not in os.environ:
        raise InputError(f"--env {name}: must be NAME=VALUE or a variable that is set, but {name!r} is not set")
    return name, os.environ[name]


def _queue(specs: Sequence[TrainerSpec], url: str | None, state: Path | None, *, quiet: bool) -> list[dict[str, Any]]:
    """Submit them in order; their rows."""
    rows: list[dict[str, Any]] = []
    with connect(url, state) as client:
        for spec in specs:
            try:
                row = client.submit(spec.as_json())
            except BFTrainerError as problem:
                if not rows:
                    raise
                done = ", ".join(f"{row['id']}" for row in rows)
                told = BFTrainerError(f"{spec.name or spec.script}: {problem}; submitted before it: {done}")
                raise told from None
            rows.append(row)
            if not quiet:
                say(f"submitted {row['id']} {printable(row['name'])}")
    return rows


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    settings = {"allow_interspersed_args": False}
    app.command("submit", cls=_LikePython, context_settings=settings)(submit)
