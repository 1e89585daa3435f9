"""Provenance of a result: the version, command, seed and input hashes in every result file and JSON."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bftrainer import __version__


def provenance(inputs: Mapping[str, str] | None = None, seed: int | None = None) -> dict[str, Any]:
    """Return the version, the command line, the seed if there is one, and the SHA-256 of each input by name."""
    return {
        "version": __version__,
        "command": shlex.join(["bftrainer", *sys.argv[1:]]),
        "seed": seed,
        "inputs": dict(inputs or {}),
    }


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
