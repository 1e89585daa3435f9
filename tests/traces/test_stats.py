from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.core import Fragment, Trace, Window
from bftrainer.errors import InputError
from bftrainer.traces.files import load_trace
from bftrainer.traces.readers.importing import import_trace
from bftrainer.traces.stats import binned_pool, hazard, idle_stats, pool_steps
from bftrainer.traces.times import Clock

FROM_PAPER = Clock()("2021-02-10T20:21:15")


def check_paper_figures(trace: Trace) -> None:
    stats = idle_stats(trace, Window(FROM_PAPER, trace.window.end))
    assert (stats.events, stats.inc_events, stats.dec_events) == (22883, 14049, 10573)
    assert stats.node_hours == pytest.approx(137639.06, abs=0.01)
    assert stats.eq_nodes == pytest.approx(407.25, abs=0.01)
    assert stats.ratio == pytest.approx(0.0860, abs=0.0001)
    assert stats.fragments == 411299
    assert stats.short_fragment_share == pytest.approx(0.5576, abs=0.0001)
    assert stats.short_fragment_node_time_share == pytest.approx(0.1075, abs=0.0001)
    # The paper finds that efficiency saturates near 120 s.
    assert stats.horizon.seconds == 120


def test_the_summit_trace_has_the_figures_of_the_paper(shared_data: Path) -> None:
    check_paper_figures(load_trace(shared_data / "summit/fragments.parquet"))


def test_the_authors_own_matrix_has_the_same_figures(shared_data: Path) -> None:
    check_paper_figures(import_trace(shared_data / "summit/ndstat-10sdn6-evt.tar.gz").trace)


def example() -> Trace:
    return Trace.from_fragments(
        [
            Fragment("a", 0.0, 1000.0),
            Fragment("b", 500.0, 1500.0),
            Fragment("c", 500.0, 700.0),
            Fragment("a", 1500.0, 2000.0),
            Fragment("b", 1900.0, 2000.0, open=True),
        ],
        nodes=["a", "b", "c", "d"],
        window=Window(0.0, 2000.0),
    )


def test_joins_and_leaves_count_after_the_start_and_events_from_it() -> None:
    stats = idle_stats(example())
    # Changes at 0, 500, 700, 1000, 1500, 1900 and 2000 (a leaves); the open end of b is no change of its own.
    assert stats.events == 7
    assert stats.inc_events == 3  # 500, 1500, 1900; those idle at 0 did not join then
    assert stats.dec_events == 4  # 700, 1000, 1500, 2000
    assert stats.node_hours == pytest.approx((1000 + 1000 + 200 + 500 + 100) / 3600)
    assert stats.ratio == pytest.approx(2800 / 2000 / 4)
    assert stats.short_fragment_share == pytest.approx(3 / 5)
    assert stats.short_fragment_node_time_share == pytest.approx(800 / 2800)
    assert stats.nodes_per_join == pytest.approx(4 / 3)


def test_a_window_cuts_fragments_before_they_are_measured() -> None:
    stats = idle_stats(example(), Window(600.0, 1500.0))
    assert stats.events == 3  # 700, 1000, 1500
    assert stats.inc_events == 1  # 1500 is in (600, 1500]
    assert stats.dec_events == 3
    assert stats.fragments == 3  # a until 1000, b until 1500, c until 700
    assert stats.node_hours == pytest.approx((400 + 900 + 100) / 3600)


def test_a_window_beyond_the_trace_is_refused() -> None:
    with pytest.raises(InputError, match="the trace covers"):
        idle_stats(example(), Window(-10.0, 100.0))


def test_a_trace_without_fragments_has_figures_too() -> None:
    stats = idle_stats(Trace.from_fragments([], ["a"], Window(0.0, 10.0)))
    assert (stats.events, stats.node_hours, stats.short_fragment_share) == (0, 0.0, None)
    assert stats.horizon.seconds is None
    assert stats.pool.max == 0


def test_pool_quantiles_are_weighted_by_time() -> None:
    trace = Trace.from_fragments([Fragment("a", 0.0, 90.0), Fragment("b", 50.0, 52.0)], window=Window(0.0, 100.0))
    pool = idle_stats(trace).pool
    assert (pool.min, pool.p05, pool.p50, pool.p95, pool.max) == (0, 0, 1, 1, 2)
    assert pool.mean == pytest.approx(0.92)


fragments = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 90), st.integers(1, 60), st.booleans()), max_size=12
).map(
    lambda rows: {
        node: Fragment(f"n{node}", float(s), min(float(s + length), 100.0), is_open and s + length >= 100)
        for node, s, length, is_open in rows
    }
)


@given(fragments, st.integers(1, 40))
def test_the_pool_over_time_holds_all_idle_node_time(rows: dict[int, Fragment], bins: int) -> None:
    window = Window(0.0, 100.0)
    trace = Trace.from_fragments(rows.values(), [f"n{i}" for i in range(6)], window)
    times, size = pool_steps(trace, window)
    total = float((size * np.diff(np.append(times, 100.0))).sum())
    assert total == pytest.approx(trace.lengths.sum())
    edges, mean = binned_pool(trace, window, bins)
    assert float((mean * np.diff(edges)).sum()) == pytest.approx(total)
    assert size.min() >= 0


@given(fragments)
def test_hazards_agree_with_looking_at_every_second(rows: dict[int, Fragment]) -> None:
    # Scaled so that there is enough exposure to be reported.
    scale = 100.0
    stretched = [Fragment(f.node, f.start * scale, f.end * scale, f.open) for f in rows.values()]
    window = Window(0.0, 100.0 * scale)
    trace = Trace.from_fragments(stretched, [f"n{i}" for i in range(6)], window)
    for row in hazard(trace, window):
        high = row.age_to_s or 1e9
        for ahead, value in row.leave_within.items():
            exposed = leaving = 0
            for f in stretched:
                if f.start <= window.start:
                    continue
                instants = np.arange(f.start, f.end) + 0.5
                age = instants - f.start
                at_age = instants[(age >= row.age_from_s) & (age < high)]
                if f.open:
                    at_age = at_age[at_age + float(ahead) <= f.end]
                exposed += len(at_age)
                leaving += 0 if f.open else int((f.end - at_age <= float(ahead)).sum())
            if value is not None:
                assert value == pytest.approx(leaving / exposed, abs=1e-9)
            else:
                assert exposed < 3600 + 6


def test_the_suggested_horizon_is_the_time_between_leaves() -> None:
    rows = [Fragment(f"n{i}", float(300 * i + 1), float(300 * i + 300)) for i in range(100)]
    horizon = idle_stats(Trace.from_fragments(rows, window=Window(0.0, 30000.0))).horizon
    assert horizon.seconds == 300
    assert horizon.mean_between_leaves_s == 300
    assert "every 300 s" in horizon.reasoning
