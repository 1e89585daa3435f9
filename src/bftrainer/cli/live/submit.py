"""`bftrainer submit` queues a script, or a file of trainers. Everything is checked before it is queued."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from bftrainer.cli.common.connection import Json, State, Url, connect, live_packages, printable, say
from bftrainer.cli.common.output import print_json, warn
from bftrainer.cli.live.control import wait_for
from bftrainer.cli.live.explain import explain_script, hint, options_passed_on
from bftrainer.cli.live.show_eta import deadline_text, eta_text
from bftrainer.cli.live.show_trainers import moment
from bftrainer.cluster.config.rules import lifetime_s
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.errors import BFTrainerError, InputError

if TYPE_CHECKING:
    from bftrainer.client import Client, Row
    from bftrainer.cluster.spec.trainer import TrainerSpec


class _LikePython(TyperCommand):
    """Command whose options end at the script, or at `-m`. The rest belongs to the script, as with `python`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep `-m` and everything after it from being parsed as options."""
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
        typer.Argument(
            metavar="SCRIPT [ARGS]", help="Training script, or -m MODULE; everything after it is passed on."
        ),
    ] = None,
    spec: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of trainers, .toml or .yaml, instead of a script.")
    ] = None,
    array: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Sweep file, .toml or .yaml: one trainer per combination of its values."),
    ] = None,
    nodes: Annotated[str | None, typer.Option(metavar="N|A-B", help="Number of nodes: exactly N, or A to B.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name; default: derived from the script.")] = None,
    group: Annotated[
        str | None, typer.Option(metavar="NAME", help="Group; default for a sweep: the file's name.")
    ] = None,
    weight: Annotated[float | None, typer.Option(metavar="W", help="Priority; default: 1.")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K=V|K",
            help="Environment variable to set; K alone copies its value, which keeps secrets out of sight.",
        ),
    ] = None,
    cwd: Annotated[str | None, typer.Option(metavar="DIR", help="Working directory; default: the current one.")] = None,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="EXE",
            help="Python interpreter, which all nodes must have; default: that of the active environment, else this "
            "command's. agent: that of the agents.",
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(metavar="elastic|ddp|torchrun|hosts", help="How the script is started and told about its peers."),
    ] = None,
    ranks_per_node: Annotated[
        str | None,
        typer.Option(metavar="N|gpu", help="Processes on each node; default: gpu, one per GPU of the node."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Ranks that the script's batch size was chosen for: the batch of a step is that of one rank times N, "
            "however many ranks train. Default: 1; with --launcher ddp those on the fewest nodes.",
        ),
    ] = None,
    log_all_ranks: Annotated[
        bool | None,
        typer.Option("--log-all-ranks", help="Collect the output of all processes, not only of the first per node."),
    ] = None,
    preload: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE[,MODULE]",
            help="Modules that nodes import ahead of the script, besides those that they learn of. none: none at all.",
        ),
    ] = None,
    curve: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Scaling curve, .csv or .json as `profile` writes it.")
    ] = None,
    up_s: Annotated[float | None, typer.Option(metavar="S", help="Cost of growing, in seconds.")] = None,
    down_s: Annotated[float | None, typer.Option(metavar="S", help="Cost of shrinking, in seconds.")] = None,
    work: Annotated[
        int | None,
        typer.Option(metavar="SAMPLES", help="Total samples to train on, if the script does not report them."),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="TIME|DURATION",
            help="When it should be done: 2026-03-01T08:00 (UTC), or 12h from now. Says how likely that is, and status "
            "shows it. It changes no decision.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="LABEL", help="Label of the trained model.")] = None,
    max_restarts: Annotated[
        int | None, typer.Option(metavar="N", help="Number of restarts allowed after failures; default: 5.")
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Say how the script becomes elastic, line by line. Reads it, and queues nothing."
        ),
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the trainer is finished; exit status 1 if it failed.")
    ] = False,
    url: Url = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Queue a training script. Options of submit come before the script, as they do for python.

    \b
    bftrainer submit --nodes 1-8 train.py --epochs 3
    bftrainer submit --array grid.yaml
    bftrainer submit --explain train.py
    """
    if explain:
        explain_script(script or [], nodes=nodes, from_file=bool(spec or array), as_json=as_json)
        return
    given: dict[str, Any] = {"nodes": nodes, "name": name, "weight": weight, "env": env or None, "cwd": cwd}
    given |= {"python": python, "launcher": launcher, "curve": curve, "up_s": up_s, "down_s": down_s}
    given |= {"work": work, "model": model, "max_restarts": max_restarts, "group": group}
    given |= {"ranks_per_node": ranks_per_node, "ranks": ranks, "log_all_ranks": log_all_ranks, "preload": preload}
    given["deadline"] = None if deadline is None else _deadline(deadline)
    said = {key: value for key, value in given.items() if value is not None}
    with live_packages():
        from bftrainer.cluster.spec.files import check_here, load_spec
        from bftrainer.cluster.spec.interpreters import in_active_environment
    if array is not None:
        specs = _from_array(array, spec, script or [], said)
    elif (spec is None) == (not script):
        raise InputError("submit needs either a script or --spec FILE, or --array FILE (see: bftrainer submit --help)")
    elif spec is not None:
        if said:
            option = next(iter(said)).replace("_", "-")
            raise InputError(f"--{option} cannot be combined with --spec: set it in {spec}")
        specs = load_spec(spec)
    else:
        specs = [_from_options(script or [], said)]
    specs = in_active_environment(specs, os.environ, warn)
    # Trainers of a sweep differ only in arguments that the script must check.
    for one in specs[:1] if array is not None else specs:
        check_here(one)
        if told := hint(one):
            warn(printable(told))
        if passed_on := options_passed_on(one):
            names = ", ".join(passed_on)
            warn(f"passed to the script, because it stands after it: {names}. Options of submit come before it")
        if one.deadline is not None and one.deadline <= time.time():
            warn(f"the deadline {moment(one.deadline)} UTC has passed already")
    with connect(url, state) as client:
        rows = _queue(client, specs, quiet=as_json)
        if not as_json:
            _tell_eta(client, [row["id"] for row in rows], asked=any(one.deadline is not None for one in specs))
        if wait:
            rows = wait_for(client, [row["id"] for row in rows], quiet=as_json)
    failed = wait and any(row["state"] != "done" for row in rows)
    if as_json:
        print_json(rows[0] if spec is None and array is None else {"trainers": rows})
    if failed:
        raise typer.Exit(1)


