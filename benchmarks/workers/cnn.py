"""The model and data of the elastic benchmarks: a CNN of about 100,000 parameters on synthetic images."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def make_model() -> nn.Module:
    """Two convolutions and two linear layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 60),
        nn.ReLU(),
        nn.Linear(60, 10),
    )


def make_data(samples: int = 4096) -> TensorDataset:
    """Images of 28 × 28 and ten classes."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 1, 28, 28, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (samples,), generator=generator))
