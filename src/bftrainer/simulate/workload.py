"""Workloads: the trainers of a simulation, read from a CSV table or a YAML description.

A file comes in; checked `Trainer`s come out in order of submission. The replay and the commands call `load_workload`.
Fields of either kind of file are checked here as text, so both obey one set of rules. `workload_yaml` handles what is
particular to YAML, and to JSON files of curves.
"""

from __future__ import annotations

import csv
import hashlib
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, tzinfo
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bftrainer.core.curve import Curve
from bftrainer.core.models import PAPER_CURVES
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.traces.source import Source, opened
from bftrainer.traces.times import LATEST, Clock

MOST_BYTES = 64 << 20
MOST_TRAINERS = 1_000_000
MOST_NODES = 10**9
_LONGEST_OFFSET_S = 1e9
"""Some 32 years: a larger number of seconds after the start is a time since 1970 in the wrong place."""

_NEEDED = ("name", "model", "submit", "min_nodes", "max_nodes", "scale_up_s", "scale_down_s", "samples")
_COLUMNS = (*_NEEDED, "owner", "weight", "start_s")
_ALIASES: Mapping[str, str] = MappingProxyType({"mnasnet1": "mnasnet", "mobilenet": "mobilenets"})
"""Model names in the paper's published files that differ from its table in more than case and hyphens."""

_SHORT = reprlib.Repr()
# Values of a YAML file can share parts, so that printing one in full may never end.
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlist, _SHORT.maxdict = 2, 60, 4, 4


@dataclass(frozen=True, slots=True)
class Workload:
    """The trainers of one simulation."""

    trainers: tuple[Trainer, ...]
    """Trainers in order of submission; those submitted together, in the order of the file."""
    name: str
    sha256: str
    """Hash of the file; or of the hashes of all files, one per line, if curves came from files that belong to it."""


def load_workload(
    path: Path, curves: Mapping[str, Curve] | None = None, zone: tzinfo = UTC, start: float | None = None
) -> Workload:
    """Read a `.csv` or `.yaml` workload. Naive times are in `zone`, times such as `+3600` count from `start`.

    `curves` take precedence over those of the paper and those in a YAML file. Without them, a `curves.json` beside a
    CSV file is used as if it had been given.
    """
    # Imported here since `workload_yaml` imports this module.
    from bftrainer.simulate.workload_yaml import read_curves, read_yaml

    with opened(path) as source:
        text = read_text(source)
        hashes = [source.sha256()]
        roster = WorkloadReader(Clock(zone), start)
        if _is_yaml(path, text):
            hashes += read_yaml(text, path.parent, curves or {}, roster)
        else:
            beside = path.parent / "curves.json"
            if curves is None and beside.is_file():
                curves, beside_hash = read_curves(beside)
                hashes.append(beside_hash)
            roster.curves = curves or {}
            _read_csv(text, roster)
        if not roster.trainers:
            raise InputError("has no trainers")
    sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    return Workload(tuple(sorted(roster.trainers, key=lambda trainer: trainer.submit)), _plain(path).stem, sha256)


def load_curves(path: Path) -> dict[str, Curve]:
    """The curves in a JSON file such as `{"mynet": {"nodes": [1, 2], "samples_per_s": [100, 190]}}`, by name."""
    from bftrainer.simulate.workload_yaml import read_curves

    return read_curves(path)[0]


