"""What every command prints alike: JSON and warnings."""

from __future__ import annotations

import json
import sys


def print_json(value: object) -> None:
    """A result for programs."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def warn(message: str) -> None:
    """Something a person should know, beside the result."""
    print(f"bftrainer: warning: {message}", file=sys.stderr)
