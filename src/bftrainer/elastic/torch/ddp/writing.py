"""Files and output of a ddp script: every rank's script takes itself for rank 0, but only the main rank writes.

What the others leave out between two steps is kept until the next step: if the main rank is lost, its successor writes
it. Only calls in the script's own files are changed, not those of libraries.
"""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bftrainer.elastic.start_files import StartFiles
from bftrainer.elastic.torch.ddp.refused import is_of_script, script_folder
from bftrainer.elastic.torch.ddp.session import DdpSession

_REPEATED = ("copyfile", "copy", "copy2", "copytree", "move")
_CHANGES: dict[Any, tuple[str, ...]] = {
    shutil: (*_REPEATED, "rmtree"),
    os: ("remove", "unlink", "rename", "replace", "symlink", "link", "rmdir", "removedirs"),
}
_real_open, _real_load, _real_save = io.open, torch.load, torch.save


class ScriptFiles:
    """Stand-ins for functions that write and read files."""

    def __init__(self, session: DdpSession, start: StartFiles) -> None:
        self._session = session
        self._start = start
        self._save: Callable[..., None] = _real_save

    def put_in_place(self) -> None:
        """Replace the functions."""
        builtins.open = io.open = self._open
        for module, names in _CHANGES.items():
            for name in names:
                setattr(module, name, self._guarded(getattr(module, name), repeated=name in _REPEATED))
        for name in ("mkdir", "makedirs"):
            setattr(os, name, self._making(getattr(os, name)))
        for name in ("exists", "isfile", "lexists"):
            setattr(os.path, name, self._seeing(getattr(os.path, name)))
        for name in ("exists", "is_file"):
            setattr(pathlib.Path, name, self._seeing(getattr(pathlib.Path, name)))
        torch.load = self._load
        torch.save = self._saved
        sys.stdout = _MainOutput(sys.stdout, self._session)

    def training_begins(self, preparation: Any) -> None:
        """Follow `elastic.prepare`, which has replaced torch.save."""
        if torch.save != self._saved:  # not in a script that trains alone
            self._save, torch.save = torch.save, self._saved
        preparation.saves.before_write = self._start.keep

    def _saved(self, obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        session = self._session
        if session.is_at_top:
            if not session.speaks:
                return
            if isinstance(f, str | os.PathLike):
                self._start.keep(Path(f))
        if not session.repeats:
            self._save(obj, f, *args, **kwargs)

    def _load(self, f: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        if session.is_at_top and isinstance(f, str | os.PathLike):
            path = self._start.find(Path(f))
            if path is None:
                raise FileNotFoundError(2, "Not there when this training began, so newcomers do not load it", str(f))
            if path.exists():
                status = path.stat()
                session.top.note(f"torch.load({Path(f).name!r})", (status.st_size, status.st_mtime_ns))
            f = path
        return _real_load(f, *args, **kwargs)

    def _open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = any(letter in mode for letter in "wax+")
        if writes and not self._session.speaks and _is_called_by_script() and isinstance(file, str | os.PathLike):
            return _real_open(os.devnull, mode.replace("x", "w"), *args, **kwargs)
        return _real_open(file, mode, *args, **kwargs)

    def _guarded(self, real: Callable[..., Any], *, repeated: bool) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            session = self._session
            if session.speaks or not _is_called_by_script():
                return real(*args, **kwargs)
            preparation = session.preparation
            if repeated and preparation is not None and not session.repeats:
                preparation.saves.leave_out(f"{real.__name__} {args}", lambda: real(*args, **kwargs))
            return args[-1] if args else None

        return guarded

    def _making(self, real: Callable[..., None]) -> Callable[..., None]:
        def making(name: Any, *args: Any, **kwargs: Any) -> None:
            try:
                real(name, *args, **kwargs)
            except FileExistsError:
                if self._session.speaks or not _is_called_by_script():
                    raise

        return making

    def _seeing(self, real: Callable[..., bool]) -> Callable[..., bool]:
        def seeing(path: Any, *args: Any, **kwargs: Any) -> bool:
            found = real(path, *args, **kwargs)
            if found and self._session.is_at_top and _is_called_by_script():
                return self._start.find(Path(path)) is not None
            return found

        return seeing


class _MainOutput:
    """Standard output of which only the main rank's is kept. All else is that of the real one."""

    def __init__(self, real: Any, session: DdpSession) -> None:
        self._real = real
        self._session = session

    def write(self, text: str) -> int:
        if self._session.is_at_top or self._session.speaks:
            self._real.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _is_called_by_script() -> bool:
    """Whether the function that a stand-in takes the place of was called by the script, perhaps through pathlib."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in ("pathlib", "os", "shutil", "genericpath", __name__):
        frame = frame.f_back
    return frame is not None and is_of_script(frame.f_globals, script_folder())
