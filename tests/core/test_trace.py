import contextlib
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.core import Fragment, Pool, Trace, Window
from bftrainer.errors import InputError


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Small traces with whole seconds, touching fragments included."""
    fragments = []
    for node in range(draw(st.integers(1, 5))):
        cuts = sorted(draw(st.sets(st.integers(0, 40), max_size=8)))
        for start, end in itertools.pairwise(cuts):
            if draw(st.booleans()):
                fragments.append(Fragment(f"n{node}", float(start), float(end)))
    return Trace.from_fragments(fragments, [f"n{i}" for i in range(5)], Window(0.0, 40.0))


def idle_at(fragments: Sequence[Fragment], time: float) -> set[str]:
    return {f.node for f in fragments if f.start <= time < f.end}


@given(traces())
def test_events_build_exactly_the_pools_that_the_fragments_describe(trace: Trace) -> None:
    fragments = list(trace.fragments())
    pool = Pool()
    for event in trace.events():
        pool = pool.after(event)
        assert set(pool) == idle_at(fragments, event.time)


@given(traces(), st.integers(0, 39), st.integers(1, 40))
def test_clipping_keeps_who_is_idle_at_every_instant_of_the_window(trace: Trace, start: int, length: int) -> None:
    window = Window(float(start), float(min(start + length, 40)))
    clipped = trace.clip(window)
    before, after = list(trace.fragments()), list(clipped.fragments())
    for second in range(start, int(window.end)):
        assert idle_at(after, second + 0.5) == idle_at(before, second + 0.5)
    assert clipped.window == window


def test_a_fragment_cut_at_the_end_of_a_window_is_open_there() -> None:
    trace = Trace.from_fragments([Fragment("a", 0.0, 10.0), Fragment("b", 0.0, 5.0)])
    rows = {f.node: f for f in trace.clip(Window(1.0, 5.0)).fragments()}
    assert rows == {"a": Fragment("a", 1.0, 5.0, open=True), "b": Fragment("b", 1.0, 5.0, open=False)}


def test_an_open_fragment_does_not_leave() -> None:
    trace = Trace.from_fragments([Fragment("a", 0.0, 10.0, open=True)])
    assert [e.left for e in trace.events()] == [()]


def test_selecting_nodes_keeps_their_fragments_and_the_given_order() -> None:
    trace = Trace.from_fragments([Fragment("a", 0.0, 1.0), Fragment("b", 0.0, 2.0), Fragment("c", 0.0, 3.0)])
    chosen = trace.select(["c", "a"])
    assert chosen.nodes == ("c", "a")
    assert {(f.node, f.end) for f in chosen.fragments()} == {("a", 1.0), ("c", 3.0)}


def test_transients_are_fragments_known_to_be_short() -> None:
    trace = Trace.from_fragments(
        [
            Fragment("cut", 0.0, 5.0),
            Fragment("short", 10.0, 15.0),
            Fragment("long", 10.0, 40.0),
            Fragment("open", 95.0, 100.0, open=True),
        ],
        window=Window(0.0, 100.0),
    )
    assert {f.node for f in trace.without_transients(10.0).fragments()} == {"cut", "long", "open"}


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        ([Fragment("a", 5.0, 3.0)], "node a has one from 1970-01-01T00:00:05 to 1970-01-01T00:00:03"),
        ([Fragment("a", 5.0, 5.0)], "must end after it starts"),
        ([Fragment("a", 0.0, 5.0), Fragment("a", 4.0, 8.0)], "node a is idle until 1970-01-01T00:00:05 and again"),
        ([Fragment("a", float("nan"), 5.0)], "no start or no end"),
        ([Fragment("a", 0.0, 200.0)], "outside the window"),
        ([Fragment("z", 0.0, 2.0)], "'z' has a fragment but is not in the list"),
    ],
)
def test_fragments_that_cannot_be_are_refused_by_name(fragments: list[Fragment], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Trace.from_fragments(fragments, ["a", "b"], Window(0.0, 100.0))


def test_a_node_named_twice_is_refused() -> None:
    with pytest.raises(InputError, match="'a' is named twice"):
        Trace.from_fragments([], ["a", "b", "a"], Window(0.0, 1.0))


def test_a_window_must_have_a_length() -> None:
    with pytest.raises(InputError, match="must end after it starts"):
        Window(5.0, 5.0)


def test_the_columns_of_a_trace_cannot_be_changed() -> None:
    trace = Trace.from_fragments([Fragment("a", 0.0, 1.0)])
    with pytest.raises(ValueError, match="read-only"):
        trace.start[0] = 7.0


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=12),
    st.integers(1, 5),
)
def test_overlapping_fragments_are_refused_however_many_are_checked_at_once(
    rows: list[tuple[int, int, int]], at_once: int
) -> None:
    fragments = [Fragment(f"n{node}", float(start), float(start + length)) for node, start, length in rows]
    overlap = any(
        a.node == b.node and a.start < b.end and b.start < a.end for a, b in itertools.combinations(fragments, 2)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bftrainer.core.trace._ROWS_AT_ONCE", at_once)
        refused = pytest.raises(InputError, match="must not overlap") if overlap else contextlib.nullcontext()
        with refused:
            Trace.from_fragments(fragments)
