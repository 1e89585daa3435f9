"""A sweep expands one trainer description into many trainers.

There is one trainer per combination of the listed values. `submit --array` loads a sweep from a file. Every trainer has
the sweep's name as its `group` and its combination as `params`. The script gets the values by its arguments or its
environment.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bftrainer.cluster.spec.files import MOST_TRAINERS, one_spec, read_mapping
from bftrainer.cluster.spec.names import default_name
from bftrainer.cluster.spec.trainer import KEYS, TrainerSpec, parse_spec
from bftrainer.errors import InputError
from bftrainer.util.suggest import closest, unknown

MOST_GROUP = 56
"""The most letters of a sweep's name: the names of its trainers have a number appended."""

_PARAM = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*")
_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9._-]*)\}")
_OWN = ("grid", "points")
_KEYS = tuple(key for key in KEYS if key not in ("name", "params"))

Point = Mapping[str, str]
"""One combination of values: a value for each parameter."""


def load_sweep(path: Path, said: Mapping[str, Any] | None = None, here: Path | None = None) -> list[TrainerSpec]:
    """Return the trainers of a sweep. `said` has the values from the command line, which override those of the file.

    Paths in the file are relative to its folder, those in `said` to `here`. A script named in the file runs in the
    file's folder, one named in `said` runs in `here`, unless `cwd` says otherwise.
    """
    top = read_mapping(path)
    for key in top:
        if key == "name":
            raise InputError(f"{path}: a sweep has a group, not a name: write group instead of name")
        if key not in (*_OWN, *_KEYS):
            raise InputError(f"{path}: {unknown('key', key, (*_OWN, *_KEYS))}")
    points = _points(top, path)
    values = {key: value for key, value in top.items() if key not in _OWN}
    said = said or {}
    if "script" in said and "script" in values:
        raise InputError(f"{path}: the script is given here and on the command line: remove one of them")
    if "script" not in said and "script" not in values:
        raise InputError(f"{path}: script is missing: write it there or after --array {path.name}")
    if "nodes" in said:
        values = {key: value for key, value in values.items() if key not in ("min_nodes", "max_nodes")}
    values |= _located(said, here or Path.cwd(), has_cwd="cwd" in values)
    group = values.setdefault("group", default_name(path.name))
    base = one_spec({**values, "name": None}, path, str(path))  # an error common to all trainers is reported once
    if len(base.group) > MOST_GROUP:
        raise InputError(f"{path}: group must have at most {MOST_GROUP} letters in a sweep, but got {group!r}")
    _check_places(base, points[0], path)
    return [_chosen(base, f"{base.group}-{number}", point, path) for number, point in enumerate(points, 1)]


def _located(said: Mapping[str, Any], here: Path, *, has_cwd: bool) -> dict[str, Any]:
    found = dict(said)
    for key in ("script", "cwd", "python"):
        is_path = key in said and (key != "python" or "/" in said[key]) and not said[key].startswith("-m ")
        if is_path:
            found[key] = str(here / said[key])
    if "script" in said and not has_cwd:
        found.setdefault("cwd", str(here))
    return found


def _points(top: Mapping[str, Any], path: Path) -> list[Point]:
    """Return all combinations of a file, in order: the last parameter of a grid changes fastest."""
    if ("grid" in top) == ("points" in top):
        example = "grid: {lr: [0.1, 0.01]}"
        raise InputError(f"{path}: a sweep must have either a grid, such as `{example}`, or a list of points")
    if "grid" in top:
        grid = top["grid"]
        if not isinstance(grid, Mapping) or not grid:
            raise InputError(f"{path}: grid must be a mapping of names to lists of values, but got {grid!r:.80}")
        axes = {_name(key, path): _values(key, values, path) for key, values in grid.items()}
        _check_count(math.prod(len(values) for values in axes.values()), path)
        return [dict(zip(axes, choice, strict=True)) for choice in itertools.product(*axes.values())]
    given = top["points"]
    if not isinstance(given, list) or not given or not all(isinstance(point, Mapping) and point for point in given):
        raise InputError(f"{path}: points must be a list of mappings such as {{lr: 0.1}}, but got {given!r:.80}")
    _check_count(len(given), path)
    points = [{_name(key, path): _value(key, value, path) for key, value in point.items()} for point in given]
    for number, point in enumerate(points, 1):
        if point.keys() != points[0].keys():
            raise InputError(f"{path}: points must all have the names that the first has, but point {number} has not")
    _check_twice([tuple(sorted(point.items())) for point in points], "points", path)
    return list(points)


def _check_count(count: int, path: Path) -> None:
    if count > MOST_TRAINERS:
        raise InputError(f"{path}: there must be at most {MOST_TRAINERS:,} trainers, but these would be {count:,}")


def _check_twice(found: Sequence[object], what: str, path: Path) -> None:
    if len(set(found)) < len(found):
        raise InputError(f"{path}: {what} must each occur once, but one occurs twice")


def _name(key: object, path: Path) -> str:
    if not isinstance(key, str) or not _PARAM.fullmatch(key):
        raise InputError(f"{path}: a parameter must be named as an option, such as batch-size, but got {key!r:.80}")
    return key


def _values(key: str, values: object, path: Path) -> list[str]:
    if not isinstance(values, list) or not values:
        raise InputError(f"{path}: {key} must be a list of values, but got {values!r:.80}")
    found = [_value(key, value, path) for value in values]
    _check_twice(found, f"the values of {key}", path)
    return found


def _value(key: object, value: object, path: Path) -> str:
    if not isinstance(value, str | int | float):
        raise InputError(f"{path}: a value of {key} must be a number, a text, true or false, but got {value!r:.80}")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _texts(spec: TrainerSpec) -> Iterable[str]:
    """Return the texts in which `{name}` is replaced by a value."""
    return (*spec.args, *spec.env.values())


def _check_places(base: TrainerSpec, point: Point, path: Path) -> None:
    """Refuse a name in braces that nearly matches a parameter: it is probably a typing error."""
    for place in _PLACE.findall(" ".join(_texts(base))):
        near = closest(place, point) if place not in point else None
        if near is not None:
            raise InputError(f"{path}: {{{place}}} is not a parameter of this sweep: did you mean {{{near}}}?")


def _chosen(base: TrainerSpec, name: str, point: Point, path: Path) -> TrainerSpec:
    """Return the trainer of one combination. A value replaces `{name}`; without that, `--name value` is appended."""
    placed = {place for text in _texts(base) for place in _PLACE.findall(text)}

    def filled(text: str) -> str:
        return _PLACE.sub(lambda found: point.get(found[1], found[0]), text)

    rest = [word for key, value in point.items() if key not in placed for word in _option(key, value)]
    changes = {
        "name": name,
        "args": [*(filled(arg) for arg in base.args), *rest],
        "env": {key: filled(value) for key, value in base.env.items()},
        "params": dict(point),
    }
    return parse_spec({**base.model_dump(), **changes}, f"{path}: {name}")


def _option(key: str, value: str) -> tuple[str, ...]:
    """Return the arguments for one parameter.

    They are one word, `--name=value`, if the value looks like an option. True adds a flag, false adds nothing.
    """
    if value in ("true", "false"):
        return (f"--{key}",) if value == "true" else ()
    return (f"--{key}={value}",) if value.startswith("-") else (f"--{key}", value)