def find_curve(name: str, extra: Mapping[str, Curve] | None = None) -> Curve:
    """The curve called `name` among `extra`, then among the seven of the paper. Case, `-` and `_` do not matter."""
    for known in (extra or {}, PAPER_CURVES):
        if name in known:
            return known[name]
        for normalised in (_folded, _canonical):
            for other, curve in known.items():
                if normalised(other) == normalised(name):
                    return curve
    names = list(dict.fromkeys([*(extra or {}), *PAPER_CURVES]))
    listed = ", ".join(names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")
    raise InputError(f"model must be one of {listed}, but got {short(name)}")


class WorkloadReader:
    """Collects the trainers read so far, with what is needed to read more: curves, clock, start."""

    def __init__(self, clock: Clock, start: float | None) -> None:
        self.curves: Mapping[str, Curve] = {}
        self.trainers: list[Trainer] = []
        self.seen: dict[str, str] = {}
        """Where each name was given."""
        self._clock, self._start = clock, start
        self._found: dict[str, Curve] = {}

    def curve(self, model: str, where: str) -> Curve:
        """The curve of a model; thousands of trainers share a few, so each is looked up once."""
        if model not in self._found:
            try:
                self._found[model] = find_curve(model, self.curves)
            except InputError as problem:
                raise InputError(f"{where}: {problem}") from None
        return self._found[model]

    def require_room(self, count: int, where: str) -> None:
        """Refuse `count` more trainers if they are too many, before they take time and memory."""
        if len(self.trainers) + count > MOST_TRAINERS:
            raise InputError(f"{where}: there must be at most {MOST_TRAINERS:,} trainers, but this makes them more")

    def add(self, trainer: Trainer, where: str) -> None:
        """Add one trainer under a unique name."""
        self.require_room(1, where)
        if trainer.name in self.seen:
            raise InputError(f"{where}: name must be unique, but {self.seen[trainer.name]} has it already")
        self.seen[trainer.name] = where
        self.trainers.append(trainer)

    def time(self, value: object, where: str, *, numbers_are_offsets: bool = False) -> float:
        """A time, or seconds after the start as `+3600` (and as 3600, if numbers are offsets)."""
        what = f"{where}: submit"
        text = value if isinstance(value, str) else ""
        offset = text.removeprefix("+") if text.startswith("+") or (numbers_are_offsets and _is_number(text)) else None
        if offset is not None:
            rule = "a number of seconds after the start, 0 or more, or a time such as 2021-02-10T20:21:15"
            seconds = number(offset, what, rule, lambda n: 0 <= n < _LONGEST_OFFSET_S, text)
            if self._start is None:
                raise InputError(f"{what} must be a full time where no start is given, but got {short(text)}")
            return self.require_time(self._start + seconds, where, f"{short(text)} after the start")
        try:
            return self._clock(text)
        except ValueError:
            rule = "a time such as 2021-02-10T20:21:15 or +SECONDS"
            raise InputError(f"{what} must be {rule}, but got {short(value)}") from None

    def require_time(self, seconds: float, where: str, got: str) -> float:
        """Check that a computed time is valid."""
        if not 0 <= seconds <= LATEST:
            raise InputError(f"{where}: submit must be between 1970 and 2200, but got {got}")
        return seconds

    def trainer(self, values: Mapping[str, Any], where: str, submit: float) -> Trainer:
        """A trainer from fields already checked one by one. Checks that all are there and fit together."""
        missing = [key for key in _NEEDED if key not in values and key != "submit"]
        if missing:
            raise InputError(f"{where}: {missing[0]} is missing")
        least, most = values["min_nodes"], values["max_nodes"]
        if most < least:
            raise InputError(f"{where}: max_nodes must be at least min_nodes ({least}), but got {most}")
        name, model, up_s, down_s, work = (values[key] for key in ("name", "model", *_NEEDED[-3:]))
        owner, weight = values.get("owner", ""), values.get("weight", 1.0)
        curve = self.curve(model, where)
        start_s = values.get("start_s", 0.0)
        return Trainer(name, curve, least, most, up_s, down_s, work, submit, owner, weight, model, start_s)


def checked(fields: Mapping[str, object], where: str) -> dict[str, Any]:
    """The fields of a trainer (except `submit`), converted to their types."""
    return {key: _CHECKS[key](value, f"{where}: {key}") for key, value in fields.items() if key in _CHECKS}


def number(value: object, what: str, rule: str, good: Callable[[float], bool], got: object = None) -> float:
    """A finite number from text; `rule` says in words what `good` requires, `got` what the user wrote."""
    if isinstance(value, str) and _is_number(value) and math.isfinite(found := float(value)) and good(found):
        return found
    raise InputError(f"{what} must be {rule}, but got {short(value if got is None else got)}")


def whole(value: object, what: str, least: int = 1, most: int = MOST_NODES) -> int:
    """A whole number from text; `1e3` and `8.0` are whole numbers too."""
    rule = f"a whole number, {least} to {most:,}"
    return int(number(value, what, rule, lambda n: n == int(n) and least <= n <= most))


def word(value: object, what: str) -> str:
    """A name that can be printed in one line."""
    if isinstance(value, str) and value and value.isprintable():
        return value
    raise InputError(f"{what} must be a printable text, but got {short(value)}")


def short(value: object) -> str:
    """A value for a message: one line, never long."""
    return _SHORT.repr(value)


def read_text(source: Source) -> str:
    """The content of a text file; refused if it is too large or not text."""
    data = source.stream.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise InputError(f"must be at most {MOST_BYTES >> 20} MiB, but is more")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise InputError(f"line {line}: must be UTF-8 text, but got the byte {data[problem.start]:#04x}") from None


def _read_csv(text: str, roster: WorkloadReader) -> None:
    """Read a table with a header line. Blank lines and lines that begin with `#` are skipped."""
    columns: list[str] = []
    for position, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        where = f"line {position}"
        try:
            # Line by line, so that an unclosed quote spoils its own line and not the rest of the file.
            cells = [cell.strip() for cell in next(csv.reader([line.removesuffix("\r")], strict=True))]
        except csv.Error as problem:
            raise InputError(f"{where}: must be comma-separated values, but {problem}") from None
        if not columns:
            columns = _header([cell.lower() for cell in cells], where)
            continue
        if len(cells) != len(columns):
            raise InputError(f"{where}: must have {len(columns)} fields ({','.join(columns)}), but got {len(cells)}")
        fields = {column: cell for column, cell in zip(columns, cells, strict=True) if cell}
        if "name" in fields:
            where = f"{where}, trainer {short(fields['name'])}"
        submit = roster.time(fields.get("submit", ""), where)
        roster.add(roster.trainer(checked(fields, where), where, submit), where)


def _header(columns: list[str], where: str) -> list[str]:
    found = ", ".join(short(column) for column in columns[:12])
    missing = [column for column in _NEEDED if column not in columns]
    if missing:
        raise InputError(f"{where}: columns must be {', '.join(_NEEDED)}, but {missing[0]} is missing (got {found})")
    strange = [column for column in columns if column not in _COLUMNS]
    if strange:
        raise InputError(f"{where}: column must be one of {', '.join(_COLUMNS)}, but got {short(strange[0])}")
    if len(set(columns)) < len(columns):
        raise InputError(f"{where}: each column must occur once, but got {found}")
    return columns


def _is_yaml(path: Path, text: str) -> bool:
    """Decide by the file's suffix or else by whether the text begins with the columns of a table."""
    suffix = _plain(path).suffix.lower()
    if suffix in (".csv", ".yaml", ".yml"):
        return suffix != ".csv"
    first = next((line for line in text.split("\n") if line.strip() and not line.startswith("#")), "")
    return not {"name", "model"} <= {cell.strip().strip('"').lower() for cell in first.split(",")}


def _plain(path: Path) -> Path:
    return Path(path.name.removesuffix(".gz"))


def _folded(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _canonical(name: str) -> str:
    return _ALIASES.get(_folded(name), _folded(name))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _cost(value: object, what: str) -> float:
    return number(value, what, "a number of seconds, 0 or more", lambda n: n >= 0)


_CHECKS: Mapping[str, Callable[[object, str], object]] = MappingProxyType(
    {
        "name": word,
        "model": word,
        "min_nodes": whole,
        "max_nodes": whole,
        "scale_up_s": _cost,
        "scale_down_s": _cost,
        "samples": lambda value, what: number(value, what, "a number of samples above 0", lambda n: n > 0),
        "owner": word,
        "weight": lambda value, what: number(value, what, "a number above 0", lambda n: n > 0),
        "start_s": _cost,
    }
)
