"""Topology of a machine: a tree of switches with nodes at its leaf switches.

It is built from a pattern of node names or from Slurm's topology.conf. `Compact` placement reads it to keep a trainer's
nodes near each other. A node has height 0, a leaf switch 1, any other switch one more than its highest child.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bftrainer.core.hostlist import expand
from bftrainer.core.pool import Node
from bftrainer.errors import InputError

ROOT = 0
"""The switch above everything. It joins the trees of a machine that has several."""
ELSEWHERE = 1
"""The leaf switch of all nodes that the topology does not name, right below the root."""


@dataclass(frozen=True, slots=True, order=True)
class Spread:
    """How scattered a set of nodes is. Smaller is closer together; leaf switches count before height."""

    leaves: int
    """Distinct leaf switches."""
    height: int
    """Height of the smallest subtree that holds all the nodes, which is the largest distance of two of them."""


@dataclass(frozen=True, slots=True)
class Topology:
    """A tree of switches. Switches are numbered: parents come before children, `ROOT` first.

    Every node has a leaf switch: `ELSEWHERE` for nodes that the topology does not name.
    """

    names: tuple[str, ...]
    heights: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    """For each switch, itself and the switches above it, up to the root."""
    leaves: Mapping[Node, int]
    """The leaf switch of each node the topology names; ask `leaf` for any node."""

    @classmethod
    def from_pattern(cls, nodes: Iterable[Node], pattern: str) -> Topology:
        r"""Switches by name: each group of the regular expression names a level, coarse first.

        `([a-h]\d\d)n\d\d` puts c05n06 below the rack c05, `([a-h])(\d\d)n\d\d` below rack c/05 of row c. Nodes whose
        whole name does not match stand elsewhere.
        """
        try:
            compiled = re.compile(pattern)
        except re.error as problem:
            raise InputError(f"topology pattern {pattern!r}: {problem}") from None
        if not compiled.groups:
            raise InputError(f"topology pattern {pattern!r}: must have a group (…) for each level of switches")
        parents: dict[str, str | None] = {}
        leaf_of: dict[Node, str] = {}
        names = list(nodes)
        for node in names:
            match = compiled.fullmatch(node)
            if match is None:
                continue
            above: str | None = None
            for level in match.groups(default=""):
                switch = level if above is None else f"{above}/{level}"
                parents.setdefault(switch, above)
                above = switch
            assert above is not None  # there is at least one group
            leaf_of[node] = above
        if names and not leaf_of:
            raise InputError(
                f"topology pattern {pattern!r}: must match whole node names, but matches none ({names[0]!r})"
            )
        return cls._grow(parents, leaf_of)

    @classmethod
    def from_slurm(cls, text: str, where: str = "topology.conf") -> Topology:
        """The switches of a Slurm topology.conf; `where` names the file in messages."""
        lines: dict[str, int] = {}
        parents: dict[str, str | None] = {}
        below: list[tuple[int, str, tuple[str, ...]]] = []
        leaf_of: dict[Node, str] = {}
        for number, statement in _statements(text):
            at = f"{where}:{number}"
            keys = _keys(statement, at)
            switch = keys["switchname"]
            if switch in lines:
                raise InputError(f"{at}: switch {switch!r} is named twice, first in line {lines[switch]}")
            lines[switch] = number
            parents[switch] = None
            kind = "nodes" if "nodes" in keys else "switches"
            try:
                children = expand(keys[kind])
            except ValueError as problem:
                raise InputError(f"{at}: {problem}") from None
            if kind == "switches":
                below.append((number, switch, children))
                continue
            for node in children:
                if leaf_of.setdefault(node, switch) != switch:
                    raise InputError(f"{at}: node {node!r} is below {leaf_of[node]!r} already, now below {switch!r}")
        for number, switch, children in below:
            for child in children:
                if child not in parents:
                    raise InputError(f"{where}:{number}: switch {child!r} below {switch!r} is not in the file")
                if parents[child] not in (None, switch):
                    raise InputError(
                        f"{where}:{number}: switch {child!r} is below {parents[child]!r} already, now below {switch!r}"
                    )
                parents[child] = switch
        loop = _find_loop(parents)
        if loop is not None:
            raise InputError(f"{where}:{lines[loop]}: switch {loop!r} is below itself")
        return cls._grow(parents, leaf_of)

    @classmethod
    def _grow(cls, parents: Mapping[str, str | None], leaf_of: Mapping[Node, str]) -> Topology:
        """Build the tree from the parents of switches (None: the top of a tree). Loops are refused."""
        children: dict[str | None, list[str]] = {}
        for switch, parent in parents.items():
            children.setdefault(parent, []).append(switch)
        names: list[str] = ["(root)", "(elsewhere)"]
        paths: list[tuple[int, ...]] = [(ROOT,), (ELSEWHERE, ROOT)]
        numbers: dict[str, int] = {}
        # Depth first, so that the switches of a subtree have neighbouring numbers.
        todo: list[tuple[str, int]] = [(switch, ROOT) for switch in reversed(children.get(None, []))]
        while todo:
            switch, parent_number = todo.pop()
            number = numbers[switch] = len(names)
            names.append(switch)
            paths.append((number, *paths[parent_number]))
            todo.extend((child, number) for child in reversed(children.get(switch, [])))
        heights = [1] * len(names)
        heights[ROOT] = 2
        for path in reversed(paths[ELSEWHERE + 1 :]):
            heights[path[1]] = max(heights[path[1]], heights[path[0]] + 1)
        leaves = {node: numbers[switch] for node, switch in leaf_of.items()}
        return cls(tuple(names), tuple(heights), tuple(paths), MappingProxyType(leaves))

    def leaf(self, node: Node) -> int:
        """The leaf switch of a node."""
        return self.leaves.get(node, ELSEWHERE)

    def leaves_of(self, nodes: Iterable[Node]) -> list[int]:
        """The leaf switch of each of many nodes."""
        leaf = self.leaves.get
        return [leaf(node, ELSEWHERE) for node in nodes]

    def common(self, switches: Iterable[int]) -> int:
        """The lowest switch that has all of `switches` below it (or is one of them)."""
        shared: tuple[int, ...] = ()
        for switch in switches:
            path = self.paths[switch]
            above = set(path)
            shared = tuple(s for s in shared if s in above) if shared else path
        if not shared:
            raise ValueError("no switches to find the common switch of")
        return shared[0]

    def distance(self, a: Node, b: Node) -> int:
        """Height of the lowest switch above both nodes; 0 from a node to itself."""
        return 0 if a == b else self.heights[self.common((self.leaf(a), self.leaf(b)))]

    def spread(self, nodes: Iterable[Node]) -> Spread:
        """How scattered `nodes` are. No nodes are the least scattered, then one."""
        distinct = set(nodes)
        leaves = set(self.leaves_of(distinct))
        if len(distinct) < 2:
            return Spread(len(leaves), 0)
        return Spread(len(leaves), self.heights[self.common(leaves)])


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """The lines with content, each with its number: comments removed, lines that end in a backslash joined."""
    begun, first = "", 0
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        said = line.partition("#")[0].rstrip()
        first = first or number
        begun += said.removesuffix("\\")
        if said.endswith("\\"):
            continue
        if begun.strip():
            yield first, begun.strip()
        begun, first = "", 0
    if begun.strip():
        yield first, begun.strip()


_PAIR = re.compile(r"""(\w+)\s*=\s*(?:"([^"]*)"|([^\s"]+))(?:\s+|$)""")


def _keys(statement: str, at: str) -> Mapping[str, str]:
    """The keys of one line in lower case, with their values: a switch and its children."""
    keys: dict[str, str] = {}
    end = 0
    while end < len(statement):
        pair = _PAIR.match(statement, end)
        if pair is None:
            raise InputError(f"{at}: must be `Key=value …`, but got {statement[end : end + 60]!r}")
        key = pair[1].lower()
        if key not in ("switchname", "nodes", "switches", "linkspeed"):
            raise InputError(f"{at}: key must be SwitchName, Nodes, Switches or LinkSpeed, but got {pair[1]!r}")
        if key in keys:
            raise InputError(f"{at}: {pair[1]} is given twice")
        keys[key] = pair[2] or pair[3] or ""
        end = pair.end()
    if not keys.get("switchname"):
        raise InputError(f"{at}: must begin with SwitchName=…, but got {statement[:60]!r}")
    if ("nodes" in keys) == ("switches" in keys):
        raise InputError(f"{at}: switch {keys['switchname']!r} must have either Nodes=… or Switches=…")
    return keys


def _find_loop(parents: Mapping[str, str | None]) -> str | None:
    """A switch that is its own ancestor, if there is one."""
    good: set[str] = set()
    for start in parents:
        path: dict[str, None] = {}
        switch: str | None = start
        while switch is not None and switch not in good:
            if switch in path:
                return switch
            path[switch] = None
            switch = parents[switch]
        good.update(path)
    return None
