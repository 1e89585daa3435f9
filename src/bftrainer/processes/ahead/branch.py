"""Branch: a warm parent that was forked from another one and has imported what a certain script imports.

`branches.py` has a warm parent fork it, as if it were a script. It imports the modules of its command line and then
forks workers, as its own parent does. A branch that cannot be forked safely after an import, or in which scripts would
compute something else (`conditions.py`), tells which module is bad, and ends. A worker of a branch must be as one that
imported everything itself, so a branch also tells which environment variables the imports have read, and which files
outside of the installed distributions.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from bftrainer.processes import forker, start_up, variables
from bftrainer.processes.ahead.conditions import Conditions, NoArguments
from bftrainer.processes.launch import Command, foreground
from bftrainer.processes.start_up import SideEffects, is_installed, origin_of

RESTART = 75
"""Exit status by which a worker asks to be started again, as in `elastic.protocol`."""

_OURS = "BFTRAINER_"
"""How variables begin that differ from worker to worker: no library depends on them."""


def main() -> None:
    """Import the modules of the command line, then fork workers. In a forked worker: run its script, then return."""
    _, path, folder, *modules = sys.argv
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    manager.connect(path)
    manager.set_inheritable(False)
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the folder that `-m` has put there
    ahead = Ahead(folder)
    forker.serve_forks(manager, modules, ahead)


@dataclass(slots=True)
class Ahead:
    """What a branch has imported ahead for the scripts of one folder."""

    folder: str
    reads: dict[str, tuple[str | None, set[str]]] = field(default_factory=dict)
    """The environment variables that the imports have read: their values, and the modules that read them."""
    roots: set[str] = field(default_factory=set)
    """The top-level modules that were loaded."""
    sets: dict[str, str] = field(default_factory=dict)
    """The environment variables that the imports have set."""

    def do(self, modules: Sequence[str]) -> dict[str, Any]:
        """Import the modules. Return what the manager is told: the first bad one, or what the imports depend on."""
        before, environment = set(sys.modules), dict(os.environ)
        # As in an interpreter without a script; the worker's own come with its script, see `forker.py`.
        sys.argv, sys.orig_argv = NoArguments(), [sys.executable]
        sys.path[:0] = [] if sys.flags.safe_path else [self.folder]
        try:
            for module in modules:
                if problem := self._import(module):
                    return {"bad": module, "problem": problem}
        finally:
            if not sys.flags.safe_path and self.folder in sys.path:
                sys.path.remove(self.folder)
        loaded = set(sys.modules) - before
        self.roots = {name.partition(".")[0] for name in loaded} - {name.partition(".")[0] for name in before}
        self.sets = {name: value for name, value in os.environ.items() if environment.get(name) != value}
        foreground()
        own = (origin_of(sys.modules[name]) for name in loaded if not is_installed(name))
        return {
            "reads": {name: value for name, (value, _) in self.reads.items()},
            "files": {path: stamp(path) for path in own if path},
        }

    def _import(self, module: str) -> str:
        """Import one module. Return why no worker may be forked after it, or an empty text."""
        conditions, before, handlers = Conditions(), SideEffects.present(), _handlers()
        try:
            with _recorded(self.reads, module), conditions.watched():
                importlib.import_module(module)
        except BaseException as problem:
            return f"{type(problem).__name__}: {problem}"[:500]
        after = SideEffects.present()
        if after != before:
            what = "a GPU" if after.on_gpu else "a thread" if after.threads != before.threads else "a process"
            return f"its import uses {what}, which a fork would not have"
        if _handlers() != handlers:
            return "its import sets a signal handler"
        changed = conditions.changed()
        return f"its import {changed}: the script has to do it itself" if changed else ""

    def begin(self, command: Command) -> None:
        """Take up a forked worker. If it cannot be as one that imported everything itself, it begins as a new program.

        It ends, and is started again, if its script sets a variable that the imports have read to another value: the
        modules would have the former one.
        """
        os.environ.update(self.sets)
        if self._is_shadowed(command):
            os.execv(sys.executable, [sys.executable, *command.argv])  # noqa: S606 - the same script
        if self.reads and variables.CHANNEL in os.environ:
            _watch_environment(self.reads)

    def _is_shadowed(self, command: Command) -> bool:
        """Whether the script's folder has a module of its own by the name of one that was loaded from elsewhere."""
        folder = folder_of(command.argv, command.cwd)
        try:
            beside = {name.partition(".")[0] for name in os.listdir(folder)}  # noqa: PTH208 - only names are needed
        except OSError:
            return True
        return any(is_installed(root) for root in self.roots & beside)


