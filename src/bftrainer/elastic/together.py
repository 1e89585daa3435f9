"""Where all ranks come together outside of steps: `run.evaluate`, `run.share`, and the ends of loops.

Every meeting has a place in the training (after which step, or at the top of which epoch) and a number there. Its
outcome is part of the state: a rank that runs the same code again, or that missed the end of a meeting because a peer
was lost in it, finds the outcome and does not meet anybody.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bftrainer.elastic.crew import Crew
from bftrainer.elastic.group import GroupBroken
from bftrainer.elastic.meeting import Judge
from bftrainer.elastic.outcomes import after, top_of
from bftrainer.elastic.sampler import DataSignature, refuse_different_data
from bftrainer.elastic.shared_values import packed, unpacked
from bftrainer.elastic.standing import Standing
from bftrainer.errors import BFTrainerError, InputError

_ERROR = "\0error"
"""In the outcome of a meeting: what the function of the script raised."""


@dataclass(frozen=True, slots=True)
class Note:
    """What each rank shows at a meeting, and what is made of all of them."""

    text: Callable[[], bytes]
    judge: Judge


class Together:
    """The meetings of one rank, and where its script is between them.

    `recover` forms the next group after a peer was lost.
    """

    def __init__(self, standing: Standing, crew: Crew, recover: Callable[[GroupBroken], None]) -> None:
        self._standing = standing
        self._crew = crew
        self._recover = recover
        self._at_top = True  # since the beginning of an epoch no step was made
        self._met = 0  # meetings since then, or since the last step

    def epoch_begins(self) -> None:
        """The script is at the top of an epoch."""
        self._at_top, self._met = True, 0

    def step_is_over(self) -> None:
        """The script's code after a step runs next, or once more."""
        self._at_top, self._met = False, 0

    def loop_begins(self) -> None:
        """The script is at its first batch. In the midst of an epoch the others have met since their last step."""
        progress = self._standing.progress
        if self._at_top and (progress.cursor or progress.part):
            self._at_top, self._met = False, self._standing.outcomes.count(after(progress.step))

    def meet(self, what: str, offer: Callable[[], Any], note: Note | None = None) -> Any:
        """Meet the other ranks that hold the state; gives what `offer` gives on the first of them.

        With a `note` each rank's is shown to the first, which makes the outcome of all of them.
        """
        progress = self._standing.progress
        place, number = top_of(progress.epoch) if self._at_top else after(progress.step), self._met
        point = f"{what} number {number + 1} after step {progress.step}"
        outcomes, raised = self._standing.outcomes, None
        while not outcomes.has(place, number):
            if self._standing.progress.key() != progress.key():  # those who are ahead would have had it
                raise InputError(f"{what} was not reached by all ranks; call it on all of them, in the same step")
            self._standing.put_right()
            progress = self._standing.progress
            meetings = self._crew.meetings
            try:
                if note is not None:
                    text = note.text()
                    value = note.judge([text]) if meetings is None else meetings.meet(point, b"", text, note.judge)
                else:
                    value, raised = self._offered(what, offer) if meetings is None or meetings.leads else (b"", None)
                    value = value if meetings is None else meetings.meet(point, value)
            except GroupBroken as problem:
                self._recover(problem)
                continue
            outcomes.add(place, unpacked(value))
        self._met = number + 1
        outcome = outcomes.get(place, number)
        if raised is not None:
            raise raised
        if isinstance(outcome, dict) and _ERROR in outcome:
            raise BFTrainerError(f"{what} failed on rank 0: {outcome[_ERROR]}")
        return outcome

    def _offered(self, what: str, offer: Callable[[], Any]) -> tuple[bytes, Exception | None]:
        """What this rank gives to all; an exception of the script is given too, so that nobody waits for a value."""
        try:
            return packed(offer(), what), None
        except GroupBroken:
            raise
        except Exception as problem:
            return packed({_ERROR: f"{type(problem).__name__}: {problem}"[:2000]}, what), problem

    def compare_data(self, signature: DataSignature, epoch: int) -> None:
        """Refuse to train on other data than the other ranks. They meet only where nothing is known of it yet."""
        outcomes, mine = self._standing.outcomes, list(signature.numbers())
        known = outcomes.data_of(epoch)
        if known is not None and known != mine and outcomes.data_is_of(epoch):  # the others train on it already
            refuse_different_data([DataSignature.of(known), signature])
        while outcomes.data_of(epoch) != mine:
            meetings = self._crew.meetings
            row = json.dumps(mine).encode()
            try:
                rows = meetings.gather(row, "the start of its batches") if meetings is not None else [row]
            except GroupBroken as problem:
                self._recover(problem)
                continue
            refuse_different_data([DataSignature.of(json.loads(said)) for said in rows])
            outcomes.note_data(epoch, mine)
        outcomes.note_data(epoch, mine)
