"""Hidden state: the part of a training's state that no `state_dict()` holds.

`TrainingState` sends it with the registered objects, so that a newcomer has the complete state. It consists of: which
parameters are trained at the moment (layers may be unfrozen during training), parameter groups that were added later,
buffers that a module does not save, and parameters that belong to no registered module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bftrainer.errors import BFTrainerError


class HiddenState:
    """State that `capture` reads from registered objects, and `load` puts into those of another rank."""

    def __init__(self) -> None:
        self._modules: dict[str, nn.Module] = {}
        self._optimizers: dict[str, Optimizer] = {}
        self._taken_over: set[int] = set()  # parameters in groups that `load` has added

    def add(self, objects: Mapping[str, object]) -> None:
        """Remember the modules and optimizers among `objects`."""
        for name, thing in objects.items():
            if isinstance(thing, nn.Module):
                self._modules[name] = thing
            elif isinstance(thing, Optimizer) and name not in self._optimizers:
                self._optimizers[name] = thing
                self._accept_again(thing)

    def capture(self) -> dict[str, Any]:
        """Return the state. Its tensors are the live ones."""
        names = self._names()
        return {
            "groups": {
                name: [[names.get(id(param)) for param in group["params"]] for group in optimizer.param_groups]
                for name, optimizer in self._optimizers.items()
            },
            "trained": {
                name: [[param.requires_grad for param in group["params"]] for group in optimizer.param_groups]
                for name, optimizer in self._optimizers.items()
            },
            "orphans": [param.detach() for param in self._orphans(names)],
            "buffers": {name: buffer.detach() for name, buffer in self._unsaved_buffers().items()},
        }

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Add the parameter groups that are missing here, so that the optimizers' own state fits."""
        params = {name: param for module in self._named_parameters() for name, param in module}
        for name, groups in state.get("groups", {}).items():
            optimizer = self._optimizers.get(name)
            for group in groups[len(optimizer.param_groups) :] if optimizer is not None else ():
                missing = [known for known in group if known not in params]
                if missing:
                    raise BFTrainerError(
                        f"parameters were added to {name!r} by add_param_group() that belong to no registered module; "
                        "register that module too, so that newcomers can find them"
                    )
                added = [params[known] for known in group]
                assert optimizer is not None
                Optimizer.add_param_group(optimizer, {"params": added})
                self._taken_over.update(map(id, added))

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the rest, after the registered objects have loaded their own state."""
        for name, groups in state.get("trained", {}).items():
            optimizer = self._optimizers.get(name)
            for here, flags in zip(optimizer.param_groups if optimizer is not None else (), groups, strict=False):
                for param, trained in zip(here["params"], flags, strict=True):
                    if param.requires_grad != trained:
                        param.requires_grad_(trained)
        with torch.no_grad():
            for param, value in zip(self._orphans(self._names()), state.get("orphans", ()), strict=False):
                param.copy_(value)
            buffers = self._unsaved_buffers()
            for name, value in state.get("buffers", {}).items():
                if name in buffers and buffers[name].shape == value.shape:
                    buffers[name].copy_(value)

    def _named_parameters(self) -> Sequence[Sequence[tuple[str, nn.Parameter]]]:
        return [
            [(f"{name}.{inner}", param) for inner, param in module.named_parameters()]
            for name, module in self._modules.items()
        ]

    def _names(self) -> dict[int, str]:
        return {id(param): name for module in self._named_parameters() for name, param in module}

    def _orphans(self, names: Mapping[int, str]) -> list[Tensor]:
        return [
            param
            for optimizer in self._optimizers.values()
            for group in optimizer.param_groups
            for param in group["params"]
            if id(param) not in names
        ]

    def _unsaved_buffers(self) -> dict[str, Tensor]:
        return {
            f"{name}.{path}.{inner}": buffer
            for name, module in self._modules.items()
            for path, part in module.named_modules()
            for inner, buffer in part._buffers.items()
            if buffer is not None and inner in part._non_persistent_buffers_set
        }

    def _accept_again(self, optimizer: Optimizer) -> None:
        """Ignore a call by the script that adds a group which came with the state already.

        A worker that joins in the epoch in which the others added the group runs the same line as they did.
        """
        add = optimizer.add_param_group

        def add_param_group(param_group: dict[str, Any]) -> None:
            params = param_group.get("params")
            listed = [params] if isinstance(params, Tensor) else list(params or ())
            tensors = [item[1] if isinstance(item, tuple) else item for item in listed]
            if tensors and all(id(param) in self._taken_over for param in tensors):
                self._taken_over.difference_update(map(id, tensors))
                return
            add({**param_group, "params": listed})

        optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
