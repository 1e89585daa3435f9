"""The state of a training, handed from one rank to the others: whatever has `state_dict` and `load_state_dict`.

A state is a tree of plain values and tensors. To send it, the tree is taken apart into a skeleton (a few kilobytes) and
its tensors, which are broadcast in pieces straight from memory to memory.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from bftrainer.elastic.group import breaking
from bftrainer.errors import BFTrainerError, InputError

_PIECE_BYTES = 64 << 20


@runtime_checkable
class Stateful(Protocol):
    """An object whose state survives."""

    def state_dict(self) -> Any:
        """Its state."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over a state."""
        ...


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where in the skeleton a tensor was, and what it is like."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Registry:
    """The named objects that survive."""

    def __init__(self) -> None:
        self.objects: dict[str, Stateful] = {}

    def add(self, objects: Mapping[str, object]) -> None:
        """Register objects under names."""
        for name, thing in objects.items():
            if not isinstance(thing, Stateful):
                raise InputError(
                    f"`{name}` must have state_dict() and load_state_dict(), but got {type(thing).__name__}; "
                    f"wrap it in a small class that has them"
                )
            if self.objects.get(name, thing) is not thing:
                raise InputError(f"`{name}` is registered already; choose another name")
            self.objects[name] = thing

    def capture(self) -> dict[str, Any]:
        """The state of all of them. Its tensors are the live ones."""
        return {name: thing.state_dict() for name, thing in self.objects.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state, whose names must be those registered here."""
        missing, surplus = self.objects.keys() - state.keys(), state.keys() - self.objects.keys()
        if missing or surplus:
            named = ", ".join(sorted(missing or surplus))
            raise BFTrainerError(
                f"the state {'lacks' if missing else 'holds'} {named}, which the script "
                f"{'registers' if missing else 'does not register'}: was it written by another version of it?"
            )
        for name, thing in self.objects.items():
            try:
                thing.load_state_dict(state[name])
            except Exception as problem:
                raise BFTrainerError(f"the state of {name!r} does not fit: {problem}") from problem

    def keep_untrained(self, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        """What puts back the present state of all that the script itself may move after a step: schedulers, averages,
        the values in `param_groups`; not what the optimizers train.
        """
        trained = {id(p) for opt in optimizers for group in opt.param_groups for p in group["params"]}
        others = {
            name: thing
            for name, thing in self.objects.items()
            if not isinstance(thing, Optimizer)
            and not (isinstance(thing, nn.Module) and any(id(p) in trained for p in thing.parameters()))
        }
        states = {name: copy.deepcopy(thing.state_dict()) for name, thing in others.items()}
        groups = [
            [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in opt.param_groups]
            for opt in optimizers
        ]

        def put_back() -> None:
            for name, thing in others.items():
                thing.load_state_dict(states[name])
            for opt, kept in zip(optimizers, groups, strict=True):
                for group, values in zip(opt.param_groups, kept, strict=True):
                    group.update(values)

        return put_back


def broadcast(state: Mapping[str, Any] | None, source: int, device: torch.device) -> dict[str, Any]:
    """The state of rank `source`, on every rank; `state` matters there only.

    Raises `GroupBroken` when a peer is lost on the way.
    """
    tensors: list[Tensor] = []
    packed = b""
    if state is not None:
        file = io.BytesIO()
        torch.save(_take_apart(state, tensors), file)
        packed = file.getvalue()
    size = torch.tensor([len(packed)], dtype=torch.int64, device=device)
    _send(size, source)
    body = torch.frombuffer(bytearray(packed), dtype=torch.uint8) if state is not None else None
    raw = body.to(device) if body is not None else torch.empty(int(size), dtype=torch.uint8, device=device)
    _send(raw, source)
    # The peer is another process of the same job, of the same user, running the same script.
    skeleton = torch.load(io.BytesIO(bytes(raw.cpu().numpy())), weights_only=False)
    slots = sorted(_slots(skeleton), key=lambda slot: slot.number)
    if state is None:
        tensors = [torch.empty(slot.shape, dtype=slot.dtype) for slot in slots]
    for piece in _pieces(slots):
        _broadcast_piece([tensors[slot.number] for slot in piece], source, device, sends=state is not None)
    whole: dict[str, Any] = _put_together(skeleton, tensors)
    return whole


def _send(tensor: Tensor, source: int) -> None:
    """The one thing here that a lost peer can break."""
    with breaking():
        dist.broadcast(tensor, source)


def _broadcast_piece(tensors: list[Tensor], source: int, device: torch.device, *, sends: bool) -> None:
    """Some tensors of one kind in one go."""
    if len(tensors) == 1 and tensors[0].device == device and tensors[0].is_contiguous():
        _send(tensors[0].detach(), source)
        return
    if sends:
        flat = torch.cat([tensor.detach().reshape(-1).to(device) for tensor in tensors])
    else:
        flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device=device)
    _send(flat, source)
    if not sends:
        pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))


def _pieces(slots: list[_Slot]) -> Iterator[list[_Slot]]:
    """Tensors of one kind together, up to a piece's size, in an order that all ranks derive alike."""
    by_kind: dict[torch.dtype, list[_Slot]] = {}
    for slot in slots:
        by_kind.setdefault(slot.dtype, []).append(slot)
    for dtype, group in by_kind.items():
        piece: list[_Slot] = []
        size = 0
        for slot in group:
            bytes_ = torch.Size(slot.shape).numel() * dtype.itemsize
            if piece and size + bytes_ > _PIECE_BYTES:
                yield piece
                piece, size = [], 0
            piece.append(slot)
            size += bytes_
        yield piece


def _take_apart(tree: Any, tensors: list[Tensor]) -> Any:
    """The tree with slots in place of its tensors, which are appended."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return _Slot(len(tensors) - 1, tree.dtype, tuple(tree.shape))
    if isinstance(tree, Mapping):
        return {key: _take_apart(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        return type(tree)(_take_apart(value, tensors) for value in tree)
    return tree


def _put_together(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, _Slot):
        return tensors[tree.number]
    if isinstance(tree, dict):
        return {key: _put_together(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        return type(tree)(_put_together(value, tensors) for value in tree)
    return tree


def _slots(tree: Any) -> Iterator[_Slot]:
    if isinstance(tree, _Slot):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _slots(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _slots(value)
