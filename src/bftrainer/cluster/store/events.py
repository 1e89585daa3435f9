"""Event data hold trainers, limits and decisions as JSON; the functions here convert both ways.

What `trainer_as_json` and `decision_as_json` write is enough to repeat every decision (`report/rerun.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bftrainer.allocate.problem import Limits
from bftrainer.core.curve import Curve
from bftrainer.core.trainer import Trainer
from bftrainer.scheduler import Plan, State


def limits_as_json(limits: Limits) -> dict[str, Any]:
    """Convert the limits in force to JSON, for the record of a decision."""
    return {"caps": dict(limits.owner_caps), "shares": dict(limits.owner_shares)}


def limits_from_json(found: Mapping[str, Any] | None) -> Limits:
    """Read what `limits_as_json` wrote; no limits if nothing was written."""
    return Limits(dict(found["caps"]), dict(found["shares"])) if found else Limits()


def limits_as_text(limits: Limits) -> str:
    """Describe the limits in force in a few words."""
    caps = [f"{owner} at most {nodes}" for owner, nodes in limits.owner_caps.items()]
    shares = [f"{owner} at least {nodes}" for owner, nodes in limits.owner_shares.items()]
    return ", ".join([*caps, *shares]) + " nodes"


def trainer_as_json(trainer: Trainer) -> dict[str, Any]:
    """Convert everything about a trainer that decisions depend on to JSON."""
    return {
        "name": trainer.name,
        "curve": {"nodes": list(trainer.curve.nodes), "rates": list(trainer.curve.rates)},
        "min_nodes": trainer.min_nodes,
        "max_nodes": trainer.max_nodes,
        "up_s": trainer.up_s,
        "down_s": trainer.down_s,
        "submit": trainer.submit,
        "owner": trainer.owner,
        "weight": trainer.weight,
        "model": trainer.model,
    }


def trainer_from_json(found: Mapping[str, Any]) -> Trainer:
    """Read what `trainer_as_json` wrote."""
    curve = Curve(tuple(found["curve"]["nodes"]), tuple(found["curve"]["rates"]))
    return Trainer(**{**found, "curve": curve})


def decision_as_json(plan: Plan, state: State, names: Mapping[str, str], took_ms: float) -> dict[str, Any]:
    """Convert a decision with its reasons and numbers to JSON.

    `state` is the state after the decision; `names` are the trainers' names that people gave.
    """
    changes = [change for change in plan.changes if change.action not in ("keep", "wait")]
    limits = plan.limits
    why = [f"within owners' limits: {limits_as_text(limits)}"] if limits and changes else []
    return {
        "allocator": plan.allocator,
        "limits": limits_as_json(limits) if limits else None,
        "pool": plan.pool,
        "horizon_s": plan.horizon_s,
        "counts": dict(plan.counts),
        "nodes": {name: list(nodes) for name, nodes in state.assigned.items()},
        "changes": [
            {
                "trainer": change.trainer,
                "action": change.action,
                "before": change.before,
                "after": change.after,
                "gain": change.gain,
                "cost": change.cost,
            }
            for change in changes
        ],
        "reasons": [
            *(
                names.get(change.trainer, change.trainer) + change.reason.removeprefix(change.trainer)
                for change in changes
            ),
            *why,
        ],
        "waiting": len(state.waiting),
        "ms": round(took_ms, 3),
    }
