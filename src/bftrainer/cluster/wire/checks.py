"""Types of message fields with their bounds, and pydantic's findings as one sentence.

`messages.py` and `worker_messages.py` use these types. Texts may hold surrogates: file names and output may contain
bytes that are no characters.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, InstanceOf, PlainValidator, ValidationError

from bftrainer.util.text import text

MOST_WHOLE = 1 << 62
MOST_NAME = 256
MOST_WORDS = 1 << 12
"""Limit of characters of a reason or a warning. A longer one is cut: agents of earlier versions know no limit."""
MOST_LINES = 1 << 16
"""Limit of characters of an error or the end of an output. A longer one is cut."""


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number that can be stored and summed."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < MOST_WHOLE


def _name(value: str) -> str:
    if not value.isprintable() or not value or len(value) > MOST_NAME:
        raise ValueError(f"must have 1 to {MOST_NAME} characters that can be printed")
    return value


def _first(value: str, most: int) -> str:
    return text(value[:most])[:most]


def _last(value: str) -> str:
    return text(value[-MOST_LINES:])[-MOST_LINES:]


Whole = Annotated[int, Field(strict=True, gt=-MOST_WHOLE, lt=MOST_WHOLE)]
NaturalNumber = Annotated[int, Field(strict=True, ge=0, lt=MOST_WHOLE)]
Flag = Annotated[bool, PlainValidator(bool)]
"""Any value; it stands for true or false as in Python."""
Text = InstanceOf[str]
Words = Annotated[InstanceOf[str], AfterValidator(lambda value: _first(value, MOST_WORDS))]
"""A reason or a warning for people. Surrogates are replaced, so that it can be stored and shown."""
Lines = Annotated[InstanceOf[str], AfterValidator(lambda value: _first(value, MOST_LINES))]
"""An error of several lines; see `Words`."""
LastLines = Annotated[InstanceOf[str], AfterValidator(_last)]
"""The end of an output; see `Words`."""
Name = Annotated[InstanceOf[str], AfterValidator(_name)]
"""A name that is stored, shown, and written into files."""
JsonObject = InstanceOf[Mapping[str, Any]]
OptionalObject = Annotated[
    Mapping[str, Any] | None, PlainValidator(lambda value: value if isinstance(value, Mapping) else None)
]
"""An object; anything else becomes None."""
LenientWhole = Annotated[int, PlainValidator(lambda value: value if is_whole(value) else -1)]
"""A whole number; anything else becomes -1."""
LenientText = Annotated[
    str, PlainValidator(lambda value: _first(value, MOST_LINES) if isinstance(value, str) else "nonsense")
]
"""A text for people; anything else becomes `nonsense`."""

_RULES: Mapping[str, str] = {
    "dataclass_type": "must be an object",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of fewer digits",
    "int_type": "must be a whole number",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "missing": "is missing",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "value_error": "{error}",
}
_CLASSES: Mapping[str, str] = {"str": "must be a text", "Mapping": "must be an object"}


def first_problem(error: ValidationError) -> str:
    """Describe the first finding in one sentence that names the field."""
    finding = error.errors(include_url=False)[0]
    kind, context = finding["type"], finding.get("ctx", {})
    rule = _CLASSES.get(context.get("class", "")) if kind == "is_instance_of" else _RULES.get(kind)
    field = ".".join(map(str, finding["loc"])) or "the message"
    demand = (rule or "is invalid").format(**context)
    got = "" if kind == "missing" else f", but got {reprlib.repr(finding['input'])}"
    return text(f"`{field}` {demand}{got}")
