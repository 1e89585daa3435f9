"""Objectives define what a second of a trainer on n nodes is worth to the allocator.

An objective turns a trainer into a curve of values. The allocator maximises the sum of values over the horizon, less
the cost of rescaling. Users may write their own: a function from a trainer to a `Curve`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from bftrainer.core.curve import Curve
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.util.plugins import find_named, is_named, said

Objective = Callable[[Trainer], Curve]


def throughput(trainer: Trainer) -> Curve:
    """Samples per second. Favours trainers that process many samples, at the expense of others."""
    return trainer.curve


def efficiency(trainer: Trainer) -> Curve:
    """Rate over the rate per node at the smallest size, so that trainers of fast and slow models weigh the same.

    It is the paper's speedup when the smallest size is one node.
    """
    least = trainer.curve.rate(trainer.min_nodes)
    if least <= 0:
        raise InputError(
            f"trainer {trainer.name!r}: the efficiency objective needs a rate above 0 at min_nodes "
            f"({trainer.min_nodes}), but the curve has {least}"
        )
    return trainer.curve.scaled(trainer.min_nodes / least)


def weighted(objective: Objective) -> Objective:
    """`objective` times each trainer's weight."""

    def by_weight(trainer: Trainer) -> Curve:
        return objective(trainer).scaled(trainer.weight)

    return by_weight


OBJECTIVES: Mapping[str, Objective] = MappingProxyType(
    {
        "throughput": throughput,
        "efficiency": efficiency,
        "weighted": weighted(throughput),
        "weighted-efficiency": weighted(efficiency),
    }
)


def find_objective(name: str) -> Objective:
    """A built-in objective by its name, or a user's own as `module:function`."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    if not is_named(name):
        raise InputError(f"objective must be one of {', '.join(OBJECTIVES)} or module:function, but got {name!r}")
    found = find_named(name, "objective")
    if not callable(found):
        raise InputError(f"objective {name!r}: {name.partition(':')[2]} is not a function")
    return _checked(found, name)


def _checked(objective: Objective, name: str) -> Objective:
    """Wrap a user's function and check its result before it is trusted."""

    def check(trainer: Trainer) -> Curve:
        try:
            curve = objective(trainer)
        except Exception as problem:  # a user's function may raise anything
            raise InputError(f"objective {name!r} failed for trainer {trainer.name!r}: {said(problem)}") from problem
        if not isinstance(curve, Curve):
            raise InputError(f"objective {name!r}: must return a Curve for trainer {trainer.name!r}, but got {curve!r}")
        return Curve.through(curve.nodes, curve.rates, f"objective {name!r} for trainer {trainer.name!r}")

    return check
