"""Registration of a script's objects: checks them before they change anything.

`Run.register` passes its arguments to `Registration`, which returns the objects that are new and the options of all
calls together.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from bftrainer.elastic.torch.arguments import positive
from bftrainer.elastic.torch.data.batch_plan import whole_number
from bftrainer.elastic.torch.gradients.lr_scaling import RULES
from bftrainer.elastic.torch.state.transfer import Stateful
from bftrainer.errors import InputError

DEFAULTS: Mapping[str, Any] = {
    "lr_scaling": "none",
    "lr_warmup_steps": 0,
    "lr_base_batch": None,
    "clip_norm": None,
    "scheduler_every": None,
}
"""Default values of the options of `Run.register`."""
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


class Registration:
    """All objects and options registered so far."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._options: dict[str, Any] = dict(DEFAULTS)

    def add(
        self, unnamed: Sequence[object], objects: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the new objects and the options of all calls together. A call that is refused leaves no trace."""
        if unnamed:
            raise InputError(
                "run.register() needs a name for each object: run.register(model=model, optimizer=optimizer)"
            )
        given = {name: value for name, value in options.items() if not _is_default(name, value)}
        if not objects and not given:
            raise InputError(
                "run.register() was given nothing; give it all that changes during training: "
                "run.register(model=model, optimizer=optimizer)"
            )
        for name, thing in objects.items():
            _check_object(name, thing)
        new = {name: thing for name, thing in objects.items() if self._objects.get(name) is not thing}
        merged = self._merged(given)
        _check_together({**self._objects, **new}, [*self._objects.items(), *new.items()], merged)
        self._objects |= new
        self._options = merged
        return new, merged

    def _merged(self, given: Mapping[str, Any]) -> dict[str, Any]:
        _check_options(given)
        for name, value in given.items():
            if self._options[name] not in (DEFAULTS[name], value):
                raise InputError(f"`{name}` was registered as {self._options[name]!r} before, but now got {value!r}")
        return {**self._options, **given}


def _is_default(name: str, value: object) -> bool:
    return type(value) is type(DEFAULTS[name]) and bool(value == DEFAULTS[name])


def _check_object(name: str, thing: Any) -> None:
    if isinstance(thing, type):
        raise InputError(
            f"`{name}` must be an object, but got the class {thing.__name__}; give an instance, {thing.__name__}(…)"
        )
    if not isinstance(thing, Stateful):
        raise InputError(
            f"`{name}` must have state_dict() and load_state_dict(), but got {type(thing).__name__}; "
            f"{_remedy(name, thing)}"
        )
    if isinstance(thing, nn.Module):
        wrapped = {base.__name__ for module in thing.modules() for base in _bases(type(module))} & _WRAPPERS
        if wrapped:
            raise InputError(
                f"`{name}` is wrapped in {min(wrapped)}; do not wrap the model: BFTrainer sums the gradients over all "
                "ranks. Give and call the plain module (model.module), or submit the unchanged script with --launcher "
                "ddp"
            )
    if isinstance(thing, Optimizer) and _needs_closure(thing):
        raise InputError(
            f"`{name}` is {type(thing).__name__}, whose step() needs a closure that computes the loss again, which "
            "cannot be done on all ranks; use an optimizer that steps on given gradients, such as AdamW or SGD"
        )


def _remedy(name: str, thing: object) -> str:
    close = difflib.get_close_matches(name, DEFAULTS, n=1, cutoff=0.8)
    if close:
        return f"did you mean the option `{close[0]}`?"
    if thing is None or isinstance(thing, bool | int | float | str | dict):
        shown = repr(thing) if len(repr(thing)) < 30 else "…"
        return f"for a value of the script write {name} = elastic.Value({shown}), register that and use {name}.value"
    if isinstance(thing, Tensor):
        return "make it a parameter or buffer of a registered module"
    if isinstance(thing, list | tuple) or inspect.isgenerator(thing):
        return "register the module that has these parameters, and each object under a name of its own"
    return "wrap it in a small class that has them"


def _bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.startswith("torch.")]


def _needs_closure(optimizer: Optimizer) -> bool:
    # Look at the class: schedulers replace the method of the object.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check_options(given: Mapping[str, Any]) -> None:
    rule = given.get("lr_scaling", "none")
    if not (callable(rule) or (isinstance(rule, str) and rule in RULES)):
        raise InputError(f"`lr_scaling` must be {', '.join(RULES)} or a function, but got {rule!r}")
    if "lr_warmup_steps" in given:
        whole_number("lr_warmup_steps", given["lr_warmup_steps"], 0)
    if "lr_base_batch" in given:
        whole_number("lr_base_batch", given["lr_base_batch"], 1)
    if "clip_norm" in given:
        positive("clip_norm", given["clip_norm"])
    if given.get("scheduler_every") not in (None, "step", "epoch"):
        raise InputError(f"`scheduler_every` must be 'step', 'epoch' or None, but got {given['scheduler_every']!r}")


def _check_together(objects: Mapping[str, Any], named: Sequence[tuple[str, Any]], options: Mapping[str, Any]) -> None:
    """Refuse objects that are valid one by one but not in combination."""
    names: dict[int, str] = {}
    trained: dict[int, str] = {}
    scalers: list[str] = []
    for name, thing in named:
        if objects[name] is not thing:
            raise InputError(f"`{name}` is registered already; choose another name")
        if id(thing) in names:
            raise InputError(f"`{name}` is the object registered as `{names[id(thing)]}`; register it once")
        names[id(thing)] = name
        if isinstance(thing, Optimizer):
            for param in (param for group in thing.param_groups for param in group["params"]):
                if trained.setdefault(id(param), name) != name:
                    raise InputError(
                        f"the optimizers `{trained[id(param)]}` and `{name}` share a parameter of shape "
                        f"{tuple(param.shape)}, which each step would train twice; give it to one of them"
                    )
        elif isinstance(thing, torch.amp.GradScaler):
            scalers.append(name)
        elif isinstance(thing, ReduceLROnPlateau) and options["scheduler_every"] is not None:
            raise InputError(
                f"`{name}` is ReduceLROnPlateau, which `scheduler_every` cannot step: it needs a number. Leave "
                f"`scheduler_every` out and call {name}.step(run.mean('loss')) after the batches of each epoch"
            )
    if len(scalers) > 1:
        raise InputError(f"one GradScaler must be registered for all optimizers, but got {' and '.join(scalers)}")


def refuse_sync_batch_norm(objects: Mapping[str, Any]) -> None:
    """Refuse SyncBatchNorm on the CPU, where torch has none: it would fail in the first step on two nodes."""
    for name, thing in objects.items():
        if isinstance(thing, nn.Module) and any(isinstance(part, nn.SyncBatchNorm) for part in thing.modules()):
            raise InputError(
                f"`{name}` has SyncBatchNorm layers, which torch runs on GPUs only; use BatchNorm, whose running "
                "statistics are averaged over the ranks, or GroupNorm"
            )
