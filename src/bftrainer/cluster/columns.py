"""How values become columns of the controller's database, and back.

`store.py` passes everything through here that comes from outside: text with bytes that are no characters, a loss that
is infinite, a number that no column holds. None of it may stop the controller.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from bftrainer.errors import BFTrainerError

_MOST = 2**63 - 1


def text(found: str) -> str:
    """Text that can be stored: file names and output may hold bytes that are no characters."""
    return found if found.isascii() else found.encode(errors="backslashreplace").decode()


def plain(value: Any) -> Any:
    """What a script reports may be any number, and must not stop the controller."""
    if isinstance(value, int) and abs(value) > _MOST:
        return _MOST if value > 0 else -_MOST
    return text(value) if isinstance(value, str) else value


def encoded(value: Any) -> str:
    """A value as JSON; None stands for numbers that JSON cannot say."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # JSON has no infinity, but a loss may be infinite
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    """The value with None for every number that JSON cannot say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def decoded(stored: str) -> Any:
    """The value of stored JSON."""
    try:
        found = json.loads(stored)
    except (ValueError, RecursionError, TypeError):
        raise _damaged(stored) from None
    return _readable(found) if "\\ud" in stored else found


def _readable(value: Any) -> Any:
    """The value with text that can be shown: JSON can name halves of characters, and older versions stored some."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {text(key): _readable(item) for key, item in value.items()}
    return [_readable(item) for item in value] if isinstance(value, list) else value


def decoded_object(stored: str) -> dict[str, Any]:
    """The value of stored JSON that must be an object."""
    found = decoded(stored)
    if not isinstance(found, dict):
        raise _damaged(stored)
    return found


def _damaged(stored: str) -> BFTrainerError:
    return BFTrainerError(f"the database is damaged: it holds {stored!r:.80} where JSON must be; restore a back-up")
