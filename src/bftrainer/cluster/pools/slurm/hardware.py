"""Compares what jobs ask for with what nodes have: partitions, features, generic resources, memory and CPUs.

`read_layout` reads the kinds of nodes of a site, of which there are few. Requests are compared with kinds, never with
single nodes. Whatever cannot be understood fits: in doubt a job could start on the node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from bftrainer.core.hostlist import expand
from bftrainer.slurm.gres import UNKNOWN, Gres, gpu_request, read_whole_gres

LAYOUT_FORMAT = "%R|%c|%m|%G|%f|%N"
_COMPLEX = re.compile(r"[^\w.+@:/&|-]")
"""Characters of constraints that this module does not evaluate: brackets, counts, negations."""


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a job asks of each of its nodes."""

    partitions: frozenset[str]
    constraint: str = ""
    gres: Gres = ()
    memory_mb: int = 0
    """At least this much; for a job that asks for memory per CPU, that of one CPU."""
    cpus: int = 0
    reservation: str = ""


@dataclass(frozen=True, slots=True)
class NodeKind:
    """What the nodes of one kind have."""

    partitions: frozenset[str]
    cpus: int = 0
    memory_mb: int = 0
    gres: Gres | None = ()
    """None: not known, since a part of it has a form that cannot be read."""
    features: frozenset[str] = frozenset()

    def fits(self, request: JobRequest) -> bool:
        """Return whether a job could run on such a node. A value of 0 means that it is not known."""
        return (
            not self.partitions.isdisjoint(request.partitions)
            and (not self.cpus or request.cpus <= self.cpus)
            and (not self.memory_mb or request.memory_mb <= self.memory_mb)
            and (self.gres is None or all(_has_gres(self.gres, *each) for each in request.gres))
            and (_COMPLEX.search(request.constraint) is not None or has_features(self.features, request.constraint))
        )

    @property
    def gpus(self) -> str:
        """The value of `--gres` that asks for all its GPUs; empty if it has none."""
        return gpu_request(self.gres or ())


@dataclass(frozen=True, slots=True)
class SiteLayout:
    """The partitions of a site, the kind of each node, and the nodes of each reservation."""

    partitions: frozenset[str] = frozenset()
    kinds: Mapping[str, NodeKind] = field(default_factory=lambda: MappingProxyType({}))
    """The kind of each node; nodes of one kind share one object."""
    reservations: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))


def has_features(features: frozenset[str], constraint: str) -> bool:
    """Return whether a node has the features of `constraint`: names joined by `&`, which binds first, and `|`."""
    return any(set(each.split("&")) <= features for each in constraint.split("|")) if constraint else True


def read_layout(text: str) -> SiteLayout:
    """Parse the output of `sinfo --exact` with `LAYOUT_FORMAT`: one line per partition and kind of node."""
    hardware: dict[str, tuple[int, int, str, str]] = {}
    partitions: dict[str, set[str]] = {}
    names = set[str]()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 6 or not cells[0]:
            raise ValueError(f"no partition in {line[:80]!r}")
        partition, cpus, memory, gres, features, nodes = cells
        names.add(partition)
        for node in expand(nodes) if nodes not in UNKNOWN else ():
            hardware[node] = (_least(cpus), _least(memory), gres, features)
            partitions.setdefault(node, set()).add(partition)
    if not names:
        raise ValueError("there is no partition")
    return SiteLayout(frozenset(names), MappingProxyType(_kinds(hardware, partitions)))


def _kinds(
    hardware: Mapping[str, tuple[int, int, str, str]], partitions: Mapping[str, set[str]]
) -> dict[str, NodeKind]:
    kinds: dict[object, NodeKind] = {}
    of_node: dict[str, NodeKind] = {}
    for node, (cpus, memory_mb, gres, features) in hardware.items():
        where = frozenset(partitions[node])
        key = (where, cpus, memory_mb, gres, features)
        if key not in kinds:
            kinds[key] = NodeKind(where, cpus, memory_mb, read_whole_gres(gres), _split(features))
        of_node[node] = kinds[key]
    return of_node


def _split(features: str) -> frozenset[str]:
    return frozenset() if features in UNKNOWN else frozenset(features.split(","))


def _least(text: str) -> int:
    """Return a number such as `8` or `8+`; 0 if it is not known, or if some nodes have more."""
    return int(text) if text.isdigit() else 0


def _has_gres(gres: Iterable[tuple[str, str, int]], name: str, kind: str, count: int) -> bool:
    return sum(number for has, has_kind, number in gres if has == name and kind in ("", has_kind)) >= count
