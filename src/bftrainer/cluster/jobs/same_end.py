"""`SameEnd` recognises a script that ends the same way everywhere.

Examples are a wrong argument and a missing module. `ElasticJob` and `OpaqueJob` ask it about each worker that failed
before the trainer ever trained. One node may be at fault, so the same end must be seen on two nodes, or three times on
one.
"""

from __future__ import annotations


class SameEnd:
    """The latest ends of one trainer's workers that had the same last line of output."""

    def __init__(self) -> None:
        self._last_line = ""
        self._nodes: list[str] = []

    def again(self, node: str, last_line: str) -> bool:
        """Record that a worker ended on a node with this last line. Returns whether the script will fail anywhere."""
        if last_line != self._last_line:
            self._nodes = []
        self._last_line = last_line
        self._nodes.append(node)
        return bool(last_line) and (len(set(self._nodes)) > 1 or len(self._nodes) > 2)

    def forget(self) -> None:
        """Forget the recorded ends: the next end is not a repetition."""
        self._last_line, self._nodes = "", []
