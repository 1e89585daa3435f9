from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from bftrainer.allocate.solver import Draft, Model, SolverWarning, Stopwatch, check_settings, solve
from bftrainer.errors import InputError


def knapsack() -> Model:
    """Three things of weight 2, 3, 4 and worth 3, 4, 5.5 in a bag of 5, and a liquid worth 0.25 a unit: best is 7."""
    draft = Draft()
    things = draft.columns(3, gain=[3, 4, 5.5])
    liquid = draft.columns(1, upper=10, whole=False, gain=0.25)
    draft.rows(1, [(things, [2, 3, 4]), (liquid, 1.0)], upper=5)
    return draft.model()


def test_a_draft_becomes_rows_in_the_order_they_were_written() -> None:
    draft = Draft()
    grid = draft.columns(6, upper=9).reshape(2, 3)
    total = draft.columns(2, lower=-1, upper=[4, 5], whole=False, gain=2)
    draft.rows(2, [(grid, 1.0), (total, [-1, -2])], lower=0, upper=0)
    draft.rows(0, [(grid[:0], 1.0)], upper=3)
    draft.rows(3, [(grid.T, [[1, 2]])], upper=[7, 8, 9])
    model = draft.model()

    dense = np.zeros((5, 8))
    for row in range(5):
        own = slice(model.row_start[row], model.row_start[row + 1])
        dense[row, model.column[own]] = model.coefficient[own]
    assert dense.tolist() == [
        [1, 1, 1, 0, 0, 0, -1, 0],
        [0, 0, 0, 1, 1, 1, 0, -2],
        [1, 0, 0, 2, 0, 0, 0, 0],
        [0, 1, 0, 0, 2, 0, 0, 0],
        [0, 0, 1, 0, 0, 2, 0, 0],
    ]
    assert model.row_upper.tolist() == [0, 0, 7, 8, 9]
    assert model.row_lower.tolist() == [0, 0, -np.inf, -np.inf, -np.inf]
    assert model.upper.tolist() == [9] * 6 + [4, 5]
    assert model.lower.tolist() == [0] * 6 + [-1, -1]
    assert model.gain.tolist() == [0] * 6 + [2, 2]
    assert model.whole.tolist() == [True] * 6 + [False] * 2


def test_highs_proves_the_best(capfd: pytest.CaptureFixture[str]) -> None:
    answer = solve(knapsack(), np.zeros(4), 60)
    assert answer.proven
    assert answer.values == pytest.approx([1, 1, 0, 0])
    assert capfd.readouterr() == ("", "")


def test_no_columns_are_solved_by_nothing() -> None:
    answer = solve(Draft().model(), np.empty(0), 1)
    assert answer.proven
    assert answer.values is not None
    assert answer.values.size == 0


def test_no_time_finds_nothing() -> None:
    answer = solve(knapsack(), np.zeros(4), 0)
    assert not answer.proven
    assert answer.values is None


def test_an_infeasible_model_has_no_values() -> None:
    draft = Draft()
    draft.rows(1, [(draft.columns(2), 1.0)], lower=3)
    answer = solve(draft.model(), np.zeros(2), 10)
    assert not answer.proven
    assert answer.values is None


def test_a_process_that_gave_highs_more_threads_still_gets_an_answer() -> None:
    import highspy

    highspy.Highs.resetGlobalScheduler(True)
    try:
        other = highspy.Highs()
        other.setOptionValue("output_flag", False)
        other.setOptionValue("threads", 2)
        other.addVar(0, 1)
        other.run()
        answer = solve(knapsack(), np.zeros(4), 60)
    finally:
        highspy.Highs.resetGlobalScheduler(True)
    assert answer.proven
    assert answer.values == pytest.approx([1, 1, 0, 0])


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_time_limit_must_be_above_0(limit: float) -> None:
    with pytest.raises(InputError, match=f"time_limit_s must be a number of seconds above 0, but got {limit}"):
        check_settings(limit, "highs")


