"""JSON views turn rows and live values into API responses (`wire.api` has their types). Pure translation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bftrainer.cluster.controller.active import ActiveTrainer
from bftrainer.cluster.controller.nodes.state import NodeState
from bftrainer.cluster.controller.reconciler import Reconciler
from bftrainer.cluster.http.learning.curve_views import curve_of
from bftrainer.cluster.jobs.learning import Learned, Prior
from bftrainer.cluster.launchers.base import HEAD
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.spec.trainer import DEFAULT_MAX_NODES, TrainerSpec
from bftrainer.cluster.store.rows import EventRow, TrainerRow
from bftrainer.cluster.wire.api import (
    EtaView,
    EventView,
    GpuView,
    NodeView,
    PositionView,
    RankView,
    SnapshotsView,
    TrainerDetail,
    TrainerView,
)
from bftrainer.cluster.wire.messages import Gpu, GpuUse, RankStatus
from bftrainer.util.text import natural

HIDDEN = "(hidden)"
"""Replaces the values of a trainer's environment, because people put passwords there."""


Nodes = Mapping[str, NodeState]


def trainer(
    row: TrainerRow,
    live: ActiveTrainer | None,
    now: float,
    waits: str = "",
    nodes: Nodes = MappingProxyType({}),
    eta: EtaView | None = None,
) -> TrainerView:
    """Return one trainer in short.

    `live` has the newest figures while the trainer is not finished; `waits` is why it has no nodes. `nodes` are those
    that the controller knows. `eta` is when it will be done.
    """
    spec = row.spec
    job = live.job if live is not None else None
    progress = job.progress if job is not None else None
    samples = progress.samples if progress is not None else row.samples
    total = progress.total if progress is not None and progress.total is not None else row.total
    state = live.present_state if live is not None else row.state
    rate = _rate(live) if live is not None and state == "running" else 0.0
    share = min(samples / total, 1.0) if total else None
    left = total - samples if total else None
    names = _nodes(live) if live is not None else []
    return {
        "id": row.id,
        "name": row.name,
        "owner": row.owner,
        "group": spec.get("group", ""),
        "params": spec.get("params", {}),
        "state": state,
        "reason": (job.reason if job is not None else row.reason) or waits,
        "script": spec.get("script", ""),
        "launcher": spec.get("launcher", "elastic"),
        "min_nodes": spec.get("min_nodes", 1),
        "max_nodes": spec.get("max_nodes", DEFAULT_MAX_NODES),
        "weight": spec.get("weight", 1.0),
        "submitted": row.submitted,
        "started": live.started if live is not None else row.started,
        "ended": row.ended,
        "nodes": names,
        "samples": samples,
        "total": total,
        "progress": 1.0 if state == "done" and share is None else share,
        "rate": rate,
        "eta_s": left / rate if left is not None and rate > 0 and state not in FINISHED else None,
        "eta": eta if state not in FINISHED else None,
        "deadline": spec.get("deadline"),
        "metrics": progress.metrics if progress is not None else row.metrics,
        "metrics_at": _positions(progress.reported.at if progress is not None else row.metrics_at),
        "epoch": progress.epoch if progress is not None else row.epoch,
        "step": progress.step if progress is not None else row.step,
        "rescales": live.rescales if live is not None else row.rescales,
        "preemptions": live.preemptions if live is not None else row.preemptions,
        "failures": job.failures_in_all if job is not None else row.failures,
        "samples_redone": progress.redone if progress is not None else row.samples_redone,
        "node_seconds": live.held.node_seconds(now) if live is not None else row.node_seconds,
        "gpu_seconds": live.held.gpu_seconds(now) if live is not None else row.gpu_seconds,
        "ranks": sum(_ranks_on(name, live, nodes) for name in names) if live is not None else 0,
    }


def trainer_in_detail(
    row: TrainerRow,
    live: ActiveTrainer | None,
    now: float,
    log_tail: list[str],
    waits: str = "",
    output: str = "",
    nodes: Nodes = MappingProxyType({}),
    eta: EtaView | None = None,
) -> TrainerDetail:
    """Return one trainer with everything that is known of it. `output` is the folder that its script writes to."""
    spec = TrainerSpec.model_validate(row.spec)
    prior = Prior(spec.prior_curve(), spec.up_s, spec.down_s)
    learned = live.learned if live is not None else Learned.from_json(row.learned or {}, prior, name=row.id)
    workers = live.job.workers.values() if live is not None else ()
    return {
        **trainer(row, live, now, waits, nodes, eta),
        "spec": {**row.spec, "env": dict.fromkeys(row.spec.get("env", ()), HIDDEN)},
        "curve": curve_of(learned, spec),
        "up_s": learned.up_s,
        "down_s": learned.down_s,
        "pauses": dict(learned.pauses()),
        "pause_parts": learned.pause_parts(),
        "start_parts": learned.start_parts(),
        "snapshots": _snapshots(live) if live is not None else None,
        "workers": [
            {
                "worker": worker.id,
                "node": worker.node,
                "state": "leaving" if worker.leave_by else "training" if worker.formed else "starting",
                "pid": worker.pid,
                "ranks": _rank_views(worker.ranks),
            }
            for worker in workers
        ],
        "error": live.job.error if live is not None else row.error,
        "traceback": live.job.traceback if live is not None else row.traceback,
        "log_tail": log_tail,
        "output": output,
    }


