import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.core import Window
from bftrainer.traces.readers.first_fit import lay_first_fit
from bftrainer.traces.readers.idle import BusyTimes, Intervals, idle_trace, union

NODES = ["n0", "n1", "n2", "n3"]
spans = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 12)).map(lambda t: (t[0], t[1], t[1] + t[2])),
    max_size=25,
)


def columns(rows: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = np.array(rows, dtype=float).reshape(-1, 3)
    return table[:, 0].astype(np.int32), table[:, 1], table[:, 2]


def covered(rows: list[tuple[int, int, int]], node: int, second: int) -> bool:
    return any(n == node and start <= second < end for n, start, end in rows)


@given(spans)
def test_the_union_covers_what_the_spans_cover_and_never_touches_itself(rows: list[tuple[int, int, int]]) -> None:
    merged = union(*columns(rows))
    found = list(zip(merged.node.tolist(), merged.start.tolist(), merged.end.tolist(), strict=True))
    for node in range(4):
        for second in range(45):
            assert covered(found, node, second) == covered(rows, node, second)
        mine = [row for row in found if row[0] == node]
        assert all(a[2] < b[1] for a, b in itertools.pairwise(mine))


@given(spans, st.booleans())
def test_a_node_is_idle_when_no_job_is_on_it_and_it_showed_life(rows: list[tuple[int, int, int]], edges: bool) -> None:
    window = Window(5.0, 40.0)
    trace, trimmed = idle_trace(union(*columns(rows)), NODES, window, keep_edges=edges, nodes_known=True)
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
    assert trimmed == missing


def test_a_job_still_running_keeps_its_node_to_the_end_of_the_window() -> None:
    busy = Intervals(np.array([0, 0], dtype=np.int32), np.array([0.0, 20.0]), np.array([10.0, np.inf]))
    trace, _ = idle_trace(busy, ["n0"], Window(0.0, 40.0), keep_edges=True, nodes_known=True)
    assert [(f.start, f.end, f.open) for f in trace.fragments()] == [(10.0, 20.0, False)]


def test_a_node_idle_across_the_end_of_the_window_is_open_there() -> None:
    busy = Intervals(np.array([0, 0], dtype=np.int32), np.array([0.0, 50.0]), np.array([10.0, 60.0]))
    trace, _ = idle_trace(busy, ["n0"], Window(0.0, 40.0), keep_edges=False, nodes_known=True)
    assert [(f.start, f.end, f.open) for f in trace.fragments()] == [(10.0, 40.0, True)]


def test_occupancy_gives_the_same_however_often_it_compacts(monkeypatch) -> None:
    rng = np.random.default_rng(1)
    jobs = [(rng.integers(0, 50, 3).astype(np.int32), float(s), float(s + 5)) for s in rng.integers(0, 200, 400)]
    results = []
    for limit in (10, 10_000):
        monkeypatch.setattr("bftrainer.traces.readers.idle._COMPACT_AT", limit)
        occupancy = BusyTimes()
        for job in jobs:
            occupancy.add(*job)
        results.append(occupancy.intervals())
    for column in ("node", "start", "end"):
        assert np.array_equal(getattr(results[0], column), getattr(results[1], column))


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=30),
    st.integers(1, 6),
    st.integers(1, 5),
)
def test_first_fit_never_uses_more_than_the_machine_and_loses_only_what_does_not_fit(
    jobs, nodes: int, per: int
) -> None:
    start = np.array([j[0] for j in jobs], dtype=float)
    end = start + np.array([j[1] for j in jobs], dtype=float)
    need = [j[2] for j in jobs]
    layout = lay_first_fit(start, end, need, nodes, nodes * per)
    for second in range(75):
        running = [n for s, e, n in zip(start, end, need, strict=True) if s <= second < e]
        busy = int(((layout.busy.start <= second) & (second < layout.busy.end)).sum())
        assert busy <= nodes
        if layout.clipped_jobs == 0:
            # Each processor in use needs a place; a node has `per` of them.
            assert busy * per >= sum(running)
            assert (busy > 0) == bool(running)
    assert (layout.clipped_share > 0) == (layout.clipped_jobs > 0)


def test_first_fit_takes_the_lowest_free_nodes_in_order_of_start() -> None:
    # Out of order on purpose: the job that starts at 0 takes nodes 0 and 1, the later one node 2.
    layout = lay_first_fit(np.array([5.0, 0.0]), np.array([9.0, 10.0]), [1, 2], 3, 3)
    rows = zip(layout.busy.node.tolist(), layout.busy.start.tolist(), layout.busy.end.tolist(), strict=True)
    assert list(rows) == [(0, 0.0, 10.0), (1, 0.0, 10.0), (2, 5.0, 9.0)]


def test_uneven_processors_add_up_to_the_machine() -> None:
    layout = lay_first_fit(np.array([0.0]), np.array([1.0]), [2004], 151, 2004)
    assert len(layout.busy.node) == 151
    assert layout.clipped_jobs == 0
