"""The registry creates a pool from its kind and settings.

The controller calls `make_pool` with the settings of the configuration file. `settings_of` returns the settings of a
kind, with one line of documentation per field, for `bftrainer config`. A user's own kind is a class, named
`module:name`, with its settings as the attribute `Settings`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from bftrainer.cluster.pools.base import Pool
from bftrainer.cluster.pools.local.pool import LocalPool, LocalSettings
from bftrainer.cluster.pools.script.pool import ScriptPool, ScriptSettings
from bftrainer.cluster.pools.slurm.commands import node_addresses as slurm_addresses
from bftrainer.cluster.pools.slurm.pool import SlurmPool
from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.plugins import find_named, is_named, said
from bftrainer.util.suggest import unknown

SETTINGS: Mapping[str, type[Any]] = {"local": LocalSettings, "script": ScriptSettings, "slurm": SlurmSettings}
"""The dataclass of settings of each built-in kind."""

_POOLS: Mapping[str, Any] = {"local": LocalPool, "script": ScriptPool, "slurm": SlurmPool}
_METHODS = ("open", "pause", "resume", "close", "describe")


def _only(*types: type) -> BeforeValidator:
    """Refuse values of other types, of which pydantic converts some."""

    def check(value: Any) -> Any:
        if type(value) not in types:
            raise ValueError
        return value

    return BeforeValidator(check)


def _split(value: Any) -> Any:
    return tuple(shlex.split(value)) if isinstance(value, str) else value


def _rows(value: Any) -> Any:
    return tuple(tuple(row) if isinstance(row, list) else row for row in value) if isinstance(value, list) else value


_Text = Annotated[str, _only(str, int, float)]
_NUMBERS_TOO = ConfigDict(coerce_numbers_to_str=True)
_READERS: Mapping[Any, tuple[TypeAdapter[Any], str]] = {
    int: (TypeAdapter(Annotated[int, _only(int, str)]), "a whole number"),
    float: (TypeAdapter(Annotated[float, _only(int, float, str)]), "a number"),
    bool: (TypeAdapter(Annotated[bool, _only(bool, str)]), "true or false"),
    str: (TypeAdapter(_Text, config=_NUMBERS_TOO), "a text"),
    tuple[str, ...]: (TypeAdapter(Annotated[tuple[str, ...], BeforeValidator(_split)]), "a list of texts"),
}
_ANYTHING = (
    TypeAdapter[Any](Annotated[tuple[Any, ...] | _Text, BeforeValidator(_rows)], config=_NUMBERS_TOO),
    "a text, or a list of texts",
)
"""For fields of any other type: a text, or a list of texts and lists."""


def make_pool(kind: str, settings: Mapping[str, Any], folder: Path) -> Pool:
    """Create a pool of a kind, which keeps its files in `folder`."""
    read = read_settings(kind, settings)
    if kind in _POOLS:
        pool: Pool = _POOLS[kind](read, folder)
        return pool
    try:
        custom: Pool = find_named(kind, "pool")(read, folder)
    except BFTrainerError:
        raise
    except Exception as problem:  # a user's class may raise anything
        raise InputError(f"pool {kind!r} cannot be made: {said(problem)}") from problem
    missing = [name for name in _METHODS if not callable(getattr(custom, name, None))]
    if missing:
        raise InputError(f"pool {kind!r} must have a method {missing[0]}, as all pools have (see pools/base.py)")
    return custom


async def node_addresses(kind: str, settings: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Return the network addresses of a pool's nodes, by name, so that the controller can choose its own.

    None: the nodes are on this machine, or the pool cannot know. Empty: they could not be found out now.
    """
    return await slurm_addresses(read_settings(kind, settings)) if kind == "slurm" else None


def settings_of(kind: str) -> type[Any]:
    """Return the dataclass of the settings of a kind; `field.metadata["doc"]` says what a field means."""
    if kind in SETTINGS:
        return SETTINGS[kind]
    if not is_named(kind):
        raise InputError(unknown("kind of pool", kind, SETTINGS))
    settings = getattr(find_named(kind, "pool"), "Settings", None)
    if not isinstance(settings, type) or not is_dataclass(settings):
        raise InputError(f"pool {kind!r} must have a dataclass of its settings as its attribute Settings")
    return settings


def read_settings(kind: str, settings: Mapping[str, Any]) -> Any:
    """Return the checked settings of a kind. Numbers may be given as text, as in environment variables."""
    known = settings_of(kind)
    hints = get_type_hints(known)
    names = [field.name for field in fields(known)]
    values = {}
    for name, value in settings.items():
        if name not in names:
            raise InputError(f"pool {kind}: {unknown('setting', name, names)}")
        values[name] = _read(kind, name, value, hints[name])
    try:
        return known(**values)
    except InputError as problem:
        raise InputError(f"pool {kind}: {problem}") from None
    except Exception as problem:  # a required setting is missing, or a check of the user's class failed
        raise InputError(f"pool {kind}: {said(problem)}") from None


def _read(kind: str, name: str, value: Any, wanted: Any) -> Any:
    """Convert a value to the type of its field."""
    adapter, rule = _READERS.get(wanted, _ANYTHING)
    try:
        return adapter.validate_python(value)
    except ValidationError:
        raise InputError(f"pool {kind}: `{name}` must be {rule}, but got {repr(value)[:200]}") from None
