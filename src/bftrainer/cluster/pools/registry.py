"""The kinds of pools by name: `make_pool` turns a kind and settings, as a configuration file has them, into a pool.

The controller calls it. `SETTINGS` holds what can be set for each kind, with a line of documentation a field, for
`bftrainer config`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from bftrainer.cluster.pools.base import Pool
from bftrainer.cluster.pools.local import LocalPool, LocalSettings
from bftrainer.cluster.pools.script import ScriptPool, ScriptSettings
from bftrainer.cluster.pools.slurm import SlurmPool
from bftrainer.cluster.pools.slurm_settings import SlurmSettings
from bftrainer.errors import InputError
from bftrainer.suggest import unknown

SETTINGS: Mapping[str, type[Any]] = {"local": LocalSettings, "script": ScriptSettings, "slurm": SlurmSettings}
"""For each kind the dataclass of its settings; `field.metadata["doc"]` says what a field means."""

_POOLS: Mapping[str, Any] = {"local": LocalPool, "script": ScriptPool, "slurm": SlurmPool}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def make_pool(kind: str, settings: Mapping[str, Any], folder: Path) -> Pool:
    """A pool of that kind, which keeps its files in `folder`."""
    if kind not in SETTINGS:
        raise InputError(unknown("kind of pool", kind, SETTINGS))
    pool: Pool = _POOLS[kind](read_settings(kind, settings), folder)
    return pool


def read_settings(kind: str, settings: Mapping[str, Any]) -> Any:
    """The settings of a kind of pool, checked. Numbers may be texts, as environment variables are."""
    known = SETTINGS[kind]
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


def _read(kind: str, name: str, value: Any, wanted: Any) -> Any:
    """The value as the type that the field has."""
    readers = {int: _integer, float: _number, bool: _truth, str: _text, tuple[str, ...]: _words}
    rules = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    try:
        return readers.get(wanted, _text_or_list)(value)
    except (ValueError, TypeError):
        rule = rules.get(wanted, "a list of texts")
        raise InputError(f"pool {kind}: `{name}` must be {rule}, but got {repr(value)[:200]}") from None


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    return float(value)


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
        return value.lower() in _TRUE
    raise TypeError


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError
    return str(value)


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(shlex.split(value))
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise TypeError
    return tuple(value)


def _text_or_list(value: Any) -> str | tuple[Any, ...]:
    if isinstance(value, list | tuple):
        return tuple(tuple(row) if isinstance(row, list) else row for row in value)
    return _text(value)
