"""The journal: what was written is read back, whatever instant the writer was killed at."""

from __future__ import annotations

import io
import itertools
import json
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.core.trace import Trace
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.traces.recorder.journal import Journal, looks_like_journal
from bftrainer.traces.recorder.recording import read_journal
from bftrainer.traces.recorder.states import NodeStates

SOURCE = {"command": ["sinfo"], "form": "sinfo"}
MACHINE = ("a", "b", "c", "d")
HEADER = b'{"bftrainer_journal":1,"version":"0","source":{"form":"sinfo"},"interval_s":10.0}\n'


def states(idle: str | set[str], nodes: tuple[str, ...] = MACHINE) -> NodeStates:
    return NodeStates(nodes, frozenset(idle))


def write(path: Path, polls: list[tuple[float, str | None]], source: dict[str, object] | None = None) -> Path:
    """A journal of polls: a time and the idle nodes, one letter each, or None for a missed poll."""
    with Journal.open(path, SOURCE if source is None else source, 10) as journal:
        for t, idle in polls:
            if idle is None:
                journal.missed(t, "no answer")
            else:
                journal.saw(t, states(idle))
    return path


def fragments(trace: Trace) -> list[tuple[str, float, float, bool]]:
    return sorted((f.node, f.start, f.end, f.open) for f in trace.fragments())


def idle_at(trace: Trace, t: float) -> set[str]:
    return {f.node for f in trace.fragments() if f.start <= t and (t < f.end or (f.open and t <= f.end))}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "T.journal"


def test_a_fragment_lasts_until_the_first_poll_that_no_longer_shows_it(path: Path) -> None:
    recording = read_journal(write(path, [(0, "a"), (10, "ab"), (20, "b"), (30, "b"), (40, "")]))
    assert fragments(recording.trace) == [("a", 0, 20, False), ("b", 10, 40, False)]
    assert (recording.trace.window.start, recording.trace.window.end) == (0, 40)
    assert (recording.polls, recording.missed, recording.gaps, recording.gap_seconds) == (5, 0, (), 0)
    assert recording.trace.nodes == MACHINE
    assert recording.trace.nodes_known
    assert recording.header.source == SOURCE


def test_a_node_still_idle_at_the_last_poll_is_open(path: Path) -> None:
    recording = read_journal(write(path, [(0, "a"), (10, "ab"), (20, "abc")]))
    assert fragments(recording.trace) == [("a", 0, 20, True), ("b", 10, 20, True)]


def test_a_node_seen_idle_once_is_a_transient(path: Path) -> None:
    write(path, [(0, ""), (10, "a"), (20, ""), (30, "b"), (40, "b"), (50, "")])
    assert fragments(read_journal(path).trace) == [("b", 30, 50, False)]
    assert fragments(read_journal(path, keep_transients=True).trace) == [("a", 10, 20, False), ("b", 30, 50, False)]


def test_a_missed_poll_or_two_do_not_end_a_fragment(path: Path) -> None:
    recording = read_journal(write(path, [(0, "a"), (10, "a"), (20, None), (30, None), (40.2, "a"), (50, "")]))
    assert fragments(recording.trace) == [("a", 0, 50, False)]
    assert (recording.polls, recording.missed, recording.gaps) == (4, 2, ())


def test_nothing_is_known_about_a_gap(path: Path) -> None:
    recording = read_journal(write(path, [(0, "a"), (10, "ab"), (20, None), (60, "abc"), (70, "ac"), (80, "c")]))
    assert fragments(recording.trace) == [("a", 0, 10, False), ("a", 60, 80, False), ("c", 60, 80, True)]
    assert [(gap.start, gap.end) for gap in recording.gaps] == [(10, 60)]
    assert recording.gap_seconds == 50
    assert idle_at(recording.trace, 30) == set()


def test_a_node_that_left_and_came_back_during_a_gap_starts_anew(path: Path) -> None:
    recording = read_journal(write(path, [(0, "a"), (10, "a"), (1000, "b"), (1010, "b")]))
    assert fragments(recording.trace) == [("a", 0, 10, False), ("b", 1000, 1010, True)]


def test_the_events_of_a_recording_can_be_replayed(path: Path) -> None:
    from bftrainer.core.pool import Pool

    pool = Pool()
    recording = read_journal(write(path, [(0, "ab"), (10, "ab"), (90, "ac"), (100, "ac"), (110, "c")]))
    for event in recording.trace.events():
        pool = pool.after(event)
    assert set(pool) == {"c"}


def test_a_given_list_of_nodes_sets_their_order(path: Path) -> None:
    write(path, [(0, "a"), (10, "a")])
    assert read_journal(path, nodes=["z", "a"]).trace.nodes == ("z", "a")
    with pytest.raises(InputError, match="'a' was idle but is not in the given list"):
        read_journal(path, nodes=["z"])


