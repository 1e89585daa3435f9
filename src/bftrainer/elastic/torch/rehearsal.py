"""Rehearsal: a newcomer makes torch do what a first step needs before the others pause for it.

The first product of two matrices in a process loads the libraries that compute it, and the first backward pass starts
autograd's threads; on a GPU this takes a good part of a second. Nothing that the script computes changes: no random
number is drawn and no state is kept.
"""

from __future__ import annotations

import contextlib

import torch

_SIZE = 64


def rehearse_backward(device: torch.device) -> None:
    """Compute a small product and its gradient on a device."""
    with contextlib.suppress(RuntimeError), torch.enable_grad():  # no memory left on the device, for example
        values = torch.ones(_SIZE, _SIZE, device=device, requires_grad=True)
        (values @ values).sum().backward()  # type: ignore[no-untyped-call]
