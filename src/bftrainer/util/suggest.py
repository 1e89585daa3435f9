"""Word suggestions: find the likely word for unknown keys, names and kinds."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST_LETTERS = 100
_MOST_LISTED = 12


def unknown(what: str, word: object, known: Iterable[str]) -> str:
    """Return a message that `word` is not a `what`, with the likely word or else with all known words."""
    text = word if isinstance(word, str) else repr(word)
    shown = repr(text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…")
    words = sorted(known)
    near = closest(text, words)
    if near is not None:
        return f"unknown {what} {shown}: did you mean {near!r}?"
    listed = ", ".join(words[:_MOST_LISTED]) + (", …" if len(words) > _MOST_LISTED else "")
    return f"unknown {what} {shown}: must be one of {listed}" if words else f"unknown {what} {shown}"


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word nearest to `word`, if one is near. Case, `-` and `_` hardly matter."""
    by_folded = {_folded(name): name for name in known}
    found = difflib.get_close_matches(_folded(word[:_MOST_LETTERS]), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def _folded(word: str) -> str:
    return word.lower().replace("-", "_")
