"""Output folder of a script: finds it, and saves files that a kill cannot damage."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch

from bftrainer.elastic import protocol
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.files import replacing, sync

_STALE_S = 3600.0
"""Age after which a temporary file is assumed to belong to a process that was killed while it wrote."""


def output_folder() -> Path:
    """Return the trainer's output folder from the environment, else the current directory. It is created if missing."""
    named = os.environ.get(protocol.OUTPUT)
    folder = Path(named) if named else Path.cwd()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BFTrainerError(
            f"the output folder {folder} cannot be made ({problem.strerror}); "
            f"name another one in the environment variable {protocol.OUTPUT}"
        ) from None
    return folder


def file_name(name: object, thing: object = None) -> str:
    """Return `name` if it is a plain file name; refuse a path, and the arguments of `run.save` in the wrong order."""
    if isinstance(thing, str | os.PathLike) and not isinstance(name, str | os.PathLike):
        raise InputError(
            f"run.save takes the name first: write run.save({os.fspath(thing)!r}, …), with the object after the name"
        )
    text = os.fspath(name) if isinstance(name, str | os.PathLike) else None
    if not isinstance(text, str) or text in ("", ".", "..") or "/" in text or "\0" in text:
        raise InputError(
            f"`name` must be a file name such as 'model.pt', without folders, but got {name!r}; the file goes into "
            "run.folder"
        )
    return text


def save(folder: Path, name: str, thing: Any) -> Path:
    """Write `thing` with torch.save. The file has either its former content or all of the new content."""
    path = folder / name
    _sweep(folder, name)
    try:
        with replacing(path, "wb", durable=True) as file:
            torch.save(thing, file)
        sync(folder)
    except Exception as problem:
        raise BFTrainerError(f"{path} cannot be written: {problem}") from problem
    return path


def _sweep(folder: Path, name: str) -> None:
    """Remove temporary files that killed processes left when they wrote this file."""
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if entry.name.startswith(f".{name}.") and entry.name.endswith(".tmp"):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat().st_mtime > _STALE_S:
                        entry.unlink()
