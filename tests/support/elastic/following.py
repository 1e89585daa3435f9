"""Ranks of one process that train the same model, and a newcomer that follows them: no manager, no group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bftrainer.elastic.protocol import Donate
from bftrainer.elastic.torch.follow.donor import DonorFlows
from bftrainer.elastic.torch.follow.newcomer import Following
from bftrainer.elastic.torch.follow.trained import TrainedState
from bftrainer.elastic.torch.gradients.optimizers import Stepper

PATIENCE_S = 60.0
MakeOptimizers = Callable[[nn.Module], list[Any]]


def make_model(seed: int = 0, width: int = 32) -> nn.Module:
    """A model with layers of different sizes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 3))


class Rank:
    """One rank: a model and its optimizers, as `run.register` gives them to a `Stepper`."""

    def __init__(self, make: MakeOptimizers, seed: int = 0, width: int = 32, **options: Any) -> None:
        self.model = make_model(seed, width)
        self.stepper = Stepper()
        self.stepper.configure(
            **{
                "scheduler_every": None,
                "clip_norm": None,
                "rule": "none",
                "warmup_steps": 0,
                "base_batch": None,
                **options,
            }
        )
        self.stepper.add(make(self.model))
        self.trained = TrainedState(self.stepper)
        self.flows = DonorFlows(self.trained)
        self.step = 0
        self.stepper.before_step = self._before_step

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.flows.before_step(self.step, optimizer, args, kwargs)

    def train(self, gradient: Callable[[nn.Module, int], None]) -> None:
        """Make one step on gradients that all ranks have."""
        self.flows.at_step(self.step)
        gradient(self.model, self.step)
        self.stepper.apply(self.step)
        self.step += 1

    def bytes(self) -> str:
        """A checksum of all trained tensors."""
        tree = self.trained.tree()
        return tree.layout.checksum(tree.tensors, 0, tree.layout.size)


def gradients(model: nn.Module, step: int) -> None:
    """Set gradients that depend on the step alone."""
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


class Asking:
    """Stands in for the newcomer's connection to its manager: asks the donors itself."""

    address = "127.0.0.1"

    def __init__(self, donors: list[Rank], worker: str = "newcomer") -> None:
        self._donors = donors
        self._worker = worker
        self.donors = len(donors)

    def follow(self, address: str, secret: str, timeout_s: float) -> int | None:
        """See `Membership.follow`."""
        for share, donor in enumerate(self._donors):
            donor.flows.add(Donate(self._worker, address, secret, share, len(self._donors)))
        return len(self._donors)


def begun(newcomer: Rank, donors: list[Rank]) -> Following:
    """A newcomer that is about to follow these donors."""
    asking: Any = Asking(donors)
    return Following(newcomer.trained, asking)


@contextmanager
def training(ranks: list[Rank], gradient: Callable[[nn.Module, int], None] = gradients) -> Iterator[threading.Event]:
    """Train in another thread until the block ends or the event is set."""
    enough = threading.Event()
    problems: list[BaseException] = []

    def keep_training() -> None:
        try:
            while not enough.wait(0.002):
                for rank in ranks:
                    rank.train(gradient)
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=keep_training)
    thread.start()
    try:
        yield enough
    finally:
        enough.set()
        thread.join(PATIENCE_S)
        if problems:
            raise problems[0]
