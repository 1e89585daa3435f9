"""Solver interface between the mixed-integer allocators and HiGHS or Gurobi.

`milp` and `milp-nodes` write a model with `Draft` (blocks of columns and rows, maximising). `solve` hands it to HiGHS
or Gurobi and returns a `Solution`. Nothing here knows about trainers or nodes.
"""

from __future__ import annotations

import importlib
import time
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bftrainer.errors import InputError
from bftrainer.util.text import one_line

Backend = Literal["highs", "gurobi"]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Term = tuple[npt.ArrayLike, npt.ArrayLike]
"""Columns and coefficients in a block of rows: (rows,) for one column per row, (rows, k) for k columns per row."""

SEED = 1
TOLERANCE = 1e-9  # HiGHS accepts 1e-10 at the least; Gurobi 1e-9
OBJECTIVE_SPAN = 1e6
"""Range that a model's objective should have, from the start to the best conceivable. Solvers ignore improvements below
their absolute tolerance, so a model in units where the whole range is small loses digits."""
TINY = 1e-290
"""Gains below this cannot be scaled into the range where solvers are precise."""


class SolverWarning(UserWarning):
    """Warns that the chosen solver could not be used and another one answered."""


@dataclass(frozen=True, slots=True)
class Model:
    """Maximise gain·x with lower ≤ x ≤ upper, row_lower ≤ A·x ≤ row_upper, and whole x where `whole`. A is by rows."""

    gain: Floats
    lower: Floats
    upper: Floats
    whole: npt.NDArray[np.bool_]
    row_lower: Floats
    row_upper: Floats
    row_start: Ints
    column: Ints
    coefficient: Floats


@dataclass(frozen=True, slots=True)
class Solution:
    """The best x found (none: no feasible one in time), and whether it is proven optimal."""

    values: Floats | None
    proven: bool


