import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.allocate.place import Compact, Grower, Placed, Placement, Stable, place
from bftrainer.core.pool import Event, Node, Pool
from bftrainer.core.topology import Topology

RACKS = {rack: [f"r{rack}n{n}" for n in range(1, 13)] for rack in range(6)}
NODES = [node for rack in RACKS.values() for node in rack]
SOME_NODES = [node for rack in RACKS.values() for node in rack[:5]]
TOPOLOGY = Topology.from_slurm(
    "\n".join(f"SwitchName=r{rack} Nodes={','.join(nodes)}" for rack, nodes in RACKS.items() if rack < 5)
    + "\nSwitchName=left Switches=r0,r1\nSwitchName=right Switches=r2,r3,r4",  # the nodes of r5 stand elsewhere
    lambda text: text.split(","),
)
POLICIES = [Stable(), Compact(TOPOLOGY)]
policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)


@dataclass(frozen=True)
class State:
    pool: Pool
    assigned: Mapping[str, Sequence[Node]]
    counts: Mapping[str, int]


@st.composite
def states(draw: st.DrawFn) -> State:
    """A pool, some of whose nodes are held, and counts that fit it."""
    idle = draw(st.permutations(SOME_NODES))[: draw(st.integers(0, len(SOME_NODES)))]
    pool = Pool({node: draw(st.integers(0, 3)) * 10.0 for node in idle})
    holders = draw(st.lists(st.integers(0, 6), min_size=len(idle), max_size=len(idle)))  # 6: nobody
    assigned = {f"t{t}": [n for n, h in zip(idle, holders, strict=True) if h == t] for t in range(5)}
    room, counts = len(idle), {}
    for trainer in draw(st.permutations([*assigned, "t5", "new"])):
        counts[trainer] = draw(st.integers(0, room))
        room -= counts[trainer]
    return State(pool, assigned, counts)


@policies
@given(state=states())
def test_every_trainer_gets_its_count_of_pool_nodes_and_no_node_serves_two(policy: Placement, state: State) -> None:
    placed = place(state.pool, state.assigned, state.counts, policy)
    assert {trainer: len(nodes) for trainer, nodes in placed.nodes.items()} == dict(state.counts)
    used = [node for nodes in placed.nodes.values() for node in nodes]
    assert len(used) == len(set(used))
    assert set(used) <= set(state.pool)


@policies
@given(state=states())
def test_a_grower_keeps_all_its_nodes_and_a_shrinker_takes_no_new_one(policy: Placement, state: State) -> None:
    placed = place(state.pool, state.assigned, state.counts, policy)
    for trainer, count in state.counts.items():
        before, after = set(state.assigned.get(trainer, ())), set(placed.nodes[trainer])
        if count >= len(before):
            assert before <= after
        if count <= len(before):
            assert after <= before


@policies
@given(state=states())
def test_what_is_gained_and_given_up_is_what_changed(policy: Placement, state: State) -> None:
    placed = place(state.pool, state.assigned, state.counts, policy)
    for trainer, after in placed.nodes.items():
        before = tuple(state.assigned.get(trainer, ()))
        gained, given_up = placed.gained.get(trainer, ()), placed.given_up.get(trainer, ())
        assert after == tuple(node for node in before if node not in given_up) + gained
        assert set(given_up) <= set(before)
    assert all(placed.gained.values())
    assert all(placed.given_up.values())


@policies
@given(state=states(), seed=st.integers(0, 1000))
def test_the_order_of_the_pool_and_of_what_is_held_changes_nothing(policy: Placement, state: State, seed: int) -> None:
    def shuffled(mapping: Mapping[str, float]) -> dict[str, float]:
        return dict(random.Random(seed).sample(list(mapping.items()), len(mapping)))

    first = place(state.pool, state.assigned, state.counts, policy)
    held = {t: random.Random(seed).sample(nodes, len(nodes)) for t, nodes in reversed(list(state.assigned.items()))}
    second = place(Pool(shuffled(state.pool.since)), held, state.counts, policy)
    assert {t: set(nodes) for t, nodes in first.nodes.items()} == {t: set(nodes) for t, nodes in second.nodes.items()}
    assert first.gained == second.gained


