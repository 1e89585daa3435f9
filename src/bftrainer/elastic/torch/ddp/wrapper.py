"""Stand-in for DistributedDataParallel: a module with the same interface that leaves the gradients alone.

Gradients are summed by `elastic.torch.prepare` after each backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from bftrainer.elastic.torch.ddp.refused import refuse

_found: Callable[[nn.Module], None] | None = None


def tell_of_models(found: Callable[[nn.Module], None]) -> None:
    """Have `found` called with each module that a script wraps."""
    global _found
    _found = found


class StandInDataParallel(nn.Module):
    """A wrapped module. `state_dict` has the keys that DistributedDataParallel gives them."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: Any = None,
        find_unused_parameters: bool = False,
        **options: Any,
    ) -> None:
        """Wrap a module. The arguments are those of torch; those for communication have nothing to do here."""
        super().__init__()
        if process_group is not None:
            refuse("DistributedDataParallel(process_group=…): all ranks train together")
        if not any(param.requires_grad for param in module.parameters()):
            raise RuntimeError("DistributedDataParallel is not needed when a module has no trained parameter")
        self.module = module
        self.device_ids = device_ids
        self.output_device = output_device
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True
        if _found is not None:
            _found(module)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Compute the wrapped module."""
        return self.module(*inputs, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients: every sum over the ranks is a sum of all passes since the last step anyway."""
        yield

    @contextmanager
    def join(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Train with uneven inputs: each rank gets its share of every batch anyway."""
        yield

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Refuse to change how gradients are summed."""
        refuse("register_comm_hook: BFTrainer sums the gradients itself")
