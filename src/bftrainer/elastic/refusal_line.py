"""Refusals are shown as one line of the user's script and one sentence, without a traceback.

A worker prints its uncaught exception at its end. For an error that BFTrainer raised on purpose, the frames inside
BFTrainer tell the user nothing: `as_line` returns what to print instead.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from bftrainer.errors import BFTrainerError

_OURS = Path(__file__).resolve().parents[1]
_INSTALLED = ("site-packages", "dist-packages")
_PYTHONS = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}


def as_line(error: BaseException, trace: TracebackType | None) -> str | None:
    """Return the script's line and the sentence of a refusal; None if the whole traceback tells more.

    It does for any other error, and for a refusal that another error has led to.
    """
    led_here = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if not isinstance(error, BFTrainerError) or led_here is not None:
        return None
    own = [frame for frame in traceback.extract_tb(trace) if _is_users(frame.filename)]
    place = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    return f"bftrainer: {place}{error}"


def _is_users(filename: str) -> bool:
    path = Path(filename).resolve()
    installed = any(part in path.parts for part in _INSTALLED)
    others = any(path.is_relative_to(folder) for folder in (_OURS, *_PYTHONS))
    return not (filename.startswith("<") or installed or others)
