"""Reattaching rebuilds a job's roster after a restart of the controller.

Each agent reports the status of its workers when it comes back. The status is kept in `Worker.status` until all workers
are back or given up. Then `take_up` puts them into the roster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bftrainer.cluster.jobs.worker import Worker
from bftrainer.cluster.wire.messages import WorkerStatus
from bftrainer.elastic.protocol import Arrived, Broken, Formed, Ready
from bftrainer.elastic.roster import Roster


def then(status: WorkerStatus, message: object) -> WorkerStatus:
    """Return `status` updated by `message`.

    A worker that has arrived at a generation but not formed it is in none (`formed = -1`).
    """
    match message:
        case Ready():
            return replace(status, ready=True)
        case Formed(generation):
            return replace(status, formed=generation, holds_state=True)
        case Arrived() | Broken():
            return replace(status, formed=-1)
        case _:
            return status


def take_up(roster: Roster, workers: Iterable[Worker], *, finishing: bool) -> frozenset[str]:
    """Put the workers whose status is known into the roster, and return their ids.

    `finishing`: training is complete, so no worker has to leave any more.
    """
    generation = roster.going
    back = [worker for worker in workers if worker.status is not None]
    order = {member: rank for rank, member in enumerate(generation.members)}
    back.sort(key=lambda worker: order.get(worker.id, len(order)))
    whole = True
    for worker in back:
        status = worker.status
        assert status is not None
        worker.status = None
        roster.start(worker.id)
        if status.ready:
            roster.ready(worker.id)
        if status.holds_state:
            roster.formed(worker.id)
        if worker.leave_by is not None and not finishing:
            roster.remove(worker.id)
        if worker.id in order:
            whole = whole and status.formed == generation.id
    present = frozenset(worker.id for worker in back)
    whole = whole and all(member in present for member in generation.members)
    roster.resume(roster.generation, whole=whole or not generation.members)
    for worker in back:
        if worker.over and not worker.said_done:
            roster.left(worker.id)
    return present
