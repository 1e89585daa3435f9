"""Learning-rate scaling: adapts the learning rate to the global batch, which changes with the nodes.

`LearningRate` returns the factor for each step; the training loop reports every rescale to it. `scaled` applies the
factor only while the optimizer steps, so the user's schedulers and checkpoints never see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Integral, Real
from typing import Any

from bftrainer.errors import InputError

RULES: dict[str, Callable[[float], float]] = {"linear": lambda ratio: ratio, "sqrt": math.sqrt, "none": lambda _: 1.0}
"""Factor as a function of the ratio of the global batch to the batch that the learning rate was chosen for."""


class LearningRate:
    """Factor on the learning rate, with a warm-up after every rescale that raises it.

    The first batch size reported takes effect at once: a warm-up at the start of training is left to the scheduler.
    """

    def __init__(
        self, rule: str | Callable[[float], float] = "none", *, base_batch: int, warmup_steps: int = 0
    ) -> None:
        """`rule`: linear, sqrt, none, or a function of the ratio of the global batch to `base_batch`."""
        chosen = RULES.get(rule) if isinstance(rule, str) else rule
        if not callable(chosen):
            raise InputError(f"`rule` must be {', '.join(RULES)} or a function, but got {rule!r}")
        self._rule = chosen
        self._base_batch = _whole("base_batch", base_batch, 1)
        self._warmup_steps = _whole("warmup_steps", warmup_steps, 0)
        # The last change: its step, the new batch, and the factor just before it.
        self._step = 0
        self._batch: int | None = None
        self._before = 0.0

    def factor(self, step: int, global_batch: int) -> float:
        """Return the factor on the optimizer's learning rate at `step`, which takes `global_batch` samples."""
        target = self._target(global_batch)
        passed = step - self._step
        # A fall applies at once: a rate too high for the batch can make training diverge, a low one only slows it.
        if self._batch is None or target <= self._before or passed >= self._warmup_steps:
            return target
        return self._before + (target - self._before) * max(passed, 0) / self._warmup_steps

    def changed(self, step: int, global_batch: int) -> None:
        """Record that the global batch changes at `step`. A warm-up starts at the factor reached then."""
        _whole("global_batch", global_batch, 1)
        # Nodes may be replaced every minute: a warm-up that restarted each time would never end.
        if global_batch == self._batch:
            return
        self._before = self._target(global_batch) if self._batch is None else self.factor(step, self._batch)
        self._step, self._batch = int(step), int(global_batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the warm-up as plain values."""
        return {"step": self._step, "batch": self._batch, "before": self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned, here or on another node."""
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise InputError(f"the learning rate's state must have {', '.join(missing)}, but got {sorted(state)}")
        self._step, self._batch, self._before = state["step"], state["batch"], state["before"]

    def _target(self, global_batch: int) -> float:
        ratio = global_batch / self._base_batch
        factor: object = self._rule(ratio)
        if isinstance(factor, bool) or not isinstance(factor, Real) or not 0 < float(factor) < math.inf:
            raise InputError(f"`rule` must give a finite number above 0, but got {factor!r} for the ratio {ratio:g}")
        return float(factor)


@contextmanager
def scaled(optimizer: Any, factor: float) -> Iterator[None]:
    """Multiply the learning rate of every parameter group by `factor` while the optimizer steps."""
    if factor == 1.0:
        yield
        return
    undo: list[Callable[[], object]] = []
    tensors: set[int] = set()
    try:
        for number, group in enumerate(optimizer.param_groups):
            rate = group.get("lr")
            if hasattr(rate, "copy_"):
                # A tensor must stay the same object: captured graphs read it. Scale a tensor that groups share once.
                if id(rate) not in tensors:
                    tensors.add(id(rate))
                    values = rate.detach()
                    undo.append(partial(values.copy_, values.clone()))
                    values.mul_(factor)
            elif isinstance(rate, Real):
                undo.append(partial(group.update, lr=rate))
                group["lr"] = rate * factor
            else:
                raise InputError(
                    f"parameter group {number} of {type(optimizer).__name__} must have a learning rate to scale, "
                    f"but `lr` is {rate!r}; use the rule 'none' with this optimizer"
                )
        yield
    finally:
        for put_back in undo:
            put_back()


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise InputError(f"`{name}` must be a whole number, {least} or more, but got {value!r}")
    return int(value)