@pytest.mark.parametrize(
    ("form", "nodes", "known"),
    [("names", ("a",), False), ("auto", ("a",), False), ("auto", ("a", "b"), True), ("sinfo", ("a",), True)],
)
def test_a_list_of_idle_names_does_not_make_the_machine_known(path: Path, form, nodes, known) -> None:
    with Journal.open(path, {"form": form}, 10) as journal:
        journal.saw(0, states("a", nodes))
        journal.saw(10, states("a", nodes))
    assert read_journal(path).trace.nodes_known is known


@pytest.mark.parametrize("polls", [[], [(0, "a")], [(0, None), (10, "a"), (20, None)]])
def test_fewer_than_two_successful_polls_make_no_trace(path: Path, polls) -> None:
    with pytest.raises(InputError, match="needs two successful polls"):
        read_journal(write(path, polls))


def test_a_journal_goes_on_where_it_ended(path: Path) -> None:
    write(path, [(0, "a"), (10, "ab")])
    write(path, [(20, "b"), (30, "")])
    assert fragments(read_journal(path).trace) == [("a", 0, 20, False), ("b", 10, 30, False)]
    assert path.read_bytes().count(b"bftrainer_journal") == 1


def test_a_torn_last_line_is_ignored_and_cut_off_before_going_on(path: Path) -> None:
    write(path, [(0, "a"), (10, "a"), (20, "ab")])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert fragments(read_journal(path).trace) == [("a", 0, 10, True)]
    with Journal.open(path, SOURCE, 10) as journal:
        assert journal.idle == {"a"}
        assert journal.last_t == 10
        journal.saw(20, states("ab"))
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", [b"", HEADER[:-1], HEADER[:40]])
def test_a_file_killed_before_its_first_poll_is_started_anew(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"not a journal|cut short"):
        read_journal(path)
    assert fragments(read_journal(write(path, [(0, "a"), (10, "a")])).trace) == [("a", 0, 10, True)]


