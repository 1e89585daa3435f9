"""Seeds of a script's random numbers, by place in the training: the same on whichever rank the place is computed."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_all(*place: int) -> None:
    """Seed Python's, numpy's and torch's random numbers by a place in the training."""
    seed = int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:8], "big") >> 1
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
