"""Restoring fills the reconciler from the store after a restart.

An earlier controller left its state in the store. Nodes that were connected are awaited, together with the workers that
ran there. The scheduler's state is that of the last decision.
"""

from __future__ import annotations

from bftrainer.cluster.controller.active import ActiveTrainer
from bftrainer.cluster.controller.effects import Effects
from bftrainer.cluster.controller.nodes.state import NodeState
from bftrainer.cluster.controller.reconciler import Reconciler
from bftrainer.cluster.launchers.base import HEAD
from bftrainer.cluster.owners.signatures import FIELD
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store import events
from bftrainer.cluster.store.environments import has_values
from bftrainer.cluster.store.rows import TrainerRow, WorkerRow
from bftrainer.cluster.store.store import Store
from bftrainer.elastic.metrics import Position
from bftrainer.errors import InputError

_MOST_NAMES = 10
_LOST_VALUES = (
    "the values of its environment variables are not in {folder}, as after the restore of a back-up, which has only "
    "their names: submit it again"
)
_UNSIGNED = (
    "users.mode is own, but the owners of {names} have not signed them, since they were submitted in mode shared, so "
    "no agent would start them: serve them in mode shared until they are done, or cancel them there"
)
_SIGNED = (
    "users.mode is shared, but there are unfinished trainers of mode own ({names}), which would begin again as the "
    "account of the controller: serve them in mode own until they are done, or cancel them there"
)


def check_mode(store: Store, *, own: bool) -> None:
    """Raise `InputError` if there are unfinished trainers that were submitted in the other mode of users.

    In mode own, agents would refuse trainers that their owners have not signed. In mode shared, signed trainers would
    run as the account of the controller, which their owners did not ask for.
    """
    others = [row.id for row in store.trainers(unfinished=True) if bool(row.spec.get(FIELD)) != own]
    if others:
        names = " ".join(others[:_MOST_NAMES]) + (" and others" if len(others) > _MOST_NAMES else "")
        raise InputError((_UNSIGNED if own else _SIGNED).format(names=names))


def restore(cluster: Reconciler, now: float) -> Effects:
    """Fill `cluster` with the state that an earlier controller left in the store."""
    store, nodes = cluster.store, cluster.nodes
    effects = Effects(decide="now")
    cluster.paused = bool(store.kept("paused", False))
    for row in store.nodes(here=True):
        if cluster.settings.dry_run:
            store.update_node(row.node, left=now)
        else:
            nodes[row.node] = NodeState.from_row(row, now)
    staying = {name for name, node in nodes.items() if node.leave_by is None}
    pool = {node.name: node.joined for node in nodes.values() if node.in_pool}
    for name in pool:
        cluster.planner.gpus.set(name, nodes[name].gpu_count)
    unfinished = {row.id: row for row in store.trainers(unfinished=True)}
    running: dict[str, list[WorkerRow]] = {trainer: [] for trainer in unfinished}
    for worker in store.workers(running=True):
        if worker.trainer in unfinished and worker.node in nodes:
            running[worker.trainer].append(worker)
            if worker.node != HEAD:
                nodes[worker.node].worker = worker.worker
        else:
            store.end_worker(worker.worker, ended=now, status=None, outcome="lost")
    cluster.planner.beliefs.take_up(now)
    without_values: list[str] = []
    for name, trainer in unfinished.items():
        kept = store.kept(f"job.{name}")
        spec = _spec(store, trainer)
        if spec is None:
            without_values.append(name)
        live = cluster.trainers[name] = ActiveTrainer.from_row(
            trainer,
            cluster.launchers,
            cluster.settings,
            now,
            spec=spec,
            kept=kept,
            workers=running[name],
            nodes=staying,
            gpu_counts=cluster.planner.gpus,
            beliefs=cluster.planner.beliefs,
        )
        if not trainer.extremes:  # the version that stored it did not keep them
            _note_extremes(live, store)
        for node in live.job.nodes:
            nodes[node].trainer = name
        cluster.jobs.give(live, effects)
    cluster.planner.restore(pool, list(cluster.trainers.values()), now)
    cluster.planner.owned(nodes.values())
    store.log(now, events.ServeRestored(len(unfinished), len(nodes)))
    for name in without_values:
        effects.add(cluster.fail(name, _LOST_VALUES.format(folder=store.environments.folder), now))
    store.environments.keep_only(cluster.trainers)
    return effects


def _note_extremes(live: ActiveTrainer, store: Store) -> None:
    """Find the extremes of a trainer's metrics in its history."""
    for metrics, at in store.reports(live.id):
        known = {name: value for name, value in metrics.items() if value is not None and name in at}
        live.job.progress.extremes.note(known, at, Position(0, 0, 0))


def _spec(store: Store, row: TrainerRow) -> TrainerSpec | None:
    """Return a stored spec with the values of its environment; None if they are not there."""
    env = row.spec.get("env", {})
    values = store.environments.read(row.id) if has_values(env) else {}
    return None if values is None else TrainerSpec.model_validate({**row.spec, "env": {**env, **values}})
