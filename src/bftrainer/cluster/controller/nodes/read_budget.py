"""The read budget limits how much each node's agents may send to the controller.

Frames are decoded on the event loop. An agent that sends more than its budget is read later, so that it keeps only
itself waiting. The budget is the node's, so connecting again does not renew it.
"""

from __future__ import annotations

import math

BYTES_PER_S = 2 << 20
"""What an agent may send all the time: far more than a node with a thousand workers does."""
BURST_BYTES = 32 << 20
"""What an agent that sent little may send at once, as after a long disconnection."""
FRAME_BYTES = 1 << 10
"""What each frame costs besides its own size."""
PART_BYTES = 8
"""What each value in a frame costs besides its own size, judged by the commas."""


class ReadBudget:
    """How much each node's agents have sent."""

    def __init__(self) -> None:
        self._paid_at: dict[str, float] = {}
        """When all that came from a node is within its budget."""

    def spend(self, node: str, frame: str, now: float) -> float:
        """Count a frame that came from a node. Returns how many seconds to wait before it is decoded."""
        cost = len(frame) + FRAME_BYTES + PART_BYTES * frame.count(",")
        paid = max(self._paid_at.get(node, -math.inf), now - BURST_BYTES / BYTES_PER_S) + cost / BYTES_PER_S
        self._paid_at[node] = paid
        return max(paid - now, 0.0)

    def forget_paid(self, now: float) -> None:
        """Forget the nodes whose agents have sent nothing for long."""
        since = now - BURST_BYTES / BYTES_PER_S
        self._paid_at = {node: paid for node, paid in self._paid_at.items() if paid > since}
