import itertools
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.core import Window
from bftrainer.core.trace import Trace
from bftrainer.traces.ranges import NodeSpans, RangeTrace
from bftrainer.traces.readers import idle as idle_module
from bftrainer.traces.readers.first_fit import lay_first_fit
from bftrainer.traces.readers.idle import BusyTimes, IdleTimes

NODES = ["n0", "n1", "n2", "n3"]
spans = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 12)).map(lambda t: (t[0], t[1], t[1] + t[2])),
    max_size=25,
)


def idle_times(rows: list[tuple[int, float, float]], nodes: int = 4) -> IdleTimes:
    busy = BusyTimes()
    for node, start, end in rows:
        busy.add(array("i", [node]).tobytes(), start, end)
    return busy.idle_times(np.arange(nodes, dtype=np.int32), nodes)


def covered(rows: list[tuple[int, int, int]], node: int, second: int) -> bool:
    return any(n == node and start <= second < end for n, start, end in rows)


def same(a: Trace, b: Trace) -> bool:
    return (a.nodes, a.window) == (b.nodes, b.window) and all(
        np.array_equal(getattr(a, column), getattr(b, column)) for column in ("node", "start", "end", "open")
    )


@given(spans, st.booleans(), st.integers(1, 30))
def test_a_node_is_idle_when_no_job_is_on_it_and_it_showed_life(
    rows: list[tuple[int, int, int]], edges: bool, at_once: int
) -> None:
    window = Window(5.0, 40.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idle_module, "_ROWS_AT_ONCE", at_once)
        times = idle_times(rows)
    parts = [times.between, times.edges()] if edges else [times.between]
    trace = RangeTrace.cut(NODES, NodeSpans.joined(parts), window, nodes_known=True).trace()
    idle = list(trace.fragments())
    missing = 0
    for number, name in enumerate(NODES):
        mine = [row for row in rows if row[0] == number]
        alive = (min((r[1] for r in mine), default=99), max((r[2] for r in mine), default=0))
        for second in range(5, 40):
            free = not covered(rows, number, second)
            known = edges or alive[0] <= second < alive[1]
            missing += free and not known
            assert any(f.node == name and f.start <= second < f.end for f in idle) == (free and known)
    if not edges:
        assert times.edges().seconds(window) == missing


@given(spans)
def test_idle_times_of_a_node_never_overlap_and_meet_only_at_a_job_without_length(
    rows: list[tuple[int, int, int]],
) -> None:
    times = idle_times(rows)
    node, start, end = NodeSpans.joined([times.between, times.edges()]).expanded()
    for number in range(4):
        mine = sorted(zip(start[node == number].tolist(), end[node == number].tolist(), strict=True))
        mine = [(a, b) for a, b in mine if a < b]
        for (_, before), (after, _) in itertools.pairwise(mine):
            assert before < after or (before == after and (number, before, before) in rows)


def test_a_job_still_running_keeps_its_node_to_the_end_of_the_window() -> None:
    times = idle_times([(0, 0.0, 10.0), (0, 20.0, np.inf)], 1)
    idle = NodeSpans.joined([times.between, times.edges()])
    trace = RangeTrace.cut(["n0"], idle, Window(0.0, 40.0), nodes_known=True).trace()
    assert [(f.start, f.end, f.open) for f in trace.fragments()] == [(10.0, 20.0, False)]


def test_a_node_idle_across_the_end_of_the_window_is_open_there() -> None:
    times = idle_times([(0, 0.0, 10.0), (0, 50.0, 60.0)], 1)
    trace = RangeTrace.cut(["n0"], times.between, Window(0.0, 40.0), nodes_known=True).trace()
    assert [(f.start, f.end, f.open) for f in trace.fragments()] == [(10.0, 40.0, True)]


def test_neighbours_that_are_idle_at_the_same_time_are_one_row() -> None:
    busy = BusyTimes()
    for start in (0.0, 100.0, 250.0):
        busy.add(array("i", range(1000)).tobytes(), start, start + 50)
    between = busy.idle_times(np.arange(1000, dtype=np.int32), 1000).between
    assert (between.first.tolist(), between.count.tolist()) == ([0, 0], [1000, 1000])
    assert (between.start.tolist(), between.end.tolist()) == ([50.0, 150.0], [100.0, 250.0])


def test_nodes_get_the_places_they_are_given_and_those_without_a_place_are_left_out() -> None:
    busy = BusyTimes()
    for start in (0.0, 100.0):
        busy.add(array("i", [0, 1, 2]).tobytes(), start, start + 50)
    times = busy.idle_times(np.array([1, -1, 0], dtype=np.int32), 2)
    assert [column.tolist() for column in times.between.expanded()] == [[0, 1], [50.0, 50.0], [100.0, 100.0]]
    assert (times.first.tolist(), times.last.tolist()) == ([0.0, 0.0], [150.0, 150.0])


