"""Effects are what the controller has to do after an event.

Every event handler of the `Reconciler` returns `Effects`. The controller carries them out after the event's
transaction is committed: it writes files, sends the messages and schedules the decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from bftrainer.cluster.wire.messages import FromController


@dataclass(slots=True)
class Effects:
    """Messages to send, and whether a decision is due."""

    messages: list[tuple[str, FromController]] = field(default_factory=list)
    """Nodes and the messages for their agents."""
    decide: Literal["now", "soon"] | None = None
    """`now`: nodes, trainers or limits changed. `soon`: only rates were learned, so the decision may wait."""
    over: list[str] = field(default_factory=list)
    """Trainers that have ended and have no worker left."""
    files: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    """Trainers and work on their files, which must be done before their workers are started."""

    hand_over: list[tuple[str, str]] = field(default_factory=list)
    """Nodes and the owners whose agents the pool is to start there, in place of another owner's."""
    left: list[tuple[str, str]] = field(default_factory=list)
    """Nodes that have left for good, and their agents, which may not come back."""

    def tell(self, node: str, message: FromController) -> None:
        """Add a message for the agent of a node."""
        self.messages.append((node, message))

    def add(self, other: Effects) -> None:
        """Add the effects of another event, which come after these."""
        self.messages += other.messages
        self.over += other.over
        self.files += other.files
        self.hand_over += other.hand_over
        self.left += other.left
        if self.decide != "now":
            self.decide = other.decide or self.decide
