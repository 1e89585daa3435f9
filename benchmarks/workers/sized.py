"""A model whose parameters and momentum have a given number of megabytes, and a batch for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim

_WIDE, _NARROW = 1024, 128


def make_sized(megabytes: float) -> tuple[nn.Module, optim.Optimizer, Tensor]:
    """Return the model, its optimizer and the inputs of every step."""
    width = _WIDE if megabytes * 1e6 >= 8 * _WIDE * _WIDE else _NARROW
    layers = max(1, round(megabytes * 1e6 / (2 * 4 * width * width)))  # each number has a momentum of four bytes, too
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    return model, optim.SGD(model.parameters(), lr=1e-4, momentum=0.9), torch.randn(8, width)
