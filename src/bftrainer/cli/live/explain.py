"""`bftrainer submit --explain`: says how a script becomes elastic. It reads the script, and needs no controller."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import typer

from bftrainer.cli.common.connection import printable, say
from bftrainer.cli.common.output import print_json
from bftrainer.errors import InputError
from bftrainer.explain import explain
from bftrainer.explain.lines import WAYS
from bftrainer.explain.text import as_text


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


def hint(words: Sequence[str], folder: Path) -> str:
    """Return what to do about a script that is submitted for the elastic launcher and makes no elastic call.

    Empty if there is nothing to say. The script is only read, and reading it never keeps it from being submitted.
    """
    try:
        way = explain(words, folder).way
    except Exception:  # whatever an unusual file does to the reader, it is only a hint
        return ""
    script = folder / words[0]
    near = script.name if script.parent == Path.cwd() else words[0]
    named = shlex.join(words[:2]) if words[0] == "-m" else shlex.quote(near)
    if way in ("elastic", "none"):
        return ""
    if launcher := WAYS[way].launcher:
        told, remedy = "is a script for torchrun", f"Submit it with --launcher {launcher}"
    else:
        call = "elastic.prepare" if way == "prepare" else WAYS[way].title
        told, remedy = "makes no elastic call, so its training will be refused", f"Add the lines for {call}"
    return f"{named} {told}. {remedy}; `bftrainer submit --explain {named}` says how"
