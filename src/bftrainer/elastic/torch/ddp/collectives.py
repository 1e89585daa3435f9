"""Stand-ins for the functions of torch.distributed that a ddp script calls.

They behave as on the ranks that the script was submitted for. At the top of the script all ranks do the same, so the
result is known without the others. Training values come from all ranks that train at present, each with its part of
the samples. An evaluation is computed as a whole on each rank; so its result is that of the main rank, and the others
must have the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bftrainer.elastic.torch.ddp.means import is_mean
from bftrainer.elastic.torch.ddp.refused import refuse, refuse_calls, unless_internal
from bftrainer.elastic.torch.ddp.session import DdpSession

_NEAR = 1e-3
"""Relative difference between evaluations of the same samples with the same weights that is put down to rounding."""
_MOST_IN_STEP = 1024
_EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "MIN": lambda values: values.min(0).values,
    "MAX": lambda values: values.max(0).values,
}
_OPS = ("SUM", "AVG", "MIN", "MAX")


class _Done:
    """The handle of an asynchronous call that is complete."""

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Collectives:
    """The functions, for one script."""

    def __init__(self, session: DdpSession) -> None:
        self._session = session
        self._initialized = False
        self._backend = "gloo"
        self._told = False

    def put_in_place(self) -> None:
        """Replace the functions of torch.distributed. Torch itself and BFTrainer still call the real ones."""
        for name in (
            *("init_process_group", "destroy_process_group", "is_initialized", "get_rank", "get_world_size"),
            *("get_backend", "barrier", "monitored_barrier", "all_reduce", "reduce", "broadcast", "all_gather"),
            *("all_gather_object", "broadcast_object_list"),
        ):
            setattr(dist, name, unless_internal(getattr(dist, name), getattr(self, name)))

    # The group.

    def init_process_group(self, backend: Any = None, *args: Any, **kwargs: Any) -> None:
        """Do as if the group was made. The real one is formed at the first batch."""
        if self._initialized:
            raise ValueError("trying to initialize the default process group twice!")
        self._initialized = True
        refuse_calls()  # the script's imports are done
        self._backend = str(backend) if backend else "nccl" if torch.cuda.is_available() else "gloo"

    def destroy_process_group(self, group: Any = None) -> None:
        """Do as if the group was gone."""
        self._initialized = False

    def is_initialized(self) -> bool:
        """Return whether the script has made its group."""
        return self._initialized

    def get_rank(self, group: Any = None) -> int:
        """Return 0: every rank's script does what rank 0 does, so that any of them can take over."""
        self._require_group(group)
        return 0

    def get_world_size(self, group: Any = None) -> int:
        """Return the number of ranks that the script was submitted for."""
        self._require_group(group)
        return self._session.ranks

    def get_backend(self, group: Any = None) -> str:
        """Return the backend that the script named."""
        return self._backend

    # Values.

    def barrier(self, group: Any = None, async_op: bool = False, *args: Any, **kwargs: Any) -> _Done | None:
        """Wait for all ranks, if the training has begun."""
        self._require_group(group)
        session = self._session
        if not session.is_at_top and (not session.in_loop or self._can_meet()):
            session.agree("barrier", lambda: self._framework.on_main("barrier()", lambda: None))
        return _Done() if async_op else None

    def monitored_barrier(self, group: Any = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, if the training has begun."""
        self.barrier(group)

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> _Done | None:
        """Put the sum, mean, minimum or maximum over all ranks into a tensor."""
        self._require_group(group)
        kind = next((name for name in _OPS if op == getattr(dist.ReduceOp, name)), "")
        if not kind:
            refuse(f"all_reduce with {op}: there are stand-ins for SUM, AVG, MIN and MAX")
        result = self._reduced(tensor.detach(), kind)
        with torch.no_grad():
            tensor.copy_(result.reshape(tensor.shape))
        return _Done() if async_op else None

    def reduce(
        self,
        tensor: Tensor,
        dst: int | None = 0,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> _Done | None:
        """Do as `all_reduce`: every rank's script takes itself for rank 0."""
        _main_only("reduce", dst, group_dst)
        return self.all_reduce(tensor, op, group, async_op)

    def broadcast(
        self,
        tensor: Tensor,
        src: int | None = 0,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> _Done | None:
        """Give the main rank's tensor to all ranks."""
        self._require_group(group)
        _main_only("broadcast", src, group_src)
        result = self._of_main("broadcast", tensor.detach().cpu())
        with torch.no_grad():
            tensor.copy_(result)
        return _Done() if async_op else None

    def broadcast_object_list(
        self, object_list: list[Any], src: int | None = 0, *args: Any, group_src: int | None = None, **kwargs: Any
    ) -> None:
        """Give the main rank's plain values to all ranks."""
        _main_only("broadcast_object_list", src, group_src)
        object_list[:] = self._of_main("broadcast_object_list", list(object_list))

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> _Done | None:
        """Put the tensor of each rank into a list."""
        self._require_group(group)
        for place, value in zip(tensor_list, self._gathered("all_gather", tensor.detach().cpu()), strict=True):
            place.copy_(value)
        return _Done() if async_op else None

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Put the plain value of each rank into a list."""
        self._require_group(group)
        object_list[:] = self._gathered("all_gather_object", obj)

    # How the values come about.

    @property
    def _framework(self) -> Any:
        preparation = self._session.preparation
        assert preparation is not None
        return preparation.framework

    def _can_meet(self) -> bool:
        """Whether all ranks reach this point of a loop: after a step, and each once."""
        preparation = self._session.preparation
        assert preparation is not None
        training = preparation.training
        if training.splits or not training.is_at_boundary:
            return False
        return not training.is_lost or preparation.has_taken_over

    def _reduced(self, value: Tensor, kind: str) -> Tensor:
        session = self._session
        if session.is_at_top:
            session.top.note(f"all_reduce of {tuple(value.shape)}", value.tolist())
            if session.evaluated:
                return self._judged([value], kind, evaluated=True)
            return value * session.ranks if kind == "SUM" else value.clone()
        if session.in_loop and not session.evaluated and not self._can_meet():
            return self._in_step(value, kind)
        if session.in_loop and not self._can_meet():
            return self._judged([value], kind, evaluated=True)

        def compute() -> Tensor:
            values: list[Tensor] = self._framework.of_all_ranks("all_reduce()", value.cpu())
            return self._judged(values, kind, evaluated=session.evaluated)

        result: Tensor = session.agree("all_reduce", compute)
        return result.to(value.device)

    def _judged(self, values: Sequence[Tensor], kind: str, *, evaluated: bool) -> Tensor:
        """Return the result for the values of all ranks that train."""
        ranks, first = self._session.ranks, values[0]
        if evaluated:
            if not all(_is_near(first, other) for other in values):
                refuse(
                    "the ranks have different values here, after an evaluation of the same samples on each of them. "
                    "Values of the training must be reduced before the evaluation begins"
                )
            return first * ranks if kind == "SUM" and ranks > 1 and is_mean(_caller()) else first.clone()
        all_values = torch.stack(list(values))
        if kind in _EXACT:
            return _EXACT[kind](all_values)
        if kind == "AVG":
            return all_values.double().mean(0).to(first.dtype)
        if len(values) == ranks or not is_mean(_caller()):
            return all_values.sum(0)
        return (all_values.double().mean(0) * ranks).to(first.dtype)

    def _in_step(self, value: Tensor, kind: str) -> Tensor:
        """Reduce a value of the batch that is being computed, between its backward passes and its step."""
        session, preparation = self._session, self._session.preparation
        assert preparation is not None
        training, ranks = preparation.training, session.ranks
        if training.handed and not training.handed[-1].passes and not training.is_lost:
            refuse(
                "a reduction between a batch and its backward pass: its result may go into the gradients, and other "
                "ranks train than those that the script sees"
            )
        mean = kind == "AVG" or (kind == "SUM" and (ranks > 1 or preparation.world > 1) and is_mean(_caller()))
        if training.splits or training.is_lost or kind in _EXACT or not training.handed:
            if not self._told and not training.is_lost:
                self._told = True
                print("bftrainer: reductions within a batch show this rank's own values", file=sys.stderr, flush=True)
            return value * ranks if mean and kind == "SUM" else value.clone()
        if value.numel() > _MOST_IN_STEP:
            refuse(f"all_reduce of {value.numel()} numbers between a batch and its step")
        weight = training.handed[-1].weight
        share = weight if mean else float(weight > 0)
        sums = training.sum_numbers([number * share for number in value.double().reshape(-1).tolist()])
        if sums is None:  # a peer was lost, and this batch comes again
            return value.clone()
        total = torch.tensor(sums, dtype=torch.float64).reshape(value.shape)
        return (total * ranks if mean and kind == "SUM" else total).to(value.dtype).to(value.device)

    def _of_main(self, what: str, value: Any) -> Any:
        session = self._session
        if session.is_at_top:
            session.top.note(what, value.tolist() if isinstance(value, Tensor) else value)
            return value
        if session.in_loop and not self._can_meet():
            refuse(f"{what} between a batch and its step")
        return session.agree(what, lambda: self._framework.on_main(f"{what}()", lambda: value))

    def _gathered(self, what: str, value: Any) -> list[Any]:
        session = self._session
        if session.is_at_top:
            session.top.note(what, value.tolist() if isinstance(value, Tensor) else value)
            return [value] * session.ranks
        if session.ranks > 1 or not session.evaluated:
            refuse(
                f"{what} in a training: the ranks that train are others than those that the script sees",
                "reduce sums with all_reduce, or submit it with --launcher torchrun",
            )
        return [self._of_main(what, value)]

    def _require_group(self, group: Any) -> None:
        if not self._initialized:
            raise ValueError("Default process group has not been initialized: call init_process_group() before")
        if group is not None and group is not dist.group.WORLD:
            refuse("a process group of the script's own")


def _main_only(what: str, *ranks: int | None) -> None:
    if any(rank not in (0, None) for rank in ranks):
        refuse(f"{what} from or to a rank other than 0: ranks come and go")


def _is_near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=_NEAR, atol=1e-12, equal_nan=True)


def _caller() -> Any:
    """Return the frame that called a stand-in."""
    frame: Any = sys._getframe(1)
    while str(frame.f_globals.get("__name__", "")).startswith(("bftrainer.", "torch.")):
        frame = frame.f_back
    return frame
