"""Plugin loader: imports objectives, allocators and pools that users name as `module:attribute`.

The registries call `find_named` for a name that they do not know. Any error in a user's module becomes one line.
"""

from __future__ import annotations

import importlib
from typing import Any

from bftrainer.errors import InputError


def is_named(name: str) -> bool:
    """Return whether `name` has the form `module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(colon and module and attribute)


def find_named(name: str, what: str) -> Any:
    """Return the object that `module:attribute` names. `what` is the expected kind of object, for messages."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        raise InputError(f"{what} {name!r}: {problem}. Is its folder on PYTHONPATH?") from None
    except Exception as problem:  # a user's module may raise anything
        raise InputError(f"{what} {name!r}: module {module_name} cannot be imported: {said(problem)}") from problem
    found = getattr(module, attribute, None)
    if found is None:
        raise InputError(f"{what} {name!r}: module {module_name} has no {attribute}")
    return found


def said(problem: Exception) -> str:
    """Return an exception in one line, with its type and message."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0].rstrip(": ")
