"""Start-up of a worker: how long each part of it took, and what its script imported.

A forked worker begins to watch before its script runs (`begin`); one that was started cold begins when it connects to
its manager. The training tells when the device is there, when the script is ready to train, when the worker has joined
the others, and when it has made its first step. What comes out goes to the manager once, with the first step: the
parts, and the modules that a warm parent may import ahead for the next worker of the same script (`ahead`).
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bftrainer.processes import variables

LEAST_S = 0.005
"""Imports that take less are not worth to be done ahead."""
MOST_MODULES = 200
"""The most modules that are reported."""
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_TELLING_S = 5.0
"""How long a process that ends waits for its manager to read its last message."""
_LOOKED_AT = 4
"""Imports that are nested more deeply are not looked at for side effects: there are thousands of them."""


def now() -> float:
    """Return the time by a clock that all processes of a machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


@cache
def _standard_folders() -> tuple[str, ...]:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    return tuple(os.path.realpath(folder) + os.sep for folder in sorted(folders))


def origin_of(module: object) -> str:
    """Return the file that a module was loaded from; an empty text if there is none."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin if isinstance(origin, str) and os.sep in origin else ""


def is_installed(name: str) -> bool:
    """Whether a module that is loaded belongs to an installed distribution, and not to the user's own folders."""
    origin = origin_of(sys.modules.get(name))
    if not origin or name.partition(".")[0] == "bftrainer":
        return bool(origin)
    # An environment may have the packages of another one on its path, so the names of folders decide.
    return bool(_PACKAGES.intersection(Path(origin).parts)) or os.path.realpath(origin).startswith(_standard_folders())


@dataclass(frozen=True, slots=True)
class SideEffects:
    """What an import must not change, or no process can be forked after it."""

    threads: int
    children: bytes
    on_gpu: bool

    @classmethod
    def present(cls) -> SideEffects:
        """Return those of this process, by what the main thread did."""
        torch = sys.modules.get("torch")
        on_gpu = torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized()
        threads, children = 1, b""
        with suppress(OSError):
            threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only names are needed
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_bytes()
        return cls(threads, children, on_gpu)


@dataclass(slots=True)
class _Import:
    """One import of a module that was not loaded before."""

    name: str
    parent: _Import | None
    began: float
    before: SideEffects | None
    depth: int
    seconds: float = 0.0
    has_side_effects: bool = False


