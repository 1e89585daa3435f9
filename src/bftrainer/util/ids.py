"""Ids of trainers and workers: `t7` is the seventh trainer, `t7-3` its third worker.

Every id is built and taken apart here.
"""

from __future__ import annotations

import re

_TRAINER = re.compile(r"t([1-9][0-9]{0,17})")
MOST_PLAUSIBLE = 10**12
"""No controller has given so many ids: a greater number in the name of a folder was not made by one."""


def trainer_id(number: int) -> str:
    """Return the id of the trainer with this number."""
    return f"t{number}"


def trainer_number(trainer: str) -> int | None:
    """Return the number of the trainer with this id; None if the text is not an id."""
    match = _TRAINER.fullmatch(trainer)
    return int(match[1]) if match is not None else None


def is_trainer_id(text: str) -> bool:
    """Whether a text is the id of a trainer. Such a text is safe as a part of a path."""
    return trainer_number(text) is not None


def worker_id(trainer: str, number: int) -> str:
    """Return the id of a trainer's worker with this number."""
    return f"{trainer}-{number}"


def trainer_of(worker: str) -> str:
    """Return the trainer's id from the id of one of its workers."""
    return worker.rpartition("-")[0]
