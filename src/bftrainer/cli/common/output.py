"""Output helpers for all commands: JSON and warnings."""

from __future__ import annotations

import json
import sys


def print_json(value: object) -> None:
    """Print a result as JSON, for programs."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def warn(message: str) -> None:
    """Print a warning for a person, apart from the result."""
    print(f"bftrainer: warning: {message}", file=sys.stderr)
