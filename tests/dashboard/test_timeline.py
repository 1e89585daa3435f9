"""What a picture of some width can show of a past of any length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.dashboard import files, timeline
from bftrainer.dashboard.timeline import Cells, Interval, busy_times, events_per_cell, gantt, series


def test_a_cell_shows_what_held_in_its_middle() -> None:
    found = gantt(
        Cells(0.0, 100.0, 10),
        [Interval("n1", 0.0, 100.0), Interval("n2", 44.0, 46.0)],
        [Interval("n1", 14.0, 36.0, 1), Interval("n1", 36.5, 44.0, 2)],
    )
    assert found["nodes"] == ["n1", "n2"]
    # Cells 1 and 2 have their middles, 15 and 25, in the first span; 35 too, and the second has none.
    assert found["runs"] == [[0, 1, 0, 1, 3, 1, 4, 6, 0], [4, 1, 0]]


def test_what_was_not_there_is_not_drawn() -> None:
    assert gantt(Cells(0.0, 10.0, 10), [], [])["runs"] == []
    found = gantt(Cells(0.0, 10.0, 10), [Interval("a", -9.0, -5.0)], [Interval("b", 2.0, 3.0, 1)])
    assert found["runs"] == [[], [2, 1, 1]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.floats(0, 100), st.floats(0.01, 50), st.integers(1, 3)), min_size=1, max_size=40
    ),
    st.integers(16, 300),
)
def test_runs_cover_each_row_in_order_without_overlap(spans: list[tuple[int, float, float, int]], cells: int) -> None:
    used = [Interval(f"n{n}", start, start + length, who) for n, start, length, who in spans]
    found = gantt(Cells(0.0, 100.0, cells), [], used)
    for runs in found["runs"]:
        at = 0
        for first, length, who in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
            assert first >= at
            assert length > 0
            assert who in (1, 2, 3)
            at = first + length
        assert at <= cells


def test_an_answer_is_bounded_however_large_the_machine_and_long_the_window() -> None:
    chance = np.random.default_rng(1)
    starts = chance.uniform(0, 604800, 120_000)
    used = [Interval(f"n{i % 5000}", start, start + 90, 1 + i % 7) for i, start in enumerate(starts.tolist())]
    found = gantt(Cells(0.0, 604800.0, 2000), [], used, most_runs=20_000)
    assert len(found["nodes"]) <= timeline.MOST_ROWS
    assert found["of_nodes"] == 5000
    assert sum(len(runs) for runs in found["runs"]) <= 3 * 20_000


def test_a_series_is_the_mean_of_what_held_and_its_extremes() -> None:
    found = series(Cells(0.0, 20.0, 2), np.array([0.0, 5.0]), np.array([20.0, 10.0]))
    assert found == {"low": [1, 1], "mean": [1.5, 1], "high": [2, 1]}
    assert series(Cells(0.0, 20.0, 2), np.zeros(0), np.zeros(0))["mean"] == [0, 0]


def test_a_node_is_used_once_and_only_while_it_is_there() -> None:
    there = [Interval("n1", 0.0, 10.0), Interval("n1", 20.0, 30.0), Interval("n2", 0.0, 30.0)]
    used = [
        Interval("n1", 5.0, 12.0),  # packs up after its node has left
        Interval("n2", 0.0, 8.0),
        Interval("n2", 7.0, 9.0),  # the next one starts meanwhile
        Interval("n3", 0.0, 30.0),  # on a node that never was in the pool
    ]
    starts, ends = busy_times(there, used)
    assert (ends - starts).sum() == 5 + 9
    assert all(len(found) == 0 for found in busy_times([], []))


_spans = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20), st.integers(0, 9)), max_size=12)


@given(_spans, _spans)
def test_use_is_what_a_count_second_by_second_finds(
    there: list[tuple[str, int, int]], used: list[tuple[str, int, int]]
) -> None:
    def seconds(spans: list[tuple[str, int, int]]) -> set[tuple[str, int]]:
        return {(node, start + i) for node, start, length in spans for i in range(length)}

    starts, ends = busy_times(*([Interval(n, a, a + b) for n, a, b in spans] for spans in (there, used)))
    assert (ends - starts).sum() == len(seconds(there) & seconds(used))


def test_times_are_counted_by_cell_and_those_outside_are_not() -> None:
    assert events_per_cell(Cells(0.0, 10.0, 10), [0.0, 0.5, 9.99, 10.0, 11.0, -1.0]) == [[0, 2], [9, 2]]


@pytest.mark.parametrize("name", [*files.STATIC, "index.html", "report.js"])
def test_no_file_of_the_page_names_another_host(name: str) -> None:
    text = files.read(name).decode().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "http://" not in text
    assert "https://" not in text
    assert "innerHTML" not in text


def test_the_script_of_a_report_has_no_imports_left() -> None:
    code = files.script()
    assert "\nimport " not in code
    assert "\nexport " not in code
    assert "drawGantt" in code


def test_data_cannot_end_the_element_it_stands_in() -> None:
    assert "<" not in files.as_data({"</script>": "<!-- &"})


def test_marks_of_too_many_losses_are_spread_over_all_of_the_time() -> None:
    taken = [[0, cell] for cell in range(10 * timeline.MOST_TAKEN + 1)]
    found = timeline.preemption_marks(taken)
    assert found["taken_every"] == 11
    assert len(found["taken"]) <= timeline.MOST_TAKEN
    cells = [cell for _, cell in found["taken"]]
    assert (cells[0], cells[-1] > 9.9 * timeline.MOST_TAKEN) == (0, True)
    assert timeline.preemption_marks(taken[:5]) == {"taken": taken[:5], "taken_every": 1}
    assert timeline.preemption_marks([]) == {"taken": [], "taken_every": 1}
