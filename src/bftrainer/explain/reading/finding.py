"""Files of a script: the script or module that a command line names, and the local modules that it imports.

Modules are looked for on disk. Nothing is imported, so no code of the user runs.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from bftrainer.errors import InputError
from bftrainer.explain.reading.source import SourceFile, read_source
from bftrainer.explain.report import Notice

MOST_FILES = 40
"""Local modules that are read beside the script."""


def read_files(words: Sequence[str], folder: Path) -> tuple[list[SourceFile], list[Notice]]:
    """Read what `SCRIPT [ARGS]` or `-m MODULE [ARGS]` names, and the modules of its folder that it imports.

    Returns the files, the script first, and notices of modules that cannot be read.
    """
    if words[0] == "-m":
        if len(words) < 2:
            raise InputError("-m must be followed by the name of a module")
        path, root = find_module(words[1], folder), folder
        name = _shown(path, folder)
    else:
        path = folder / words[0]
        name, root = words[0], path.parent
    script = read_source(path, name)
    files, notices, seen = [script], [], {path.resolve()}
    for module, line in _local_modules(script, root):
        if module.resolve() in seen or len(files) > MOST_FILES:
            continue
        seen.add(module.resolve())
        try:
            files.append(read_source(module, _shown(module, folder)))
        except InputError as problem:
            notices.append(Notice(name, line, f"the module imported here was not read: {problem}", "correct it"))
    return files, notices


def find_module(name: str, folder: Path) -> Path:
    """Return the file that `python -m NAME` in `folder` would run."""
    places = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    search: Sequence[str] = places
    parts = name.split(".")
    spec = None
    for end in range(1, len(parts) + 1):
        if not parts[end - 1].isidentifier():
            raise InputError(f"-m {name}: must be the name of a module, such as package.train")
        spec = PathFinder.find_spec(".".join(parts[:end]), search)
        if spec is None:
            raise InputError(f"-m {name}: there is no module {'.'.join(parts[:end])} in {folder} or on the module path")
        search = list(spec.submodule_search_locations or ())
    if spec is not None and spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec(f"{name}.__main__", search)
        if spec is None:
            raise InputError(f"-m {name}: is a package without __main__.py: name one of its modules")
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise InputError(f"-m {name}: its source is not a Python file, so it cannot be read")
    return Path(spec.origin)


def _local_modules(script: SourceFile, root: Path) -> Iterator[tuple[Path, int]]:
    """The files that the imports of a script name below `root`, each with the line of the import."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Import):
            modules = [(root, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = script.path.parent if node.level else root
            for _ in range(node.level - 1):
                base = base.parent
            start = f"{node.module}." if node.module else ""
            modules = [(base, start + alias.name) for alias in node.names]
            modules += [(base, node.module)] if node.module else []
        else:
            continue
        for base, module in modules:
            found = _module_file(base, module)
            if found is not None:
                yield found, node.lineno


def _module_file(base: Path, module: str) -> Path | None:
    place = base.joinpath(*module.split("."))
    for candidate in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _shown(path: Path, folder: Path) -> str:
    """The path as a person in `folder` writes it."""
    try:
        return path.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError:
        return str(path)
