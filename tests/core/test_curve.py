import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.core.curve import Curve
from bftrainer.errors import InputError

RATES = st.floats(0, 1e9, allow_subnormal=False)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    nodes = sorted(draw(st.sets(st.integers(1, 5000), min_size=1, max_size=12)))
    return Curve.through(nodes, draw(st.lists(RATES, min_size=len(nodes), max_size=len(nodes))))


@given(curves())
def test_a_curve_has_the_measured_rate_at_every_point(curve: Curve) -> None:
    assert [curve.rate(n) for n in curve.nodes] == list(curve.rates)
    assert curve.at(curve.nodes).tolist() == list(curve.rates)


@given(curves(), st.data())
def test_between_two_points_the_rate_is_between_theirs(curve: Curve, data: st.DataObject) -> None:
    i = data.draw(st.integers(1, len(curve.nodes) - 1))
    share = data.draw(st.floats(0, 1))
    low, high = sorted(curve.rates[i - 1 : i + 1])
    rate = curve.rate(curve.nodes[i - 1] + share * (curve.nodes[i] - curve.nodes[i - 1]))
    slack = 1e-9 * high
    assert low - slack <= rate <= high + slack


def test_halfway_between_two_points_the_rate_is_their_mean() -> None:
    assert Curve.through([2, 4], [10.0, 16.0]).rate(3) == 13.0


@given(curves(), st.integers(0, 10_000))
def test_beyond_the_last_point_the_rate_holds(curve: Curve, more: int) -> None:
    assert curve.rate(curve.nodes[-1] + more) == curve.rates[-1]


@given(curves())
def test_no_nodes_make_no_progress(curve: Curve) -> None:
    assert curve.rate(0) == 0.0
    assert curve.nodes[0] == 0


@given(curves(), st.lists(st.integers(0, 6000), max_size=20))
def test_many_rates_at_once_are_the_same_as_one_by_one(curve: Curve, counts: list[int]) -> None:
    assert curve.at(counts).tolist() == [curve.rate(n) for n in counts]


@given(curves(), st.floats(0, 1000))
def test_a_scaled_curve_has_every_rate_multiplied(curve: Curve, factor: float) -> None:
    assert curve.scaled(factor).nodes == curve.nodes
    assert curve.scaled(factor).rates == tuple(rate * factor for rate in curve.rates)


def test_a_curve_may_fall_and_bend_either_way() -> None:
    assert Curve.through([1, 2, 4, 8], [10, 25, 30, 20]).rate(8) == 20.0


def test_points_may_be_numbers_of_numpy() -> None:
    assert Curve.through(np.array([1, 2]), np.array([3.0, 5.0])) == Curve.through([1, 2], [3.0, 5.0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "rates", "words"),
    [
        ([], [], "at least one point"),
        ([0], [0], "a point above 0 nodes"),
        ([1, 2], [5], "as many values as nodes, but got 1 and 2"),
        ([1, 1], [5, 6], r"rise from point to point, but got \[1, 1\]"),
        ([2, 1], [5, 6], "rise from point to point"),
        ([-1], [5], "0 or more, but got -1"),
        ([1.5], [5], "whole numbers, 0 or more, but got 1.5"),
        ([True], [5], "whole numbers, 0 or more, but got True"),
        ([math.nan], [5], "whole numbers, 0 or more, but got nan"),
        ([math.inf], [5], "whole numbers, 0 or more, but got inf"),
        (["4"], [5], "whole numbers, 0 or more, but got '4'"),
        ([None], [5], "whole numbers, 0 or more, but got None"),
        ([1], [-5], "finite numbers, 0 or more, but got -5"),
        ([1], [math.nan], "finite numbers, 0 or more, but got nan"),
        ([1], [math.inf], "finite numbers, 0 or more, but got inf"),
        ([1], [False], "finite numbers, 0 or more, but got False"),
        ([1], ["fast"], "finite numbers, 0 or more, but got 'fast'"),
        ([0, 1], [3, 5], "at 0 nodes must be 0, but got 3.0"),
    ],
)
def test_points_that_make_no_curve_are_refused_with_the_curves_name(nodes: Any, rates: Any, words: str) -> None:
    with pytest.raises(InputError, match=rf"resnet\.csv: .*{words}"):
        Curve.through(nodes, rates, "resnet.csv")


