"""Rules for the values of configuration keys: what a number, a path, a name or a lifetime may be."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainValidator

from bftrainer.util.plugins import is_named

PLACEMENTS = ("stable", "compact")
"""The words for `policy.placement`; any other value is a path."""


def some_text(value: object) -> str:
    """Return the value if it is a non-blank text in one line. Raises ValueError otherwise."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError
    return value


def some_path(value: object) -> Path:
    """Return the value as an absolute path, with a leading `~` expanded. Raises ValueError if it is not a path."""
    return Path(os.path.expanduser(some_text(value))).absolute()  # noqa: PTH111 - pathlib's may raise


def number(value: object) -> object:
    """Refuse true, false and text, which pydantic would convert."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    return value


def number_or_auto(value: object) -> object:
    """Return a number, or None for `auto`. Raises ValueError."""
    return None if value == "auto" else number(value)


def allocator_name(value: object) -> str:
    """Return the name of an allocator. Raises ValueError."""
    from bftrainer.allocate.registry import ALLOCATORS  # numpy takes time to load, and few calls set this

    text = some_text(value)
    if text not in ALLOCATORS and not is_named(text):
        raise ValueError
    return text


def placement_value(value: object) -> str:
    """Return a word for a placement or the path of a file. Raises ValueError."""
    if value in PLACEMENTS:
        return str(value)
    path = some_path(value)
    if not path.is_file():
        raise ValueError
    return str(path)


def file_or_nothing(value: object) -> str:
    """Return an absolute path, or nothing. Raises ValueError."""
    return "" if value == "" else str(some_path(value))


def texts(value: object) -> tuple[str, ...]:
    """Return a list of texts, each in one line. Raises ValueError."""
    if not isinstance(value, list | tuple):
        raise ValueError
    return tuple(some_text(each) for each in value)


def name_or_nothing(value: object) -> str:
    """Return a text in one line, or nothing. Raises ValueError."""
    return "" if value == "" else some_text(value)


def lifetime_s(text: str) -> float | None:
    """Return the seconds of a lifetime such as 12h, 30d or 52w; None for `never`. Raises ValueError."""
    if text == "never":
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,4})([mhdw])", text, re.ASCII)
    if match is None:
        raise ValueError
    return float(match[1]) * {"m": 60, "h": 3600, "d": 86400, "w": 604800}[match[2]]


def lifetime_text(value: object) -> str:
    """Return the text of a lifetime as `lifetime_s` reads it. Raises ValueError."""
    text = some_text(value)
    lifetime_s(text)
    return text


def log_file_path(value: object) -> str:
    """Return an absolute path, nothing, or `none`. Raises ValueError."""
    return "none" if value == "none" else file_or_nothing(value)


NUMBER, AUTO = BeforeValidator(number), BeforeValidator(number_or_auto)
Seconds = Annotated[float, NUMBER, Field(ge=0, allow_inf_nan=False, description="a number of seconds, 0 or more")]
PositiveSeconds = Annotated[float, NUMBER, Field(gt=0, allow_inf_nan=False, description="a number of seconds above 0")]
Days = Annotated[float, NUMBER, Field(ge=0, le=36_500, description="a number of days up to 36500; 0: no limit")]
Gigabytes = Annotated[float, NUMBER, Field(ge=0, le=1e9, description="a number of GB; 0: no limit")]
FilePath = Annotated[str, PlainValidator(file_or_nothing), Field(description="the path of a file, or empty")]
