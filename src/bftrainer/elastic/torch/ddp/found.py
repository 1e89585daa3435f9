"""Objects of a ddp script that change in training: noted when the script makes them, prepared at its first batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bftrainer.elastic.torch.ddp.refused import is_of_script, refuse, script_folder


class FoundObjects:
    """Models that were wrapped, and optimizers, schedulers and GradScalers, in the order they were made."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self._made: list[Any] = []
        self._closed = False

    def watch(self) -> None:
        """Note all objects that are made from now on."""
        # Some schedulers of torch do not call the constructor of their base class.
        for kind in (Optimizer, LRScheduler, *_subclasses(LRScheduler), torch.amp.GradScaler):
            if "__init__" in vars(kind):
                _after_init(kind, self._note)

    def add_model(self, module: nn.Module) -> None:
        """Note a module that the script wraps."""
        if self._closed:
            refuse("a model is wrapped in DistributedDataParallel after training began")
        if not any(module is known for known in self.models):
            self.models.append(module)

    def close(self) -> list[Any]:
        """Return all objects to prepare. Objects made later are refused."""
        self._closed = True
        trained = {id(param) for model in self.models for param in model.parameters()}
        optimizers = [one for one in self._made if isinstance(one, Optimizer) and _params(one) & trained]
        others = [one for one in self._made if not isinstance(one, Optimizer)]
        inner = {id(one) for outer in others for one in getattr(outer, "_schedulers", ())}
        steered = [one for one in others if _steers(one, optimizers) and id(one) not in inner]
        return [*self.models, *_loose_modules(self.models), *optimizers, *steered]

    def _note(self, made: Any) -> None:
        if self._closed:
            refuse(f"a {type(made).__name__} is made after training began, when newcomers cannot receive its state")
        if not any(made is known for known in self._made):
            self._made.append(made)


def _after_init(kind: type, note: Callable[[Any], None]) -> None:
    real = kind.__init__  # type: ignore[misc]

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        note(self)

    init.__wrapped__ = real  # type: ignore[attr-defined]
    kind.__init__ = init  # type: ignore[misc]


def _subclasses(kind: type[Any]) -> list[type[Any]]:
    found: list[type[Any]] = list(kind.__subclasses__())
    for direct in tuple(found):
        found += _subclasses(direct)
    return found


def _params(optimizer: Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _steers(thing: Any, optimizers: list[Optimizer]) -> bool:
    """Whether a scheduler belongs to one of these optimizers. GradScalers serve all."""
    optimizer = getattr(thing, "optimizer", None)
    return optimizer is None or any(optimizer is known for known in optimizers)


def _loose_modules(models: list[nn.Module]) -> list[nn.Module]:
    """Return other modules with a state that the script holds, such as averages of the weights.

    They are found by the names in the script's running functions, in an order that is the same on all ranks.
    """
    known = {id(part) for model in models for part in model.modules()}
    found: list[nn.Module] = []
    folder = script_folder()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_script(frame.f_globals, folder):
            for names in (frame.f_locals, frame.f_globals):
                for thing in list(names.values()):
                    module = sys.modules.get(type(thing).__module__)
                    own = module is not None and is_of_script(vars(module), folder)
                    held = getattr(thing, "__dict__", {}).values() if own else ()
                    _collect([thing, *held], known, found)
        frame = frame.f_back
    return found


def _collect(things: list[Any], known: set[int], found: list[nn.Module]) -> None:
    for thing in things:
        if not isinstance(thing, nn.Module) or any(id(part) in known for part in thing.modules()):
            continue
        if thing.state_dict():
            known.update(id(part) for part in thing.modules())
            found.append(thing)