@given(st.floats(0, 1), st.floats(0.001, 1e6), st.integers(1, 5000))
def test_amdahls_law_holds_at_one_node_and_at_the_most(parallel: float, rate: float, most: int) -> None:
    curve = Curve.amdahl(parallel, rate, most)
    assert curve.nodes[-1] == most
    assert curve.rate(1) == pytest.approx(rate)
    assert curve.rate(most) == pytest.approx(rate / ((1 - parallel) + parallel / most))
    assert all(a <= b * (1 + 1e-12) for a, b in zip(curve.rates, curve.rates[1:], strict=False))
    if parallel < 1:
        assert curve.rate(most) <= rate / (1 - parallel) * (1 + 1e-9)


def test_work_that_is_all_parallel_scales_without_loss_and_none_at_all_not() -> None:
    assert [Curve.amdahl(1, 3.0, 100).rate(n) for n in (1, 50, 100)] == pytest.approx([3.0, 150.0, 300.0])
    assert [Curve.amdahl(0, 3.0, 100).rate(n) for n in (1, 50, 100)] == pytest.approx([3.0, 3.0, 3.0])


def test_amdahls_points_are_the_powers_of_two_and_the_most() -> None:
    assert Curve.amdahl(0.9, 1.0, 12).nodes == (0, 1, 2, 4, 8, 12)
    assert Curve.amdahl(0.9, 1.0, 8).nodes == (0, 1, 2, 4, 8)


@pytest.mark.parametrize("parallel", [-0.1, 1.1, math.nan])
def test_a_parallel_share_beyond_0_to_1_is_refused(parallel: float) -> None:
    with pytest.raises(InputError, match="`parallel` must be a share from 0 to 1"):
        Curve.amdahl(parallel, 1.0, 8)


@pytest.mark.parametrize("most", [0, -4])
def test_an_amdahl_curve_needs_a_node(most: int) -> None:
    with pytest.raises(InputError, match=f"`max_nodes` must be 1 or more, but got {most}"):
        Curve.amdahl(0.9, 1.0, most)


@given(curves(), st.booleans(), st.sampled_from([",", ";", " , "]))
def test_a_curve_written_as_csv_reads_back_the_same(curve: Curve, names: bool, separator: str) -> None:
    rows = [f"{n}{separator}{rate!r}" for n, rate in zip(curve.nodes, curve.rates, strict=True)]
    text = "\n".join(([f"nodes{separator}rate"] if names else []) + rows)
    assert Curve.from_csv(text) == curve


def test_a_csv_may_have_comments_empty_lines_more_columns_and_a_byte_order_mark() -> None:
    text = "\ufeff# measured on 3 May\n\nnodes,samples per second,error\n1,10,0.1\n\n# half a rack\n8.0,70,2\n"
    assert Curve.from_csv(text) == Curve.through([1, 8], [10, 70])
    assert Curve.from_csv("\ufeff1,10\n8,70") == Curve.through([1, 8], [10, 70])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes,rate\n1,10\n2", "profile.csv:3: must be `nodes,samples per second`, but got '2'"),
        ("nodes,rate\nmany,10\n2,20", "profile.csv:2: "),
        ("1.5,10\n2,20", "profile.csv:1: "),
        ("1,fast\n2,20", "profile.csv:1: "),
        ("nodes,rate\nnodes,rate\n2,20", "profile.csv:2: "),
        ("1;2,5", "profile.csv:1: "),
        ("inf,5", "profile.csv:1: "),
        ("nan,5", "profile.csv:1: "),
        ("1,nan", "profile.csv: values must be finite"),
        ("2,20\n1,10", "profile.csv: nodes must rise"),
        ("nodes,rate", "profile.csv: must have at least one point"),
        ("", "profile.csv: must have at least one point"),
    ],
)
def test_a_csv_that_holds_no_curve_is_refused_with_the_file_and_the_line(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Curve.from_csv(text, "profile.csv")


@given(st.text(alphabet="0123456789,;.-en #\n", max_size=40))
def test_any_text_either_holds_a_curve_or_is_refused(text: str) -> None:
    try:
        curve = Curve.from_csv(text)
    except InputError:
        return
    assert Curve.through(curve.nodes, curve.rates) == curve
