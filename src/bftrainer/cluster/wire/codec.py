"""Encodes and decodes the messages between agent and controller: JSON objects, one per websocket frame.

Unknown fields and messages are ignored, so that agents and controllers of different versions understand each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from bftrainer.cluster.wire.checks import first_problem
from bftrainer.cluster.wire.messages import Gpu, GpuUse, Message, RankStatus, WorkerStatus
from bftrainer.elastic.protocol import ProtocolError

_KINDS: Mapping[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Message)}
_NAMES: Mapping[type[Any], tuple[str, tuple[str, ...]]] = {
    kind: (name, tuple(field.name for field in fields(kind))) for name, kind in _KINDS.items()
}
_PARTS: Mapping[type[Any], tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind)) for kind in (WorkerStatus, RankStatus, Gpu, GpuUse)
}
_OF_SEVERAL = frozenset({"gpus", "slots", "ranks", "log_all_ranks", "knows_ranks", "preload", "secret", "spec"})
"""Fields that are left out while they are empty: version 0.1.0 does not have them."""
_ADAPTERS: Mapping[str, TypeAdapter[Message]] = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}


def encode(message: Message) -> str:
    """Return the frame of a message."""
    name, names = _NAMES[type(message)]
    return json.dumps({"type": name, **_values(message, names)}, default=_plain)


def _values(value: object, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(value, name) for name in names}
    return {name: part for name, part in values.items() if part or name not in _OF_SEVERAL}


def _plain(value: object) -> Any:
    if type(value) in _PARTS:
        return _values(value, _PARTS[type(value)])
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"cannot send {value!r}")


MOST_BYTES = 4 << 20
"""Limit of the characters of an agent's frame: a thousand workers' reports have 1 MB, and a piece of output of 256 KB
has at most 1.5 MB as JSON."""
MOST_JOIN_BYTES = 16 << 20
"""Limit of the characters of a join, which has the ends of the outputs of workers that ended meanwhile."""
MOST_PARTS = 500_000
"""Limit of the values of an agent's frame, judged by its commas: many small values take long to decode."""

_JOIN = re.compile(r'\s*\{\s*"type"\s*:\s*"join"')


def decode_from_agent(frame: str) -> Message | None:
    """Decode a frame of an agent as `decode` does, if it is not too large. Raises `ProtocolError`."""
    joins = _JOIN.match(frame) is not None
    most = MOST_JOIN_BYTES if joins else MOST_BYTES
    if len(frame) > most:
        raise ProtocolError(f"a frame has {len(frame)} characters, and may have {most}")
    if (parts := frame.count(",")) > MOST_PARTS:
        raise ProtocolError(f"a frame has {parts} commas, and may have {MOST_PARTS}")
    return decode(frame)


def decode(frame: str | bytes) -> Message | None:
    """Return the message of a frame; None if this version does not know its kind. Raises `ProtocolError`."""
    try:
        data = json.loads(frame)
        adapter = _ADAPTERS.get(data["type"])
        return None if adapter is None else adapter.validate_python(data)
    except ValidationError as error:
        raise ProtocolError(f"invalid message `{data['type']}`: {first_problem(error)}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as problem:
        raise ProtocolError(
            f"a frame must be a JSON object with a `type`, but got {frame[:200]!r}: {problem}"
        ) from None
