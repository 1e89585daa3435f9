"""`bftrainer submit --explain`: says how a script becomes elastic. It reads the script, and needs no controller."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bftrainer.cli.common.connection import printable, say
from bftrainer.cli.common.output import print_json
from bftrainer.errors import InputError
from bftrainer.explain import explain, what_keeps_from_place
from bftrainer.explain.lines import WAYS
from bftrainer.explain.text import as_text

if TYPE_CHECKING:
    from bftrainer.cluster.spec.trainer import TrainerSpec

_OF_SUBMIT = ("--nodes", "--wait", "--launcher", "--explain", "--array", "--deadline", "--ranks-per-node", "--preload")
"""Options of `bftrainer submit` that hardly any script has."""


def explain_script(words: Sequence[str], *, nodes: str | None, from_file: bool, as_json: bool) -> None:
    """Print the explanation of the script that a command line names. Exit status 1 says that there is no way."""
    if from_file or not words:
        raise InputError("--explain needs a script or -m MODULE, not --spec or --array (see: bftrainer submit --help)")
    explanation = explain(words, Path.cwd(), nodes or "1-4")
    if as_json:
        print_json(explanation.as_json())
    else:
        for line in as_text(explanation).split("\n"):
            say(printable(line))
    if explanation.way == "none":
        raise typer.Exit(1)


def hint(spec: TrainerSpec) -> str:
    """Return what to do about a script that is submitted in a way that does not fit. Empty if there is nothing to say.

    The script is only read, and reading it never keeps it from being submitted.
    """
    folder = Path(spec.cwd)
    fewest = spec.min_nodes * (spec.ranks_per_node if isinstance(spec.ranks_per_node, int) else 1)
    try:
        if spec.launcher == "elastic":
            return _right_way(spec.argv, explain(spec.argv, folder).way, folder)
        fewer_ranks = spec.ranks is not None and spec.ranks > fewest
        line = what_keeps_from_place(spec.argv, folder, fewer_ranks=fewer_ranks) if spec.launcher == "ddp" else None
    except Exception:  # whatever an unusual file does to the reader, it is only a hint
        return ""
    if line is None:
        return ""
    place = f"{line.file}:{line.line}"
    return f"{place}: {line.what}, so it may go on with --launcher torchrun and its restarts; {line.remedy}"


def options_passed_on(spec: TrainerSpec) -> list[str]:
    """Return options of `bftrainer submit` among a script's arguments, if the script itself does not name them."""
    given = [word.partition("=")[0] for word in spec.argv[1:]]
    ours = [name for name in _OF_SUBMIT if name in given]
    try:
        text = (Path(spec.cwd) / spec.argv[0]).read_text(errors="replace") if ours else ""
    except (OSError, ValueError):  # of a module
        return []
    return [name for name in ours if name not in text]


def _right_way(words: Sequence[str], way: str, folder: Path) -> str:
    if way in ("elastic", "none"):
        return ""
    script = folder / words[0]
    near = script.name if script.parent == Path.cwd() else words[0]
    named = shlex.join(words[:2]) if words[0] == "-m" else shlex.quote(near)
    if launcher := WAYS[way].launcher:
        told, remedy = "is a script for torchrun", f"Submit it with --launcher {launcher}"
    else:
        call = "elastic.prepare" if way == "prepare" else WAYS[way].title
        told, remedy = "makes no elastic call, so its training will be refused", f"Add the lines for {call}"
    return f"{named} {told}. {remedy}; `bftrainer submit --explain {named}` says how"
