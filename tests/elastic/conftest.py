"""A run in this process, without a manager."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from bftrainer import elastic


@pytest.fixture
def sigterm_restored() -> Iterator[None]:
    """`elastic.init` handles SIGTERM; afterwards all is as before."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run() -> elastic.Run:
    """A run of one rank with a small model."""
    import torch

    made = elastic.init(device="cpu")
    model = torch.nn.Linear(1, 1)
    made.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    return made