def stamp(path: str) -> list[int]:
    """Return what changes when a file is written; an empty list if there is no file."""
    try:
        found = Path(path).stat()
    except OSError:
        return []
    return [found.st_mtime_ns, found.st_size]


def folder_of(argv: Sequence[str], cwd: str) -> str:
    """Return the folder that is first on the path of a script's imports."""
    return cwd if argv[0] == "-m" else str(Path(os.path.realpath(Path(cwd, argv[0]))).parent)


def _handlers() -> list[Any]:
    return [signal.getsignal(number) for number in signal.valid_signals()]


@contextmanager
def _recorded(reads: dict[str, tuple[str | None, set[str]]], module: str) -> Iterator[None]:
    """Record which variables of `os.environ` are read while a module is imported, and their values before it."""
    kind: Any = type(os.environ)
    before = dict(os.environ)

    class ReadRecorder(kind):  # type: ignore[misc]
        """`os.environ`, which notes what is read. Going through all names reads each value by its name, too."""

        def __getitem__(self, name: str) -> Any:
            if not name.startswith(_OURS):
                _, by = reads.setdefault(name, (before.get(name), set()))
                by.add(module)
            return super().__getitem__(name)

    os.environ.__class__ = ReadRecorder
    try:
        yield
    finally:
        os.environ.__class__ = kind


def _watch_environment(reads: Mapping[str, tuple[str | None, set[str]]]) -> None:
    kind: Any = type(os.environ)
    put_away: dict[str, str] | None = None  # by `clear`, until `update` puts it back
    changes_all = False  # within these two

    class Watched(kind):  # type: ignore[misc]
        """`os.environ`, which does not let a script change what modules have read before it.

        Accelerate clears all of it for a moment, and puts it back. That changes nothing for modules.
        """

        def __setitem__(self, name: str, value: str) -> None:
            if not changes_all and name in reads and put_away is not None:
                os.environ.__class__ = kind
                os.environ.update(put_away)  # the manager's address is among them
                _start_again(name, reads[name][1])
            if not changes_all and name in reads and reads[name][0] != value:
                _start_again(name, reads[name][1])
            super().__setitem__(name, value)

        def __delitem__(self, name: str) -> None:
            if not changes_all and name in reads and reads[name][0] is not None:
                _start_again(name, reads[name][1])
            super().__delitem__(name)

        def clear(self) -> None:
            nonlocal put_away, changes_all
            changes_all = True
            put_away = self.copy() if put_away is None else put_away
            super().clear()
            changes_all = False

        def update(self, *args: Any, **kwargs: Any) -> None:
            nonlocal put_away, changes_all
            if put_away is None:
                super().update(*args, **kwargs)
                return
            changes_all = True
            super().update(*args, **kwargs)
            before, put_away, changes_all = put_away, None, False
            for name, (_, modules) in reads.items():
                if self.get(name) != before.get(name):
                    _start_again(name, modules)

    def unwatch() -> None:
        os.environ.__class__ = kind

    os.environ.__class__ = Watched
    start_up.current().at_first_step = unwatch  # by then the script has imported them itself


def _start_again(name: str, modules: set[str]) -> NoReturn:
    """Tell the manager which modules must not be imported ahead, and end this worker: it is started again."""
    print(
        f"bftrainer: the script sets {name}, which {', '.join(sorted(modules))} read when imported ahead of it: "
        "starting again, without that",
        file=sys.stderr,
        flush=True,
    )
    start_up.tell_manager({"type": "preloadrefused", "variable": name, "modules": sorted(modules)})
    os._exit(RESTART)


if __name__ == "__main__":
    main()