def node(view: NodeState, cluster: Reconciler, now: float) -> NodeView:
    """Return one node that is in the pool."""
    live, worker = cluster.on(view.name)
    running = live.job.worker_on(view.name) if live is not None and view.name != HEAD else None
    uses = view.gpu_uses(now)
    shown: NodeView = {
        "node": view.name,
        "host": view.host,
        "state": "leaving" if view.leave_by is not None else "awaited" if not view.here else _use(view, live),
        "trainer": live.name if live is not None else None,
        "owner": live.owner if live is not None else None,
        "worker": worker,
        "since": view.joined,
        "agent_pid": view.pid,
        "heard_s": round(now - view.heard, 3),
        "gpus": [_gpu(gpu, uses.get(gpu.id)) for gpu in view.gpus],
        "slots": view.ranks,
        "ranks": _rank_views(running.ranks) if running is not None else [],
    }
    if view.owner:
        shown["serves"] = view.owner
    return shown


def pool(cluster: Reconciler) -> dict[str, Any]:
    """Return the size of the pool and the number of its nodes in use, and the same of GPUs."""
    state, gpus = cluster.planner.state, cluster.planner.gpus
    own = {"owners": cluster.hand_overs.describe()} if state.homes else {}
    return {
        "size": len(state.pool),
        "used": sum(len(nodes) for nodes in state.assigned.values()),
        "gpus": gpus.total,
        "used_gpus": sum(gpus.of(nodes) for nodes in state.assigned.values()),
        **own,
    }


def event(row: EventRow) -> EventView:
    """Return one event of the log."""
    return {
        "seq": row.seq, "time": row.time, "kind": row.kind, "trainer": row.trainer, "node": row.node, "data": row.data
    }  # fmt: skip


def _use(view: NodeState, live: ActiveTrainer | None) -> str:
    if view.name == HEAD:
        return "head"
    return "assigned" if live is not None else "free"


def _nodes(live: ActiveTrainer) -> list[str]:
    """Return the nodes on which a trainer trains or will train."""
    running = {worker.node for worker in live.job.workers.values()} - {HEAD}
    return sorted(running | set(live.job.nodes), key=natural)


def _ranks_on(name: str, live: ActiveTrainer, nodes: Nodes) -> int:
    """Return how many ranks a trainer has on a node; 0 while no worker of it runs there."""
    worker = live.job.worker_on(name)
    if live.launcher.traits.speaks and (worker is None or worker.ranks):
        return len(worker.ranks) if worker is not None else 0
    # Programs that do not speak start their ranks themselves, and older agents say nothing of ranks.
    return live.spec.ranks_on(nodes[name].ranks if name in nodes else 1)


def _rank_views(ranks: Sequence[RankStatus]) -> list[RankView]:
    return [{"pid": rank.pid, "device": rank.device} for rank in ranks]


def _gpu(gpu: Gpu, use: GpuUse | None) -> GpuView:
    """Return a GPU. Numbers that make no sense, as an agent may send them, are not known."""
    return {
        "id": gpu.id,
        "kind": gpu.kind,
        "name": gpu.name,
        "memory_mb": gpu.memory_mb if gpu.memory_mb > 0 else None,
        "percent": use.percent if use is not None and 0 <= use.percent <= 100 else None,
        "used_mb": use.memory_mb if use is not None and use.memory_mb >= 0 else None,
    }


def _rate(live: ActiveTrainer) -> float:
    """Return the samples per second at the present size."""
    world = live.job.world
    found = live.job.progress.rates.get(world) or live.learned.measured.get(world)
    return found if found is not None and math.isfinite(found) else 0.0


def _snapshots(live: ActiveTrainer) -> SnapshotsView | None:
    """Return the present snapshot interval and the cost of a snapshot; None before the workers report them."""
    progress = live.job.progress
    if progress.snapshot_every_s is None:
        return None
    return {
        "step": progress.snapshot_step,
        "every_s": progress.snapshot_every_s,
        "stall_s": progress.snapshot_stall_s,
    }


def _positions(positions: Mapping[str, Sequence[int]]) -> dict[str, PositionView]:
    """Return the position (epoch, step, samples) that each metric belongs to."""
    return {
        name: {"epoch": epoch, "step": step, "samples": samples} for name, (epoch, step, samples) in positions.items()
    }
