from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.core.curve import Curve
from bftrainer.core.objective import OBJECTIVES, efficiency, find_objective, throughput, weighted
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError

MODULE = """
from bftrainer.core.curve import Curve

def half(trainer):
    return trainer.curve.scaled(0.5)

def nothing(trainer):
    return None

def falls_below_zero(trainer):
    return Curve((0, 1), (0.0, -1.0))

def breaks(trainer):
    return 1 / 0

def made_of_text(trainer):
    return Curve((0, 'x'), (0.0, 'y'))

pi = 3.14
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path of imports, with a module of objectives."""
    import sys

    before = set(sys.modules)
    (tmp_path / "my_objectives.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


@st.composite
def trainers(draw: st.DrawFn) -> Trainer:
    nodes = sorted(draw(st.sets(st.integers(1, 200), min_size=1, max_size=8)))
    rates = draw(st.lists(st.floats(0.1, 1e6), min_size=len(nodes), max_size=len(nodes)))
    least = draw(st.integers(1, 100))
    return Trainer("t", Curve.through(nodes, rates), least, least + 50, weight=draw(st.floats(0.01, 100)))


@given(trainers())
def test_throughput_is_the_trainers_own_curve(trainer: Trainer) -> None:
    assert throughput(trainer) == trainer.curve


@given(trainers())
def test_efficiency_is_worth_one_per_node_at_the_smallest_size(trainer: Trainer) -> None:
    assert efficiency(trainer).rate(trainer.min_nodes) == pytest.approx(trainer.min_nodes)


@given(trainers(), st.floats(0.1, 100))
def test_efficiency_is_the_same_for_a_model_that_is_faster_by_a_factor(trainer: Trainer, factor: float) -> None:
    faster = Trainer("f", trainer.curve.scaled(factor), trainer.min_nodes, trainer.max_nodes)
    assert efficiency(faster).rates == pytest.approx(efficiency(trainer).rates)


def test_efficiency_is_the_speedup_for_a_trainer_that_starts_at_one_node() -> None:
    trainer = Trainer("t", Curve.through([1, 2, 4], [50.0, 90.0, 160.0]))
    assert efficiency(trainer).rates == pytest.approx((0.0, 1.0, 1.8, 3.2))


def test_efficiency_needs_a_rate_at_the_smallest_size() -> None:
    trainer = Trainer("stuck", Curve.through([4, 8], [0.0, 10.0]), min_nodes=4)
    with pytest.raises(InputError, match=r"trainer 'stuck': .* above 0 at min_nodes \(4\), but the curve has 0.0"):
        efficiency(trainer)


@given(trainers(), st.sampled_from([throughput, efficiency]))
def test_a_weighted_objective_is_the_weight_times_the_objective(trainer: Trainer, objective: object) -> None:
    plain = throughput if objective is throughput else efficiency
    assert weighted(plain)(trainer).rates == pytest.approx([trainer.weight * v for v in plain(trainer).rates])


@given(trainers())
def test_every_objective_is_found_by_its_name_and_gives_a_curve(trainer: Trainer) -> None:
    for name, objective in OBJECTIVES.items():
        assert find_objective(name) is objective
        curve = objective(trainer)
        assert Curve.through(curve.nodes, curve.rates) == curve


def test_a_users_own_function_is_an_objective(folder: Path) -> None:
    trainer = Trainer("t", Curve.through([1, 2], [10.0, 20.0]))
    assert find_objective("my_objectives:half")(trainer).rates == (0.0, 5.0, 10.0)


@pytest.mark.parametrize("name", ["fastest", "", ":f", "module:"])
def test_an_unknown_objective_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InputError, match=f"one of throughput, efficiency, .* or module:function, but got '{name}'"):
        find_objective(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_missing:f", "No module named 'my_missing'. Is its folder on PYTHONPATH?"),
        ("my_objectives:f", "module my_objectives has no f"),
        ("my_objectives:pi", "pi is not a function"),
        ("my_broken:f", "module my_broken cannot be imported: SyntaxError: "),
        ("my_wrong:f", "module my_wrong cannot be imported: AttributeError: module 'math' has no attribute 'tau2'"),
        ("my_picky:f", "module my_picky cannot be imported: ImportError: cannot import name 'nope'"),
        (".my_objectives:half", "module .my_objectives cannot be imported: TypeError: "),
    ],
)
def test_a_users_objective_that_cannot_be_found_is_refused_by_name(folder: Path, name: str, words: str) -> None:
    (folder / "my_broken.py").write_text("def f(:\n")
    (folder / "my_wrong.py").write_text("import math\nmath.tau2\n")
    (folder / "my_picky.py").write_text("from math import nope\n")
    with pytest.raises(InputError, match=f"objective '{name}': {words}"):
        find_objective(name)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("nothing", ": must return a Curve for trainer 't', but got None"),
        ("falls_below_zero", " for trainer 't': values must be finite numbers, 0 or more, but got -1.0"),
        ("made_of_text", " for trainer 't': nodes must be whole numbers, 0 or more, but got 'x'"),
        ("breaks", " failed for trainer 't': ZeroDivisionError: division by zero"),
    ],
)
def test_a_users_objective_that_gives_no_curve_is_refused(folder: Path, function: str, words: str) -> None:
    objective = find_objective(f"my_objectives:{function}")
    with pytest.raises(InputError, match=f"objective 'my_objectives:{function}'{words}"):
        objective(Trainer("t", Curve.through([1], [10.0])))
