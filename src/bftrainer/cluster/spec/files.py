"""Spec files describe trainers in TOML or YAML, with curves in separate files.

`submit` uses this module before anything is queued: it loads or makes specs, makes their paths absolute (`located`),
and checks what only the submitting machine can check (`check_here`).
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import tomllib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from bftrainer.cluster.spec.interpreters import own_python
from bftrainer.cluster.spec.trainer import AGENTS_OWN, KEYS, CurvePoints, TrainerSpec, parse_spec
from bftrainer.core.curve import Curve
from bftrainer.errors import InputError
from bftrainer.util.suggest import closest, unknown
from bftrainer.util.text import one_line
from bftrainer.util.yaml_text import TextLoader

_MOST_BYTES = 4 << 20
MOST_TRAINERS = 10_000
_MOST_SCRIPT_BYTES = 16 << 20
_DEFAULTS = tuple(key for key in KEYS if key != "name")


def load_spec(path: Path) -> list[TrainerSpec]:
    """Return the trainers of a file: one trainer, or a list `trainers` with `defaults` for all of them.

    Paths in the file are relative to its folder. Scripts run in that folder, too, unless `cwd` says otherwise.
    """
    top = read_mapping(path)
    if "trainers" not in top and "defaults" not in top:
        return [one_spec(top, path, str(path))]
    for key in top:
        if key not in ("trainers", "defaults"):
            hint = f"{key!r} belongs into `defaults`" if key in _DEFAULTS else unknown("key", key, top_keys())
            raise InputError(f"{path}: {hint}")
    defaults, entries = top.get("defaults", {}), top.get("trainers")
    if not isinstance(defaults, Mapping):
        raise InputError(f"{path}: defaults must be a mapping of keys, but got {defaults!r:.80}")
    for key in defaults:
        if key not in _DEFAULTS:
            raise InputError(f"{path}: defaults: {unknown('key', key, _DEFAULTS)}")
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path}: trainers must be a list with at least one trainer, but got {entries!r:.80}")
    if len(entries) > MOST_TRAINERS:
        raise InputError(f"{path}: there must be at most {MOST_TRAINERS:,} trainers, but got {len(entries):,}")
    specs: list[TrainerSpec] = []
    seen: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        where = f"{path}: trainer {number}"
        if not isinstance(entry, Mapping):
            raise InputError(f"{where} must be a mapping of keys, but got {entry!r:.80}")
        spec = one_spec(_merged(defaults, entry), path, where)
        if spec.name is not None and seen.setdefault(spec.name, number) != number:
            raise InputError(f"{where}: name must be unique, but trainer {seen[spec.name]} is {spec.name!r} too")
        specs.append(spec)
    return specs


def top_keys() -> tuple[str, ...]:
    """Return the keys allowed at the top of a file."""
    return ("trainers", "defaults", *KEYS)


def _merged(defaults: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry completed by the defaults."""
    sizes = {"nodes", "min_nodes", "max_nodes"}
    if "nodes" in entry:
        defaults = {key: value for key, value in defaults.items() if key not in sizes}
    elif sizes & entry.keys():
        defaults = {key: value for key, value in defaults.items() if key != "nodes"}
    both = {**defaults, **entry}
    if isinstance(defaults.get("env"), Mapping) and isinstance(entry.get("env"), Mapping):
        both["env"] = {**defaults["env"], **entry["env"]}
    return both