@policies
@given(state=states())
def test_deciding_the_same_again_moves_nothing(policy: Placement, state: State) -> None:
    placed = place(state.pool, state.assigned, state.counts, policy)
    again = place(state.pool, placed.nodes, state.counts, policy)
    assert again.nodes == placed.nodes
    assert not again.gained
    assert not again.given_up


@given(states())
def test_stable_gives_up_the_youngest_and_takes_the_oldest(state: State) -> None:
    placed = place(state.pool, state.assigned, state.counts, Stable())
    since = state.pool.since
    for trainer, given_up in placed.given_up.items():
        kept = placed.nodes[trainer]
        assert not kept or max(since[n] for n in kept) <= min(since[n] for n in given_up)
    gained = [node for nodes in placed.gained.values() for node in nodes]
    left = set(since) - {node for nodes in placed.nodes.values() for node in nodes}
    assert not (gained and left) or max(since[n] for n in gained) <= min(since[n] for n in left)
    assert [since[n] for n in gained] == sorted(since[n] for n in gained)  # so the first to pick has the oldest


def test_among_nodes_of_one_age_the_lower_number_is_first() -> None:
    pool = Pool({"n10": 5.0, "n9": 5.0, "n2": 5.0, "n02": 5.0, "n1x": 5.0, "m11": 5.0, "z": 1.0})
    placed = place(pool, {}, {"a": 7})
    assert placed.nodes["a"] == ("z", "m11", "n1x", "n02", "n2", "n9", "n10")


def test_growers_pick_in_the_order_of_the_counts() -> None:
    pool = Pool({"old": 0.0, "new": 9.0})
    assert place(pool, {}, {"a": 1, "b": 1}).nodes == {"a": ("old",), "b": ("new",)}
    assert place(pool, {}, {"b": 1, "a": 1}).nodes == {"a": ("new",), "b": ("old",)}


def test_a_grower_takes_what_a_shrinker_releases_and_keeps_its_own_order() -> None:
    pool = Pool({"c": 3.0, "b": 2.0, "a": 1.0, "d": 4.0})
    placed = place(pool, {"x": ["c", "a", "b"], "y": ["d"]}, {"x": 2, "y": 2})
    assert placed == Placed({"x": ("a", "b"), "y": ("d", "c")}, {"y": ("c",)}, {"x": ("c",)})


def test_a_trainer_that_stops_gives_up_everything() -> None:
    placed = place(Pool({"a": 0.0, "b": 0.0}), {"x": ["a", "b"]}, {"x": 0})
    assert placed == Placed({"x": ()}, {}, {"x": ("a", "b")})


@policies
def test_nothing_decided_places_nothing(policy: Placement) -> None:
    assert place(Pool(), {}, {}, policy) == Placed({}, {}, {})
    assert place(Pool({"a": 0.0}), {"gone": []}, {}, policy) == Placed({}, {}, {})


