"""Pass pattern: after which backward passes a script steps which optimizer, as seen so far.

Gradients are summed right after a backward pass, so that the script can clip and read the sums before it steps. With
gradient accumulation only the passes of the last batch before a step need a sum. Which one that is, is learned from the
first steps, in which every pass is followed by a sum. A sum too many costs time; a missing one would let the script
clip a part of the gradient, which is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from bftrainer.elastic.torch.state.transfer import FreshState
from bftrainer.errors import InputError

_ENOUGH = 20
"""Steps to learn from. Scripts that make a pass more every 16 steps are common."""


def refuse_accumulation() -> NoReturn:
    """Refuse a script that adds up gradients when its batches come in parts: only it knows how many make a step."""
    raise InputError(
        "the script did not call optimizer.step() after a batch. If it adds up the gradients of several batches, say "
        "how many, so that fewer ranks can take the same batch in parts: elastic.prepare(…, accumulate=4)"
    )


class PassPattern(FreshState):
    """Learns from the steps that a script makes. The passes of a batch are numbered from 1."""

    def __init__(self) -> None:
        self._observed = 0  # steps, or batches if there are several optimizers
        self._batches: int | None = None  # the fewest batches that were accumulated for a step
        self._followed: dict[int, set[int]] = {}  # by number of the pass: the optimizers stepped after it

    def single_step_follows(self, batches: int, *, last: bool) -> bool:
        """Return whether the only optimizer may be stepped after a pass for the last of so many batches.

        `last`: the epoch has no more batches, so a step comes although fewer were accumulated.
        """
        return last or self._batches is None or self._observed < _ENOUGH or batches >= self._batches

    def stepped(self, batches: int, *, last: bool) -> None:
        """Learn from a step of the only optimizer."""
        self._observed = min(self._observed + 1, _ENOUGH)
        if not last:
            self._batches = batches if self._batches is None else min(self._batches, batches)

    def step_may_follow(self, number: int, optimizer: int) -> bool:
        """Return whether one of several optimizers, by its place, may be stepped after pass `number` of a batch."""
        return self._observed < _ENOUGH or optimizer in self._followed.get(number, {optimizer})

    def part_stepped(self, number: int, optimizer: int) -> None:
        """Learn that this optimizer was stepped after pass `number` of a batch."""
        self._followed.setdefault(number, set()).add(optimizer)

    def batch_ended(self, passes: int) -> None:
        """Learn that the other passes of this batch were followed by no step."""
        self._observed = min(self._observed + 1, _ENOUGH)
        for number in range(1, passes + 1):
            self._followed.setdefault(number, set())

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned as plain values."""
        followed = [[number, sorted(optimizers)] for number, optimizers in sorted(self._followed.items())]
        return {"observed": self._observed, "batches": self._batches, "followed": followed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what other ranks have learned."""
        self._observed, self._batches = state["observed"], state["batches"]
        self._followed = {number: set(optimizers) for number, optimizers in state["followed"]}
