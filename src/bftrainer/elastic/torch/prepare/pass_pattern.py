"""Pass pattern: after which backward passes a script steps which optimizer, as seen so far.

Gradients are summed right after a backward pass, so that the script can clip and read the sums before it steps. With
gradient accumulation only the last pass before a step needs a sum. Which one that is, is learned. What was seen once is
expected to come again: a sum too many costs time, a missing one would let the script clip a part of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PassPattern:
    """Learns from the steps that a script makes.

    The passes of a batch, or of the batches that are accumulated for one step, are numbered from 1.
    """

    def __init__(self) -> None:
        self._batches: int | None = None  # the fewest batches that were accumulated for a step
        self._passes: int | None = None  # the fewest passes per batch
        self._followed: dict[int, set[int]] = {}  # by number of the pass: the optimizers stepped after it

    def single_step_follows(self, passes: int, batches: int, *, last: bool) -> bool:
        """Return whether the only optimizer may be stepped after this pass.

        `last`: the epoch has no more batches, so a step comes although fewer were accumulated.
        """
        if self._batches is None or self._passes is None:
            return True
        return passes >= (min(batches, self._batches) if last else self._batches) * self._passes

    def stepped(self, passes: int, batches: int, *, last: bool) -> None:
        """Learn from a step of the only optimizer."""
        per_batch = max(1, passes // max(1, batches))
        self._passes = per_batch if self._passes is None else min(self._passes, per_batch)
        if not last:
            self._batches = batches if self._batches is None else min(self._batches, batches)

    def step_may_follow(self, number: int, optimizer: int) -> bool:
        """Return whether one of several optimizers, by its place, may be stepped after pass `number` of a batch."""
        return number not in self._followed or optimizer in self._followed[number]

    def part_stepped(self, number: int, optimizer: int) -> None:
        """Learn that this optimizer was stepped after pass `number` of a batch."""
        self._followed.setdefault(number, set()).add(optimizer)

    def batch_ended(self, passes: int) -> None:
        """Learn that the other passes of this batch were followed by no step."""
        for number in range(1, passes + 1):
            self._followed.setdefault(number, set())

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned as plain values."""
        followed = [[number, sorted(optimizers)] for number, optimizers in sorted(self._followed.items())]
        return {"batches": self._batches, "passes": self._passes, "followed": followed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what other ranks have learned."""
        self._batches, self._passes = state["batches"], state["passes"]
        self._followed = {number: set(optimizers) for number, optimizers in state["followed"]}