class ImportWatch:
    """Measures the imports of this process's main thread, between `begin` and `end`.

    It replaces the function that loads modules which are not loaded yet. The replacement looks like a part of the
    import system, so that tracebacks are the same with and without it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """How long the imports took in all."""
        self._imports: list[_Import] = []
        self._present: _Import | None = None
        self._thread = threading.get_ident()
        self._loads: Callable[..., Any] | None = None

    def begin(self) -> None:
        """Begin to measure."""
        bootstrap: Any = importlib._bootstrap
        self._loads = loads = bootstrap._find_and_load

        def _find_and_load(name: str, import_: Any) -> Any:
            entered = self._enter(name)
            try:
                return loads(name, import_)
            finally:
                self._leave(entered)

        _find_and_load.__code__ = _find_and_load.__code__.replace(co_filename=loads.__code__.co_filename)
        bootstrap._find_and_load = _find_and_load

    def end(self) -> None:
        """Stop measuring."""
        if self._loads is not None:
            bootstrap: Any = importlib._bootstrap
            bootstrap._find_and_load = self._loads
            self._loads = None

    def modules(self) -> dict[str, float]:
        """Return the installed modules that were imported and how long each took, in the order of their imports.

        Modules that another one of them imports are left out, and so are those whose import started a thread or a
        process or used a GPU.
        """
        found: dict[str, float] = {}
        within: dict[int, bool] = {}
        for each in self._imports:
            parent = each.parent
            covered = parent is not None and within.get(id(parent), False)
            installed = is_installed(each.name)
            within[id(each)] = covered or installed
            if installed and not covered and not each.has_side_effects and each.seconds >= LEAST_S:
                found.setdefault(each.name, round(each.seconds, 3))
        return dict(list(found.items())[:MOST_MODULES])

    def _enter(self, name: str) -> _Import | None:
        if threading.get_ident() != self._thread:
            return None
        parent, depth = self._present, self._present.depth + 1 if self._present is not None else 0
        before = SideEffects.present() if depth <= _LOOKED_AT else None
        self._present = _Import(name, parent, now(), before, depth)
        self._imports.append(self._present)
        return self._present

    def _leave(self, entered: _Import | None) -> None:
        if entered is None:
            return
        entered.seconds = now() - entered.began
        entered.has_side_effects = entered.before is not None and SideEffects.present() != entered.before
        self._present = entered.parent
        if entered.parent is None:
            self.seconds += entered.seconds


class StartUp:
    """The start of this process as a worker. Each part is told once; later calls change nothing."""

    def __init__(self, ordered: float | None, began: float, watch: ImportWatch | None = None) -> None:
        """`ordered` is when the manager wanted the worker, `began` when its script began, by `now`."""
        self._ordered = ordered
        self._began = began
        self._watch = watch
        self._device_s = 0.0
        self._awaited_s = _overlap_s(ordered, began)
        self._imports_s: float | None = None
        self._ready: float | None = None
        self._joined: float | None = None
        self.at_first_step: Callable[[], None] = lambda: None
        """Called at the first step."""
        self._is_over = False

    def imports_took(self, seconds: float) -> None:
        """Tell how long the imports took, where they were not watched."""
        self._imports_s = seconds

    def device_took(self, seconds: float) -> None:
        """Tell how long the device needed before it could be used."""
        self._device_s += seconds

    def ready(self) -> None:
        """Tell that the script has imported and built everything, and can train."""
        self._ready = self._ready or now()

    def joined(self) -> None:
        """Tell that the worker trains with the others, with their state."""
        self._joined = self._joined or now()

    def stepped(self) -> tuple[dict[str, float], dict[str, float]] | None:
        """Tell that a step was made. At the first one, return the parts of the start and the modules imported."""
        if self._is_over:
            return None
        self._is_over, stepped = True, now()
        self.at_first_step()
        modules: dict[str, float] = {}
        if self._watch is not None:
            self._watch.end()
            self._imports_s, modules = self._watch.seconds, self._watch.modules()
        ready = self._ready or stepped
        joined = self._joined or ready
        imports_s = self._imports_s or 0.0
        parts = {
            "start": max(self._began - self._ordered - self._awaited_s, 0.0) if self._ordered is not None else 0.0,
            "imports": imports_s + self._awaited_s,
            "device": self._device_s,
            "build": max(ready - self._began - imports_s - self._device_s, 0.0),
            "join": max(joined - ready, 0.0),
            "first_step": max(stepped - joined, 0.0),
        }
        return {name: round(seconds, 4) for name, seconds in parts.items()}, modules


PARTS: Mapping[str, str] = {
    "start": "fork or launch of the process",
    "imports": "imports of the script, as far as they were not done before it was wanted",
    "device": "first use of the GPU",
    "build": "model, data and the rest of the script until it can train",
    "join": "waiting for the others and for their state",
    "first_step": "first step",
}
"""The parts of a start, in their order, and what each is."""

_imported: list[tuple[float, float]] = []
"""When this process, and those it was forked from, began and ended to import for scripts."""
_current: StartUp | None = None
_send: Callable[[bytes], None] | None = None
"""Sends a line to the manager, once the script has connected to it."""


def imported(began: float, ended: float) -> None:
    """Tell when a warm parent has imported for the scripts of its workers."""
    _imported.append((began, ended))


def begin() -> None:
    """Begin to watch this process, whose script runs next, if a manager has started it."""
    global _current
    if variables.CHANNEL in os.environ:
        watch = ImportWatch()
        _current = StartUp(_ordered(), now(), watch)
        watch.begin()


def current() -> StartUp:
    """Return the start of this process. Without `begin`, it began with the process, and imported until now."""
    global _current
    if _current is None:
        began = _process_began()
        _current = StartUp(_ordered(), began)
        _current.imports_took(now() - began)
    return _current


def _overlap_s(ordered: float | None, began: float) -> float:
    """Return how long a worker that was ordered had to wait for imports of its warm parent."""
    since = began if ordered is None else ordered
    return sum(max(min(end, began) - max(start, since), 0.0) for start, end in _imported)


def _ordered() -> float | None:
    try:
        return float(os.environ[variables.ORDERED])
    except (KeyError, ValueError):
        return None


def _process_began() -> float:
    """Return when this process began, by `now`, to a hundredth of a second."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now()
    return now() - max(age, 0.0)


def connected(send: Callable[[bytes], None]) -> None:
    """Tell by which function this process sends lines to its manager."""
    global _send
    _send = send


def tell_manager(message: Mapping[str, Any]) -> None:
    """Send a message to the manager, whether the script has connected to it or not."""
    line = json.dumps(dict(message)).encode() + b"\n"
    if _send is not None:
        _send(line)
        return
    rank = int(os.environ.get(variables.LOCAL_RANK) or 0)
    worker = os.environ.get(variables.WORKER, "")
    hello = {"type": "hello", "worker": worker, "pid": os.getpid(), "protocol": 1, "local_rank": rank}
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(_TELLING_S)
        channel.connect(os.environ[variables.CHANNEL])
        channel.sendall(json.dumps(hello).encode() + b"\n" + line)
        channel.shutdown(socket.SHUT_WR)
        while channel.recv(4096):
            pass  # the manager closes the channel once it has read all of it
