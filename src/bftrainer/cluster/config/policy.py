"""The scheduler's policy is built from the configuration by `policy_of`."""

from __future__ import annotations

from pathlib import Path

from bftrainer.allocate.exact import ExactAllocator
from bftrainer.allocate.place import Compact, Stable
from bftrainer.allocate.registry import make_allocator
from bftrainer.cluster.config.keys import Config
from bftrainer.core.objective import find_objective
from bftrainer.core.topology import Topology
from bftrainer.scheduler import Policy
from bftrainer.slurm import ask
from bftrainer.slurm.site import read_switches

SOLVE_S = 1.0
"""How long an allocator may search. After that, the best solution found is used."""


def policy_of(config: Config) -> Policy:
    """Return the policy that a configuration describes."""
    policy = config.policy
    # Neither compiled code, loaded after many decisions, nor a long search may hold up everything else.
    exact = ExactAllocator(compiled=False) if policy.allocator == "exact" else None
    return Policy(
        allocator=exact or make_allocator(policy.allocator, time_limit_s=SOLVE_S),
        objective=find_objective(policy.objective),
        horizon_s=policy.horizon_s,
        max_parallel=policy.max_parallel,
        placement=Stable() if policy.placement == "stable" else Compact(_topology(policy.placement)),
    )


def _topology(placement: str) -> Topology:
    if placement == "compact":
        return read_switches(ask.run(("scontrol", "show", "topology")))
    return Topology.from_slurm(Path(placement).read_text(), placement)