@pytest.mark.parametrize("content", [b"n1 idle\n", b"{", b'{"nodes": []}\n', b"\x00\x01PAR1", b"\n"])
def test_a_file_that_is_no_journal_is_never_touched(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a journal"):
        Journal.open(path, SOURCE, 10)
    with pytest.raises(InputError, match="not a journal"):
        read_journal(path)
    assert path.read_bytes() == content


def test_another_source_or_interval_is_refused(path: Path) -> None:
    write(path, [(0, "a")])
    before = path.read_bytes()
    with pytest.raises(InputError, match="was recorded from"):
        Journal.open(path, {"command": ["pbsnodes"], "form": "pbs-json"}, 10)
    with pytest.raises(InputError, match="every 10 s, not every 20 s"):
        Journal.open(path, SOURCE, 20)
    assert path.read_bytes() == before


def test_two_recorders_do_not_share_a_journal(path: Path) -> None:
    with Journal.open(path, SOURCE, 10), pytest.raises(InputError, match="another recorder"):
        Journal.open(path, SOURCE, 10)
    Journal.open(path, SOURCE, 10).close()


@pytest.mark.parametrize("interval", [0, -1, float("nan"), float("inf")])
def test_an_impossible_interval_is_refused(path: Path, interval: float) -> None:
    with pytest.raises(InputError, match="interval"):
        Journal.open(path, SOURCE, interval)
    assert not path.exists()


def test_places_that_cannot_hold_a_journal_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be a file"):
        Journal.open(tmp_path, SOURCE, 10)
    with pytest.raises(InputError, match="cannot write"):
        Journal.open(tmp_path / "none" / "T", SOURCE, 10)
    with pytest.raises(InputError, match="cannot read"):
        read_journal(tmp_path / "none")


def test_a_clock_that_went_back_is_refused_and_nothing_is_written(path: Path) -> None:
    write(path, [(100, "a")])
    before = path.read_bytes()
    with Journal.open(path, SOURCE, 10) as journal, pytest.raises(BFTrainerError, match="set the clock"):
        journal.saw(100, states(""))
    assert path.read_bytes() == before


def test_a_full_disk_is_reported_and_its_torn_line_does_not_hurt(path: Path) -> None:
    size = len(write(path, [(0, "a"), (10, "a")]).read_bytes())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal.open(path, SOURCE, 10) as journal:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, hard))
        try:
            with pytest.raises(BFTrainerError, match="cannot append to the journal"):
                journal.saw(20, states(""))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(path.read_bytes()) == size + 5
    assert read_journal(path).polls == 2
    assert read_journal(write(path, [(20, "")])).polls == 3


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"[]",
        b"{}",
        b'{"t":true}',
        b'{"t":NaN}',
        b'{"t":1e999}',
        b'{"t":' + b"9" * 400 + b"}",
        b'{"t":' + b"9" * 5000 + b"}",
        b'{"t":"5"}',
        b'{"t":0}',
        b'{"t":5,"joined":["zz"]}',
        b'{"t":5,"joined":["a"]}',
        b'{"t":5,"left":["b"]}',
        b'{"t":5,"left":"a"}',
        b'{"t":5,"seen":[""]}',
        b'{"t":5,"missed":7}',
        b"\xff\xfe",
        b"[" * 100_000,
        b"",
    ],
)
def test_a_damaged_line_is_named_by_its_number(path: Path, line: bytes) -> None:
    first = b'{"t":0,"joined":["a"],"seen":["a","b"]}\n'
    path.write_bytes(HEADER + first + line + b"\n" + b'{"t":10}\n')
    for attempt in (lambda: read_journal(path), lambda: Journal.open(path, {"form": "sinfo"}, 10)):
        with pytest.raises(InputError, match=r"T\.journal:3: ") as caught:
            attempt()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b'{"bftrainer_journal":2}', "format 2"),
        (b'{"bftrainer_journal":1}', "damaged"),
        (b'{"bftrainer_journal":', "damaged"),
        (b'{"bftrainer_journal":1,"source":{},"interval_s":0}', "damaged"),
        (b'{"bftrainer_journal":1,"source":[],"interval_s":1}', "damaged"),
    ],
)
def test_a_damaged_header_is_refused(header: bytes, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_journal(io.BytesIO(header + b"\n"))


def test_a_journal_is_told_from_other_files_by_its_beginning(path: Path) -> None:
    assert looks_like_journal(write(path, []).read_bytes()[:32])
    assert not looks_like_journal(b'{"nodes": []}')


def test_the_lines_are_json_that_anyone_can_read(path: Path) -> None:
    write(path, [(0, "a"), (10, None), (20, "")])
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["bftrainer_journal"] == 1
    assert header["interval_s"] == 10
    assert lines == [
        {"t": 0, "joined": ["a"], "seen": ["a", "b", "c", "d"]},
        {"t": 10, "missed": "no answer"},
        {"t": 20, "left": ["a"]},
    ]


idle_sets = st.lists(st.frozensets(st.sampled_from(MACHINE)) | st.none(), min_size=2, max_size=14)
steps = st.sampled_from([10.0, 10.25, 9.5, 20.0, 30.5, 36.0, 500.0])


@st.composite
def recorded(draw: st.DrawFn) -> list[tuple[float, frozenset[str] | None]]:
    t, polls = 1.6e9, []
    for idle in draw(idle_sets):
        polls.append((t, idle))
        t += draw(steps)
    return polls


def journal_bytes(path: Path, polls: list[tuple[float, frozenset[str] | None]]) -> bytes:
    path.unlink(missing_ok=True)
    return write(path, polls).read_bytes()  # type: ignore[arg-type]


@settings(deadline=None)
@given(recorded())
def test_reading_gives_back_the_idle_nodes_of_every_poll(tmp_path_factory, polls) -> None:
    path = tmp_path_factory.getbasetemp() / "property.journal"
    data = journal_bytes(path, polls)
    seen = [(t, set(idle)) for t, idle in polls if idle is not None]
    if len(seen) < 2:
        with pytest.raises(InputError):
            read_journal(io.BytesIO(data))
        return
    recording = read_journal(io.BytesIO(data), keep_transients=True)
    gaps = []
    for (t, idle), (after, _) in itertools.pairwise(seen):
        gap = after - t > 35
        gaps += [(t, after)] if gap else []
        assert idle_at(recording.trace, (t + after) / 2) == (set() if gap else idle)
    assert [(gap.start, gap.end) for gap in recording.gaps] == gaps
    (t, idle), (end, last_idle) = seen[-2:]
    assert idle_at(recording.trace, end) == (set() if end - t > 35 else idle & last_idle)
    without = {f[:3] for f in fragments(read_journal(io.BytesIO(data)).trace)}
    assert without <= {f[:3] for f in fragments(recording.trace)}


@settings(deadline=None)
@given(recorded(), st.data())
def test_a_journal_cut_anywhere_never_invents_idleness(tmp_path_factory, polls, data) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.journal"
    whole = journal_bytes(path, polls)
    cut = data.draw(st.integers(whole.index(b"\n") + 1, len(whole)))
    path.write_bytes(whole[:cut])
    with Journal.open(path, SOURCE, 10):
        pass
    assert whole.startswith(path.read_bytes())
    try:
        trace = read_journal(io.BytesIO(whole[:cut]), keep_transients=True).trace
    except InputError:
        return
    for t, idle in polls:
        if idle is not None:
            assert idle_at(trace, t) <= idle


@settings(deadline=None)
@given(recorded(), st.data())
def test_a_journal_with_a_changed_byte_raises_nothing_but_input_errors(tmp_path_factory, polls, data) -> None:
    whole = bytearray(journal_bytes(tmp_path_factory.getbasetemp() / "flip.journal", polls))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        recording = read_journal(io.BytesIO(bytes(whole)))
    except InputError as problem:
        message = str(problem)
    else:
        message = "read"
        assert recording.polls >= 2
    assert "\n" not in message
