"""Claims, large problems and a check of solutions for tests of the solver's models."""

from __future__ import annotations

import random

import numpy as np

from bftrainer.allocate.problem import Claim, Problem
from bftrainer.allocate.solver import Model
from bftrainer.core.curve import Curve

LINE = Curve.through([1, 100], [1.0, 100.0])


def claim(name: str, current: int = 0, least: int = 1, most: int = 8, **rest: object) -> Claim:
    defaults: dict[str, object] = {"value": LINE, "up_s": 1.0, "down_s": 1.0, "owner": ""}
    return Claim(name, current, least, most, **{**defaults, **rest})  # type: ignore[arg-type]


def solves(model: Model, x: np.ndarray) -> bool:
    """Whether x keeps to every bound and row of a model."""
    rows = np.zeros(len(model.row_lower))
    np.add.at(rows, np.repeat(np.arange(len(rows)), np.diff(model.row_start)), model.coefficient * x[model.column])
    return bool(
        (x >= model.lower - 1e-9).all()
        and (x <= model.upper + 1e-9).all()
        and (rows >= model.row_lower - 1e-6).all()
        and (rows <= model.row_upper + 1e-6).all()
        and (x[model.whole] == np.rint(x[model.whole])).all()
    )


def large_problem(seed: int, trainers: int = 20, pool: int = 300) -> Problem:
    """Zig-zag curves and a current map that fills part of the pool."""
    dice = random.Random(seed)
    drawn = []
    for k in range(trainers):
        nodes = [1, 2, 4, 8, 16, 32, 64]
        rates = [n * dice.uniform(0.5, 1.5) for n in nodes]
        current = dice.randint(0, pool // trainers)
        drawn.append(Claim(f"t{k}", current, 1, 64, Curve.through(nodes, rates), up_s=18.0, down_s=12.0))
    return Problem(pool, 120.0, tuple(drawn))
