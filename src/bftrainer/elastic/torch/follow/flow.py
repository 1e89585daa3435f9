"""State flow of one rank: follows the training before it joins, and later sends the state to newcomers.

`TrainingMember` calls it at step boundaries and before optimizer steps, `TrainingState` when a group is formed. It says
in one line whether a newcomer has followed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from bftrainer.elastic import protocol
from bftrainer.elastic.membership import Membership
from bftrainer.elastic.protocol import Donate
from bftrainer.elastic.torch.follow.donor import DonorFlows
from bftrainer.elastic.torch.follow.frames import FlowError, FlowLateError, FlowLostError
from bftrainer.elastic.torch.follow.newcomer import Following
from bftrainer.elastic.torch.follow.trained import TrainedState
from bftrainer.elastic.torch.gradients.optimizers import Stepper

LEAST_BYTES = 4 << 20
"""Size of the trained parameters from which newcomers follow. Less is sent in the pause in no time."""
_ATTEMPTS = 4


class StateFlow:
    """The flow of trained tensors to and from this rank. See `state.followed.FollowedState`."""

    def __init__(self, stepper: Stepper, membership: Membership | None, step: Callable[[], int]) -> None:
        self._membership = membership
        self._step = step
        self._trained = TrainedState(stepper)
        self._donors = DonorFlows(self._trained)
        self._following: Following | None = None
        self._kept: Tensor | None = None
        if membership is not None and membership.local_rank == 0:
            membership.on_donate = self._donate
            stepper.before_step = self._before_step

    # A newcomer.

    def follow(self) -> None:
        """Take the trained state before joining, if the manager can arrange it and there is one. Never raises."""
        membership, environment = self._membership, os.environ
        several = int(environment.get(protocol.LOCAL_WORLD) or 1) > 1
        wanted = environment.get(protocol.FOLLOW) == "1"
        if membership is None or several or not wanted:
            return
        if self._trained.parameter_bytes < LEAST_BYTES:
            return
        problem, was_lost, margin = "", False, 1
        for _ in range(_ATTEMPTS):
            following = Following(self._trained, membership)
            try:
                following.begin(margin=margin)
            except FlowError as error:
                problem = str(error)
                following.restore()
                was_lost = was_lost or isinstance(error, FlowLostError)
                margin *= 8 if isinstance(error, FlowLateError) else 1
                if not was_lost:  # after a loss the manager may not know yet who is gone
                    break
            else:
                self._following, self._kept = following, following.kept
                return
        if problem:
            print(f"bftrainer: this node takes the state when it joins: {problem}", file=sys.stderr, flush=True)

    @property
    def follows(self) -> bool:
        """See `FollowedState`."""
        return self._following is not None and not self._following.problem

    def has_caught_up(self, label: str, key: Sequence[int], check: Callable[[], None]) -> bool:
        """See `FollowedState`."""
        return self._following is not None and self._following.has_caught_up(label, key, check)

    def is_taking(self, sent: int, whole: int) -> None:
        """See `FollowedState`."""
        following, self._following = self._following, None
        if following is None:
            return
        problem = following.problem
        following.stop("the newcomer has joined")
        following.free()
        steps = f"this node has followed the training for {following.repeated} steps"
        sizes = f"{sent / 1e6:.1f} MB of {whole / 1e6:.1f} MB were sent when it joined"
        print(f"bftrainer: {steps}; {sizes}{f' ({problem})' if problem else ''}", file=sys.stderr, flush=True)

    def begins_alone(self) -> None:
        """See `FollowedState`."""
        following, self._following = self._following, None
        if following is not None:
            following.stop("nobody trains any more")
            following.restore()

    # A donor.

    def _donate(self, request: Donate) -> None:
        self._donors.add(request)

    def at_rest(self) -> None:
        """Note a step boundary: copies of the state for newcomers may begin."""
        self._donors.at_step(self._step())

    def _before_step(self, optimizer: Optimizer, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        self._donors.before_step(self._step(), optimizer, args, kwargs)

    def mark(self, label: str, key: Sequence[int]) -> None:
        """See `FollowedState`."""
        self._donors.mark(label, key)

    def trained(self) -> list[Tensor]:
        """See `FollowedState`."""
        return self._trained.tensors()

    def joined(self, members: Sequence[str]) -> None:
        """See `FollowedState`."""
        self._donors.end("the newcomer has joined", members)

    def state_was_loaded(self) -> None:
        """See `FollowedState`."""
        self._donors.end("the donor has taken over another state")

    def leave(self, label: str, key: Sequence[int]) -> None:
        """Tell newcomers how far this rank was, and end all flows: the rank leaves the training."""
        self._donors.mark(label, key)
        self._donors.close()

    def close(self) -> None:
        """End all flows."""
        self.begins_alone()
        self._donors.close()
