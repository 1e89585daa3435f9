"""Training state of one rank: progress, learning rate and the registered objects, as one unit.

`Run` has it saved between two batches. Whenever a group is formed, all ranks take over the state of the most advanced
one. This module also undoes changes by the script's code after a failed step that must not stay.
"""

from __future__ import annotations

import copy
import hashlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bftrainer.elastic.membership import Assignment
from bftrainer.elastic.metrics import ReportedMetrics
from bftrainer.elastic.torch.epoch_mean import EpochMean
from bftrainer.elastic.torch.gradients.optimizers import Stepper
from bftrainer.elastic.torch.gradients.step_exchange import StepNumbers
from bftrainer.elastic.torch.group.peers import Peers
from bftrainer.elastic.torch.snapshots.portable import check_snapshotable
from bftrainer.elastic.torch.snapshots.snapshot import Snapshots
from bftrainer.elastic.torch.snapshots.snapshot_interval import SnapshotInterval
from bftrainer.elastic.torch.state.followed import FollowedState, NotFollowed, StateInParts, receive_rest
from bftrainer.elastic.torch.state.hand_over import Roles, hand_over
from bftrainer.elastic.torch.state.hidden_state import HiddenState
from bftrainer.elastic.torch.state.outcomes import Outcomes
from bftrainer.elastic.torch.state.pause import PauseClock
from bftrainer.elastic.torch.state.rows import StateRow, refuse_other_models
from bftrainer.elastic.torch.state.transfer import Registry, broadcast, bytes_in


@dataclass(slots=True)
class Progress:
    """Progress of the training. Of two ranks, the one with the greater epoch, cursor and step is ahead."""

    epoch: int = 0
    """The epoch in progress, from 0."""
    cursor: int = 0
    """Committed samples of the epoch; in a loop over `run.steps`, committed steps."""
    step: int = 0
    """Committed steps in total."""
    samples: int = 0
    """Samples trained on in total, over all ranks."""
    saved_at: float = 0.0
    """When the last snapshot was taken, or training began. Unix time, because it is sent between nodes."""

    part: int = 0
    """Committed calls of `run.step(optimizer=…)` for the batch at `cursor`."""

    ended: bool = False
    """Whether the script's code after the last batch of the last epoch has run. It runs again if a peer was lost in it;
    its effect is in the state."""

    over: bool = False
    """Whether the script has left its training loop. A worker that joins now has nothing to train."""

    def key(self) -> tuple[int, int, int]:
        """Return the values by which the progress of two ranks is compared."""
        return self.epoch, self.cursor, self.step


