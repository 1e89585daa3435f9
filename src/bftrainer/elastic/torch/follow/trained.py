"""Trained state: the parameters and states of the registered optimizers, and the steps that change them.

Both change only in `optimizer.step()`. So a rank that has them after step S, and then makes the same optimizer steps on
the same gradients with the same settings, has the same bytes as the others. A donor takes the state apart and records
steps; a newcomer loads the state and makes the recorded steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bftrainer.elastic.torch.follow.flat import ALIGNMENT, FlatLayout, Spec
from bftrainer.elastic.torch.follow.frames import FlowError
from bftrainer.elastic.torch.follow.memory import make_room
from bftrainer.elastic.torch.gradients.optimizers import Stepper, params_of
from bftrainer.elastic.torch.snapshots.portable import portable, restored
from bftrainer.elastic.torch.state import transfer


@dataclass(frozen=True, slots=True)
class TrainedTree:
    """The trained state at one moment: plain values with slots, and the live tensors for the slots."""

    skeleton: Any
    tensors: list[Tensor]
    layout: FlatLayout


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What one optimizer step depends on, besides the trained state. `gradients` are live tensors."""

    header: dict[str, Any]
    gradients: list[Tensor]
    layout: FlatLayout


class TrainedState:
    """The trained state of this rank."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    @property
    def parameter_bytes(self) -> int:
        """Size of the trained parameters."""
        return sum(param.nbytes for param in self._stepper.params)

    @property
    def gpu(self) -> torch.device | None:
        """The GPU that trained parameters are on; None if none is."""
        return next((param.device for param in self._stepper.params if param.is_cuda), None)

    def choose_gpu(self) -> None:
        """Make that GPU the present thread's: a new thread begins on the first one."""
        if (gpu := self.gpu) is not None:
            torch.cuda.set_device(gpu)

    @property
    def estimated_bytes(self) -> int:
        """Size of the trained state, with some room to spare. For any thread: an optimizer may be in its step."""
        size = self.parameter_bytes
        for optimizer in self._stepper.optimizers:
            for state in list(optimizer.state.values()):
                size += sum(value.nbytes + ALIGNMENT for value in list(state.values()) if isinstance(value, Tensor))
        return size + ALIGNMENT * (len(self._stepper.params) + 1024)

    @property
    def gradient_sizes(self) -> list[int]:
        """Size of each gradient on the CPU."""
        params = (param for param in self._stepper.params if param.requires_grad and not param.is_cuda)
        return [param.nbytes for param in params]

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradients of the largest optimizer step, as they are sent."""
        optimizers = self._stepper.optimizers
        return max(FlatLayout([Spec.of(param) for param in params_of([optimizer])]).size for optimizer in optimizers)

    def tree(self) -> TrainedTree:
        """Return the present state. Raises an InputError that names a value that cannot be sent."""
        optimizers = self._stepper.optimizers
        state = {
            "params": [[param.detach() for param in params_of([optimizer])] for optimizer in optimizers],
            "optimizers": [_in_order(optimizer.state_dict()) for optimizer in optimizers],
        }
        skeleton, tensors = transfer.take_apart(state)
        return TrainedTree(skeleton, tensors, FlatLayout([Spec.of(tensor) for tensor in tensors]))

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the present state."""
        return self.tree().tensors

    def load(self, skeleton: Any, flat: Tensor) -> Callable[[], None]:
        """Load a state whose tensors lie in `flat`. Return a function that restores what was here before.

        Raises a `FlowError` if the others train other parameters than those here.
        """
        slots = transfer.slots_of(skeleton)
        layout = FlatLayout([Spec(tuple(slot.shape), slot.dtype) for slot in slots])
        if layout.size != flat.numel():
            raise FlowError(f"the state has {flat.numel()} bytes instead of {layout.size}")
        views, params = layout.views(flat), sum(map(len, skeleton["params"]))
        # The optimizers keep what they are given, so that gets memory of its own, on the device where they want it.
        device = self.gpu or torch.device("cpu")
        own = [
            view.to("cpu" if slot.on_cpu else device, copy=True)
            for slot, view in zip(slots[params:], views[params:], strict=True)
        ]
        state = transfer.put_together(skeleton, views[:params] + own)
        optimizers = self._stepper.optimizers
        here = [[Spec.of(param) for param in params_of([optimizer])] for optimizer in optimizers]
        if here != [[Spec.of(value) for value in values] for values in state["params"]]:
            raise FlowError("the others train other parameters than this node at its start")
        before = _in_one_block(self._stepper.params)
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]

        def restore() -> None:
            self._put(before, states)

        values = [value for values in state["params"] for value in values]
        try:
            self._put(values, state["optimizers"])
        except (ValueError, KeyError, RuntimeError) as problem:
            restore()
            raise FlowError(f"the state of an optimizer does not fit: {problem}") from problem
        return restore

    def _put(self, values: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
        with torch.no_grad():
            for param, value in zip(self._stepper.params, values, strict=True):
                param.copy_(value)
        for optimizer, state in zip(self._stepper.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def record(self, optimizer: Optimizer, step: int) -> RecordedStep:
        """Return what the step that `optimizer` is about to make depends on. Raises a `FlowError` if it is more."""
        amp = [name for name in ("grad_scale", "found_inf") if getattr(optimizer, name, None) is not None]
        if amp:
            raise FlowError(f"{type(optimizer).__name__} unscales gradients itself (fused, with a GradScaler)")
        params = params_of([optimizer])
        gradients = [param.grad for param in params if param.grad is not None]
        if any(gradient.layout is not torch.strided for gradient in gradients):
            raise FlowError("there are sparse gradients")
        header = {
            "kind": "step",
            "step": step,
            "optimizer": self._stepper.optimizers.index(optimizer),
            "present": [param.grad is not None for param in params],
            "groups": portable({"groups": _settings(optimizer)}, lambda tensor: tensor.cpu().clone())["groups"],
        }
        return RecordedStep(header, gradients, FlatLayout([Spec.of(gradient) for gradient in gradients]))

    def repeat(self, header: Mapping[str, Any], flat: Tensor) -> None:
        """Make a recorded step, with the gradients that lie in `flat`."""
        optimizer = self._stepper.optimizers[header["optimizer"]]
        params, present = params_of([optimizer]), header["present"]
        if len(params) != len(present) or len(optimizer.param_groups) != len(header["groups"]):
            raise FlowError("the others have begun to train other parameters")
        used = [param for param, flag in zip(params, present, strict=True) if flag]
        layout = FlatLayout([Spec.of(param) for param in used])
        if layout.size != flat.numel():
            raise FlowError(f"the gradients have {flat.numel()} bytes instead of {layout.size}")
        for param, gradient in zip(used, layout.views(flat), strict=True):
            param.grad = gradient.to(param.device, non_blocking=True)
        for group, settings in zip(optimizer.param_groups, restored(header["groups"]), strict=True):
            _set(group, settings)
        try:
            self._stepper.step_as_is(optimizer)
        finally:
            for param in params:
                param.grad = None
        if (gpu := self.gpu) is not None:
            torch.cuda.current_stream(gpu).synchronize()  # the memory of the gradients is used again


def _in_one_block(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors that share one block of memory, which goes back to the system as soon as they do."""
    layout = FlatLayout([Spec.of(tensor) for tensor in tensors])
    if any(tensor.is_cuda for tensor in tensors):
        return [tensor.detach().clone() for tensor in tensors]
    room = make_room(layout.size, pinned=False)
    layout.copy(tensors, 0, layout.size, room)
    return layout.views(room)


def _in_order(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with the parameters in order: a rank may have used them in another order."""
    made = dict(state)
    inner = made.get("state")
    if isinstance(inner, dict) and all(isinstance(key, int) for key in inner):
        made["state"] = dict(sorted(inner.items()))
    return made


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _set(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        own = group.get(name)
        if isinstance(own, Tensor) and isinstance(value, Tensor):
            own.copy_(value)
        else:
            group[name] = value