@pytest.mark.parametrize(
    ("assigned", "counts", "words"),
    [
        ({}, {"x": -1}, "trainer 'x' cannot get -1 nodes"),
        ({}, {"x": 2, "y": 2}, "4 nodes are decided, but the pool has 3"),
        ({"x": ["a", "b"], "y": ["b"]}, {"x": 1, "y": 1}, "node 'b' is assigned twice"),
        ({"x": ["a", "a"]}, {"x": 1}, "node 'a' is assigned twice"),
        ({"x": ["a", "q"]}, {"x": 1}, "node 'q' is assigned, but not in the pool"),
        ({"x": ["a"]}, {"y": 1}, "trainer 'x' holds nodes, but nothing is decided for it"),
    ],
)
@policies
def test_what_cannot_be_placed_is_a_mistake_of_the_caller(
    policy: Placement, assigned: dict[str, list[str]], counts: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        place(Pool({"a": 0.0, "b": 0.0, "c": 0.0}), assigned, counts, policy)


@dataclass(frozen=True)
class Faulty:
    """A policy that does what no policy may."""

    kept: Sequence[Node] = ("a",)
    taken: Sequence[Sequence[Node]] = (("c",), ("d",))
    name: str = "faulty"

    def keep(self, held: Sequence[Node], count: int) -> Sequence[Node]:
        return self.kept

    def take(self, growers: Sequence[Grower], free: Sequence[Node]) -> Sequence[Sequence[Node]]:
        return self.taken


@pytest.mark.parametrize(
    "policy",
    [
        Faulty(kept=("a", "b")),
        Faulty(kept=("c",)),
        Faulty(taken=(("c",), ("c",))),
        Faulty(taken=(("c", "d"), ())),
        Faulty(taken=(("c",), ("e",))),
        Faulty(taken=(("c",), ("a",))),
    ],
)
def test_a_policy_cannot_break_the_rules(policy: Faulty) -> None:
    pool = Pool(dict.fromkeys("abcd", 0.0))
    good = place(pool, {"x": ["a", "b"]}, {"x": 1, "y": 1, "z": 1}, Faulty())
    assert good.nodes == {"x": ("a",), "y": ("c",), "z": ("d",)}
    with pytest.raises(ValueError, match="placement 'faulty' must"):
        place(pool, {"x": ["a", "b"]}, {"x": 1, "y": 1, "z": 1}, policy)


def rack_nodes(**wanted: int) -> list[Node]:
    """So many nodes of each rack: r0=2 is r0n1, r0n2."""
    return [node for rack, count in wanted.items() for node in RACKS[int(rack[1:])][:count]]


def compact(free: Sequence[Node], counts: Mapping[str, int], **held: Sequence[Node]) -> Placed:
    nodes = [*free, *(node for nodes in held.values() for node in nodes)]
    return place(Pool(dict.fromkeys(nodes, 0.0)), held, counts, Compact(TOPOLOGY))


@pytest.mark.parametrize(
    ("free", "count", "chosen"),
    [
        (rack_nodes(r0=6, r1=4, r2=9), 4, rack_nodes(r1=4)),  # the smallest rack that has enough
        (rack_nodes(r0=6, r1=4, r2=9), 9, rack_nodes(r2=9)),
        (rack_nodes(r0=6, r2=6, r3=3), 8, rack_nodes(r2=6, r3=2)),  # two racks are needed: two that are near
        (rack_nodes(r0=3, r1=3, r2=6, r4=6), 12, rack_nodes(r2=6, r4=6)),
        (rack_nodes(r0=5, r2=4, r3=3, r4=2), 8, rack_nodes(r0=5, r3=3)),  # few racks come before near racks
        (rack_nodes(r0=9, r2=5, r3=2, r4=1), 7, rack_nodes(r0=7)),  # one rack that has all
        (rack_nodes(r2=5, r3=2, r4=1), 6, rack_nodes(r2=5, r4=1)),  # the rest from the rack that fits it best
    ],
)
def test_a_starter_gets_the_switches_that_fit_it_best(free: list[Node], count: int, chosen: list[Node]) -> None:
    assert set(compact(free, {"a": count}).nodes["a"]) == set(chosen)


def test_a_grower_stays_in_its_rack_while_there_is_room_then_goes_to_the_nearest_that_has_enough() -> None:
    held, more = RACKS[0][:3], RACKS[0][3:5]
    assert set(compact([*more, *RACKS[1]], {"a": 5}, a=held).gained["a"]) == set(more)
    free = [*more, *RACKS[1][:3], *RACKS[2][:2]]
    assert set(compact(free, {"a": 7}, a=held).gained["a"]) == {*more, *RACKS[1][:2]}


def test_a_starter_does_not_settle_where_a_grower_could_grow() -> None:
    free = [*RACKS[0][3:6], *RACKS[2][:4]]
    placed = compact(free, {"starter": 3, "a": 6}, a=RACKS[0][:3])
    assert set(placed.gained["a"]) == set(RACKS[0][3:6])
    assert set(placed.gained["starter"]) <= set(RACKS[2])


def test_a_shrinker_gives_up_what_is_farthest_from_its_bulk() -> None:
    held = rack_nodes(r0=5, r1=2, r2=3)
    assert set(compact([], {"a": 7}, a=held).given_up["a"]) == set(rack_nodes(r2=3))
    held = rack_nodes(r0=5, r1=1, r2=3)
    assert set(compact([], {"a": 8}, a=held).given_up["a"]) == set(rack_nodes(r1=1))


def test_on_one_switch_compact_is_as_careful_of_age_as_stable() -> None:
    pool = Pool({node: float(-i) for i, node in enumerate(RACKS[0])})
    placed = place(pool, {"a": RACKS[0][:4]}, {"a": 2, "b": 3}, Compact(TOPOLOGY))
    assert placed.given_up == {"a": tuple(RACKS[0][:2])}
    assert set(placed.gained["b"]) == set(RACKS[0][-3:])


@given(st.sets(st.sampled_from(NODES), min_size=1, max_size=11), st.data())
def test_a_starter_and_a_shrinker_end_as_close_together_as_can_be(nodes: set[Node], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(nodes)))
    best = min(TOPOLOGY.spread(choice) for choice in combinations(sorted(nodes), count))
    assert TOPOLOGY.spread(compact(sorted(nodes), {"a": count}).nodes["a"]) == best
    assert TOPOLOGY.spread(compact([], {"a": count}, a=sorted(nodes)).nodes["a"]) == best