def _from_array(path: Path, spec: Path | None, words: Sequence[str], said: dict[str, Any]) -> list[TrainerSpec]:
    """The trainers of a sweep. The script may be named in the file or on the command line."""
    from bftrainer.cluster.spec.sweep import load_sweep

    if spec is not None:
        raise InputError("--spec and --array cannot be combined: give one of them")
    if "name" in said:
        raise InputError("--name is for one trainer: name a sweep with --group")
    return load_sweep(path, _values(words, said), Path.cwd())


def _from_options(words: Sequence[str], said: dict[str, Any]) -> TrainerSpec:
    """The spec that a command line describes."""
    from bftrainer.cluster.spec.files import located
    from bftrainer.cluster.spec.trainer import parse_spec

    # The script's path is relative to the current folder, as in a shell; `cwd` is where it will run.
    return located(parse_spec(_values(words, said)), Path.cwd())


def _values(words: Sequence[str], said: dict[str, Any]) -> dict[str, Any]:
    """The options of a command line, as keys of a trainer file."""
    from bftrainer.cluster.spec.files import load_curve

    values = dict(said)
    if words and words[0] == "-m":
        if len(words) < 2:
            raise InputError("-m must be followed by the name of a module")
        values |= {"script": f"-m {words[1]}", "args": list(words[2:])}
    elif words:
        values |= {"script": words[0], "args": list(words[1:])}
    if "env" in said:
        values["env"] = dict(_variable(text) for text in said["env"])
    if "curve" in said:
        values["curve"] = load_curve(said["curve"], said.get("model", "")).model_dump()
    return values


