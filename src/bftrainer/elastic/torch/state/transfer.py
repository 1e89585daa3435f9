"""State transfer: sends a training's state from one rank to the others.

A state is a tree of plain values and tensors, from objects with `state_dict` and `load_state_dict`. To send it, the
tree is split into a skeleton (a few kilobytes) and its tensors. The tensors are broadcast in pieces straight from
memory to memory, as bytes, so every tensor type works with every backend. Nothing that a peer sent is unpickled as
code: the skeleton is read as `torch.load` reads weights. Where nodes have several ranks, `hand_over.py` sends the
tensors in another way.
"""

from __future__ import annotations

import copy
import io
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from bftrainer.elastic.torch.group import nccl
from bftrainer.elastic.torch.group.group import breaking
from bftrainer.elastic.torch.snapshots.portable import portable, restored
from bftrainer.errors import BFTrainerError, InputError

PIECE_BYTES = 64 << 20
"""Most bytes that are sent at a time."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state survives when nodes come and go."""

    def state_dict(self) -> Any:
        """Return the object's state."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load a state."""
        ...


_LARGE = (Optimizer, nn.Module)
"""Types of objects that may hold large tensors."""


class FreshState:
    """Base class of objects whose `state_dict` is made anew at each call, and never changed: it needs no copy."""


_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
"""Types whose values need no copy."""
_MARK = "\0tensor"
"""First item of a tuple in a skeleton that stands for a tensor."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Placeholder of a tensor in the skeleton, with the tensor's properties."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    on_cpu: bool

    def as_plain(self) -> tuple[Any, ...]:
        """Return the tuple that stands for the slot in a skeleton that is sent."""
        return (_MARK, self.number, self.dtype, self.shape, self.on_cpu)


class Registry:
    """The registered objects by name."""

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

    @property
    def modules(self) -> list[nn.Module]:
        """The registered modules, sorted by name."""
        named = sorted(self.objects.items())
        return [thing for _, thing in named if isinstance(thing, nn.Module)]

    def capture(self) -> dict[str, Any]:
        """Return the state of all objects. Its tensors are the live ones."""
        return {name: thing.state_dict() for name, thing in self.objects.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state, whose names must be those registered here."""
        missing, surplus = self.objects.keys() - state.keys(), state.keys() - self.objects.keys()
        if missing or surplus:
            named = ", ".join(sorted(missing or surplus))
            raise BFTrainerError(
                f"the state {'lacks' if missing else 'holds'} {named}, which the script "
                f"{'registers' if missing else 'does not register'}: was it written by another version of it?"
            )
        for name, thing in self.objects.items():
            its = _without_copies(thing, state[name]) if isinstance(thing, nn.Module) else state[name]
            try:
                thing.load_state_dict(its)
            except Exception as problem:
                raise BFTrainerError(f"the state of {name!r} does not fit: {problem}") from problem

    def keep_untrained(self, optimizers: Sequence[Optimizer], *, modules: bool = True) -> Callable[[], None]:
        """Return a function that restores the present state of all objects that the script may change after a step.

        These are schedulers, averages and the values in `param_groups`, but not what the optimizers train. Modules,
        which may be large, are left out if `modules` is False.
        """
        others = [thing for thing in self.objects.values() if not isinstance(thing, _LARGE)]
        if modules:
            trained = {id(p) for opt in optimizers for group in opt.param_groups for p in group["params"]}
            others += [thing for thing in self.modules if not any(id(p) in trained for p in thing.parameters())]
        states = [
            thing.state_dict() if isinstance(thing, FreshState) else copied(thing.state_dict()) for thing in others
        ]
        groups = [
            [
                {k: v if type(v) in _ATOMS else copied(v) for k, v in group.items() if k != "params"}
                for group in opt.param_groups
            ]
            for opt in optimizers
        ]

        def put_back() -> None:
            for thing, state in zip(others, states, strict=True):
                thing.load_state_dict(state)
            for opt, kept in zip(optimizers, groups, strict=True):
                for group, values in zip(opt.param_groups, kept, strict=False):  # groups may have come with a state
                    group.update(values)

        return put_back


