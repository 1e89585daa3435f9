"""Synthetic traces have the paper's figures for the three machines, and the shape of real idleness."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.core.trace import Trace
from bftrainer.errors import InputError
from bftrainer.traces.synthetic.synth import PROFILES, synthesise

SEEDS = range(5)

# Join and leave events per hour, idle share of the machine, equivalent nodes.
TABLE_1 = {
    "summit": (41.7, 28.6, 0.111, 524),
    "theta": (6.3, 6.2, 0.125, 547),
    "mira": (2.8, 2.4, 0.103, 5071),
}


@dataclass(frozen=True)
class Figures:
    joins_per_hour: float
    leaves_per_hour: float
    ratio: float
    eq_nodes: float
    short_share: float
    short_time_share: float

    @classmethod
    def of(cls, trace: Trace) -> "Figures":
        window, lengths = trace.window, trace.lengths
        short = lengths < 600
        node_seconds = lengths.sum()
        return cls(
            len(np.unique(trace.start[trace.start > window.start])) / window.hours,
            len(np.unique(trace.end[~trace.open])) / window.hours,
            node_seconds / window.seconds / len(trace.nodes),
            node_seconds / window.seconds,
            float(short.mean()),
            lengths[short].sum() / node_seconds,
        )


@pytest.fixture(scope="module")
def summit() -> Trace:
    return synthesise("summit", seed=0)


@pytest.fixture(scope="module", params=list(TABLE_1))
def machine(request: pytest.FixtureRequest) -> tuple[str, list[Figures]]:
    return request.param, [Figures.of(synthesise(request.param, seed=seed)) for seed in SEEDS]


def test_a_profile_knows_the_size_of_its_machine() -> None:
    assert {name: profile.nodes for name, profile in PROFILES.items()} == {"summit": 4608, "theta": 4392, "mira": 49152}
    assert all(name == profile.name for name, profile in PROFILES.items())


def test_the_mean_of_five_seeds_is_within_a_tenth_of_the_paper_and_each_within_three_tenths(
    machine: tuple[str, list[Figures]],
) -> None:
    name, figures = machine
    for field, target in zip(("joins_per_hour", "leaves_per_hour", "ratio", "eq_nodes"), TABLE_1[name], strict=True):
        found = [getattr(f, field) for f in figures]
        assert np.mean(found) == pytest.approx(target, rel=0.10), field
        assert found == pytest.approx([target] * len(found), rel=0.30), field


def test_most_fragments_of_summit_are_short_and_hold_little_of_the_time(summit: Trace) -> None:
    figures = Figures.of(summit)
    assert figures.short_share == pytest.approx(0.58, abs=0.05)
    assert figures.short_time_share == pytest.approx(0.10, abs=0.03)


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    one, same, other = (synthesise("summit", nodes=256, hours=24, seed=seed) for seed in (3, 3, 4))
    assert one.nodes == same.nodes
    for column in ("node", "start", "end", "open"):
        np.testing.assert_array_equal(getattr(one, column), getattr(same, column))
    assert not np.array_equal(one.start, other.start)


def test_a_profile_may_be_given_by_name_or_as_a_value() -> None:
    by_name, by_value = (synthesise(p, nodes=64, hours=12) for p in ("theta", PROFILES["theta"]))
    np.testing.assert_array_equal(by_name.start, by_value.start)


def test_nodes_join_and_leave_in_heavy_tailed_groups(summit: Trace) -> None:
    for times in (summit.start, summit.end[~summit.open]):
        group = np.unique(times, return_counts=True)[1]
        assert group.mean() > 20
        assert np.median(group) < group.mean() / 3
        assert np.quantile(group, 0.99) > 10 * group.mean()


def test_nodes_that_join_together_are_neighbours(summit: Trace) -> None:
    together = np.diff(summit.start) == 0
    assert (np.diff(summit.node)[together] == 1).mean() > 0.8


def test_groups_have_the_size_of_the_smallest_jobs_of_theta_and_of_the_blocks_of_mira() -> None:
    theta = np.unique(synthesise("theta").start, return_counts=True)[1]
    assert 64 <= np.median(theta) <= 256
    mira = np.unique(synthesise("mira").start, return_counts=True)[1]
    assert (mira % 512 == 0).all()


def test_the_longer_a_node_has_been_idle_the_less_likely_it_leaves_soon(summit: Trace) -> None:
    # Few large blocks stay for hours, so that one trace alone says little about them.
    traces = [summit, *(synthesise("summit", seed=seed) for seed in (1, 2))]
    lengths = np.concatenate([trace.lengths[~trace.open] for trace in traces])
    leaves_within_5_min = [(lengths[lengths > age] <= age + 300).mean() for age in (60, 300, 1200, 7200)]
    assert leaves_within_5_min == sorted(leaves_within_5_min, reverse=True)
    assert leaves_within_5_min[0] > 3 * leaves_within_5_min[-1]


def test_the_pool_of_summit_is_bursty(summit: Trace) -> None:
    times = np.arange(summit.window.start, summit.window.end, 600.0)
    joined, left = (np.searchsorted(np.sort(column), times, "right") for column in (summit.start, summit.end))
    pool = joined - left
    assert pool.std() > pool.mean()
    assert np.median(pool) < 0.75 * pool.mean()


def test_summit_is_seen_through_ten_second_polls_that_drop_transients(summit: Trace) -> None:
    assert (summit.start % 10 == 0).all()
    assert (summit.end % 10 == 0).all()
    inside = ~summit.open & (summit.start > summit.window.start)
    assert summit.lengths[inside].min() >= 70


def test_the_window_opens_and_closes_in_the_steady_state(summit: Trace) -> None:
    window = summit.window
    assert window.hours == 336
    assert (summit.start == window.start).any()
    assert summit.open.any()
    assert (summit.end[summit.open] == window.end).all()
    # The first and the last day, averaged over seeds, hold as much as the whole.
    edges = []
    for seed in range(20):
        trace = synthesise("theta", hours=48, seed=seed)
        for day in (0, 24):
            low, high = trace.window.start + day * 3600, trace.window.start + (day + 24) * 3600
            idle = np.clip(trace.end, low, high) - np.clip(trace.start, low, high)
            edges.append(idle.sum() / 86400 / len(trace.nodes))
    assert np.mean(edges[::2]) == pytest.approx(0.125, rel=0.25)
    assert np.mean(edges[1::2]) == pytest.approx(0.125, rel=0.25)


@pytest.mark.parametrize("name", list(TABLE_1))
def test_a_small_machine_keeps_the_idle_share_and_the_lengths_and_sees_fewer_events(name: str) -> None:
    full, small = Figures.of(synthesise(name, seed=1)), Figures.of(synthesise(name, nodes=512, seed=1))
    assert small.ratio == pytest.approx(full.ratio, rel=0.25)
    assert small.short_share == pytest.approx(full.short_share, rel=0.25)
    assert small.short_time_share == pytest.approx(full.short_time_share, rel=0.25)
    assert small.joins_per_hour <= full.joins_per_hour
    assert small.leaves_per_hour <= full.leaves_per_hour


def test_a_large_machine_keeps_the_idle_share() -> None:
    assert Figures.of(synthesise("theta", nodes=20_000, seed=2)).ratio == pytest.approx(0.125, rel=0.30)


@pytest.mark.parametrize(("nodes", "hours"), [(1, 0.1), (1, 336), (7, 5), (64, 0.1), (1024, 24.5), (100_000, 0.5)])
def test_tiny_and_odd_sizes_work(nodes: int, hours: float) -> None:
    trace = synthesise("summit", nodes=nodes, hours=hours)
    assert len(trace.nodes) == nodes
    assert trace.window.hours == pytest.approx(hours)


def test_names_are_padded_to_the_size_of_the_machine() -> None:
    assert synthesise("summit", nodes=7, hours=1).nodes[0] == "node1"
    names = synthesise("summit", hours=0.1).nodes
    assert (names[0], names[-1]) == ("node0001", "node4608")
    assert list(names) == sorted(names)


def test_the_start_moves_the_window() -> None:
    trace = synthesise("theta", nodes=64, hours=2, start=1_700_000_003.5)
    assert (trace.window.start, trace.window.end) == (1_700_000_003.5, 1_700_007_203.5)


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(list(PROFILES)),
    nodes=st.integers(1, 6000),
    hours=st.floats(0.01, 30),
    seed=st.integers(0, 2**32),
)
def test_every_trace_lies_in_its_window_and_no_node_is_idle_twice(
    name: str, nodes: int, hours: float, seed: int
) -> None:
    trace = synthesise(name, nodes=nodes, hours=hours, seed=seed)
    assert len(trace.nodes) == nodes
    assert (trace.lengths > 0).all()
    assert (trace.start >= trace.window.start).all()
    assert (trace.end <= trace.window.end).all()
    by_node = np.lexsort((trace.start, trace.node))
    same = np.diff(trace.node[by_node]) == 0
    assert (trace.start[by_node][1:][same] > trace.end[by_node][:-1][same]).all()


@pytest.mark.parametrize(
    ("profile", "options", "message"),
    [
        ("frontier", {}, "`profile` must be one of summit, theta, mira, but got frontier"),
        ("summit", {"nodes": 0}, "`nodes` must be from 1 to 1000000, but got 0"),
        ("summit", {"nodes": 1_000_001}, "`nodes` must be from 1 to 1000000, but got 1000001"),
        ("summit", {"hours": 0.0}, "`hours` must be more than 0 and at most 87840"),
        ("summit", {"hours": -1.0}, "`hours` must be more than 0"),
        ("summit", {"hours": 1e6}, "`hours` must be more than 0"),
        ("summit", {"hours": float("nan")}, "`hours` must be more than 0"),
        ("summit", {"seed": -1}, "`seed` must be 0 or more, but got -1"),
        ("summit", {"start": float("inf")}, "`start` must be"),
        ("mira", {"nodes": 1_000_000, "hours": 8760}, "must give at most"),
    ],
)
def test_bad_arguments_are_refused_with_the_argument_named(
    profile: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(InputError) as error:
        synthesise(profile, **options)  # type: ignore[arg-type]
    assert message in str(error.value)
