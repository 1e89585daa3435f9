"""Shared-value codec: encodes what rank 0 gives to all ranks as bytes, and decodes it.

Decoding runs no code of the sender.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

from bftrainer.elastic.torch.snapshots.portable import portable, restored
from bftrainer.errors import InputError

MOST_BYTES = 4 << 20
"""Maximum size of a value that is sent through the store of a group."""
_JSON, _TORCH = b"j", b"t"
"""Encodings of a value: JSON, which is faster, if that is exact; otherwise torch.save."""


def packed(value: Any, what: str) -> bytes:
    """Return a value as bytes. If it cannot be sent, raise an InputError that names the call, `what`."""
    if isinstance(value, Path):
        value = str(value)
    if value is None or type(value) in (bool, int, str):
        return _limited(_JSON + json.dumps(value).encode(), what)
    try:
        plain = portable({"value": value}, lambda tensor: tensor.detach().cpu())
    except InputError as problem:
        raise InputError(f"{what} gives plain values and tensors to all ranks: {problem}") from None
    file = io.BytesIO()
    torch.save(plain, file)
    return _limited(_TORCH + file.getvalue(), what)


def _limited(raw: bytes, what: str) -> bytes:
    if len(raw) > MOST_BYTES:
        raise InputError(
            f"{what} gives at most {MOST_BYTES >> 20} MiB to all ranks, but got {len(raw) / 2**20:.1f} MiB; "
            "give numbers, and keep large tensors in a registered module or in a file"
        )
    return raw


def unpacked(raw: bytes) -> Any:
    """Return the value that `packed` encoded."""
    if raw.startswith(_JSON):
        return json.loads(raw[1:])
    return restored(torch.load(io.BytesIO(raw[1:]), weights_only=True))["value"]
