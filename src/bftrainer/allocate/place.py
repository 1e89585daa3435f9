"""Placement turns node counts into nodes, without migration: the nodes each trainer keeps, gains and gives up.

The scheduler calls `place` with the pool, the nodes each trainer holds and the counts that an allocator decided.
`place` enforces the rules: a grower keeps every node, a shrinker takes none, a node serves one trainer. A `Placement`
chooses the better nodes: `Stable` looks at how long nodes have been idle, `Compact` at their position in the topology.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Protocol

from bftrainer.core.pool import Node, Pool
from bftrainer.core.topology import Topology
from bftrainer.util.text import natural


@dataclass(frozen=True, slots=True)
class Placed:
    """Nodes of each trainer after a decision, and the changes."""

    nodes: Mapping[str, tuple[Node, ...]]
    """Nodes of every trainer of the decision. Kept nodes come first, in their old order, so that ranks can stay."""
    gained: Mapping[str, tuple[Node, ...]]
    """Trainers that grow, and the nodes they take."""
    given_up: Mapping[str, tuple[Node, ...]]
    """Trainers that shrink, and the nodes they lose."""


@dataclass(frozen=True, slots=True)
class Grower:
    """A trainer that gets more nodes."""

    held: Sequence[Node]
    needs: int
    """How many more nodes the trainer takes, at least one."""


class Placement(Protocol):
    """Policy that chooses among nodes. It always sees them oldest first (idle for longest; then by name)."""

    @property
    def name(self) -> str:
        """Name on the command line."""
        ...

    def keep(self, held: Sequence[Node], count: int) -> Sequence[Node]:
        """The `count` nodes of `held` that a shrinking trainer keeps; 0 < count < len(held)."""
        ...

    def take(self, growers: Sequence[Grower], free: Sequence[Node]) -> Sequence[Sequence[Node]]:
        """For each grower, as many nodes of `free` as it needs. There are enough for all."""
        ...


@dataclass(frozen=True, slots=True)
class Stable:
    """Prefers old nodes: the longer a node has been idle, the less likely it is to leave soon.

    Shrinkers give up their youngest nodes, growers take the oldest, first come first served.
    """

    name = "stable"

    def keep(self, held: Sequence[Node], count: int) -> Sequence[Node]:
        """Keep the oldest nodes."""
        return held[:count]

    def take(self, growers: Sequence[Grower], free: Sequence[Node]) -> Sequence[Sequence[Node]]:
        """Give the oldest nodes to the first grower, and so on."""
        oldest = iter(free)
        return [tuple(islice(oldest, grower.needs)) for grower in growers]


@dataclass(frozen=True, slots=True)
class Compact:
    """Prefers near nodes: few leaf switches per trainer, then a low subtree; among equals the older node."""

    topology: Topology
    name = "compact"

    def keep(self, held: Sequence[Node], count: int) -> Sequence[Node]:
        """Keep the bulk: the nodes on the fewest leaf switches, and of those the ones nearest to each other."""
        by_leaf = self._by_leaf(held)
        return self._pick(by_leaf, self._choose(_sizes(by_leaf), count))

    def take(self, growers: Sequence[Grower], free: Sequence[Node]) -> Sequence[Sequence[Node]]:
        """First give growers the free nodes on switches they already use, then each in turn the best of the rest.

        The first round comes before any choice of a new switch, so that no trainer occupies a switch where another
        could grow.
        """
        by_leaf = self._by_leaf(free)
        sizes = _sizes(by_leaf)
        taken: list[list[Node]] = []
        bulks: list[int | None] = []
        for grower in growers:
            population = Counter(self.topology.leaves_of(grower.held))
            ranked = sorted(population, key=lambda leaf: (-population[leaf], leaf))
            bulks.append(ranked[0] if ranked else None)
            nodes: list[Node] = []
            for leaf in ranked:
                here = min(grower.needs - len(nodes), sizes.get(leaf, 0))
                if here:
                    nodes += self._pick(by_leaf, self._spend(sizes, [(leaf, here)]))
            taken.append(nodes)
        for grower, bulk, nodes in zip(growers, bulks, taken, strict=True):
            rest = grower.needs - len(nodes)
            if rest:
                nodes += self._pick(by_leaf, self._spend(sizes, self._choose(sizes, rest, bulk)))
        return taken

    def _choose(self, sizes: Mapping[int, int], count: int, bulk: int | None = None) -> list[tuple[int, int]]:
        """Nodes to take from each leaf, given the nodes on each: few leaves first, then low, then a tight fit.

        With a `bulk`, a leaf that the trainer is on, low means low as seen from that leaf.
        """
        topology = self.topology
        if bulk is None:
            fitting = [leaf for leaf, size in sizes.items() if size >= count]
            if fitting:
                return [(min(fitting, key=lambda leaf: (sizes[leaf], leaf)), count)]
        # Filling the largest leaves first uses the fewest, below any switch; one pass finds that for all switches.
        largest_first = sorted(sizes, key=lambda leaf: (-sizes[leaf], leaf))
        above_bulk = None if bulk is None else set(topology.paths[bulk])
        total: dict[int, int] = {}
        needed: dict[int, int] = {}
        for leaf in largest_first:
            size = sizes[leaf]
            for switch in topology.paths[leaf]:
                if above_bulk is None or switch in above_bulk:
                    before = total.get(switch, 0)
                    if before < count:
                        needed[switch] = needed.get(switch, 0) + 1
                    total[switch] = before + size
        enough = [switch for switch, size in total.items() if size >= count]
        best = min(enough, key=lambda switch: (needed[switch], topology.heights[switch], total[switch], switch))
        return self._fill([leaf for leaf in largest_first if best in topology.paths[leaf]], sizes, count)

    @staticmethod
    def _fill(largest_first: Iterable[int], sizes: Mapping[int, int], count: int) -> list[tuple[int, int]]:
        """Take whole leaves, the largest first; the remainder comes from the smallest leaf that has enough."""
        chosen: list[tuple[int, int]] = []
        last: int | None = None
        for leaf in largest_first:
            if sizes[leaf] >= count:
                last = leaf  # the smallest leaf so far that has enough for the rest
            elif last is None:
                chosen.append((leaf, sizes[leaf]))
                count -= sizes[leaf]
            else:
                break
        assert last is not None  # the leaves have enough together
        return [*chosen, (last, count)]

    def _by_leaf(self, nodes: Sequence[Node]) -> dict[int, list[Node]]:
        """The nodes below each leaf switch, youngest first: the oldest is popped off the end."""
        by_leaf: defaultdict[int, list[Node]] = defaultdict(list)
        for node, leaf in zip(reversed(nodes), self.topology.leaves_of(reversed(nodes)), strict=True):
            by_leaf[leaf].append(node)
        return by_leaf

    @staticmethod
    def _spend(sizes: dict[int, int], chosen: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Subtract the choice from the sizes and return the choice."""
        for leaf, count in chosen:
            sizes[leaf] -= count
            if not sizes[leaf]:
                del sizes[leaf]
        return chosen

    @staticmethod
    def _pick(by_leaf: Mapping[int, list[Node]], chosen: Iterable[tuple[int, int]]) -> list[Node]:
        """Take the oldest nodes of each chosen leaf, and remove them from the leaf."""
        return [by_leaf[leaf].pop() for leaf, count in chosen for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Homes:
    """Whose agents run on which nodes, where each agent serves one owner only."""

    of_nodes: Mapping[Node, str] = field(default_factory=lambda: MappingProxyType({}))
    """The owner of each node's agent. A node without one is at home with every owner."""
    of_trainers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The owner of each trainer."""

    def take(
        self, policy: Placement, growers: Mapping[str, Grower], free: Sequence[Node]
    ) -> Iterable[tuple[str, Sequence[Node]]]:
        """Yield the nodes of `free` that each grower takes: first those of its owner, then as few others as possible.

        With any choice of counts, an owner's trainers together take as many foreign nodes as they need beyond the free
        nodes of their owner, and no more: the number of nodes that change their owner is the least possible.
        """
        if not self.of_nodes:
            yield from zip(growers, policy.take(tuple(growers.values()), free), strict=True)
            return
        left, taken = list(free), {name: list[Node]() for name in growers}
        for owner in dict.fromkeys(self.of_trainers.get(name, "") for name in growers):
            mine = [name for name in growers if self.of_trainers.get(name, "") == owner]
            self._give(policy, growers, mine, [node for node in left if self.of_nodes.get(node) == owner], left, taken)
        for name in growers:
            self._give(policy, growers, [name], [node for node in left if node not in self.of_nodes], left, taken)
        # What is left belongs to other owners, and is more than their trainers need: their growers have chosen.
        self._give(policy, growers, list(growers), list(left), left, taken)
        yield from taken.items()

    @staticmethod
    def _give(
        policy: Placement,
        growers: Mapping[str, Grower],
        names: Sequence[str],
        offered: Sequence[Node],
        left: list[Node],
        taken: Mapping[str, list[Node]],
    ) -> None:
        """Let some growers take what they still need of the `offered` nodes, as far as these go."""
        room, wanting = len(offered), dict[str, Grower]()
        for name in names:
            needs = min(growers[name].needs - len(taken[name]), room)
            if needs:
                wanting[name] = Grower((*growers[name].held, *taken[name]), needs)
                room -= needs
        for name, nodes in zip(wanting, policy.take(tuple(wanting.values()), offered), strict=True) if wanting else ():
            taken[name].extend(nodes)
            gone = set(nodes)
            left[:] = [node for node in left if node not in gone]


NO_HOMES = Homes()


def place(
    pool: Pool,
    assigned: Mapping[str, Sequence[Node]],
    counts: Mapping[str, int],
    policy: Placement = Stable(),  # noqa: B008 - a frozen value without fields
    homes: Homes = NO_HOMES,
) -> Placed:
    """Choose nodes for every trainer in `counts`; earlier growers choose first.

    `assigned` holds the nodes of each trainer, all still in the pool; a trainer preempted below its minimum holds none.
    The order of `assigned` and of the pool does not matter. Counts that cannot be placed raise a ValueError.
    """
    owned = _check(pool, assigned, counts)
    nodes: dict[str, tuple[Node, ...]] = {}
    given_up: dict[str, tuple[Node, ...]] = {}
    growers: dict[str, Grower] = {}
    released: list[Node] = []
    for trainer, count in counts.items():
        held = tuple(assigned.get(trainer, ()))
        nodes[trainer] = held
        if count > len(held):
            growers[trainer] = Grower(held, count - len(held))
        elif count < len(held):
            kept = set(policy.keep(_oldest_first(held, pool), count)) if count else set()
            nodes[trainer] = tuple(node for node in held if node in kept)
            given_up[trainer] = tuple(node for node in held if node not in kept)
            if not len(kept) == len(nodes[trainer]) == count:
                raise ValueError(f"placement {policy.name!r} must keep {count} nodes of {trainer!r}, but kept {kept}")
            released.extend(given_up[trainer])
    gained: dict[str, tuple[Node, ...]] = {}
    if growers:
        free = _oldest_first([*released, *(pool.since.keys() - owned)], pool)
        left = set(free)
        for trainer, taken in homes.take(policy, growers, free):
            if not len(taken) == len(left.intersection(taken)) == growers[trainer].needs:
                raise ValueError(
                    f"placement {policy.name!r} must give {trainer!r} {growers[trainer].needs} free nodes, "
                    f"but gave {taken}"
                )
            left.difference_update(taken)
            gained[trainer] = tuple(taken)
            nodes[trainer] += gained[trainer]
    return Placed(MappingProxyType(nodes), MappingProxyType(gained), MappingProxyType(given_up))


def _check(pool: Pool, assigned: Mapping[str, Sequence[Node]], counts: Mapping[str, int]) -> set[Node]:
    """The assigned nodes, after checking that the counts can be placed."""
    for trainer, count in counts.items():
        if count < 0:
            raise ValueError(f"trainer {trainer!r} cannot get {count} nodes")
    if sum(counts.values()) > len(pool):
        raise ValueError(f"{sum(counts.values())} nodes are decided, but the pool has {len(pool)}")
    uncounted = next((trainer for trainer, held in assigned.items() if held and trainer not in counts), None)
    if uncounted is not None:
        raise ValueError(f"trainer {uncounted!r} holds nodes, but nothing is decided for it")
    owned: set[Node] = set().union(*assigned.values())
    if len(owned) < sum(map(len, assigned.values())):
        times = Counter(node for held in assigned.values() for node in held)
        raise ValueError(f"node {max(times, key=times.__getitem__)!r} is assigned twice")
    gone = owned - pool.since.keys()
    if gone:
        raise ValueError(f"node {min(gone)!r} is assigned, but not in the pool")
    return owned


def _oldest_first(nodes: Iterable[Node], pool: Pool) -> list[Node]:
    """Sort nodes by idle time, then by name. Two sorts by plain keys are faster than one by pairs."""
    return sorted(sorted(nodes, key=natural), key=pool.since.__getitem__)


def _sizes(by_leaf: Mapping[int, Sequence[Node]]) -> dict[int, int]:
    """Number of nodes of each leaf."""
    return {leaf: len(nodes) for leaf, nodes in by_leaf.items()}
