"""Together: meetings of all ranks with stored outcomes, for `run.evaluate`, `run.share` and the ends of loops.

Every meeting has a place in the training (after which step, or at the top of which epoch) and a number there. Its
outcome is part of the state. A rank that runs the same code again, or that missed the end of a meeting because a peer
was lost in it, finds the outcome and does not have to meet the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bftrainer.elastic.torch.data.batch_plan import DataSignature, refuse_different_data
from bftrainer.elastic.torch.group.group import GroupBroken
from bftrainer.elastic.torch.group.meeting import Judge
from bftrainer.elastic.torch.group.peers import Peers
from bftrainer.elastic.torch.meetings.shared_values import packed, unpacked
from bftrainer.elastic.torch.state.outcomes import after, top_of
from bftrainer.elastic.torch.state.training_state import TrainingState
from bftrainer.errors import BFTrainerError, InputError

_ERROR = "\0error"
"""Key in the outcome of a meeting for an exception of the script's function."""


@dataclass(frozen=True, slots=True)
class Note:
    """One rank's note for a meeting, and the function that computes the outcome from all notes."""

    text: Callable[[], bytes]
    judge: Judge


class Together:
    """The meetings of one rank, and the position of its script between them.

    `recover` forms the next group after a peer was lost.
    """

    def __init__(self, state: TrainingState, peers: Peers, recover: Callable[[GroupBroken], None]) -> None:
        self._state = state
        self._peers = peers
        self._recover = recover
        self._at_top = True  # no step was made since the epoch began
        self._met = 0  # meetings since the epoch began, or since the last step

    def epoch_begins(self) -> None:
        """Record that the script is at the top of an epoch."""
        self._at_top, self._met = True, 0

    def step_is_over(self) -> None:
        """Record that the script's code after a step runs next, or runs again."""
        self._at_top, self._met = False, 0

    def loop_begins(self) -> None:
        """Record that the script is at its first batch.

        In mid-epoch the other ranks may have met since their last step.
        """
        progress = self._state.progress
        if self._at_top and (progress.cursor or progress.part):
            self._at_top, self._met = False, self._state.outcomes.count(after(progress.step))

    def meet(self, what: str, offer: Callable[[], Any], note: Note | None = None) -> Any:
        """Meet the other ranks that hold the state. Return what `offer` returns on the first of them.

        With a `note`, each rank shows its note to the first rank, which computes the outcome from all of them.
        """
        progress = self._state.progress
        place, number = top_of(progress.epoch) if self._at_top else after(progress.step), self._met
        point = f"{what} number {number + 1} after step {progress.step}"
        outcomes, raised = self._state.outcomes, None
        while not outcomes.has(place, number):
            if self._state.progress.key() != progress.key():  # ranks that are ahead would have the outcome
                raise InputError(f"{what} was not reached by all ranks; call it on all of them, in the same step")
            self._state.put_right()
            progress = self._state.progress
            meetings = self._peers.meetings
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
        """Return this rank's value for all ranks.

        An exception of the script is sent too, so that no rank waits for a value.
        """
        try:
            return packed(offer(), what), None
        except GroupBroken:
            raise
        except Exception as problem:
            return packed({_ERROR: f"{type(problem).__name__}: {problem}"[:2000]}, what), problem

    def compare_data(self, signature: DataSignature, epoch: int) -> None:
        """Refuse to train on other data than the other ranks. The ranks meet only if the data is not known yet."""
        outcomes = self._state.outcomes
        known = outcomes.data_of(epoch)
        if known is not None and outcomes.data_is_of(epoch):  # the other ranks already train on it
            refuse_different_data([DataSignature.of(known), signature])
        while not _is_known(signature, outcomes.data_of(epoch)):
            meetings = self._peers.meetings
            row = json.dumps(signature.numbers()).encode()
            try:
                rows = meetings.gather(row, "the start of its batches") if meetings is not None else [row]
            except GroupBroken as problem:
                self._recover(problem)
                continue
            said: list[list[int]] = [json.loads(row) for row in rows]
            refuse_different_data([DataSignature.of(numbers) for numbers in said])
            outcomes.note_data(epoch, said[0])  # the same on all ranks, also where their floats are rounded differently
        outcomes.note_data(epoch, outcomes.data_of(epoch) or signature.numbers())


def _is_known(mine: DataSignature, known: Sequence[int] | None) -> bool:
    """Return whether all ranks have said that they train on this data, with its samples."""
    if known is None:
        return False
    theirs = DataSignature.of(known)
    return theirs.agrees_with(mine) and (theirs.samples is None) == (mine.samples is None)
