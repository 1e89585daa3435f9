"""After a restart of the controller: a job's roster, made again of what agents say of its workers as they come back.

What each of them tells is kept in `Worker.status` until all are back or given up; then `take_up` tells the roster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bftrainer.cluster.wire import WorkerStatus
from bftrainer.cluster.workers import Worker
from bftrainer.elastic.protocol import Arrived, Broken, Formed, Ready
from bftrainer.elastic.roster import Roster


def then(status: WorkerStatus, message: object) -> WorkerStatus:
    """What is known of a worker once it has said something more. Whoever is under way to a generation is in none."""
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
    """Let the roster go on with those of whom something is known; who they are.

    `finishing`: training is complete, so that nobody has to leave any more.
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