@given(spans, st.integers(1, 5))
def test_a_trace_by_ranges_is_the_same_as_one_of_fragments(rows: list[tuple[int, int, int]], piece: int) -> None:
    window = Window(5.0, 40.0)
    times = idle_times(rows)
    ranges = RangeTrace.cut(NODES, times.edges(), window, nodes_known=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bftrainer.traces.ranges.PIECE_ROWS", piece)
        trace = ranges.trace()
    checked = Trace.build(NODES, trace.node, trace.start, trace.end, trace.open, window)
    assert same(trace, checked)
    assert (ranges.fragments, ranges.node_seconds) == (len(trace), trace.lengths.sum())
    assert same(RangeTrace.of(trace).trace(), trace)
    assert same(ranges.without_transients(6.0).trace(), trace.without_transients(6.0))


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=30),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_first_fit_never_uses_more_than_the_machine_and_loses_only_what_does_not_fit(
    jobs: list[tuple[int, int, int]], nodes: int, per: int, block: int
) -> None:
    start = np.array([j[0] for j in jobs], dtype=float)
    end = start + np.array([j[1] for j in jobs], dtype=float)
    need = [j[2] for j in jobs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bftrainer.traces.readers.first_fit._BLOCK", block)
        layout = lay_first_fit(start, end, need, nodes, nodes * per)
    for second in range(75):
        running = [n for s, e, n in zip(start, end, need, strict=True) if s <= second < e]
        idle = int(layout.idle.count[(layout.idle.start <= second) & (second < layout.idle.end)].sum())
        busy = nodes - idle
        assert 0 <= busy <= nodes
        if layout.clipped_jobs == 0:
            # Each processor in use needs a place; a node has `per` of them.
            assert busy * per >= sum(running)
            assert (busy > 0) == bool(running)
    assert (layout.clipped_share > 0) == (layout.clipped_jobs > 0)


def idle_rows(spans: NodeSpans) -> set[tuple[int, float, float]]:
    return set(zip(*(column.tolist() for column in spans.expanded()), strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 30)), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(0, 20),
    st.integers(1, 4),
)
def test_first_fit_with_whole_ranges_gives_what_it_gives_processor_by_processor(
    jobs: list[tuple[int, int, int]], nodes: int, more: int, block: int
) -> None:
    total = nodes + more
    capacity = np.diff(np.arange(nodes + 1) * total // nodes).tolist()
    owner = [node for node, count in enumerate(capacity) for _ in range(count)]
    free_from = [-np.inf] * total  # by processor
    held: list[tuple[int, float, float]] = []
    for start, run, need in sorted(jobs, key=lambda job: (job[0], job[0] + job[1])):
        free = [p for p in range(total) if free_from[p] <= start]
        for processor in free[:need] if run else ():
            free_from[processor] = start + run
            held.append((owner[processor], start, start + run))
    expected = set()
    for node in range(nodes):
        since = -np.inf
        for _, start, end in sorted(row for row in held if row[0] == node):
            if start > since:
                expected.add((node, since, float(start)))
            since = max(since, end)
        expected.add((node, float(since), np.inf))
    begin = np.array([j[0] for j in jobs], dtype=float)
    end = begin + np.array([j[1] for j in jobs], dtype=float)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bftrainer.traces.readers.first_fit._BLOCK", block)
        patch.setattr(idle_module, "_ROWS_AT_ONCE", 5)
        layout = lay_first_fit(begin, end, [j[2] for j in jobs], nodes, total)
    assert idle_rows(layout.idle) == expected


def test_first_fit_takes_the_lowest_free_nodes_in_order_of_start() -> None:
    # Out of order on purpose: the job that starts at 0 takes nodes 0 and 1, the later one node 2.
    layout = lay_first_fit(np.array([5.0, 0.0]), np.array([9.0, 10.0]), [1, 2], 3, 3)
    assert idle_rows(layout.idle) == {
        (0, -np.inf, 0.0), (0, 10.0, np.inf), (1, -np.inf, 0.0), (1, 10.0, np.inf), (2, -np.inf, 5.0), (2, 9.0, np.inf)
    }  # fmt: skip


def test_uneven_processors_add_up_to_the_machine() -> None:
    layout = lay_first_fit(np.array([0.0]), np.array([1.0]), [2004], 151, 2004)
    assert int(layout.idle.count[layout.idle.start == 1.0].sum()) == 151
    assert layout.clipped_jobs == 0
