"""Schedules of virtual nodes: from scripts and traces, looped and sped up."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.cluster.pools.local.churn import Action, Schedule, after_trace, make_schedule
from bftrainer.core.pool import Fragment
from bftrainer.core.trace import Trace, Window
from bftrainer.errors import InputError
from bftrainer.traces.files import save_trace


def names(count: int) -> tuple[str, ...]:
    return tuple(f"node-{i}" for i in range(1, count + 1))


def replayed(schedule: Schedule, until_s: float) -> frozenset[str]:
    """Who is there if one follows the actions from the start."""
    there = set(schedule.present(0.0))
    for action in schedule.between(0.0, until_s):
        assert (action.node in there) != (action.kind == "join"), action
        (there.add if action.kind == "join" else there.discard)(action.node)
    return frozenset(there)


def test_fixed_nodes_stay() -> None:
    schedule = make_schedule("fixed", 3)
    assert schedule.present(0.0) == schedule.present(1e9) == set(names(3))
    assert schedule.next_time(0.0) is None


def test_a_script_is_followed_and_sped_up() -> None:
    lines = ["10 leave node-1", "4 join node-9", "12.5 kill node-2", (20, "join", "node-1")]
    schedule = make_schedule(lines, 2, speed=2.0)
    assert schedule.actions == (
        Action(2.0, "join", "node-9"),
        Action(5.0, "leave", "node-1"),
        Action(6.25, "kill", "node-2"),
        Action(10.0, "join", "node-1"),
    )
    assert schedule.present(0.0) == {"node-1", "node-2"}
    assert schedule.present(2.0) == {"node-1", "node-2", "node-9"}
    assert schedule.present(1e6) == {"node-1", "node-9"}
    assert [action.time_s for action in schedule.between(2.0, 6.25)] == [5.0, 6.25]
    assert schedule.next_time(6.25) == 10.0


def test_a_script_may_be_a_file_with_comments(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("# a quiet start\n\n12.5 leave node-3   # then one goes\n")
    assert make_schedule(str(tmp_path / "script"), 3).actions == (Action(12.5, "leave", "node-3"),)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["soon leave node-1"], "action 1: an action must be like `12.5 leave node-3`"),
        (["1 leave"], "action 1: an action must be like"),
        (["1 leave node-1", "2 leave node-1"], "action 2: node-1 cannot leave at 2 s: it is not there then"),
        (["1 kill node-7"], "action 1: node-7 cannot kill at 1 s: it is not there then"),
        (["1 leave node-1", "2 join node-1", "3 join node-1"], "action 3: node-1 cannot join at 3 s: it is there"),
        (["nan leave node-1"], "must be like"),
        (["-1 leave node-1"], "must be like"),
        (["1 leave --help"], "must be like"),
        ([7], "action 1: an action must be like `12.5 leave node-3` (join, leave or kill), but got 7"),
        ([[True, "leave", "node-1"]], "must be like"),
    ],
)
def test_a_wrong_script_is_one_clear_line(lines: list[object], message: str) -> None:
    with pytest.raises(InputError) as error:
        make_schedule(lines, 2)
    assert message in str(error.value)


def test_a_wrong_line_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("1 leave node-1\n\nrubbish\n")
    with pytest.raises(InputError, match=r"script: line 3: an action must be like"):
        make_schedule(str(tmp_path / "script"), 2)


def test_a_profile_that_nobody_knows_is_a_clear_error() -> None:
    with pytest.raises(InputError, match="`churn` must be fixed, a profile .*but got 'sumit'.*did you mean 'summit'"):
        make_schedule("sumit", 2)


def test_a_looped_schedule_comes_back_to_its_start() -> None:
    schedule = make_schedule(["1 leave node-1", "2 join node-9", "4 leave node-2"], 3, loop=True)
    assert schedule.period_s == 4.0
    for lap in range(5):
        assert schedule.present(4.0 * lap) == set(names(3))
        assert schedule.present(4.0 * lap + 2.5) == {"node-2", "node-3", "node-9"}
    assert schedule.next_time(4.0) == 5.0
    assert replayed(schedule, 22.5) == schedule.present(22.5)


def test_a_loop_that_takes_no_time_is_refused() -> None:
    with pytest.raises(InputError, match="`loop` needs a schedule that takes time"):
        make_schedule(["0 leave node-1"], 1, loop=True)


fragments = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=25).map(
    lambda rows: _apart(rows)
)


def _apart(rows: list[tuple[int, int, int]]) -> list[Fragment]:
    """Fragments out of rows of node, gap and length, one after the other on each node."""
    end = dict.fromkeys(range(6), 1000)
    found = []
    for node, gap, length in rows:
        start = end[node] + gap
        end[node] = start + length
        if end[node] <= 1100:
            found.append(Fragment(f"n{node}", float(start), float(end[node])))
    return found


@settings(max_examples=40)
@given(fragments, st.booleans(), st.integers(0, 3), st.floats(0.5, 20.0))
def test_a_schedule_has_the_nodes_that_the_trace_has(rows: list[Fragment], loop: bool, seed: int, speed: float) -> None:
    trace = Trace.from_fragments(rows, [f"n{i}" for i in range(6)], Window(1000.0, 1100.0))
    schedule = after_trace(trace, names(6), speed, seed, 0.5, loop)
    for tenth in range(0, 1000, 7):
        time = 1000.0 + tenth / 10 + 0.05
        want = sum(row.start <= time < row.end for row in rows)
        assert len(schedule.present((time - 1000.0) / speed)) == want
        if loop and schedule.actions:
            assert len(schedule.present((time - 1000.0 + 300.0) / speed)) == want
    assert replayed(schedule, 355.5 / speed) == schedule.present(355.5 / speed)


def test_the_same_seed_gives_the_same_schedule_and_another_one_another() -> None:
    first, again, other = (make_schedule("summit", 8, hours=2, seed=seed, abrupt=0.3) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("profile", ["summit", "theta", "mira"])
def test_of_eight_virtual_nodes_the_number_present_varies(profile: str) -> None:
    schedule = make_schedule(profile, 8, speed=60.0, hours=2, seed=0)
    counts = np.array([len(schedule.present(time)) for time in np.arange(0.0, 120.0, 0.5)])
    assert counts.std() > 1.0
    assert (counts > 0).mean() > 0.5
    assert counts.max() >= 4


def test_the_share_of_abrupt_leaves_is_as_asked() -> None:
    kinds = [a.kind for a in make_schedule("summit", 64, hours=24, seed=3, abrupt=0.25).actions if a.kind != "join"]
    assert len(kinds) > 200
    assert 0.15 < kinds.count("kill") / len(kinds) < 0.35
    calm = make_schedule("summit", 8, hours=24, seed=3)
    assert not any(action.kind == "kill" for action in calm.actions)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_trace_file_is_followed(tmp_path: Path, suffix: str) -> None:
    rows = [Fragment("a", 0.0, 100.0), Fragment("b", 50.0, 80.0)]
    path = tmp_path / f"trace{suffix}"
    save_trace(Trace.from_fragments(rows, ["a", "b"], Window(0.0, 100.0)), path, {})
    schedule = make_schedule(str(path), 2, speed=10.0)
    assert [len(schedule.present(time)) for time in (0.0, 5.0, 8.0, 10.0)] == [1, 2, 1, 0]
    with pytest.raises(InputError, match="`nodes` must be at most the 2 nodes of the trace, but got 3"):
        make_schedule(str(path), 3)


def test_following_a_long_loop_costs_little() -> None:
    schedule = make_schedule(["1 leave node-1", "2 join node-1"], 1, loop=True)
    assert [action.time_s for action in itertools.islice(schedule.between(1e7, 1e9), 2)] == [1e7 + 1, 1e7 + 2]