class TrainingState:
    """The state of one rank's training, which comes from the start, a snapshot or a peer."""

    def __init__(
        self, registry: Registry, stepper: Stepper, metrics: ReportedMetrics, snapshots: Snapshots | None
    ) -> None:
        self.progress = Progress(saved_at=time.time())
        self.has_state = False
        """Whether this rank has begun to train or has received a state. Before that it has none to send."""
        self.repair: Callable[[], None] | None = None
        """Undoes changes by the script's code after a step that failed, or that this rank had missed."""
        self.mean = EpochMean()
        self.hidden = HiddenState()
        self.outcomes = Outcomes()
        self.exchanged = StepNumbers()
        self.separate = False
        """Whether the script steps its optimizers one by one."""
        self.loads = 0
        """Number of times a state was loaded."""
        self.took_over = False
        """Whether a state was received from peers that train."""
        self.decides_again = False
        """Whether code that is repeated after a missed step must find the values from before that step."""
        self.owes = False
        """Whether newcomers in the group still wait for the state."""
        self.followed: FollowedState = NotFollowed()
        """What newcomers get in advance."""
        self.pause = PauseClock()
        """Measures what the exchange of states takes."""
        self._round = 0
        self._before_batch: Callable[[], None] | None = None
        self._registry = registry
        self._stepper = stepper
        self._metrics = metrics
        self._snapshots = snapshots
        self._saved = 0  # the step of the last snapshot that was begun
        self.resumed_step = 0
        """The step of the snapshot that this rank resumed the training from; 0 if it did not."""

    @property
    def snapshot_step(self) -> int | None:
        """The step of the newest snapshot on disk."""
        return self._snapshots.last_step if self._snapshots is not None else None

    @property
    def snapshot_interval(self) -> SnapshotInterval | None:
        """The time between snapshots, and what one costs."""
        return self._snapshots.interval if self._snapshots is not None else None

    # Snapshots.

    def begin(self) -> None:
        """Start without peers, from the newest snapshot if there is one."""
        if not self.has_state:
            self._resume()
        self.has_state = True

    def check_state(self, *, peers: bool) -> None:
        """Raise an InputError now if the state holds a value that cannot be sent to `peers` or kept in a snapshot."""
        if peers or self._snapshots is not None:
            check_snapshotable(self._capture())

    def save_if_due(self) -> None:
        """Take a snapshot if one is due; it is written while training continues. Never raises."""
        keeper = self._snapshots
        if keeper is not None and self.progress.step != self._saved and keeper.due():
            self.progress.saved_at = time.time()
            if keeper.try_to_take(self.progress.step, self._capture):
                self._saved = self.progress.step

    def save(self, *, last: bool = False) -> None:
        """Take a snapshot before continuing. A failure, such as a full disk, does not end the training.

        `last`: the training is complete.
        """
        if self._snapshots is not None:
            try:
                self._snapshots.take_now(self.progress.step, self._capture())
            except Exception as problem:  # also raised by an object's own state_dict()
                print(f"bftrainer: no snapshot of step {self.progress.step}: {problem}", file=sys.stderr, flush=True)
            if last:
                self._snapshots.clean()

    def can_save(self, within_s: float) -> bool:
        """Return whether a step is in no snapshot yet, and a snapshot of it can be written in `within_s` seconds."""
        keeper = self._snapshots
        if keeper is None or not self.has_state or self.progress.step == max(self.resumed_step, keeper.last_step or 0):
            return False
        return keeper.interval.stall_s + keeper.interval.write_s <= within_s

    def save_within(self, seconds: float) -> None:
        """Take a snapshot if there is time, after the one that is being written: that may be of this very step."""
        if self._snapshots is not None and self._snapshots.close(seconds) and self.can_save(seconds):
            self.save()

    def close(self, patience_s: float) -> None:
        """Wait at most `patience_s` seconds for a snapshot that is being written."""
        if self._snapshots is not None:
            self._snapshots.close(patience_s)

    def _resume(self) -> None:
        self.followed.begins_alone()
        if self._snapshots is not None:
            self._snapshots.claim()
        found = self._snapshots.latest() if self._snapshots is not None else None
        if found is not None:
            self._load(found.state)
            self.progress.over = False  # a training that was complete may be given more epochs
            self._repeats_top()
            self._saved = self.resumed_step = found.step
            print(f"bftrainer: resumed from {found.path} at step {found.step}", file=sys.stderr, flush=True)

    # Peers.

    def sync(self, assignment: Assignment, peers: Peers, *, inside: bool = False) -> None:
        """Give every member of a new group the state of the most advanced one.

        `inside`: this rank is in a meeting, in the middle of the script's code. Then newcomers wait for the state until
        the ranks that have it reach a step boundary (`give_owed`).
        """
        self._round, self.owes = 0, False
        self.pause.begin()
        if self._snapshots is not None:
            self._snapshots.lease.generation = assignment.generation
        if assignment.world == 1:
            self.begin()
            peers.meet_with((0,), "alone")
            return
        while not self._exchange(assignment, peers, inside=inside):
            self._round += 1  # a newcomer gets the state at the others' next step boundary

    def give_owed(self, assignment: Assignment, peers: Peers) -> None:
        """Send the state, at a step boundary, to newcomers that had to wait for it."""
        self._round += 1
        self._exchange(assignment, peers, inside=False)

    def key(self) -> tuple[int, ...]:
        """Return how far this rank is. Of two ranks, the one with the greater key is ahead."""
        return (*self.progress.key(), *self.outcomes.passed(self.progress.epoch, self.progress.step))

    def _exchange(self, assignment: Assignment, peers: Peers, *, inside: bool) -> bool:
        """Compare all members and send what is missing. Return False if this rank has to wait for the state."""
        rest = inside, self._signature(), self._size(), self.followed.follows
        mine = StateRow(self.has_state, self.key(), *rest)
        meetings = peers.meet_with(range(assignment.world), f"sync-{self._round}")
        rows = [StateRow.read(text) for text in meetings.gather(mine.written())]
        holders = [rank for rank, row in enumerate(rows) if row.has_state]
        source = max(holders, key=lambda rank: (rows[rank].key, -rank)) if holders else 0
        refuse_other_models(mine, rows, source, assignment.rank)
        later = any(row.inside for row in rows)
        if not holders and assignment.rank == source:
            self._resume()
        taking = [] if later else [rank for rank, row in enumerate(rows) if not row.has_state and rank != source]
        taking += [rank for rank in holders if rows[rank].key != rows[source].key]
        self.took_over = bool(holders) and assignment.rank in taking
        if taking:
            equals = [rank for rank in holders if rows[rank].key == rows[source].key]
            if not self._take_rest(rows, source, taking, assignment, peers):
                self._take_over(Roles.of(assignment, source, taking, equals), assignment, peers)
        if later and not self.has_state:
            return False
        self.has_state = True
        self.owes = later and len(holders) < assignment.world
        if not self.owes:
            self.followed.joined(assignment.members)
        peers.meet_with(holders if self.owes else range(assignment.world), f"round-{self._round}")
        return True

    def _take_rest(
        self, rows: list[StateRow], source: int, taking: list[int], assignment: Assignment, peers: Peers
    ) -> bool:
        """Send newcomers only what they do not have, if all that take the state have followed the training.

        Returns False if the whole state has to be sent.
        """
        followed = all(rows[rank].follows for rank in taking) and all(row.follows is not None for row in rows)
        if not followed or assignment.world > assignment.nodes:
            return False
        rank, meetings = assignment.rank, peers.meetings
        assert meetings is not None
        label, here, word = f"{assignment.generation}/{self._round}", None, ""
        if rank not in taking:
            self.followed.mark(label, rows[rank].key)
        if rank == source or (
            rank in taking and self.followed.has_caught_up(label, rows[source].key, peers.check_whole)
        ):
            with self.pause.part("copy"):
                here = StateInParts(self._capture(), self.followed.trained())
                word = here.layout
        words = meetings.gather(word.encode())
        if not words[source] or any(words[taker] != words[source] for taker in taking):
            return False
        with self.pause.part("send"):
            if rank == source:
                assert here is not None
                here.send(source, peers)
                return True
            rest = receive_rest(here if rank in taking else None, source, peers)
        if rest is not None:
            with self.pause.part("copy"):
                self.followed.is_taking(rest.sent, rest.whole)
                self._load(rest.state)
                self._repeats_top()
        return True

    def _take_over(self, roles: Roles, assignment: Assignment, peers: Peers) -> None:
        rank = assignment.rank
        wanted = any(rank in takers for takers in roles.takers)
        with self.pause.part("send"):
            if assignment.world > assignment.nodes and peers.can_exchange:
                # A rank that has yet to undo changes of repeated code is not exactly like the source.
                gives = rank == roles.source or (rank in roles.helpers and self.repair is None)
                state = hand_over(self._capture() if gives else None, roles, rank, peers)
            else:
                state = broadcast(self._capture() if rank == roles.source else None, roles.source, peers)
        if state is None or not wanted:
            return
        with self.pause.part("copy"):
            self._put_in_place(state)

    def _put_in_place(self, state: dict[str, Any]) -> None:
        """Load the state of a rank that is ahead of this one."""
        if not self.has_state:
            whole = bytes_in(state)
            self.followed.is_taking(whole, whole)
            self._load(state)
            self._repeats_top()
            return
        # The script's code after the missed step still runs on this rank, but its effect is in this state already. So
        # the state is loaded again after that. Load a copy now: objects may keep and change what they are given. Until
        # then a framework finds the values that it found on the other ranks, and decides as they did.
        put_back = self._registry.keep_untrained(self._stepper.optimizers) if self.decides_again else None
        self._load(copy.deepcopy(state))
        if put_back is not None:
            put_back()
        self.repair = lambda: self._load(state)

    def _signature(self) -> str:
        """Return a text that is the same on ranks that train the same parameters."""
        names = sorted(self._registry.objects)
        shapes = [[tuple(param.shape) for param in module.parameters()] for module in self._registry.modules]
        return hashlib.sha256(repr((names, shapes)).encode()).hexdigest()

    def _size(self) -> str:
        tensors = [param for module in self._registry.modules for param in module.parameters()]
        numbers = sum(param.numel() for param in tensors)
        return f"{', '.join(sorted(self._registry.objects))} with {numbers} numbers in {len(tensors)} parameters"

    # Effects of the script's code after a step.

    def repeats_code(self) -> None:
        """Prepare for code of the script whose effect is in the state already: its changes are undone afterwards."""
        if self.repair is None:
            self.repair = self._registry.keep_untrained(self._stepper.optimizers)

    def _repeats_top(self) -> None:
        """Prepare for the code at the top of the epoch, which a newcomer or a resumed training runs again.

        The state has the effect of that code only if the batches of the epoch were begun: not at the start of a
        training, and not if the epoch before was the last one of a complete training.
        """
        if self.progress.cursor or self.outcomes.data_is_of(self.progress.epoch):
            self.repeats_code()

    def batch_begins(self) -> None:
        """Remember what the script may change before the step of this batch, which may fail.

        Modules that are not trained, such as averages, change after a step. With several steps per batch they also
        change between two of them.
        """
        self._before_batch = self._registry.keep_untrained(self._stepper.optimizers, modules=self.separate)

    def forget_batch(self) -> None:
        """Forget what `batch_begins` remembered: a rank that trains alone loses no step."""
        self._before_batch = None

    def take_batch_back(self) -> None:
        """Undo what the script has changed for this batch, which comes again because a step of it failed."""
        if self._before_batch is not None:
            self._before_batch()

    def put_right(self) -> None:
        """Undo the effects of code that was repeated, if there are any."""
        if self.repair is not None:
            repair, self.repair = self.repair, None
            repair()

    # The whole state.

    def _capture(self) -> dict[str, Any]:
        return {
            "progress": asdict(self.progress),
            "lr": self._stepper.state_dict(),
            "objects": self._registry.capture(),
            "hidden": self.hidden.capture(),
            "reported": self._metrics.as_state(),
            "mean": self.mean.as_state(),
            "outcomes": self.outcomes.as_state(),
            "exchanged": self.exchanged.as_state(),
            "separate": self.separate,
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        self.followed.state_was_loaded()
        hidden = state.get("hidden", {})
        self.hidden.prepare(hidden)
        self._registry.load(state["objects"])
        self.hidden.load(hidden)
        self.progress = Progress(**state["progress"])
        self._stepper.load_state_dict(state["lr"])
        self._metrics.load(state.get("reported", {}))
        self.mean.load(state.get("mean", {}))
        self.outcomes.load(state.get("outcomes", {}))
        self.exchanged.load(state.get("exchanged", {}))
        self.separate = state.get("separate", False)
        self.loads += 1
        if self._snapshots is not None:
            self._snapshots.last_was(time.time() - self.progress.saved_at)