def test_a_backend_must_be_known() -> None:
    with pytest.raises(InputError, match="backend must be 'highs' or 'gurobi', but got 'cplex'"):
        check_settings(1, "cplex")


def test_a_watch_counts_down_past_its_limit() -> None:
    watch = Stopwatch(limit_s=1.0, started=0.0)  # long ago
    assert watch.left_s < 0
    assert watch.ms > 0


def test_without_gurobi_highs_answers_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gurobipy", None)
    with pytest.warns(SolverWarning, match="Gurobi is not installed .*; HiGHS is used instead"):
        answer = solve(knapsack(), np.zeros(4), 60, "gurobi")
    assert answer.proven
    assert answer.values == pytest.approx([1, 1, 0, 0])


def fake_gurobi(refuses_at: str, message: str) -> types.ModuleType:
    """A gurobipy that fails like one with a small licence, or none."""

    class GurobiError(Exception):
        pass

    class Env:
        def __init__(self, params: dict[str, Any]) -> None:
            assert params["OutputFlag"] == 0
            if refuses_at == "start":
                raise GurobiError(message)

        def __enter__(self) -> Env:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    class NativeModel(Env):
        def __init__(self, env: Env) -> None:
            pass

        def setParam(self, *_: object) -> None:  # noqa: N802
            pass

        def addVars(self, numbers: range, **_: object) -> dict[int, Any]:  # noqa: N802
            return {k: types.SimpleNamespace() for k in numbers}

        def addLConstr(self, *_: object) -> None:  # noqa: N802
            pass

        def optimize(self) -> None:
            raise GurobiError(message)

    names = ("INTEGER", "CONTINUOUS", "MAXIMIZE", "EQUAL", "LESS_EQUAL", "GREATER_EQUAL", "OPTIMAL")
    module = types.ModuleType("gurobipy")
    vars(module).update(
        GurobiError=GurobiError,
        Env=Env,
        Model=NativeModel,
        LinExpr=lambda coefficients, variables: None,
        GRB=types.SimpleNamespace(**dict.fromkeys(names)),
    )
    return module


@pytest.mark.parametrize(
    ("refuses_at", "message"),
    [
        (
            "solve",
            "Model too large for size-limited license; visit https://gurobi.com/unrestricted for more information",
        ),
        ("start", "No Gurobi license found (user u, host h)"),
    ],
)
def test_what_gurobi_may_not_solve_highs_does_and_says_so(
    monkeypatch: pytest.MonkeyPatch, refuses_at: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "gurobipy", fake_gurobi(refuses_at, message))
    with pytest.warns(SolverWarning) as caught:
        answer = solve(knapsack(), np.zeros(4), 60, "gurobi")
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith("Gurobi cannot solve this model: " + message[:20])
    assert text.endswith("; HiGHS is used instead")
    assert "\n" not in text
    assert answer.proven


def test_gurobi_proves_the_best(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gurobipy")
    answer = solve(knapsack(), np.zeros(4), 60, "gurobi")
    assert answer.proven
    assert answer.values == pytest.approx([1, 1, 0, 0])
    assert capfd.readouterr() == ("", "")


def test_a_model_beyond_gurobis_small_licence_is_solved_by_highs() -> None:
    gurobipy = pytest.importorskip("gurobipy")
    draft = Draft()
    columns = draft.columns(2100, gain=np.arange(2100))
    draft.rows(1, [(columns, 1.0)], upper=1)
    model = draft.model()
    try:
        with gurobipy.Env(params={"OutputFlag": 0}) as env, gurobipy.Model(env=env) as native:
            native.addVars(2100)
            native.optimize()
    except gurobipy.GurobiError:
        with pytest.warns(SolverWarning, match="HiGHS is used instead"):
            answer = solve(model, np.zeros(2100), 60, "gurobi")
    else:
        pytest.skip("this machine has a full Gurobi licence")
    assert answer.values is not None
    assert answer.values[-1] == pytest.approx(1)
