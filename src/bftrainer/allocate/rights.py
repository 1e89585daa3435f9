"""Rights of owners: how far a decision's counts fall short of owners' shares, as one number to compare.

Part of a share is sure: what the owner's trainers can use with no more nodes than the share itself. The sure part is
kept first. So an owner cannot take another's share by submitting a trainer that needs more nodes than its own share.
The rest of the shares is kept as far as the pool allows, and only then does gain decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bftrainer.allocate.problem import Claim, Problem


@dataclass(frozen=True, slots=True)
class Right:
    """Right of one owner to nodes."""

    share: int
    sure: int
    weight: int
    """Weight of a node that the sure part lacks: more than the largest total shortfall of all shares."""

    def lack(self, nodes: int) -> int:
        """How far `nodes` nodes fall short of the right."""
        return self.weight * max(0, self.sure - nodes) + max(0, self.share - nodes)


def rights(problem: Problem) -> dict[str, Right]:
    """The rights that are in force, by owner."""
    shares, caps = problem.limits.owner_shares, problem.limits.owner_caps
    if not shares:
        return {}
    weight = 1 + sum(shares.values())
    owned: dict[str, list[Claim]] = {owner: [] for owner in shares}
    for claim in problem.claims:
        if claim.owner in owned:
            owned[claim.owner].append(claim)
    return {
        owner: Right(share, _largest(owned[owner], min(share, problem.pool, caps.get(owner, share))), weight)
        for owner, share in shares.items()
    }


def lacking(known: Mapping[str, Right], claims: Sequence[Claim], counts: Sequence[int]) -> int:
    """How far counts fall short of all rights; smaller is better."""
    held = dict.fromkeys(known, 0)
    for claim, count in zip(claims, counts, strict=True):
        if claim.owner in held:
            held[claim.owner] += count
    return sum(right.lack(held[owner]) for owner, right in known.items())


def _largest(claims: Sequence[Claim], most: int) -> int:
    """The largest number of nodes up to `most` that some of these claims can use together."""
    everything = (1 << (most + 1)) - 1
    reached = 1  # bit n: n nodes can be used
    for claim in claims:
        top = min(claim.max_nodes, most)
        if claim.min_nodes > top:
            continue
        used, covered, counts = reached << claim.min_nodes, 1, top - claim.min_nodes + 1
        while covered < counts:  # each pass doubles the counts that are tried
            shift = min(covered, counts - covered)
            used |= used << shift
            covered += shift
        reached |= used & everything
    return reached.bit_length() - 1
