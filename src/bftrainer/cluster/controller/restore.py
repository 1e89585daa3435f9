"""Restoring fills the reconciler from the store after a restart.

An earlier controller left its state in the store. Nodes that were connected are awaited, together with the workers that
ran there. The scheduler's state is that of the last decision.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import cast

from bftrainer.cluster.controller.active import ActiveTrainer, NodeState
from bftrainer.cluster.controller.reconciler import Reconciler
from bftrainer.cluster.launchers.base import HEAD
from bftrainer.cluster.spec.states import TrainerState
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store import events
from bftrainer.cluster.store.rows import TrainerRow
from bftrainer.core.pool import Pool
from bftrainer.elastic.metrics import Position
from bftrainer.elastic.protocol import Generation
from bftrainer.scheduler import PoolStatistics, State

RESTORED_GRACE_S = 2.0
"""The time that a leaving node still has after a restart of the controller, which may have taken long."""


def restore(cluster: Reconciler, now: float) -> None:
    """Fill `cluster` with the state that an earlier controller left in the store."""
    store = cluster.store
    cluster.paused = bool(store.kept("paused", False))
    totals = store.kept("totals") or {}
    cluster.pool_node_s, cluster.decisions = totals.get("pool_node_s", 0.0), totals.get("decisions", 0)
    cluster.pool_counted_at = now
    for row in store.nodes(here=True):
        if cluster.settings.dry_run:
            store.update_node(row.node, left=now)
            continue
        node = NodeState(row.node, row.host, row.agent, row.pid, row.joined, now, here=False)
        node.leave_by = now + RESTORED_GRACE_S if row.leaving is not None else None
        cluster.nodes[row.node] = node
    running: dict[str, list[tuple[str, str, float]]] = {}
    for worker in store.workers(running=True):
        running.setdefault(worker.trainer, []).append((worker.worker, worker.node, worker.started))
    queue = [_restored(cluster, row, running.pop(row.id, []), now) for row in store.trainers(unfinished=True)]
    for workers in running.values():  # workers of finished trainers
        for worker_id, _, _ in workers:
            store.end_worker(worker_id, ended=now, status=None, outcome="lost")
    known = {live.id: cluster.tell_scheduler(live, now) for live in queue}
    admitted = [known.pop(name) for name in store.kept("admitted") or () if name in known]
    cluster.state = State(
        Pool(MappingProxyType({n.name: n.joined for n in cluster.nodes.values() if n.in_pool})),
        tuple(admitted),
        tuple(known.values()),
        MappingProxyType({live.id: live.job.nodes for live in queue if live.job.nodes}),
        PoolStatistics(**seen) if (seen := store.kept("seen")) else PoolStatistics(),
    )
    store.log(now, events.ServeRestored(len(queue), len(cluster.nodes)))
    cluster.undecided = True


def _restored(cluster: Reconciler, row: TrainerRow, workers: list[tuple[str, str, float]], now: float) -> ActiveTrainer:
    spec = TrainerSpec.model_validate(row.spec)
    live = cluster.make_live(row.id, row.name, row.owner, row.submitted, spec, row.learned)
    job = live.job
    kept = cluster.store.kept(f"job.{row.id}") or {}
    job.next_worker = row.next_worker
    job.ever_ran = row.started is not None
    job.progress.samples, job.progress.total = row.samples, row.total
    job.progress.epoch, job.progress.step = row.epoch, row.step
    job.progress.redone = row.samples_redone
    job.progress.noted.take(row.metrics, row.metrics_at, Position(row.epoch, row.step, row.samples))
    job.failures_in_all = row.failures
    job.reason = row.reason
    for worker_id, node, started in workers:
        if node in cluster.nodes:
            job.expect(worker_id, node, started)
            if node != HEAD:
                cluster.occupied[node] = worker_id
        else:
            cluster.store.end_worker(worker_id, ended=now, status=None, outcome="lost")
    nodes = tuple(n for n in kept.get("nodes", ()) if n in cluster.nodes and cluster.nodes[n].leave_by is None)
    generation = Generation(row.generation, tuple(kept.get("members", ())))
    job.resume(generation, frozenset(kept.get("trained_by", ())), nodes)
    live.state = cast(TrainerState, row.state)
    live.preemptions, live.rescales, live.node_seconds = row.preemptions, row.rescales, row.node_seconds
    live.started, live.counted_at, live.counted_nodes = row.started, now, len(nodes)
    cluster.trainers[row.id] = live
    for node in nodes:
        cluster.given_to[node] = row.id
    cluster.give(live)
    return live
