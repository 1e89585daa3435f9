"""Reattaching continues with workers whose agents come back, after a restart of the controller or a broken connection.

Each agent reports the status of its workers when it comes back. After a restart, the status is kept in `Worker.status`
until all workers are back or given up. Then `take_up` puts them into the roster. After a broken connection the roster
is still there; `unheard` and `is_in_step` find out what was missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bftrainer.cluster.jobs.worker import Worker
from bftrainer.cluster.wire.messages import WorkerStatus
from bftrainer.elastic.protocol import Arrived, Broken, Done, Failed, Formed, FromWorker, Left, Ready
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


def restore_worker(worker: Worker, status: WorkerStatus) -> None:
    """Fill in the record of an awaited worker."""
    worker.status = status
    worker.ready, worker.formed, worker.pid = status.ready, status.formed, status.pid
    worker.over, worker.said_done = status.over, status.done
    worker.is_new = not status.holds_state


def unheard(worker: Worker, status: WorkerStatus) -> list[FromWorker]:
    """Return the messages of a worker that its job has not heard."""
    if status.failed:
        return [] if worker.failed else [Failed(status.failed, status.traceback)]
    if status.done:
        return [Done(0)]
    if status.over:
        return [] if worker.over else [Left(0)]
    return [Ready()] if status.ready and not worker.ready else []


def is_in_step(roster: Roster, worker: Worker, status: WorkerStatus) -> bool:
    """Whether a worker has got all messages about generations, and its job all of its answers.

    Otherwise it is unknown how far the worker and its peers got with a new generation, and another one must begin.
    """
    if status.over or status.status is not None or worker.id not in roster.members:
        return True
    return roster.generation.id == roster.going.id == status.newest == status.formed == worker.formed


def take_up(roster: Roster, workers: Iterable[Worker], *, finishing: bool) -> frozenset[str]:
    """Put the workers whose status is known into the roster, and return their ids.

    Workers that were told of a later generation than the roster knows, as after the restore of a back-up, would ignore
    earlier ones: the roster continues after the latest.
    `finishing`: training is complete, so no worker has to leave any more.
    """
    generation = roster.going
    back = [worker for worker in workers if worker.status is not None]
    order = {member: rank for rank, member in enumerate(generation.members)}
    back.sort(key=lambda worker: order.get(worker.id, len(order)))
    whole, newest = True, 0
    for worker in back:
        status = worker.status
        assert status is not None
        worker.status = None
        newest = max(newest, status.newest)
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
    whole = whole or not generation.members
    if newest > roster.generation.id:
        roster.resume(replace(roster.generation, id=newest), whole=False)
    else:
        roster.resume(roster.generation, whole=whole)
    for worker in back:
        if worker.over and not worker.said_done:
            roster.left(worker.id)
    return present
