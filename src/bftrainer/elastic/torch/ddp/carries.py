"""Names of a script's variables that keep values from epoch to epoch, read from its text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from bftrainer.errors import BFTrainerError
from bftrainer.explain import kept_values


@cache
def carried_names(words: Sequence[str]) -> tuple[str, ...]:
    """Return the variables of the script of a command line; one name for all if the script cannot be read."""
    try:
        return kept_values(words, Path.cwd())
    except BFTrainerError:
        return ("a variable",)
