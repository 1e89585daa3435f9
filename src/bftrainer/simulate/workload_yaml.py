"""YAML workloads and JSON curves: reads the nested files of a workload.

`workload` hands over the text and a `WorkloadReader` to fill. Entries that stand for many trainers (`hpo`, `diverse`,
`poisson`) are expanded here. Every scalar stays text until a check asks for a number: YAML's own guesses turn `no` into
false and `1:30` into 90, and leave `130e6` as text.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bftrainer.core.curve import Curve
from bftrainer.core.models import PAPER_CURVES
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.simulate.workload import (
    MOST_NODES,
    MOST_TRAINERS,
    WorkloadReader,
    checked,
    number,
    read_text,
    short,
    whole,
    word,
)
from bftrainer.traces.source import opened
from bftrainer.util.text import one_line
from bftrainer.util.yaml_text import TextLoader

_MOST_BYTES = 4 << 20
"""Largest description. YAML is read at some hundred kB a second, so this size takes most of a minute."""

_TOP = ("curves", "defaults", "trainers")
_DEFAULTS = ("model", "min_nodes", "max_nodes", "scale_up_s", "scale_down_s", "samples", "owner", "weight", "start_s")
_ANY = ("name", "submit", *_DEFAULTS)
_KINDS: Mapping[str, tuple[str, ...]] = {
    "hpo": ("every_s",),
    "diverse": ("models", "every_s"),
    "poisson": ("rate_per_hour", "seed"),
}
"""Entries that stand for many trainers, and their keys beyond those of a single trainer."""
_PREFIXES = {"hpo": "HPO", "diverse": "DIV", "poisson": "POI"}


def read_yaml(text: str, folder: Path, given: Mapping[str, Curve], roster: WorkloadReader) -> list[str]:
    """Fill `roster` from a description. Returns the hashes of the curve files that it names, which are in `folder`."""
    if len(text) > _MOST_BYTES:
        raise InputError(
            f"a YAML workload must be at most {_MOST_BYTES >> 20} MiB, but is {len(text) / (1 << 20):.1f} MiB; "
            "write as many trainers as that into a CSV file"
        )
    top = _mapping(_parse(text), "the file", _TOP)
    if "trainers" not in top:
        raise InputError("trainers is missing")
    curves, hashes = _curves(top.get("curves", {}), folder)
    roster.curves = {**curves, **given}
    defaults = checked(_mapping(top.get("defaults", {}), "defaults", _DEFAULTS), "defaults")
    entries = top["trainers"]
    if not isinstance(entries, list):
        raise InputError(f"trainers must be a list of entries, but got {short(entries)}")
    # Names chosen by the user come first; generated names avoid them.
    taken = {e["name"] for e in entries if isinstance(e, dict) and isinstance(e.get("name"), str)}
    numbers: dict[str, Iterator[int]] = defaultdict(count)
    for position, entry in enumerate(entries, 1):
        where = f"entry {position} of trainers"
        kinds = [kind for kind in _KINDS if isinstance(entry, dict) and kind in entry]
        if len(kinds) > 1:
            raise InputError(f"{where}: must be one of {', '.join(_KINDS)}, but got {' and '.join(kinds)}")
        if not kinds:
            _add_one(entry, where, defaults, roster)
            continue
        for prefix, trainer, submit in _generated(kinds[0], entry, f"{where} ({kinds[0]})", defaults, roster):
            # Prefixes can collide (a1 + 0000, a + 10000), so every name is checked.
            names = (f"{prefix}{n:04d}" for n in numbers[prefix])
            name = next(name for name in names if name not in taken and name not in roster.seen)
            roster.add(replace(trainer, name=name, submit=submit), where)
    return hashes


def read_curves(path: Path) -> tuple[dict[str, Curve], str]:
    """The curves of a JSON file and its hash."""
    with opened(path) as source:
        text = read_text(source)
        try:
            # Numbers stay text, so that they pass the same checks as those of other files.
            found = json.loads(text, parse_int=str, parse_float=str, parse_constant=str, object_pairs_hook=_once)
        except ValueError as problem:
            raise InputError(f"must be JSON, but {problem}") from None
        except RecursionError:
            raise InputError("must be JSON, but is nested too deep") from None
        if not isinstance(found, dict) or not found:
            raise InputError(f"must be a JSON object of curves by name, but got {short(found)}")
        curves: dict[str, Curve] = {}
        for name, spec in found.items():
            where = f"curve {short(word(name, 'the name of a curve'))}"
            if not isinstance(spec, dict):
                raise InputError(f"{where} must be an object with nodes and samples_per_s, but got {short(spec)}")
            curves[name] = curve_through(spec, where)
        return curves, source.sha256()


def _parse(text: str) -> object:
    """Parse a YAML text that holds one document."""
    try:
        loader = TextLoader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise InputError(f"{where}must be YAML, but {_line(problem.problem or problem.context)}") from None
    except RecursionError:
        raise InputError("must be YAML, but is nested too deep") from None
    except (yaml.YAMLError, ValueError, OverflowError) as problem:  # odd characters, impossible escapes
        raise InputError(f"must be YAML, but {_line(problem)}") from None


def _add_one(item: object, where: str, defaults: Mapping[str, Any], roster: WorkloadReader) -> None:
    """Add a single trainer of the description."""
    entry = _mapping(item, where, _ANY, tuple(_KINDS))
    if "name" in entry:
        where = f"{where}, trainer {short(entry['name'])}"
    values = {**defaults, **checked(entry, where)}
    submit = roster.time(entry.get("submit", "+0"), where, numbers_are_offsets=True)
    roster.add(roster.trainer(values, where, submit), where)


def _generated(
    kind: str, item: object, where: str, defaults: Mapping[str, Any], roster: WorkloadReader
) -> Iterator[tuple[str, Trainer, float]]:
    """The trainers of one entry, each with the prefix of its name and its submission time."""
    entry = _mapping(item, where, (kind, *_KINDS[kind], *(key for key in _ANY if (kind, key) != ("diverse", "model"))))
    total = whole(entry[kind], f"{where}: {kind}", most=MOST_TRAINERS)
    roster.require_room(total, where)
    values = {"name": _PREFIXES[kind], **defaults, **checked(entry, where)}
    choices = [values]
    if kind == "diverse":
        choices = [{**values, "model": name} for name in _models(entry.get("models", list(PAPER_CURVES)), where)]
    first = roster.time(entry.get("submit", "+0"), where, numbers_are_offsets=True)
    offsets = _arrivals(entry, total, where) if kind == "poisson" else _regular(entry, total, where)
    roster.require_time(first + offsets[-1], where, f"{offsets[-1]:g} s after the first")
    trainers = [roster.trainer(choice, where, first) for choice in choices]
    for trainer, offset in zip(cycle(trainers), offsets, strict=False):
        yield values["name"], trainer, first + offset


def _regular(entry: Mapping[str, object], total: int, where: str) -> list[float]:
    """Evenly spaced seconds after the first; all at once unless the entry says otherwise."""
    every_s = number(entry.get("every_s", "0"), f"{where}: every_s", "a number of seconds, 0 or more", lambda n: n >= 0)
    return [i * every_s for i in range(total)]


def _arrivals(entry: Mapping[str, object], total: int, where: str) -> list[float]:
    """Random arrival times in seconds, independent of each other."""
    if "rate_per_hour" not in entry:
        raise InputError(f"{where}: rate_per_hour is missing")
    rate = number(entry["rate_per_hour"], f"{where}: rate_per_hour", "a number above 0", lambda n: n > 0)
    seed = whole(entry.get("seed", "0"), f"{where}: seed", 0)
    mean_s = 3600 / rate
    return [float(t) * mean_s for t in np.random.default_rng(seed).exponential(size=total).cumsum()]


def _models(names: object, where: str) -> Sequence[str]:
    if not isinstance(names, list) or not names:
        raise InputError(f"{where}: models must be a list of names, but got {short(names)}")
    return [word(name, f"{where}: models") for name in names]


def _curves(item: object, folder: Path) -> tuple[dict[str, Curve], list[str]]:
    """The curves in a description, and the hashes of their files."""
    if not isinstance(item, dict):
        raise InputError(f"curves must be a mapping of names to curves, but got {short(item)}")
    curves: dict[str, Curve] = {}
    hashes: list[str] = []
    for name, spec in item.items():
        where = f"curve {short(word(name, 'the name of a curve'))}"
        if not isinstance(spec, dict):
            raise InputError(
                f"{where} must be a mapping with nodes and samples_per_s, amdahl or csv, but got {short(spec)}"
            )
        try:
            if "csv" in spec:
                path = folder / word(_mapping(spec, where, ("csv",))["csv"], f"{where}: csv")
                curves[name], sha256 = _curve_file(path)
                hashes.append(sha256)
            elif "amdahl" in spec:
                curves[name] = _amdahl(_mapping(spec, where, ("amdahl", "one_node", "max_nodes")), where)
            else:
                curves[name] = curve_through(spec, where)
        except InputError as problem:
            said = str(problem)
            raise InputError(said if said.startswith(where) else f"{where}: {said}") from None
    return curves, hashes


def _curve_file(path: Path) -> tuple[Curve, str]:
    with opened(path) as source:
        text, sha256 = read_text(source), source.sha256()
    curve = Curve.from_csv(text, str(path))
    if curve.nodes[-1] > MOST_NODES:
        raise InputError(f"{path}: nodes must be at most {MOST_NODES:,}, but got {curve.nodes[-1]:.3g}")
    return curve, sha256


def _amdahl(spec: Mapping[str, object], where: str) -> Curve:
    for key in ("one_node", "max_nodes"):
        if key not in spec:
            raise InputError(f"{where}: {key} is missing")
    share = number(spec["amdahl"], f"{where}: amdahl", "a share from 0 to 1", lambda n: 0 <= n <= 1)
    rate = number(spec["one_node"], f"{where}: one_node", "a number of samples per second above 0", lambda n: n > 0)
    return Curve.amdahl(share, rate, whole(spec["max_nodes"], f"{where}: max_nodes"))


def curve_through(spec: Mapping[str, object], where: str) -> Curve:
    """A curve from lists of node counts and rates, given as text."""
    lists: list[Sequence[object]] = []
    for key in ("nodes", "samples_per_s"):
        entries = spec.get(key)
        if not isinstance(entries, list):
            problem = f"must be a list of numbers, but got {short(entries)}" if key in spec else "is missing"
            raise InputError(f"{where}: {key} {problem}")
        lists.append(entries)
    for key in spec:
        if key not in ("nodes", "samples_per_s"):
            raise InputError(f"{where}: key must be one of nodes, samples_per_s, but got {short(key)}")
    nodes = [whole(n, f"{where}: nodes", 0) for n in lists[0]]
    rule = "numbers, 0 or more"
    return Curve.through(nodes, [number(r, f"{where}: samples_per_s", rule, lambda r: r >= 0) for r in lists[1]], where)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; duplicate keys are refused."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{short(next(key for key in keys if keys.count(key) > 1))} occurs twice")
    return found


def _mapping(item: object, where: str, known: Sequence[str], also: Sequence[str] = ()) -> dict[str, object]:
    """Check that a mapping has only `known` keys; `also` names others that would make it something else."""
    if not isinstance(item, dict):
        raise InputError(f"{where} must be a mapping with {', '.join(known)}, but got {short(item)}")
    for key in item:
        if key not in known:
            raise InputError(f"{where}: key must be one of {', '.join((*also, *known))}, but got {short(key)}")
    return item


def _line(problem: object) -> str:
    return one_line(problem)[:160]
