"""Converts the scheduler's values to events and back: enough to repeat every decision (`report/rerun.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from bftrainer.allocate.problem import Limits
from bftrainer.cluster.store.events import Decided, TrainerLearned
from bftrainer.core.curve import Curve
from bftrainer.core.trainer import Trainer
from bftrainer.scheduler import Plan, State


def learned_event(trainer: Trainer) -> TrainerLearned:
    """Return the event of a trainer's description for the scheduler. The trainer's name there is its id."""
    return TrainerLearned(
        trainer.name,
        trainer.name,
        {"nodes": trainer.curve.nodes, "rates": trainer.curve.rates},
        trainer.min_nodes,
        trainer.max_nodes,
        trainer.up_s,
        trainer.down_s,
        trainer.submit,
        trainer.owner,
        trainer.weight,
        trainer.model,
        trainer.start_s,
    )


def learned_trainer(event: TrainerLearned) -> Trainer:
    """Return the description that `learned_event` stored."""
    return Trainer(
        event.name,
        Curve(tuple(event.curve["nodes"]), tuple(event.curve["rates"])),
        event.min_nodes,
        event.max_nodes,
        event.up_s,
        event.down_s,
        submit=event.submit,
        owner=event.owner,
        weight=event.weight,
        model=event.model,
        start_s=event.start_s,
    )


def decision_event(plan: Plan, state: State, names: Mapping[str, str], took_ms: float) -> Decided:
    """Return the event of a decision with its reasons and numbers.

    `state` is the state after the decision; `names` are the trainers' names that people gave.
    """
    changes = [change for change in plan.changes if change.action not in ("keep", "wait")]
    reasons = [names.get(each.trainer, each.trainer) + each.reason.removeprefix(each.trainer) for each in changes]
    limits = plan.limits
    if limits and changes:
        reasons.append(f"within owners' limits: {_limits_as_text(limits)}")
    keys = ("trainer", "action", "before", "after", "gain", "cost")
    return Decided(
        plan.allocator,
        {"caps": dict(limits.owner_caps), "shares": dict(limits.owner_shares)} if limits else None,
        plan.pool,
        plan.horizon_s,
        dict(plan.counts),
        {name: list(nodes) for name, nodes in state.assigned.items()},
        [{key: getattr(change, key) for key in keys} for change in changes],
        reasons,
        len(state.waiting),
        round(took_ms, 3),
    )


def decision_limits(event: Decided) -> Limits:
    """Return the owners' limits that were in force at a decision."""
    return Limits(dict(event.limits["caps"]), dict(event.limits["shares"])) if event.limits else Limits()


def _limits_as_text(limits: Limits) -> str:
    caps = [f"{owner} at most {nodes}" for owner, nodes in limits.owner_caps.items()]
    shares = [f"{owner} at least {nodes}" for owner, nodes in limits.owner_shares.items()]
    return ", ".join([*caps, *shares]) + " nodes"