def _without_copies(module: nn.Module, state: Any) -> Any:
    """Return a module's state with its own parameters in place of aliases of them: torch copies none onto itself.

    A newcomer that has followed the training has its parameters already; copying them would take part of the pause.
    """
    if not isinstance(state, dict) or type(module).load_state_dict is not nn.Module.load_state_dict:
        return state
    params = [param for param in module.parameters() if param.numel() and param.layout is torch.strided]
    own = {memory_of(param): param for param in params}
    made = copy.copy(state)  # with the attributes of an OrderedDict
    for key, value in state.items():
        if isinstance(value, Tensor) and value.layout is torch.strided:
            made[key] = own.get(memory_of(value), value)
    return made


def copied(state: Any) -> Any:
    """Return a deep copy. For plain values, of which states mostly consist, this takes a fraction of `deepcopy`."""
    kind = type(state)
    if kind in _ATOMS:
        return state
    if kind is dict:
        return {key: copied(value) for key, value in state.items()}
    if kind is list or kind is tuple:
        return kind(map(copied, state))
    return copy.deepcopy(state)


class TransferGroup(Protocol):
    """The group through which a state is sent."""

    @property
    def wire(self) -> torch.device:
        """Device that tensors must be on for the group to transfer them."""
        ...

    def wait(self, work: dist.Work) -> None:
        """Wait for an operation."""
        ...

    def check_whole(self) -> None:
        """Raise `GroupBroken` if received data must not be used."""
        ...


def broadcast(state: Mapping[str, Any] | None, source: int, link: TransferGroup) -> dict[str, Any]:
    """Return the state of rank `source` on every rank; `state` is used only on that rank.

    Raises `GroupBroken` when a peer is lost on the way.
    """
    skeleton, tensors = take_apart(state) if state is not None else (None, [])
    skeleton, _ = broadcast_skeleton(skeleton, (), source, link)
    slots = slots_of(skeleton)
    if state is None:
        tensors = memory_for(slots, link.wire)
    broadcast_tensors(tensors, slots, source, link, sends=state is not None)
    return put_together(skeleton, tensors)


def broadcast_tensors(
    tensors: Sequence[Tensor], slots: list[TensorSlot], source: int, link: TransferGroup, *, sends: bool
) -> None:
    """Broadcast the tensors of some slots. Raises `GroupBroken` when a peer is lost on the way."""
    for piece in _pieces(slots):
        _broadcast_piece([tensors[slot.number] for slot in piece], source, link, sends=sends)
    link.check_whole()


def broadcast_skeleton(skeleton: Any, flags: Sequence[int], source: int, link: TransferGroup) -> tuple[Any, list[int]]:
    """Return on every rank the skeleton and the flags that rank `source` gives.

    The other ranks give as many flags, which do not count, and no skeleton.
    """
    device, check = link.wire, link.check_whole
    packed = b""
    if skeleton is not None:
        file = io.BytesIO()
        torch.save(skeleton, file)
        packed = file.getvalue()
    head = torch.tensor([len(packed), *flags], dtype=torch.int64, device=device)
    send(head, source, link)
    length, *flags = head.tolist()
    check()
    body = torch.frombuffer(bytearray(packed), dtype=torch.uint8) if packed else None
    raw = body.to(device) if body is not None else torch.empty(length, dtype=torch.uint8, device=device)
    send(raw, source, link)
    received = bytes(raw.cpu().numpy())
    check()
    try:
        return torch.load(io.BytesIO(received), weights_only=True), flags
    except Exception as problem:
        raise BFTrainerError(f"the state that rank {source} sent cannot be read: {problem}") from problem


def take_apart(state: Mapping[str, Any]) -> tuple[Any, list[Tensor]]:
    """Return the skeleton of a state, and its tensors in the order of their slots."""
    tensors: list[Tensor] = []
    return _take_apart(portable(state, lambda tensor: tensor), tensors), tensors


def slots_of(skeleton: Any) -> list[TensorSlot]:
    """Return the slots of a skeleton, in order."""
    return sorted((slot for _, slot in placed_slots(skeleton)), key=lambda slot: slot.number)


