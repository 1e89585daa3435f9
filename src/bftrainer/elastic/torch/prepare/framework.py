"""Loop of a training framework that counts batches and steps itself, such as the Trainer of Hugging Face.

Such a framework cannot be told that a batch comes again. So a step is made anew right where it was lost, before the
framework goes on: it takes the batches of a whole step, computes them, and asks for the outcome. How many parts a batch
comes in and on how many ranks is not visible to it. A framework that can begin in the middle of an epoch does so on
ranks that join later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

from bftrainer.elastic.torch.gradients.step_exchange import Numbers, StepExchange
from bftrainer.elastic.torch.loop import TrainingLoop
from bftrainer.elastic.torch.meetings.shared_values import packed, unpacked
from bftrainer.elastic.torch.meetings.together import Note
from bftrainer.elastic.torch.member import TrainingMember
from bftrainer.elastic.torch.prepare.epoch_loader import EpochLoader, LoadedBatch
from bftrainer.elastic.torch.prepare.loader import PreparedLoader
from bftrainer.elastic.torch.prepare.loop import PreparedLoop
from bftrainer.elastic.torch.prepare.shared_work import SharedWork
from bftrainer.elastic.torch.prepare.training import PreparedTraining
from bftrainer.elastic.torch.present_batch import PresentBatch
from bftrainer.elastic.torch.reports import ProgressReports
from bftrainer.elastic.torch.state.training_state import Progress
from bftrainer.errors import BFTrainerError, InputError


class StepOutcome(Enum):
    """What has become of a step whose batches were computed."""

    MADE = "made"
    """The gradients are summed: the optimizer can step."""
    LOST = "lost"
    """A peer was lost: take the batches again."""
    PASSED = "passed"
    """A peer was lost, but another rank has made the step, and this rank has its result: go on as if it were made."""


class FrameworkLoop:
    """Epochs, steps and evaluations of one rank, as a framework asks for them."""

    def __init__(
        self,
        member: TrainingMember,
        batch: PresentBatch,
        loop: TrainingLoop,
        reports: ProgressReports,
        prepared: PreparedLoop,
        training: PreparedTraining,
    ) -> None:
        self._member = member
        self._batch = batch
        self._loop = loop
        self._reports = reports
        self._prepared = prepared
        self._training = training
        self._work = SharedWork(member, loop)
        self._epoch = 0
        self._loader: EpochLoader | None = None

    # Joining and leaving.

    def join(self, epochs: int | None) -> Progress:
        """Join the training, which has `epochs` epochs, and return where it is. All objects are prepared before."""
        self._reports.epochs = epochs
        self._member.state.decides_again = True
        self._member.join()
        return self._member.progress

    def start_at(self, epoch: int, cursor: int, step: int) -> None:
        """Begin a new training in the middle, with a state that the framework has loaded itself, on all ranks."""
        progress = self._member.progress
        progress.epoch, progress.cursor, progress.step = epoch, cursor, step
        self._member.buffers.commit()

    @property
    def has_begun(self) -> bool:
        """Whether this rank has joined the training. Before that, every rank takes itself for the main one."""
        return self._member.joined

    @property
    def is_training(self) -> bool:
        """Whether this rank has joined and the training is not over, so that the other ranks can be met."""
        return self._member.joined and not self._loop.is_over

    @property
    def is_managed(self) -> bool:
        """Whether BFTrainer has started this process, so that there may be other ranks."""
        return self._member.membership is not None

    @property
    def has_left(self) -> bool:
        """Whether this rank ends because its node was taken out of the training."""
        return self._member.left

    @property
    def repeats(self) -> bool:
        """Whether the framework's code runs again: another rank has run it, and this rank has its effects already."""
        return self._member.state.repair is not None

    def finish(self) -> None:
        """Complete the training. See `Run.finish`."""
        self._loop.finish()

    # Epochs and steps.

    def begin_epoch(self, loader: PreparedLoader, epoch: int) -> None:
        """Begin an epoch, or go on in it."""
        if not self._prepared.enter(epoch):
            raise BFTrainerError(f"epoch {epoch} was begun, but the training is in epoch {self._member.progress.epoch}")
        self._reports.batches_are(loader.batches.plan)
        self._loader = EpochLoader(self._member, self._training, loader.batches, epoch)
        self._epoch = epoch

    def take(self, count: int) -> list[list[LoadedBatch]]:
        """Return this rank's parts of the next `count` batches, which make a step.

        There are none if the other ranks are in a later epoch, so that this step was made.
        """
        assert self._loader is not None
        training = self._training
        training.take_again()
        taken: list[list[LoadedBatch]] = []
        while len(taken) < count:
            parts: list[LoadedBatch] = []
            while not parts or not parts[-1].handed.is_last:
                training.end_batch()
                if training.is_at_boundary:
                    if not self._loop.between(self._epoch):
                        return []
                    self._loader.at_boundary()
                loaded = self._loader.next()
                if loaded is None:
                    raise BFTrainerError(f"epoch {self._epoch} has no more batches, but the framework asks for one")
                parts.append(loaded)
            taken.append(parts)
        return taken

    def sum(self, numbers: Sequence[float]) -> list[float] | None:
        """Return sums over all ranks, after `take`. None if a peer was lost: ask for the outcome."""
        return self._training.sum_numbers(numbers)

    def exchange(self, numbers: Numbers) -> None:
        """Have all ranks get some numbers of this rank along with the gradients of the present step."""
        self._training.exchange = StepExchange(numbers, self._member.rank, self._member.world)

    @property
    def exchanged(self) -> list[Numbers] | None:
        """Numbers of all ranks for a step that is made or passed."""
        step = self._member.progress.step
        return self._member.state.exchanged.of(step if self._training.is_lost else step + 1)

    @contextmanager
    def computing(self, part: LoadedBatch) -> Iterator[None]:
        """Count backward passes in this block for a part of a batch."""
        self._training.present = part.handed
        try:
            yield
        finally:
            self._training.present = None

    def outcome(self) -> StepOutcome:
        """Return what has become of the step, after all its batches were computed."""
        if self._training.is_lost:
            return StepOutcome.PASSED if self._batch.taken_over else StepOutcome.LOST
        if not self._training.is_summed:
            raise InputError(
                "a batch was computed without a backward pass for its loss. Each batch needs one: the ranks add up "
                "their gradients in it"
            )
        return StepOutcome.MADE

    @property
    def loss(self) -> float | None:
        """Loss of a step that is made, over all its batches and all ranks, as the gradients are weighted."""
        return self._training.loss.of_step

    def end_epoch(self) -> None:
        """End the loop over the batches of an epoch, whether all were taken or not."""
        self._training.end_batch()
        self._training.leave()
        self._loop.batches_were_taken(self._epoch)
        self._loader = None

    # Outside of steps.

    def on_main(self, what: str, function: Callable[[], Any]) -> Any:
        """Call a function on rank 0 and return its result on every rank. See `Run.evaluate`."""
        return self._loop.meet(what, function)

    def of_all_ranks(self, what: str, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks, on every rank."""

        def judge(notes: list[bytes]) -> bytes:
            return packed([unpacked(note) for note in notes], what)

        values: list[Any] = self._loop.meet(what, lambda: None, Note(lambda: packed(value, what), judge))
        return values

    def divide(self, what: str, count: int, compute: Callable[[list[int]], Mapping[int, Any]]) -> list[Any]:
        """Have the ranks compute `count` items, each on one of them, and return all results on every rank.

        `compute` returns the results of some items, by number: tensors, plain values, or lists, tuples and dicts of
        them. All ranks call this at the same point. If a rank is lost meanwhile, others compute what it had.
        """
        return self._work.divide(what, count, compute)
