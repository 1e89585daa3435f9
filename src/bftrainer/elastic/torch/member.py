"""Training member: this rank's state, its group of peers, and the way from one group to the next.

A member joins when training begins. Between two batches, when all of the script's code for a step has run, it re-forms
its group if all ranks know of a new generation; newcomers then receive the state. When a peer is lost, the group is
broken: the member gives it up and continues in the next one, with the state of the most advanced rank.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import NoReturn

import torch

from bftrainer.elastic.membership import Assignment, Leave, Membership
from bftrainer.elastic.metrics import ReportedMetrics
from bftrainer.elastic.pacing import Pacer
from bftrainer.elastic.protocol import FirstStep, Formed, Generation, Leaving, Message
from bftrainer.elastic.torch.data.loader import Loaders
from bftrainer.elastic.torch.follow.flow import StateFlow
from bftrainer.elastic.torch.freed_memory import keep_freed_memory
from bftrainer.elastic.torch.gradients.gradients import Gradients
from bftrainer.elastic.torch.gradients.optimizers import Stepper
from bftrainer.elastic.torch.gradients.riders import RIDERS
from bftrainer.elastic.torch.group.group import GroupBroken, default_backend
from bftrainer.elastic.torch.group.peers import Peers
from bftrainer.elastic.torch.meetings.digest import Digest, refuse_drift
from bftrainer.elastic.torch.meetings.shared_values import packed
from bftrainer.elastic.torch.meetings.together import Note, Together
from bftrainer.elastic.torch.rates import Meter
from bftrainer.elastic.torch.refusals import refuse_unknown_schedulers
from bftrainer.elastic.torch.rehearsal import rehearse_backward
from bftrainer.elastic.torch.sigterm import on_sigterm
from bftrainer.elastic.torch.snapshots.last_save import LastSave
from bftrainer.elastic.torch.snapshots.snapshot import Snapshots
from bftrainer.elastic.torch.state.buffers import Buffers
from bftrainer.elastic.torch.state.training_state import Progress, TrainingState
from bftrainer.elastic.torch.state.transfer import Registry
from bftrainer.errors import InputError
from bftrainer.processes import start_up


class TrainingMember:
    """This rank as a member of the training. `state` is its training state, `peers` the group it is in."""

    def __init__(self, device: torch.device, backend: str | None, snapshots: Snapshots | None) -> None:
        self.device = device
        self.registry = Registry()
        self.stepper = Stepper()
        self.metrics = ReportedMetrics()
        self.start_up = start_up.current()
        self.membership = Membership.connect()
        self.peers = Peers(self.membership, backend or default_backend(device), device)
        self.meter = Meter()
        # A lost peer ends the wait of a paced step.
        self.pacer = Pacer.from_environment(time.sleep if self.membership is None else self.membership.wait_for_cut)
        self.state = TrainingState(self.registry, self.stepper, self.metrics, snapshots)
        self.flow = StateFlow(self.stepper, self.membership, lambda: self.progress.step)
        self.state.followed = self.flow
        self.gradients = Gradients(self.stepper)
        self.buffers = Buffers()
        self.loaders = Loaders()
        self.together = Together(self.state, self.peers, self.recover_inside)
        self.registers_by = "run.register()"
        """The call by which the script names its objects, for messages."""
        self.joined = False
        self.left = False
        """Whether this rank ended at a step boundary because its node is not in the next generation."""
        self.agreed = False
        """Whether all ranks know of a new generation, so that the group can be re-formed at this step boundary."""
        self.fresh = False
        """Whether this member received the state from its peers and made no step with them yet."""
        self._forming = False  # between two groups
        self._inside = False  # a group is formed in the middle of the script's code
        self._assignment: Assignment | None = None  # the rank and the peers in the present generation
        self._terminating = False
        self.last_save = LastSave(
            self._save_within,
            needed=self.state.can_save,
            someone_else_has_it=self._is_one_of_many,
            send=self._send,
            generation=lambda: self.meter.generation,
        )
        if self.membership is not None:
            keep_freed_memory()
            self.membership.on_taken = self.last_save.taken
            self.membership.is_fresh = lambda: self.fresh
            self.membership.report_failures(self.peers.is_collateral)
        on_sigterm(self._on_sigterm)

    @property
    def rank(self) -> int:
        """This rank's number in the present generation, from 0."""
        return self.peers.rank

    @property
    def world(self) -> int:
        """Number of ranks that train at present."""
        return self.peers.world

    @property
    def local_rank(self) -> int:
        """This rank's number among those on its node, from 0."""
        return self.peers.local_rank

    @property
    def local_world(self) -> int:
        """Number of ranks on this node."""
        return self.peers.local_world

    @property
    def node_rank(self) -> int:
        """This node's number in the present generation, from 0."""
        return self.peers.node_rank

    @property
    def nodes(self) -> int:
        """Number of nodes that train at present."""
        return self.peers.nodes

    @property
    def progress(self) -> Progress:
        """Progress of the training: epochs, steps and samples done."""
        return self.state.progress

    # At step boundaries.

    def join(self) -> None:
        """Become a member. A newcomer costs the other ranks nothing until they pause for it."""
        if self.joined:
            return
        if not self.stepper.optimizers:
            raise InputError(f"{self.registers_by} must be given at least one optimizer before training begins")
        if self.membership is not None:
            refuse_unknown_schedulers(self.registry.objects.values(), self.stepper.optimizers, self.registers_by)
        self.state.check_state(peers=self.membership is not None)
        self.joined = True
        self.buffers.find(self.registry.modules, self.stepper.params)
        self.gradients.follow(RIDERS + self.buffers.size)
        if self.membership is None:
            self.state.begin()
            self.buffers.commit()
            self.gradients.follow()  # a snapshot may have unfrozen layers
            self.meter.formed(0, 1)
            if self.pacer is not None:
                self.pacer.begin()
            return
        self.peers.rehearse()
        rehearse_backward(self.device)
        if self.peers.wire != self.device:
            self.gradients.whole.pin_ahead()
        self.start_up.ready()
        self.flow.follow()
        self.membership.ready()
        self._reform()

    def follow_generation(self) -> None:
        """Re-form the group if all ranks know of a new generation."""
        if self.agreed:
            self._reform()

    def rest(self) -> None:
        """Do the work between two batches. All ranks have committed the same steps and run the script's code for them.

        Newcomers that wait for the state receive it, and a snapshot is taken if one is due.
        """
        self.state.put_right()
        self.last_save.end_if_taken()
        self._follow_trained()
        self.give_owed()
        if self.world > 1:
            self.state.batch_begins()
        else:
            self.state.forget_batch()
        if self._terminating and self.membership is None:
            self.state.save()
            raise SystemExit(128 + signal.SIGTERM)
        if self.rank == 0:
            self.state.save_if_due()
        self.flow.at_rest()
        self.last_save.at_rest = True

    def give_owed(self) -> None:
        """Send the state to newcomers that joined while the script's code was running."""
        while self.state.owes:
            assert self._assignment is not None
            try:
                self.state.give_owed(self._assignment, self.peers)
                self.peers.check_whole()
            except GroupBroken as problem:
                self._recover(problem)

    def _follow_trained(self) -> None:
        """Sum the gradients of layers that were unfrozen and of groups that were added to an optimizer."""
        while not self.state.separate and self.gradients.is_behind:
            meetings = self.peers.meetings
            try:
                if meetings is not None:
                    meetings.meet("a change of the trained parameters")
            except GroupBroken as problem:
                self._recover(problem)
                continue
            self.gradients.follow()

    def fence(self, point: str) -> None:
        """Wait until all ranks are at this point of the script, and check that their states are the same."""

        def judge(notes: list[bytes]) -> bytes:
            refuse_drift(notes)
            return packed(None, point)

        self.together.meet(point, lambda: None, Note(Digest(self.registry.objects).written, judge))

    def unbroken_fence(self, point: str) -> bool:
        """Wait until all ranks are at this point. Return False, on all ranks, if a peer was lost while some waited."""
        entered = self.meter.generation

        def judge(notes: list[bytes]) -> bytes:
            return packed({int(note) for note in notes} == {self.meter.generation}, point)

        return bool(self.together.meet(point, lambda: None, Note(lambda: b"%d" % entered, judge)))

    # From one group to the next.

    def recover_inside(self, problem: GroupBroken) -> None:
        """Continue in the next group after a break in the middle of the script's code. Newcomers have to wait."""
        self._inside = True
        try:
            self._recover(problem)
        finally:
            self._inside = False

    def _recover(self, problem: GroupBroken) -> None:
        """Continue training in the next group, because the present one is broken."""
        self.peers.give_up(problem)
        self.gradients.abandon()
        self._reform()
        self.last_save.at_rest = False

    def _reform(self) -> None:
        """Continue training in the group of the newest generation."""
        membership = self.membership
        assert membership is not None
        self._forming = True
        self.last_save.at_rest = self.state.has_state and not self._inside
        self.last_save.end_if_taken(saves=not self._inside)
        paused_at = self.meter.last_at if self.state.has_state else time.perf_counter()
        try:
            assignment, form_s, sync_s = self.peers.form_anew(self._sync)
        except Leave as leave:
            self._leave(leave.generation)
        self.agreed = self._forming = False
        self._assignment = assignment
        # The received state may train other parameters. But a script that steps several optimizers may have frozen one
        # network for the pass of another, in the middle of a batch: that one stays trained.
        if self.gradients.is_behind and not (self._inside and self.state.separate):
            self.gradients.follow()
        self.gradients.group_is(alone=assignment.world == 1, check=self.peers.check_whole, wait=self.peers.wait)
        pause_s = time.perf_counter() - paused_at
        generation, nodes = assignment.generation, assignment.nodes
        self.meter.formed(generation, nodes)
        if self.pacer is not None:
            self.pacer.begin()
        self.start_up.joined()
        times = round(pause_s, 6), round(form_s, 6), round(sync_s, 6)
        membership.send(Formed(generation, nodes, *times, self.state.pause.parts(*times)))

    def _sync(self, assignment: Assignment) -> None:
        self.last_save.at_rest = False
        before, had_state = self.state.loads, self.state.has_state
        self.state.sync(assignment, self.peers, inside=self._inside)
        self.fresh = self.fresh or (self.state.took_over and not had_state)
        if self.state.loads != before or not self.buffers.committed:
            self.buffers.commit()

    def stepped(self) -> None:
        """Take note of a committed step: tell the manager how long the start took, after the first one."""
        self.fresh = False
        if (told := self.start_up.stepped()) is not None:
            self._send(FirstStep(*told))

    def _leave(self, generation: Generation) -> NoReturn:
        """End this rank at a step boundary."""
        assert self.membership is not None
        self.last_save.end_if_taken(saves=not self._inside)
        former = self._assignment.members if self._assignment is not None else ()
        is_last = not set(generation.members) & set(former)  # no node that has the state stays
        if self.state.has_state and self.local_rank == 0 and is_last and not self._inside:
            self.state.save()  # one rank per node saves
        self.left = True
        self.loaders.close()
        self.flow.leave(f"{generation.id}/0", self.state.key())
        self.membership.leave(self.progress.step)
        raise SystemExit(0)

    # Signals, and the last save when the node is taken.

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self._terminating = True
        if self.last_save.interrupt():
            return
        if not self.state.has_state:
            raise SystemExit(128 + signum)  # no other rank waits for this one yet
        if self.membership is not None:
            # In another thread, because this one may be interrupted while it sends.
            threading.Thread(target=self.membership.send, args=(Leaving(),), daemon=True).start()

    def _save_within(self, seconds: float) -> None:
        self.buffers.take_back()  # a batch that is being computed may have changed them
        self.state.save_within(seconds)

    def _is_one_of_many(self) -> bool:
        """Return whether another rank saves: the first one on this node, or the main rank of a complete group."""
        assert self.membership is not None
        if self.local_rank > 0:
            return True
        return self.rank > 0 and not self._forming and not self.membership.cut

    def _send(self, message: Message) -> None:
        if self.membership is not None:
            self.membership.send(message)