def _deadline(text: str) -> str | float:
    """A duration such as 12h as a time; a time is left to the check of the description."""
    try:
        if (seconds := lifetime_s(text)) is not None:
            return time.time() + seconds
    except ValueError:
        with suppress(ValueError):
            datetime.fromisoformat(text)
            return text
    raise InputError(
        "--deadline must be a time in UTC such as 2026-03-01T08:00, or a duration such as 90m, 12h or 3d, but got "
        f"{text!r:.80}"
    )


def _tell_eta(client: Client, ids: Sequence[str], *, asked: bool) -> None:
    """Say when the trainers will be done, if that can be said; if a deadline asks for it, say why it cannot."""
    from bftrainer.client import RefusedError

    try:
        eta = client.eta(*ids)["eta"]
    except RefusedError as problem:
        # Older controllers do not predict, and a busy one may not be able to now. The trainers are queued all the same.
        if asked and problem.status not in (404, 405):
            say(f"done: not known yet: {problem}")
        return
    if eta["low"] is None and eta["deadline"] is None:
        return  # nothing is known of the script yet; `status` will say it
    say("; ".join(part for part in (f"done: {eta_text(eta, time.time())}", deadline_text(eta)) if part))
    if eta["futures"]:
        say(f"({printable(eta['basis'])})")


def _variable(text: str) -> tuple[str, str]:
    """Parse `K=V`, or `K` with its value in this environment."""
    name, equals, value = text.partition("=")
    if equals:
        return name, value
    if name not in os.environ:
        raise InputError(f"--env {name}: must be NAME=VALUE or a variable that is set, but {name!r} is not set")
    return name, os.environ[name]


def _queue(client: Client, specs: Sequence[TrainerSpec], *, quiet: bool) -> list[Row]:
    """Submit the trainers in order and return their rows."""
    rows: list[Row] = []
    if any(spec.params for spec in specs):
        _check_free(client, specs)
    for spec in specs:
        try:
            row = client.submit_spec(spec)
        except BFTrainerError as problem:
            if not rows:
                raise
            done = ", ".join(row["id"] for row in rows) if len(rows) < 10 else f"{rows[0]['id']} to {rows[-1]['id']}"
            raise BFTrainerError(f"{spec.name or spec.script}: {problem}; submitted before it: {done}") from None
        rows.append(row)
        if not quiet:
            params = " ".join(f"{name}={printable(value)}" for name, value in spec.params.items())
            say(f"submitted {row['id']} {printable(row['name'])} {params}".rstrip())
    return rows


def _check_free(client: Client, specs: Sequence[TrainerSpec]) -> None:
    """Check the names of a sweep first, so that either all of its trainers are queued or none."""
    me = client.me()
    most, have = me["limits"]["max_trainers"], me["use"]["trainers"]
    if most is not None and have + len(specs) > most:
        raise InputError(
            f"{me['owner']} may have {most} unfinished trainers and has {have}, so {len(specs)} more are too many: "
            "wait until some are finished, or cancel some"
        )
    mine = [row for row in client.trainers(all=True) if row["owner"] == me["owner"]]
    group = specs[0].group
    if earlier := sum(row.get("group") == group for row in mine):
        raise InputError(
            f"the group {group!r} exists already, with {earlier} trainers of an earlier sweep: choose another name, "
            f"such as --group {group}-again"
        )
    taken = {row["name"] for row in mine if row["state"] not in FINISHED}
    clash = [spec for spec in specs if spec.name in taken]
    if clash:
        what = f"{len(clash)} of {len(specs)} names are those of unfinished trainers"
        how = "give this sweep another --group, or end those with `bftrainer cancel`"
        raise InputError(f"{what}, such as {clash[0].name!r}: {how}")


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    settings = {"allow_interspersed_args": False}
    app.command("submit", cls=_LikePython, context_settings=settings)(submit)
