"""Text cleaning: makes text from outside safe to store and show."""

from __future__ import annotations


def text(found: str) -> str:
    """Return text that can be stored. File names and output may contain bytes that are no characters."""
    return found if found.isascii() else found.encode(errors="backslashreplace").decode()
