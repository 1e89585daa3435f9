"""Problem files hold allocation problems as JSON for `bftrainer allocate`. Errors name the trainer and the field."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from bftrainer.allocate.problem import Claim, Limits, Problem
from bftrainer.core.curve import Curve
from bftrainer.errors import InputError

_TOP = {"pool", "horizon_s", "trainers", "limits"}
_NEEDED = ("name", "current", "min", "max", "nodes", "values", "up_s", "down_s")
_LIMITS = {"owner_caps", "owner_shares", "exclusive"}


def parse_problem(text: str) -> Problem:
    """Parse a problem from a JSON text."""
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as problem:
        raise InputError(f"not JSON: {problem}") from None
    except RecursionError:
        raise InputError("not JSON: nested too deep") from None
    top = _object(found, "the problem", _TOP, ("pool", "horizon_s", "trainers"))
    trainers = top["trainers"]
    if not isinstance(trainers, list):
        raise InputError(f"trainers must be a list, but got {_short(trainers)}")
    claims = tuple(_claim(item, i) for i, item in enumerate(trainers))
    return Problem(
        _whole(top["pool"], "pool"), _number(top["horizon_s"], "horizon_s"), claims, _limits(top.get("limits", {}))
    )


def _claim(item: object, position: int) -> Claim:
    where = f"trainer {position + 1}"
    fields = _object(item, where, {*_NEEDED, "owner", "start_s"}, _NEEDED)
    name = fields["name"]
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: name must be a text, but got {_short(name)}")
    where = f"trainer {name!r}"
    nodes, values = fields["nodes"], fields["values"]
    for key, entries in (("nodes", nodes), ("values", values)):
        if not isinstance(entries, list):
            raise InputError(f"{where}: {key} must be a list of numbers, but got {_short(entries)}")
    curve = Curve.through(
        [_whole(n, f"{where}: nodes") for n in nodes], [_number(v, f"{where}: values") for v in values], where
    )
    current, least, most = (_whole(fields[key], f"{where}: {key}") for key in ("current", "min", "max"))
    if most < least:
        raise InputError(f"{where}: max must be at least min ({least}), but got {most}")
    up_s, down_s, start_s = (_number(fields.get(key, 0), f"{where}: {key}") for key in ("up_s", "down_s", "start_s"))
    owner = fields.get("owner", "")
    if not isinstance(owner, str):
        raise InputError(f"{where}: owner must be a text, but got {_short(owner)}")
    return Claim(name, current, least, most, curve, up_s, down_s, owner, start_s)


def _limits(item: object) -> Limits:
    fields = _object(item, "limits", _LIMITS, ())
    counts: dict[str, dict[str, int]] = {}
    for key in ("owner_caps", "owner_shares"):
        entries = fields.get(key, {})
        if not isinstance(entries, dict):
            raise InputError(f"limits: {key} must be an object of owners and node counts, but got {_short(entries)}")
        counts[key] = {owner: _whole(count, f"limits: {key} of {owner!r}") for owner, count in entries.items()}
    groups = fields.get("exclusive", [])
    if not isinstance(groups, list) or not all(
        isinstance(group, list) and all(isinstance(name, str) for name in group) for group in groups
    ):
        raise InputError("limits: exclusive must be a list of lists of trainer names")
    return Limits(counts["owner_caps"], counts["owner_shares"], tuple(frozenset(group) for group in groups))


def _object(item: object, where: str, known: set[str], needed: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InputError(f"{where} must be a JSON object, but got {_short(item)}")
    missing = [key for key in needed if key not in item]
    if missing:
        raise InputError(f"{where}: {', '.join(missing)} is missing")
    strange = sorted(set(item) - known)
    if strange:
        raise InputError(f"{where}: key must be one of {', '.join(sorted(known))}, but got {strange[0]!r}")
    return item


def _whole(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{where} must be a whole number, but got {_short(value)}")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where} must be a number, but got {_short(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{where} must be a finite number, but got {_short(value)}")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
