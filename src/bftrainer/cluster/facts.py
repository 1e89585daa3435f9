"""The live system's values in the forms that others want: the scheduler, the store and the event log.

Pure translation. What is written to the log by `trainer_as_json` and `decision_as_json` is enough to make every
decision again (`rerun.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bftrainer.cluster.owners import limits_as_json, limits_as_text
from bftrainer.cluster.spec import TrainerSpec
from bftrainer.cluster.words import LEAST, MOST
from bftrainer.cluster.workers import JobSettings
from bftrainer.core.curve import Curve
from bftrainer.core.trainer import Trainer
from bftrainer.scheduler import Plan, State

if TYPE_CHECKING:
    from bftrainer.cluster.live import Live


def job_settings(settings: JobSettings, spec: TrainerSpec) -> JobSettings:
    """How patient to be with this trainer."""
    return replace(settings, most_failures=spec.max_restarts + 1)


def as_trainer(live: Live, usual_rate: float) -> Trainer:
    """What the scheduler is told of a trainer. Its name there is its id."""
    spec, learned = live.spec, live.learned
    curve = learned.curve(spec.min_nodes, spec.max_nodes, usual_rate)
    return Trainer(
        live.id,
        Curve(curve.nodes, (0.0, *(min(max(rate, LEAST), MOST) for rate in curve.rates[1:]))),
        spec.min_nodes,
        spec.max_nodes,
        min(learned.growth_s(len(live.job.nodes)), MOST),
        min(learned.down_s, MOST),
        submit=live.submitted,
        owner=live.owner,
        weight=min(max(spec.weight, LEAST), MOST),
        model=spec.model,
    )


def trainer_as_json(trainer: Trainer) -> dict[str, Any]:
    """All of a trainer that decisions depend on."""
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
    """What `trainer_as_json` wrote."""
    curve = Curve(tuple(found["curve"]["nodes"]), tuple(found["curve"]["rates"]))
    return Trainer(**{**found, "curve": curve})


def decision_as_json(plan: Plan, state: State, names: Mapping[str, str], took_ms: float) -> dict[str, Any]:
    """A decision with its reasons and numbers; `state` is the one after it, `names` are those that people gave."""
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


def columns(live: Live, ended: float | None) -> dict[str, Any]:
    """What the store keeps of a trainer."""
    job = live.job
    progress = job.progress
    metrics, metrics_at = progress.noted.both()
    return {
        "state": live.state,
        "reason": job.reason,
        "started": live.started,
        "ended": ended,
        "generation": job.roster.generation.id,
        "next_worker": job.next_worker,
        "samples": progress.samples,
        "total": progress.total if progress.total is not None else live.spec.work,
        "epoch": progress.epoch,
        "step": progress.step,
        "metrics": metrics,
        "metrics_at": {name: list(at) for name, at in metrics_at.items()},
        "rescales": live.rescales,
        "preemptions": live.preemptions,
        "failures": job.failures_in_all,
        "samples_redone": progress.redone,
        "node_seconds": live.node_seconds,
        "error": job.error,
        "traceback": job.traceback,
    }
