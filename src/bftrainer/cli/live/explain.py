"""`bftrainer submit --explain`: says how a script becomes elastic. It reads the script, and needs no controller."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from bftrainer.cli.common.connection import printable, say
from bftrainer.cli.common.output import print_json
from bftrainer.errors import InputError
from bftrainer.explain import explain
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
