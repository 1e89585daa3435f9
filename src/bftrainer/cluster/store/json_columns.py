"""JSON columns hold outside values; functions here encode and decode them.

`store.py` passes everything through here that comes from outside: text with bytes that are no characters, an infinite
loss, a number that fits in no column. None of it may stop the controller.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from bftrainer.errors import BFTrainerError
from bftrainer.util.text import text

_MOST = 2**63 - 1


def plain(value: Any) -> Any:
    """Return a value that a column can hold. A script may report any number, and none may stop the controller."""
    if isinstance(value, int) and abs(value) > _MOST:
        return _MOST if value > 0 else -_MOST
    return text(value) if isinstance(value, str) else value


def encoded(value: Any) -> str:
    """Return a value as JSON; None replaces numbers that JSON cannot express."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # JSON has no infinity, but a loss may be infinite
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    """Return the value with None for every number that JSON cannot express."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def decoded(stored: str) -> Any:
    """Return the value of stored JSON."""
    try:
        found = json.loads(stored)
    except (ValueError, RecursionError, TypeError):
        raise _damaged(stored) from None
    return _readable(found) if "\\ud" in stored else found


def _readable(value: Any) -> Any:
    """Return the value with printable text: JSON can hold halves of characters, and older versions stored some."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {text(key): _readable(item) for key, item in value.items()}
    return [_readable(item) for item in value] if isinstance(value, list) else value


def decoded_object(stored: str) -> dict[str, Any]:
    """Return the value of stored JSON that must be an object."""
    found = decoded(stored)
    if not isinstance(found, dict):
        raise _damaged(stored)
    return found


def _damaged(stored: str) -> BFTrainerError:
    return BFTrainerError(f"the database is damaged: it holds {stored!r:.80} where JSON must be; restore a back-up")
