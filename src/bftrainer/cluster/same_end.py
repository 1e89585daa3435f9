"""Recognises a script that ends in the same way wherever it is started: a wrong argument, a module that is not there.

`Job` and `QuietJob` ask it for each worker that failed before the trainer ever trained. One node may be at fault, so
the same end must be seen on two nodes, or three times on one.
"""

from __future__ import annotations


class SameEnd:
    """The last ends of one trainer's workers, as far as they are the same."""

    def __init__(self) -> None:
        self._last_line = ""
        self._nodes: list[str] = []

    def again(self, node: str, last_line: str) -> bool:
        """A worker ended there with this last line; whether the script will not do better anywhere."""
        if last_line != self._last_line:
            self._nodes = []
        self._last_line = last_line
        self._nodes.append(node)
        return bool(last_line) and (len(set(self._nodes)) > 1 or len(self._nodes) > 2)

    def forget(self) -> None:
        """What comes next is no repetition."""
        self._last_line, self._nodes = "", []
