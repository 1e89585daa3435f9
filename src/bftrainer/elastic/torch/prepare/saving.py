"""Saving by a prepared script: `torch.save` to a path writes on the main rank only, and a kill cannot damage the file.

A script that was written for one process saves on every rank, all to the same file. All ranks have the same state, so
one of them writes. The others remember what they left out until the next step: if the main rank is lost meanwhile, its
successor writes it. Saving to an open file is left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bftrainer.util.files import replacing

_real_save: Callable[..., None] = torch.save


class Saves:
    """Calls of `torch.save` by one rank's script. `is_main` says whether this rank writes."""

    def __init__(self, is_main: Callable[[], bool]) -> None:
        self._is_main = is_main
        self._left_out: dict[str, Callable[[], None]] = {}
        self.before_write: Callable[[Path], None] = lambda _: None
        """Called with the path before a file is written."""

    def take_charge(self) -> None:
        """Replace `torch.save`."""
        torch.save = self._save

    def step_is_made(self) -> None:
        """Forget what was left out: it was of the state before this step."""
        self._left_out.clear()

    def take_over(self) -> None:
        """Write what was left out since the last step, if this has become the main rank."""
        if self._is_main():
            left_out, self._left_out = self._left_out, {}
            for write in left_out.values():
                write()

    def leave_out(self, name: str, write: Callable[[], None]) -> None:
        """Remember something else that only the main rank writes, until the next step."""
        self._left_out[name] = write

    def _save(self, obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        def write() -> None:
            self.before_write(Path(f))
            with replacing(Path(f), "wb") as file:
                _real_save(obj, file, *args, **kwargs)

        if not isinstance(f, str | os.PathLike):
            _real_save(obj, f, *args, **kwargs)
        elif self._is_main():
            write()
        else:
            self._left_out[os.path.abspath(f)] = write  # noqa: PTH100 - as the script would find it
