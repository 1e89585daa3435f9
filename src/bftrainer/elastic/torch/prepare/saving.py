"""Saving by a prepared script: `torch.save` to a path writes on the main rank only, and a kill cannot damage the file.

A script that was written for one process saves on every rank, all to the same file. All ranks have the same state, so
one of them writes. Saving to an open file is left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bftrainer.util.files import replacing

_real_save: Callable[..., None] = torch.save


def save_on_main_rank(is_main: Callable[[], bool]) -> None:
    """Replace `torch.save`. `is_main` says whether this rank writes."""

    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, str | os.PathLike):
            _real_save(obj, f, *args, **kwargs)
        elif is_main():
            with replacing(Path(f), "wb") as file:
                _real_save(obj, file, *args, **kwargs)

    torch.save = save