@given(st.sets(st.sampled_from(NODES), min_size=2, max_size=11), st.data())
def test_a_lone_grower_ends_as_close_together_as_can_be(nodes: set[Node], data: st.DataObject) -> None:
    held = data.draw(st.lists(st.sampled_from(sorted(nodes)), unique=True, min_size=1, max_size=len(nodes) - 1))
    free = sorted(nodes - set(held))
    count = data.draw(st.integers(1, len(free)))
    best = min(TOPOLOGY.spread([*held, *choice]) for choice in combinations(free, count))
    assert TOPOLOGY.spread(compact(free, {"a": len(held) + count}, a=held).nodes["a"]) == best


@dataclass(frozen=True)
class Careless:
    """Any nodes will do."""

    rng: random.Random = field(default_factory=lambda: random.Random(3))
    name: str = "careless"

    def keep(self, held: Sequence[Node], count: int) -> Sequence[Node]:
        return self.rng.sample(held, count)

    def take(self, growers: Sequence[Grower], free: Sequence[Node]) -> Sequence[Sequence[Node]]:
        return Stable().take(growers, self.rng.sample(free, len(free)))


MACHINE = [f"r{rack:02}n{n:02}" for rack in range(32) for n in range(16)]
MACHINE_TOPOLOGY = Topology.from_pattern(MACHINE, r"(r\d)(\d)n\d\d")


def churn(policy: Placement, steps: int = 250) -> Iterator[tuple[float, Pool, Placed]]:
    """Nodes come and go, 12 trainers ask for more and less: the same for every policy."""
    rng = random.Random(7)
    pool, placed = Pool(dict.fromkeys(rng.sample(MACHINE, 200), 0.0)), Placed({}, {}, {})
    wanted = {f"t{i}": 8 for i in range(12)}
    for time in range(1, steps):
        left = rng.sample(sorted(pool), rng.randrange(12))
        joined = rng.sample(sorted(set(MACHINE) - set(pool)), rng.randrange(12))
        pool = pool.after(Event(float(time), joined=tuple(joined), left=tuple(left)))
        for trainer in rng.sample(sorted(wanted), 3):
            wanted[trainer] = rng.choice((0, 4, 8, 16, 24))
        room, counts = len(pool), {}
        for trainer, count in wanted.items():
            counts[trainer] = min(count, room)
            room -= counts[trainer]
        held = {trainer: [n for n in nodes if n in pool] for trainer, nodes in placed.nodes.items()}
        placed = place(pool, held, counts, policy)
        yield float(time), pool, placed


def test_over_a_long_churn_compact_needs_far_fewer_switches_than_stable() -> None:
    def spread(policy: Placement) -> tuple[float, float]:
        spreads = [
            MACHINE_TOPOLOGY.spread(nodes)
            for _, _, placed in churn(policy)
            for nodes in placed.nodes.values()
            if len(nodes) > 1
        ]
        return mean(s.leaves for s in spreads), mean(s.height for s in spreads)

    compact_leaves, compact_height = spread(Compact(MACHINE_TOPOLOGY))
    stable_leaves, stable_height = spread(Stable())
    assert compact_leaves < stable_leaves / 2
    assert compact_height < stable_height


def test_over_a_long_churn_stable_holds_older_nodes_than_chance_would() -> None:
    def age(policy: Placement) -> float:
        return mean(
            time - pool.since[n] for time, pool, placed in churn(policy) for t in placed.nodes.values() for n in t
        )

    assert age(Stable()) > 1.3 * age(Careless())
