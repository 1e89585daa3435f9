"""Reattaching takes up the workers that an agent reports when it comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from bftrainer.cluster.controller.active import ActiveTrainer
from bftrainer.cluster.controller.effects import Effects
from bftrainer.cluster.controller.job_runner import JobRunner
from bftrainer.cluster.controller.nodes.state import NodeState
from bftrainer.cluster.wire.messages import Ended, Forget, Stop, WorkerStatus
from bftrainer.elastic import protocol


def reattach(
    node: NodeState,
    statuses: Sequence[WorkerStatus],
    concerned: Callable[[NodeState], list[ActiveTrainer]],
    trainer_of: Callable[[str, str], ActiveTrainer | None],
    jobs: JobRunner,
    now: float,
    effects: Effects,
) -> list[str]:
    """Take up the workers of a node. Returns the trainers that it concerned.

    `concerned` says which trainers run on a node or are assigned it, `trainer_of` whose worker it is.
    """
    touched = [live.id for live in concerned(node)]
    told = {status.worker for status in statuses}
    for status in statuses:
        live = trainer_of(status.worker, node.name)
        if live is None:
            clear(node.name, (status,), effects)
            continue
        touched.append(live.id)
        jobs.reattach(live, status, now, effects)
    for live in concerned(node):
        waiting = live.job.worker_on(node.name)
        if waiting is not None and waiting.id not in told:
            # The order to start this worker did not reach the agent.
            jobs.ended(live, Ended(waiting.id, protocol.RESTART), now, effects)
    return touched


def clear(name: str, statuses: Iterable[WorkerStatus], effects: Effects) -> None:
    """End workers on a node that belong to no known trainer."""
    for status in statuses:
        effects.tell(name, Forget(status.worker) if status.status is not None else Stop(status.worker))