def one_spec(given: Mapping[str, Any], path: Path, where: str) -> TrainerSpec:
    """Return one trainer of a file. Error messages begin with `where`."""
    folder = path.absolute().parent
    values = dict(given)
    if isinstance(values.get("curve"), str):
        try:
            values["curve"] = load_curve(folder / values["curve"], str(values.get("model", ""))).model_dump()
        except InputError as problem:
            raise InputError(f"{where}: curve: {problem}") from None
    return located(parse_spec(values, where), folder)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a TOML or YAML file, read according to the file's ending."""
    kind = path.suffix.lower()
    if kind not in (".toml", ".yaml", ".yml"):
        raise InputError(f"{path}: a spec must end in .toml or .yaml")
    text = _text(path, _MOST_BYTES)
    try:
        found = tomllib.loads(text) if kind == ".toml" else yaml.load(text, TextLoader)  # noqa: S506 - texts only
    except tomllib.TOMLDecodeError as problem:
        raise InputError(f"{path}: must be TOML, but {problem}") from None
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise InputError(f"{path}{line}: must be YAML, but {problem.problem or problem.context}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as problem:
        raise InputError(f"{path}: cannot be read: {one_line(problem)[:160]}") from None
    except RecursionError:
        raise InputError(f"{path}: is nested too deep") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: must be a mapping of keys such as script and nodes, but got {found!r:.80}")
    return found


def _text(path: Path, most: int) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as problem:
        raise InputError(f"{path}: {problem.strerror or problem}") from None
    if len(content) > most:
        raise InputError(f"{path}: must be at most {most >> 20} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise InputError(f"{path}: must be UTF-8 text, but byte {problem.start} is not") from None


def load_curve(path: Path, model: str = "") -> CurvePoints:
    """Read a curve from a CSV file, or from a JSON file with one curve or with curves by name.

    `profile` writes such files. `model` selects one of several curves.
    """
    text = _text(path, _MOST_BYTES)
    if path.suffix.lower() != ".json":
        return _points(Curve.from_csv(text, str(path)))
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise InputError(f"{path}: must be JSON, but {str(problem) or 'is nested too deep'}") from None
    if not isinstance(found, dict) or not found:
        raise InputError(f"{path}: must be a JSON object with a curve, but got {found!r:.80}")
    if "nodes" not in found:
        found = found[_which(found, model, path)]
    if not isinstance(found, dict):
        raise InputError(f"{path}: a curve must be an object with nodes and samples_per_s, but got {found!r:.80}")
    nodes, rates = found.get("nodes"), found.get("samples_per_s", found.get("rates"))
    if not isinstance(nodes, list) or not isinstance(rates, list):
        raise InputError(f"{path}: a curve must have the lists nodes and samples_per_s")
    return _points(Curve.through(nodes, rates, str(path)))


def _which(curves: Mapping[str, Any], model: str, path: Path) -> str:
    """Return the name of the curve that `model` selects."""
    if len(curves) == 1:
        return next(iter(curves))
    if model in curves:
        return model
    near = closest(model, curves) if model else None
    hint = f"did you mean {near!r}?" if near else "choose one by the trainer's model: " + ", ".join(list(curves)[:12])
    raise InputError(f"{path}: holds {len(curves)} curves, and none is called {model!r}: {hint}")


def _points(curve: Curve) -> CurvePoints:
    return CurvePoints(nodes=curve.nodes, rates=curve.rates)


def located(spec: TrainerSpec, folder: Path) -> TrainerSpec:
    """Return the spec with absolute paths.

    Relative paths start at `folder`. The script runs there, too, if the spec has no `cwd`.
    """
    changes = {"cwd": _absolute(spec.cwd, folder)}
    if spec.module is None:
        changes["script"] = _absolute(spec.script, folder)
    if "/" in spec.python:
        changes["python"] = _absolute(spec.python, folder)
    elif spec.python and spec.python != AGENTS_OWN:
        changes["python"] = shutil.which(spec.python) or spec.python
    elif not spec.python:
        changes["submitted_python"] = own_python()
    return spec.model_copy(update=changes)


def _absolute(path: str, folder: Path) -> str:
    """Make a path absolute without following links.

    The interpreter of a virtual environment is a link, and finds its environment by its own path.
    """
    return os.path.normpath(folder.absolute() / os.path.expanduser(path))  # noqa: PTH111 - pathlib's may raise


def check_here(spec: TrainerSpec) -> None:
    """Check on the submitting machine that the script, the folder and the interpreter exist and are usable."""
    try:
        if spec.cwd and not Path(spec.cwd).is_dir():
            raise InputError(f"{spec.cwd}: cwd must be a folder, but {_what_is(spec.cwd)}")
        if spec.python not in ("", AGENTS_OWN) and not (
            Path(spec.python).is_file() and os.access(spec.python, os.X_OK)
        ):
            what = _what_is(spec.python)
            raise InputError(f"{spec.python}: python must be an interpreter that can be run, but {what}")
        if spec.module is None:
            script = Path(spec.cwd, spec.script)
            if not script.is_file():
                raise InputError(f"{script}: script must be a file, but {_what_is(script)}{_similar(script)}")
            if script.suffix == ".py":
                other = spec.python or spec.submitted_python not in ("", own_python())
                _check_python(script, own_interpreter=not other)
    except OSError as problem:  # a name too long, a folder that may not be searched
        raise InputError(f"{problem.filename}: {problem.strerror}") from None


def _what_is(path: str | Path) -> str:
    path = Path(path)
    if not path.exists():
        return "there is nothing of that name"
    return "it is a folder" if path.is_dir() else "it is not one"


def _similar(script: Path) -> str:
    """Suggest a file in the same folder that may have been meant."""
    try:
        near = closest(script.name, [entry.name for entry in script.parent.iterdir() if entry.is_file()])
    except OSError:
        return ""
    return f": did you mean {near!r}?" if near else ""


def _check_python(script: Path, *, own_interpreter: bool) -> None:
    source = _text(script, _MOST_SCRIPT_BYTES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source, str(script))
    except SyntaxError as problem:
        if own_interpreter:  # another interpreter may support newer syntax
            raise InputError(f"{script}:{problem.lineno or 1}: script must be Python, but {problem.msg}") from None
    except (ValueError, RecursionError, MemoryError) as problem:
        raise InputError(f"{script}: script must be Python, but {str(problem) or 'is nested too deep'}") from None