def put_together(skeleton: Any, tensors: list[Tensor]) -> dict[str, Any]:
    """Return the state that `take_apart` took apart."""
    whole: dict[str, Any] = restored(_put_together(skeleton, tensors))
    return whole


def bytes_in(state: Mapping[str, Any]) -> int:
    """Return the number of bytes of all tensors of a state."""
    return sum(tensor.nbytes for tensor in take_apart(state)[1])


def memory_for(slots: list[TensorSlot], device: torch.device) -> list[Tensor]:
    """Allocate memory for the tensors: on the receiving device if the sender has them on one and they fit."""
    try:
        return [torch.empty(slot.shape, dtype=slot.dtype, device="cpu" if slot.on_cpu else device) for slot in slots]
    except torch.OutOfMemoryError:
        return [torch.empty(slot.shape, dtype=slot.dtype) for slot in slots]


def send(tensor: Tensor, source: int, link: TransferGroup) -> None:
    """Broadcast one tensor. This is the only operation here that a lost peer can break."""
    with breaking():
        with nccl.issuing:
            work = dist.broadcast(tensor, source, async_op=True)
        link.wait(work)


def _broadcast_piece(tensors: list[Tensor], source: int, link: TransferGroup, *, sends: bool) -> None:
    """Broadcast some tensors together, as bytes."""
    device = link.wire
    if len(tensors) == 1 and tensors[0].device == device and is_bytes(tensors[0]):
        send(bytes_of(tensors[0]), source, link)
        return
    if sends:
        flat = torch.cat([bytes_of(tensor).to(device) for tensor in tensors])
    else:
        flat = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device=device)
    send(flat, source, link)
    if not sends:
        pieces = torch.split(flat, [tensor.nbytes for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            bytes_of(tensor).copy_(piece)


def is_bytes(tensor: Tensor) -> bool:
    """Return whether the tensor's memory is its bytes in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return where a dense tensor lies in memory, and how. Tensors with the same values of this have the same bytes."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a flat view of the tensor's memory; of a copy if the tensor is not contiguous."""
    found = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return found.view(torch.uint8) if found.numel() else found.new_empty(0, dtype=torch.uint8)


def _pieces(slots: list[TensorSlot]) -> Iterator[list[TensorSlot]]:
    """Yield groups of tensors up to the size of a piece, in an order that all ranks derive in the same way."""
    piece: list[TensorSlot] = []
    size = 0
    for slot in slots:
        bytes_ = torch.Size(slot.shape).numel() * slot.dtype.itemsize
        if piece and size + bytes_ > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(slot)
        size += bytes_
    if piece:
        yield piece


def _take_apart(tree: Any, tensors: list[Tensor]) -> Any:
    """Return the tree with slots in place of its tensors, and append these to `tensors`."""
    if isinstance(tree, Tensor) and tree.layout is torch.strided:
        tensors.append(tree)
        return TensorSlot(len(tensors) - 1, tree.dtype, tuple(tree.shape), tree.device.type == "cpu").as_plain()
    return _rebuilt(tree, lambda part: _take_apart(part, tensors))


def _rebuilt(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same kind with every item changed; return any other value unchanged."""
    kind = type(tree)
    if kind in (dict, OrderedDict, Counter):
        made: Any = kind()
        for key, value in tree.items():
            made[key] = change(value)
        if kind is OrderedDict:  # a module's state_dict() keeps the versions of its layers in an attribute
            vars(made).update(vars(tree))
        return made
    return kind(change(value) for value in tree) if kind in (list, tuple) else tree


def _slot(tree: Any) -> TensorSlot | None:
    is_slot = type(tree) is tuple and len(tree) == 5 and isinstance(tree[0], str) and tree[0] == _MARK
    return TensorSlot(*tree[1:]) if is_slot else None


def _put_together(tree: Any, tensors: list[Tensor]) -> Any:
    if (slot := _slot(tree)) is not None:
        return tensors[slot.number]
    return _rebuilt(tree, lambda part: _put_together(part, tensors))


def placed_slots(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], TensorSlot]]:
    """Yield the slots of a skeleton, each with its place: the keys and positions that lead to it."""
    if (slot := _slot(tree)) is not None:
        yield place, slot
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from placed_slots(value, (*place, key))
