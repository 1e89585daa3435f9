"""Seeds of a script's random numbers, by place in the training: the same on whichever rank the place is computed."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_all(*place: int) -> None:
    """Seed Python's, numpy's and torch's random numbers by a place in the training. It is called for each batch.

    `torch.manual_seed` formats a traceback for every kind of device that is not in use, which takes a millisecond.
    Those devices draw no numbers, so they are left out here.
    """
    seed = int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:8], "big") >> 1
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    if torch.xpu.is_initialized():  # type: ignore[no-untyped-call]
        torch.xpu.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
