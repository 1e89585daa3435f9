"""The allocation problem and the `Allocator` protocol: pool, horizon and claims in, one node count per claim out.

For each claim j, now on C_j nodes, choose N_j ∈ {0} ∪ [min_j, max_j] with Σ N_j ≤ |pool|, maximising
Σ_j T·O_j(N_j) − O_j(C_j)·R_j − L_j, where R_j is up_j if N_j > C_j, down_j if N_j < C_j, else 0. L_j is what nodes that
start cost: where N_j > C_j, the trainer goes on at O_j(C_j) for start_j seconds before it has the new nodes' help, so
L_j = min(start_j, T)·(O_j(N_j) − O_j(C_j)); else 0. The paper has no such term: there start_j is 0. `place.py` chooses
the nodes: every such vector can be placed without migration, so counts are enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from bftrainer.core.curve import Curve
from bftrainer.errors import InputError

LARGEST_POOL = 1_000_000

Status = Literal["optimal", "time-limit", "kept", "heuristic"]
"""optimal: proven best. time-limit: the best found in time. kept: nothing better than the current map was found in
time. heuristic: the rule of a baseline, which proves nothing."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim of one trainer on the pool: its current count, its allowed counts and their value."""

    name: str
    current: int  # C_j, after preemption
    min_nodes: int  # N_j^min
    max_nodes: int  # N_j^max
    value: Curve  # O_j
    up_s: float  # R_j^up
    down_s: float  # R_j^dw
    owner: str = ""
    start_s: float = 0.0
    """Seconds from giving a node to the trainer to the node's first step."""

    def __post_init__(self) -> None:
        def require(good: bool, field: str, rule: str, value: object) -> None:
            if not good:
                raise InputError(f"trainer {self.name!r}: {field} must be {rule}, but got {value!r}")

        for name in ("current", "min_nodes", "max_nodes"):
            value = getattr(self, name)
            require(isinstance(value, int) and not isinstance(value, bool), name, "a whole number", value)
        require(0 <= self.current <= LARGEST_POOL, "current", f"from 0 to {LARGEST_POOL}", self.current)
        require(self.min_nodes >= 1, "min_nodes", "1 or more", self.min_nodes)
        require(self.max_nodes >= self.min_nodes, "max_nodes", f"at least min_nodes ({self.min_nodes})", self.max_nodes)
        for name in ("up_s", "down_s", "start_s"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, name, "a number of seconds, 0 or more", value)

    @property
    def running(self) -> int:
        """The nodes it really runs on: a trainer preempted below its minimum has stopped, and its nodes are free."""
        return self.current if self.current >= self.min_nodes else 0

    def with_new_nodes_s(self, horizon_s: float) -> float:
        """The part of the horizon in which nodes that are given now compute: T − min(start, T)."""
        return max(horizon_s - self.start_s, 0.0)

    def growth_cost(self, horizon_s: float) -> float:
        """What growing costs at any size, so that its gain is (T − start)·O(n) minus this: O(C)·(up − start)."""
        return (self.up_s + self.with_new_nodes_s(horizon_s) - horizon_s) * self.value.rate(self.running)

    def gain_at(self, nodes: int, horizon_s: float) -> float:
        """T·O(n) − O(C)·R − L for one count, whether the claim allows it or not."""
        running = self.running
        if nodes > running:
            return self.with_new_nodes_s(horizon_s) * self.value.rate(nodes) - self.growth_cost(horizon_s)
        value = horizon_s * self.value.rate(nodes)
        return value if nodes == running else value - self.down_s * self.value.rate(running)

    def gains(self, top: int, horizon_s: float) -> Floats:
        """T·O(n) − O(C)·R − L for every n from 0 to `top`, minus infinity where the claim does not allow it."""
        running = self.running
        rates = self.value.up_to(top)
        gains: Floats = horizon_s * rates
        if running:
            gains[:running] -= self.down_s * self.value.rate(running)
        if running or self.start_s:
            more = slice(running + 1, None)
            gains[more] = self.with_new_nodes_s(horizon_s) * rates[more] - self.growth_cost(horizon_s)
        if self.min_nodes > 1:
            gains[1 : self.min_nodes] = -np.inf
        if self.max_nodes < top:
            gains[self.max_nodes + 1 :] = -np.inf
        return gains

    def allows(self, nodes: int) -> bool:
        """Whether the trainer may run on `nodes` nodes (0: not at all)."""
        return nodes == 0 or self.min_nodes <= nodes <= self.max_nodes


@dataclass(frozen=True, slots=True)
class Limits:
    """Constraints beyond the paper's model. `milp` obeys all of them, `exact` those of owners, the others none."""

    owner_caps: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """The most nodes for all trainers of an owner."""
    owner_shares: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """The fewest nodes for an owner, as far as its trainers can use them and the pool has them; see `rights.py`."""
    exclusive: Sequence[frozenset[str]] = ()
    """Groups of trainers of which at most one may run at a time."""

    def __post_init__(self) -> None:
        for kind, counts in (("cap", self.owner_caps), ("share", self.owner_shares)):
            for owner, count in counts.items():
                if count < 0:
                    raise InputError(f"the {kind} of owner {owner!r} must be 0 nodes or more, but got {count}")

    def __bool__(self) -> bool:
        return bool(self.owner_caps or self.owner_shares or self.exclusive)


@dataclass(frozen=True, slots=True)
class Problem:
    """A pool of idle nodes and the claims on it, in order of submission."""

    pool: int  # |N|
    horizon_s: float  # T_fwd
    claims: tuple[Claim, ...]
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 <= self.pool <= LARGEST_POOL:
            raise InputError(f"pool must be from 0 to {LARGEST_POOL} nodes, but got {self.pool}")
        if not (math.isfinite(self.horizon_s) and self.horizon_s > 0):
            raise InputError(f"horizon_s must be a number of seconds above 0, but got {self.horizon_s}")
        names: set[str] = set()
        for claim in self.claims:
            if claim.name in names:
                raise InputError(f"trainer {claim.name!r} is named twice")
            names.add(claim.name)
        strangers = sorted(set().union(*self.limits.exclusive) - names) if self.limits.exclusive else []
        if strangers:
            raise InputError(f"exclusive group names trainer {strangers[0]!r}, which is not in the problem")

    @property
    def current(self) -> tuple[int, ...]:
        """The current counts of the trainers that really run."""
        return tuple(claim.running for claim in self.claims)

    def feasible(self, counts: Sequence[int]) -> bool:
        """Whether `counts` obey the pool and every claim (the extra limits are not checked)."""
        return sum(counts) <= self.pool and all(c.allows(n) for c, n in zip(self.claims, counts, strict=True))

    def objective(self, counts: Sequence[int]) -> float:
        """Σ_j T·O_j(N_j) − O_j(C_j)·R_j − L_j."""
        return math.fsum(c.gain_at(n, self.horizon_s) for c, n in zip(self.claims, counts, strict=True))


@dataclass(frozen=True, slots=True)
class Decision:
    """Number of nodes for each claim, in the order of the problem's claims."""

    counts: tuple[int, ...]
    status: Status
    objective: float
    solve_ms: float


class Allocator(Protocol):
    """Solves problems. Every implementation passes the conformance suite in `tests/allocate/test_allocators.py`."""

    @property
    def name(self) -> str:
        """Name for `--allocator`."""
        ...

    def allocate(self, problem: Problem) -> Decision:
        """Node counts that obey the pool and every claim."""
        ...
