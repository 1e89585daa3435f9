"""An elastic job manages one trainer's workers that speak `elastic.protocol`.

It tracks which worker runs on which node and in which generation. The `Reconciler` passes in the assigned nodes
(`want`) and the workers' messages. `reconcile` returns the intents that bring the workers closer to the assignment. The
job uses no clock, socket or process: time is passed in, intents come out.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from functools import partial

from bftrainer.cluster.jobs.base import Intent, JobNews, JobRecord, StartWorker, StopWorker, TellWorker
from bftrainer.cluster.jobs.failures import FailureJudge, Verdict, WorkerEnd
from bftrainer.cluster.jobs.finish import Finish
from bftrainer.cluster.jobs.formation import Formation
from bftrainer.cluster.jobs.progress import Rescale, TrainerProgress
from bftrainer.cluster.jobs.reattach import is_in_step, restore_worker, take_up, then, unheard
from bftrainer.cluster.jobs.worker import JobSettings, JobWorkers, Worker
from bftrainer.cluster.spec.states import TrainerState
from bftrainer.cluster.wire.messages import WorkerStatus
from bftrainer.elastic import protocol
from bftrainer.elastic.breaks import Breaks
from bftrainer.elastic.manager.workers import ManagedWorkers
from bftrainer.elastic.protocol import Done, Failed, Formed, Generation, Ready, Report
from bftrainer.elastic.roster import Roster
from bftrainer.util import ids


class ElasticJob:
    """The workers of one trainer whose script speaks `elastic.protocol`."""

    def __init__(self, trainer: str, min_nodes: int, settings: JobSettings) -> None:
        self.id = trainer
        self.settings = settings
        self.roster = Roster(min_nodes, partial(secrets.token_hex, 16))
        self.roster.resume(Generation(0, ()), whole=True)
        self.next_worker = 1
        self.workers = JobWorkers()
        self.nodes: tuple[str, ...] = ()
        """The assigned nodes."""
        self.progress = TrainerProgress()
        self.outcome: TrainerState | None = None
        self.error = self.traceback = self.reason = ""
        self.ever_ran = False
        self._rescales: list[Rescale] = []
        self._formation = Formation()
        self._finish = Finish(settings.finish_grace_s)
        self._managed = ManagedWorkers(self.workers, self.roster, Breaks(settings.most_breaks))
        self._judge = FailureJudge(settings, self._managed)
        self._announce_at: float | None = None
        self._cut_at: float | None = None
        """When the survivors were first told of a lost member, if they have not formed a new generation since."""
        self._intents: list[Intent] = []

    # State.

    @property
    def record(self) -> JobRecord:
        """The part of the job to be stored."""
        shape = (self.roster.generation, self.trained_by, self.nodes)
        return JobRecord(*shape, self.next_worker, self.failures_in_all, self.reason, self.ever_ran)

    @property
    def failures_in_all(self) -> int:
        """How often the script failed, on any node."""
        return self._judge.in_all

    @property
    def world(self) -> int:
        """How many workers train together now."""
        return len(self.trained_by)

    @property
    def trained_by(self) -> frozenset[str]:
        """The workers that train together now."""
        return self._formation.members

    @property
    def state(self) -> TrainerState:
        """The trainer's state."""
        if self.outcome is not None:
            return self.outcome
        if self.workers.awaited:
            return "running" if self.trained_by else "starting"
        if not self.workers and not self.nodes:
            return "waiting" if self.ever_ran else "queued"
        members = self.roster.going.members
        if self.trained_by and members and self.trained_by == frozenset(members):
            return "running" if self.roster.going.id == self.roster.generation.id else "rescaling"
        return "rescaling" if self.trained_by else "starting"

    @property
    def over(self) -> bool:
        """Whether the trainer has ended and has no worker left."""
        return self.outcome is not None and not self.workers

    def worker_on(self, node: str) -> Worker | None:
        """Return the trainer's worker on a node."""
        return self.workers.on(node)

    # Events.

    def want(self, nodes: tuple[str, ...]) -> None:
        """Assign these nodes to the trainer."""
        self.nodes = nodes if self.outcome is None else ()

    def heard(self, worker_id: str, message: object, now: float) -> None:
        """Handle a worker's message."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        if worker.status is not None:  # the roster is not complete yet: other workers are awaited
            worker.status = then(worker.status, message)
        if error := self._managed.heard(worker, message, now, self.settings.leave_grace_s):
            self._obey(self._judge.broke(error, now))
        match message:
            case Ready():
                worker.ready = True
                self._gather(now)
            case Formed():
                worker.formed = message.generation
                self._judge.formed(worker.node, message.world)
                self._formed(self._formation.formed(worker_id, message, self.roster.going, self.workers, now))
            case Done():
                worker.over = worker.said_done = True
                self._complete(now)
            case Failed():
                self._raised(worker, message, now)
            case Report():
                self._reported(worker, message)
            case _:
                pass

    def started(self, worker_id: str, pid: int) -> None:
        """Record that a worker runs."""
        self.workers[worker_id].pid = pid

    def ended(self, worker_id: str, status: int, tail: str, error: str, now: float, *, spoke: bool = True) -> None:
        """Handle the end of a worker. `spoke`: it had connected to its agent's channel."""
        worker = self.workers.drop(worker_id)
        if worker is None:
            return
        expected = self._gone(worker)
        self._take_up()
        if self.outcome is not None:
            return
        if worker.said_done:
            if error_at_end := self._finish.ended(worker, status, tail):
                self.fail(error_at_end, tail)
        elif not expected and not self._finish.begun:
            end = WorkerEnd(status, tail, error, spoke)
            self._obey(self._judge.ended(worker, end, now, self.progress.samples, ever_ran=self.ever_ran))
        self._see_whether_done()

    def lost(self, node: str) -> None:
        """Handle the loss of a node and of its worker."""
        worker = self.worker_on(node)
        if worker is not None:
            self.workers.drop(worker.id)
            self._formation.lost(worker.id)
            self._finish.lost(worker)
            self._gone(worker)
            self._take_up()
            self._see_whether_done()
        self.nodes = tuple(name for name in self.nodes if name != node)

    def is_missed(self, node: str) -> bool:
        """See `TrainerJob`. A worker is missed if its group has broken and no group was formed since."""
        worker = self.worker_on(node)
        return worker is not None and self.roster.is_cut and worker.id in self.roster.members

    def leave(self, node: str, by: float) -> None:
        """Make the worker on a node leave before the time at which the node goes."""
        self.nodes = tuple(name for name in self.nodes if name != node)
        worker = self.worker_on(node)
        if worker is None or worker.over or worker.killed:
            return
        if worker.ready:
            worker.leave_by = by if worker.leave_by is None else min(by, worker.leave_by)
            self.roster.remove(worker.id)
        elif worker.id not in self.workers.awaited:
            self._kill(worker)

    def cancel(self, reason: str) -> None:
        """End the trainer as cancelled."""
        if self.outcome is None:
            self._end("cancelled", reason)

    def fail(self, error: str, traceback: str = "") -> None:
        """End the trainer as failed."""
        if self.outcome is None:
            self.error, self.traceback = error, traceback
            self._end("failed", error)

    # Restart of the controller.

    def expect(self, worker_id: str, node: str, started: float) -> None:
        """Add a worker of an earlier controller. Its agent will come back and report it, or be given up."""
        self.workers.expect(Worker(worker_id, node, started))

    def resume(self, record: JobRecord) -> None:
        """Continue from the record of an earlier controller. Call it after `expect`."""
        self.roster.resume(record.generation, whole=True)
        self._formation.members = record.trained_by
        self.nodes = record.nodes
        self.next_worker, self._judge.in_all, self.reason = record.next_worker, record.failures, record.reason
        self.ever_ran = record.ever_ran or bool(record.trained_by)
        self._take_up()

    def reattach(self, worker_id: str, status: WorkerStatus, now: float) -> None:
        """See `TrainerJob`."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        if worker_id in self.workers.awaited:
            restore_worker(worker, status)
            self.workers.awaited.discard(worker_id)
            self._take_up()
        elif not is_in_step(self.roster, worker, status):
            self.roster.resume(self.roster.generation, whole=False)
        for message in unheard(worker, status):
            self.heard(worker_id, message, now)
        if worker.killed and status.status is None:
            self._kill(worker)  # the order may be lost: its agent was not connected

    def _take_up(self) -> None:
        """Once all workers are back or given up, continue with the roster."""
        if not self.workers.awaited and any(worker.status for worker in self.workers.values()):
            self._formation.keep(take_up(self.roster, self.workers.values(), finishing=self._finish.begun))

    # Reconciliation.

    def reconcile(self, now: float, free: Collection[str]) -> list[Intent]:
        """Return the intents that bring the workers closer to the assignment.

        `free` has the nodes on which a worker can be started: no worker of any trainer runs there.
        """
        if self.workers.awaited:
            return self._flush()
        if self.outcome is None and not self._finish.begun:
            self._start_missing(now, free)
            self._end_unwanted(now)
        self._settle(now)
        for worker in self.workers.values():
            if worker.leave_by is None or worker.killed:
                continue
            if not self._finish.begun and worker.id not in self.roster.members:  # it was told to leave
                worker.leave_by = min(worker.leave_by, now + self.settings.leave_grace_s)
        for worker in self._managed.overdue(now):
            self._kill(worker)
        return self._flush()

    @property
    def due(self) -> float | None:
        """When to call `reconcile` next, if nothing happens until then."""
        times = self.workers.deadlines()
        if self._announce_at is not None:
            times.append(self._announce_at)
        if self._cut_at is not None and self.settings.stuck_after_s and self.roster.missing():
            times.append(self._cut_at + self.settings.stuck_after_s)
        if self.outcome is None and not self._finish.begun:
            times += self._judge.deadlines(node for node in self.nodes if self.worker_on(node) is None)
        return min(times, default=None)

    def take_news(self) -> JobNews:
        """Return the rescales and failures since the last call."""
        news = JobNews(tuple(self._rescales), self._judge.take_news())
        self._rescales.clear()
        return news

    def shift(self, seconds: float) -> None:
        """Move all times by `seconds`: the clock was set, or stood still."""
        self.workers.shift(seconds)
        self._announce_at = None if self._announce_at is None else self._announce_at + seconds
        self._cut_at = None if self._cut_at is None else self._cut_at + seconds
        self._judge.shift(seconds)

    def _start_missing(self, now: float, free: Collection[str]) -> None:
        for node in self.nodes:
            if node in free and self.worker_on(node) is None and self._judge.may_start(node, now):
                worker = Worker(ids.worker_id(self.id, self.next_worker), node, now)
                self.next_worker += 1
                self.workers.add(worker)
                self.roster.start(worker.id)
                self._intents.append(StartWorker(worker.id, node, background=bool(self.trained_by)))

    def _end_unwanted(self, now: float) -> None:
        wanted = frozenset(self.nodes)
        for worker in self.workers.values():
            if worker.node in wanted or worker.leave_by is not None or worker.over or worker.killed:
                continue
            if worker.ready and worker.id in self.roster.members:
                worker.leave_by = now + self.settings.handover_s
                self.roster.remove(worker.id)
            else:
                self._kill(worker)

    def _gather(self, now: float) -> None:
        """After a newcomer is ready, wait `gather_s` for others started with it: each rescale has a cost."""
        if self._announce_at is None and any(not worker.ready for worker in self.workers.values()):
            self._announce_at = now + self.settings.gather_s

    def _settle(self, now: float) -> None:
        waiting = any(not worker.ready and not worker.killed for worker in self.workers.values())
        announce = self._announce_at is None or now >= self._announce_at or not waiting
        if announce:
            self._announce_at = None
        before = self.roster.generation.id
        for saying in self.roster.settle(announce=announce):
            worker = self.workers.get(saying.worker)
            if worker is not None:
                self._intents.append(TellWorker(worker.id, worker.node, protocol.as_json(saying.message)))
        if self.roster.generation.id != before and self.roster.generation.cut and self._cut_at is None:
            self._cut_at = now
        if self.roster.going.id == self.roster.generation.id:
            self._cut_at = None
        limit_s = self.settings.stuck_after_s
        if limit_s and self._cut_at is not None and now >= self._cut_at + limit_s:
            for name in self.roster.missing():
                if not self.workers[name].said_done and not self.workers[name].killed:
                    self._kill(self.workers[name])

    def _flush(self) -> list[Intent]:
        intents, self._intents = self._intents, []
        return intents

    def _kill(self, worker: Worker) -> None:
        worker.killed = True
        self._intents.append(StopWorker(worker.id, worker.node))

    # Progress, failures and the end of a trainer.

    def _gone(self, worker: Worker) -> bool:
        """Handle the end or the loss of a worker. Returns whether its end was expected."""
        expected = self._managed.gone(worker, left=worker.over and not worker.said_done)
        self._formation.gone(worker.id)
        if not self.workers and self.outcome is None:
            self._formation.members = frozenset()
        return expected

    def _formed(self, rescale: Rescale | None) -> None:
        """Record a complete rescale, if there is one."""
        if rescale is not None:
            self._rescales.append(rescale)
            self.ever_ran = True
            self.reason = self._judge.reason

    def _reported(self, worker: Worker, report: Report) -> None:
        self.progress.redone += max(report.redone - worker.redone, 0)
        worker.redone = max(report.redone, worker.redone)
        self.progress.take(report)

    def _complete(self, now: float) -> None:
        """Finish the training, which is complete and stored. Workers that never joined are killed; the others end."""
        if self._finish.begun or self.outcome is not None:
            return
        self._finish.begin()
        for worker in self.workers.values():
            if worker.id not in self.roster.going.members:
                self._kill(worker)
            elif worker.node in self.nodes or worker.leave_by is None:
                worker.leave_by = now + self.settings.finish_grace_s

    def _see_whether_done(self) -> None:
        result = self._finish.result(self.workers.values()) if self.outcome is None else None
        if result == "done":
            self._end("done", "")
        elif result == "again":
            for worker in self.workers.values():
                worker.leave_by = None

    def _raised(self, worker: Worker, failed: Failed, now: float) -> None:
        """Handle an exception of the script on one node."""
        self._obey(self._judge.raised(worker, failed, now, ever_ran=self.ever_ran, finishing=self._finish.begun))

    def _obey(self, verdict: Verdict) -> None:
        """Carry out a verdict on a failure."""
        self.reason = verdict.reason or self.reason
        for worker in verdict.kill:
            self._kill(worker)
        if verdict.done:
            self._end("done", "")
        elif verdict.error:
            self.fail(verdict.error, verdict.traceback)

    def _end(self, outcome: TrainerState, reason: str) -> None:
        self.outcome, self.reason = outcome, reason
        self._finish.stop()
        self.nodes = ()
        for worker in self.workers.values():
            if not worker.killed:
                self._kill(worker)