@dataclass(slots=True)
class Draft:
    """A model under construction. Columns and rows come in blocks, so that many nodes need no Python loop."""

    _columns: list[tuple[Floats, Floats, Floats, npt.NDArray[np.bool_]]] = field(default_factory=list)
    _rows: list[tuple[Floats, Floats]] = field(default_factory=list)
    _entries: list[tuple[Ints, Ints, Floats]] = field(default_factory=list)
    _column_count: int = 0
    _row_count: int = 0

    def columns(
        self,
        count: int,
        *,
        lower: npt.ArrayLike = 0.0,
        upper: npt.ArrayLike = 1.0,
        whole: bool = True,
        gain: npt.ArrayLike = 0.0,
    ) -> Ints:
        """Add `count` variables, binary by default, and return their numbers."""
        block = [np.broadcast_to(np.asarray(part, dtype=np.float64), count) for part in (gain, lower, upper)]
        self._columns.append((block[0], block[1], block[2], np.full(count, whole)))
        self._column_count += count
        return np.arange(self._column_count - count, self._column_count, dtype=np.int32)

    def rows(
        self, count: int, terms: list[Term], *, lower: npt.ArrayLike = -np.inf, upper: npt.ArrayLike = np.inf
    ) -> None:
        """Add `count` constraints lower ≤ sum of the terms ≤ upper; a column must not occur twice in a row."""
        if count == 0:
            return
        bounds = [np.broadcast_to(np.asarray(part, dtype=np.float64), count) for part in (lower, upper)]
        self._rows.append((bounds[0], bounds[1]))
        first = np.arange(self._row_count, self._row_count + count, dtype=np.int32)
        for columns, coefficients in terms:
            numbers = np.asarray(columns, dtype=np.int32).reshape(count, -1)
            weights = np.asarray(coefficients, dtype=np.float64)
            if weights.ndim == 1:
                weights = weights.reshape(count, -1)
            self._entries.append(
                (
                    np.repeat(first, numbers.shape[1]),
                    numbers.ravel(),
                    np.broadcast_to(weights, numbers.shape).ravel(),
                )
            )
        self._row_count += count

    def model(self) -> Model:
        """The model written so far."""
        none = np.empty(0)
        gain, lower, upper = (np.concatenate([none, *(block[k] for block in self._columns)]) for k in range(3))
        whole = np.concatenate([np.empty(0, dtype=np.bool_), *(block[3] for block in self._columns)])
        row_lower, row_upper = (np.concatenate([none, *(block[k] for block in self._rows)]) for k in range(2))
        row = np.concatenate([np.empty(0, dtype=np.int32), *(entry[0] for entry in self._entries)])
        column = np.concatenate([np.empty(0, dtype=np.int32), *(entry[1] for entry in self._entries)])
        coefficient = np.concatenate([none, *(entry[2] for entry in self._entries)])
        order = np.argsort(row, kind="stable")
        row_start = np.zeros(self._row_count + 1, dtype=np.int32)
        np.cumsum(np.bincount(row, minlength=self._row_count), out=row_start[1:])
        return Model(gain, lower, upper, whole, row_lower, row_upper, row_start, column[order], coefficient[order])


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Measures how long a call has taken and how much of its time limit is left."""

    limit_s: float
    started: float = field(default_factory=time.perf_counter)

    @property
    def left_s(self) -> float:
        """Seconds to the limit, below 0 past it."""
        return self.limit_s - (time.perf_counter() - self.started)

    @property
    def ms(self) -> float:
        """Milliseconds since the call began."""
        return (time.perf_counter() - self.started) * 1000


def check_settings(time_limit_s: float, backend: str) -> None:
    """Raise InputError on settings that no solver can run with."""
    if not time_limit_s > 0:
        raise InputError(f"time_limit_s must be a number of seconds above 0, but got {time_limit_s!r}")
    if backend not in ("highs", "gurobi"):
        raise InputError(f"backend must be 'highs' or 'gurobi', but got {backend!r}")


def solve(model: Model, start: Floats, time_limit_s: float, backend: Backend = "highs") -> Solution:
    """Solve within the time, from a feasible `start`. If Gurobi cannot, HiGHS does, and a SolverWarning says so."""
    if len(model.gain) == 0:
        return Solution(np.empty(0), proven=True)
    if time_limit_s <= 0:
        return Solution(None, proven=False)
    watch = Stopwatch(time_limit_s)
    if backend == "gurobi":
        try:
            return _gurobi(model, start, time_limit_s)
        except _NoGurobiError as reason:
            warnings.warn(f"{reason}; HiGHS is used instead", SolverWarning, stacklevel=2)
    return _highs(model, start, watch.left_s)


def _highs(model: Model, start: Floats, time_limit_s: float) -> Solution:
    import highspy  # slow to import, and only these two allocators need it

    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in (
        ("output_flag", False),
        ("threads", 1),
        ("random_seed", SEED),
        ("time_limit", max(0.0, time_limit_s)),
        ("mip_rel_gap", 0.0),
        ("mip_abs_gap", 0.0),
        ("mip_feasibility_tolerance", TOLERANCE),
        ("primal_feasibility_tolerance", TOLERANCE),
        ("dual_feasibility_tolerance", TOLERANCE),
    ):
        highs.setOptionValue(option, value)
    columns, rows = len(model.gain), len(model.row_lower)
    highs.passModel(
        columns,
        rows,
        len(model.column),
        int(highspy.MatrixFormat.kRowwise),
        int(highspy.ObjSense.kMaximize),
        0.0,
        model.gain,
        model.lower,
        model.upper,
        model.row_lower,
        model.row_upper,
        model.row_start,
        model.column,
        model.coefficient,
        model.whole.astype(np.int32),
    )
    highs.setSolution(columns, np.arange(columns, dtype=np.int32), start)
    if highs.run() == highspy.HighsStatus.kError:
        # HiGHS keeps one thread pool per process; if other code has set its size, only that size is accepted.
        highs.setOptionValue("threads", 0)
        highs.run()
    if highs.getInfo().primal_solution_status != 2:  # 2: feasible
        return Solution(None, proven=False)
    proven = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return Solution(np.array(highs.getSolution().col_value), proven=proven)


class _NoGurobiError(Exception):
    """Raised with the reason why Gurobi cannot solve this model here."""


def _gurobi(model: Model, start: Floats, time_limit_s: float) -> Solution:
    try:
        gurobipy: Any = importlib.import_module("gurobipy")
    except ImportError as error:
        raise _NoGurobiError("Gurobi is not installed (pip install gurobipy)") from error
    try:
        options = {"OutputFlag": 0, "LogToConsole": 0}  # set on the environment, as Gurobi prints its licence otherwise
        with gurobipy.Env(params=options) as env, gurobipy.Model(env=env) as native:
            return _solve_native(gurobipy.GRB, gurobipy.LinExpr, native, model, start, time_limit_s)
    except gurobipy.GurobiError as error:
        raise _NoGurobiError(f"Gurobi cannot solve this model: {one_line(error).split('; visit')[0]}") from error


def _solve_native(
    codes: Any, expression: Any, native: Any, model: Model, start: Floats, time_limit_s: float
) -> Solution:
    for option, value in (
        ("Threads", 1),
        ("Seed", SEED),
        ("TimeLimit", time_limit_s),
        ("MIPGap", 0.0),
        ("MIPGapAbs", 0.0),
        ("IntFeasTol", TOLERANCE),
        ("FeasibilityTol", TOLERANCE),
        ("OptimalityTol", TOLERANCE),
    ):
        native.setParam(option, value)
    kinds = [codes.INTEGER if whole else codes.CONTINUOUS for whole in model.whole]
    numbers = range(len(model.gain))
    bounds = {"lb": model.lower.tolist(), "ub": model.upper.tolist(), "obj": model.gain.tolist(), "vtype": kinds}
    variables = list(native.addVars(numbers, **bounds).values())
    native.ModelSense = codes.MAXIMIZE
    for variable, value in zip(variables, start.tolist(), strict=True):
        variable.Start = value
    columns, coefficients = model.column.tolist(), model.coefficient.tolist()
    for row, (lower, upper) in enumerate(zip(model.row_lower.tolist(), model.row_upper.tolist(), strict=True)):
        own = slice(int(model.row_start[row]), int(model.row_start[row + 1]))
        total = expression(coefficients[own], [variables[k] for k in columns[own]])
        if lower == upper:
            native.addLConstr(total, codes.EQUAL, upper)
            continue
        if upper < np.inf:
            native.addLConstr(total, codes.LESS_EQUAL, upper)
        if lower > -np.inf:
            native.addLConstr(total, codes.GREATER_EQUAL, lower)
    native.optimize()
    if native.SolCount == 0:
        return Solution(None, proven=False)
    return Solution(np.array([variable.X for variable in variables]), proven=native.Status == codes.OPTIMAL)
