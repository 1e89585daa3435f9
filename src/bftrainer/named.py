"""What users bring themselves, named `module:attribute`: objectives, allocators, pools.

The registries call `find_named` for a name that is none of theirs. Whatever is wrong with a user's module is one line.
"""

from __future__ import annotations

import importlib
from typing import Any

from bftrainer.errors import InputError


def is_named(name: str) -> bool:
    """Whether `name` has the form `module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(colon and module and attribute)


def find_named(name: str, what: str) -> Any:
    """What `module:attribute` stands for. `what` says in messages what it was to be."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        raise InputError(f"{what} {name!r}: {problem}. Is its folder on PYTHONPATH?") from None
    except Exception as problem:  # whatever a user's module may do wrong
        raise InputError(f"{what} {name!r}: module {module_name} cannot be imported: {said(problem)}") from problem
    found = getattr(module, attribute, None)
    if found is None:
        raise InputError(f"{what} {name!r}: module {module_name} has no {attribute}")
    return found


def said(problem: Exception) -> str:
    """An exception in one line, by its kind and its words."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0].rstrip(": ")
