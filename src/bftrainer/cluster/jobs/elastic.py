"""An elastic job manages one trainer's workers that speak `elastic.protocol`.

It tracks which worker runs on which node and in which generation. The `Reconciler` passes in the assigned nodes
(`want`) and the workers' messages. `reconcile` returns the intents that bring the workers closer to the assignment. The
job uses no clock, socket or process: time is passed in, intents come out.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from functools import partial

from bftrainer.cluster.jobs.bad_nodes import BadNodes, NodeFailure
from bftrainer.cluster.jobs.base import Intent, JobNews, JobRecord, StartWorker, StopWorker, TellWorker
from bftrainer.cluster.jobs.formation import Formation
from bftrainer.cluster.jobs.progress import Rescale, TrainerProgress
from bftrainer.cluster.jobs.reattach import take_up, then
from bftrainer.cluster.jobs.same_end import SameEnd
from bftrainer.cluster.jobs.worker import JobSettings, JobWorkers, Worker, end_in_words, was_taken
from bftrainer.cluster.spec.states import TrainerState
from bftrainer.cluster.wire.messages import WorkerStatus
from bftrainer.elastic import protocol
from bftrainer.elastic.breaks import Breaks
from bftrainer.elastic.manager.workers import ManagedWorkers
from bftrainer.elastic.protocol import Done, Failed, Formed, Generation, Ready, Report
from bftrainer.elastic.roster import Roster
from bftrainer.processes.unguided import NEVER_CALLED
from bftrainer.util import ids
from bftrainer.util.text import last_line

_LONG_WAIT = 600
"""The factor on the usual wait before a node is tried again where a worker failed right after it had joined."""


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
        self.finishing = False
        """Training is complete, and the job waits for the script to end."""
        self.ever_ran = False
        self._said_last_words = self._words_lost = False
        self.failures = self.restarts = 0
        """Failures of the script, and losses of workers, both in a row without progress in between."""
        self.failures_in_all = 0
        self._rescales: list[Rescale] = []
        self._node_failures: list[NodeFailure] = []
        self._formation = Formation()
        self._not_before = 0.0
        self._announce_at: float | None = None
        self._cut_at: float | None = None
        """When the survivors were first told of a lost member, if they have not formed a new generation since."""
        self._breaks = Breaks(settings.most_breaks)
        self._managed = ManagedWorkers(self.workers, self.roster, self._breaks)
        self._bad_nodes = BadNodes(settings.restart_backoff_s)
        self._samples_at_failure = 0
        self._same_end = SameEnd()
        self._intents: list[Intent] = []

    # State.

    @property
    def record(self) -> JobRecord:
        """The part of the job to be stored."""
        shape = (self.roster.generation, self.trained_by, self.nodes)
        return JobRecord(*shape, self.next_worker, self.failures_in_all, self.reason, self.ever_ran)

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
        if verdict := self._managed.heard(worker, message, now, self.settings.leave_grace_s):
            self._broke(verdict, now)
        match message:
            case Ready():
                worker.ready = True
                self._gather(now)
            case Formed():
                worker.formed = message.generation
                self._bad_nodes.worked(worker.node)
                if message.world > 1:  # neither the network nor the script is at fault
                    self._bad_nodes.broke_alone.clear()
                self._formed(self._formation.formed(worker_id, message, self.roster.going, self.workers, now))
            case Done():
                worker.over = worker.said_done = True
                self._complete(now)
            case Failed(error, traceback, fresh):
                self._raised(worker, error, traceback, now, fresh=fresh)
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
        if worker.said_done and status > 0:
            self.fail(f"training was complete, but then the script ended with status {status}: {last_line(tail)}", tail)
        elif worker.said_done and status == 0:
            self._said_last_words = True
        elif worker.said_done and worker.killed:
            limit_s = self.settings.finish_grace_s
            self.fail(f"training was complete, but the script did not end within {limit_s:g} s after it", tail)
        elif worker.said_done:
            self._words_lost = True
        elif not expected and not self.finishing:
            if status == 0 and (not spoke or self._managed.train_without(worker)):
                self._ended_early(worker, spoke, tail, now)
            else:
                self._judge(worker, status, tail, error, now)
        self._see_whether_done()

    def lost(self, node: str) -> None:
        """Handle the loss of a node and of its worker."""
        worker = self.worker_on(node)
        if worker is not None:
            self.workers.drop(worker.id)
            self._formation.lost(worker.id)
            self._words_lost |= worker.said_done
            self._gone(worker)
            self._take_up()
            self._see_whether_done()
        self.nodes = tuple(name for name in self.nodes if name != node)

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
        self.next_worker, self.failures_in_all, self.reason = record.next_worker, record.failures, record.reason
        self.ever_ran = record.ever_ran or bool(record.trained_by)
        self._take_up()

    def reattach(self, worker_id: str, status: WorkerStatus, now: float) -> None:
        """Handle the return of an awaited worker's agent."""
        worker = self.workers.get(worker_id)
        if worker is None or worker_id not in self.workers.awaited:
            return
        worker.status = status
        worker.ready, worker.formed, worker.pid = status.ready, status.formed, status.pid
        worker.over, worker.said_done = status.over, status.done
        worker.is_new = not status.holds_state
        self.workers.awaited.discard(worker_id)
        self._take_up()
        if worker.killed and status.status is None:
            self._kill(worker)  # the order was lost: its agent was not connected
        if status.failed:
            self._raised(worker, status.failed, status.traceback, now, fresh=False)
        elif status.done:
            self._complete(now)

    def _take_up(self) -> None:
        """Once all workers are back or given up, continue with the roster."""
        if not self.workers.awaited and any(worker.status for worker in self.workers.values()):
            self._formation.keep(take_up(self.roster, self.workers.values(), finishing=self.finishing))

    # Reconciliation.

    def reconcile(self, now: float, free: Collection[str]) -> list[Intent]:
        """Return the intents that bring the workers closer to the assignment.

        `free` has the nodes on which a worker can be started: no worker of any trainer runs there.
        """
        if self.workers.awaited:
            return self._flush()
        if self.outcome is None and not self.finishing:
            self._start_missing(now, free)
            self._end_unwanted(now)
        self._settle(now)
        for worker in self.workers.values():
            if worker.leave_by is None or worker.killed:
                continue
            if not self.finishing and worker.id not in self.roster.members:  # it was told to leave
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
        if self.outcome is None and not self.finishing:
            times += self._bad_nodes.deadlines(node for node in self.nodes if self.worker_on(node) is None)
        if self._not_before and self.outcome is None and any(self.worker_on(node) is None for node in self.nodes):
            times.append(self._not_before)
        return min(times, default=None)

    def take_news(self) -> JobNews:
        """Return the rescales and failures since the last call."""
        news = JobNews(tuple(self._rescales), tuple(self._node_failures))
        self._rescales.clear()
        self._node_failures.clear()
        return news

    def shift(self, seconds: float) -> None:
        """Move all times by `seconds`: the clock was set, or stood still."""
        self.workers.shift(seconds)
        self._announce_at = None if self._announce_at is None else self._announce_at + seconds
        self._cut_at = None if self._cut_at is None else self._cut_at + seconds
        self._breaks.shift(seconds)
        self._bad_nodes.shift(seconds)
        self._not_before += seconds if self._not_before else 0.0

    def _start_missing(self, now: float, free: Collection[str]) -> None:
        if now < self._not_before:
            return
        for node in self.nodes:
            if node in free and self.worker_on(node) is None and self._bad_nodes.may_start(node, now):
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
            self.reason = self._bad_nodes.reason

    def _reported(self, worker: Worker, report: Report) -> None:
        self.progress.redone += max(report.redone - worker.redone, 0)
        worker.redone = max(report.redone, worker.redone)
        self.progress.take(report)

    def _broke(self, verdict: str, now: float) -> None:
        """Handle a group that keeps breaking. Its newcomers are blamed, if the others can do without them."""
        members = [self.workers[name] for name in self.roster.going.members if name in self.workers]
        newcomers = [worker for worker in members if not worker.joined]
        if len(newcomers) == 1:
            self._bad_nodes.broke_alone.add(newcomers[0].node)
        if not newcomers or len(newcomers) == len(members) or len(self._bad_nodes.broke_alone) > 1:
            self.fail(verdict)
            return
        for turn, worker in enumerate(newcomers, 1):
            self._leave_out(worker, verdict, now, turn=turn)
            self._kill(worker)
        self._breaks.lost()

    def _complete(self, now: float) -> None:
        """Finish the training, which is complete and stored. Workers that never joined are killed; the others end."""
        if self.finishing or self.outcome is not None:
            return
        self.finishing = True
        for worker in self.workers.values():
            if worker.id not in self.roster.going.members:
                self._kill(worker)
            elif worker.node in self.nodes or worker.leave_by is None:
                worker.leave_by = now + self.settings.finish_grace_s

    def _see_whether_done(self) -> None:
        if not self.finishing or self.outcome is not None:
            return
        whole = self._said_last_words and not self._words_lost
        if whole and all(worker.killed for worker in self.workers.values()):
            self._end("done", "")
        elif not whole and not any(worker.said_done for worker in self.workers.values()):
            # Some workers were lost after they had said `Done`, perhaps rank 0, which saves the model. The remaining or
            # new workers continue from the last snapshot and say `Done` again.
            self.finishing = self._said_last_words = self._words_lost = False
            for worker in self.workers.values():
                worker.leave_by = None

    def _leave_out(self, worker: Worker, reason: str, now: float, *, turn: int = 1) -> None:
        """Continue without a newcomer that failed. Its node is tried again later."""
        failure = self._bad_nodes.failed(worker.node, worker.id, reason, now, turn=turn)
        self._node_failures.append(failure)
        self.failures_in_all += 1
        self.reason = self._bad_nodes.reason

    def _raised(self, worker: Worker, error: str, traceback: str, now: float, *, fresh: bool) -> None:
        """Handle an exception of the script on one node. If the worker is a newcomer, the node may be at fault.

        A `fresh` worker has joined, which cost the others a rescale. Its node is not tried again for long.
        """
        words = f"{error} (on {worker.node})"
        if fresh and self._managed.others_joined(worker) and not self.finishing:
            worker.failed = True
            worker.leave_by = now + self.settings.leave_grace_s
            self._leave_out(worker, words, now, turn=_LONG_WAIT)
            return
        first = not self.ever_ran and (len(self.workers) == 1 or worker.id in self.roster.going.members)
        if worker.joined or first or self.finishing:
            worker.over = True
            self.fail(words, traceback)
            return
        worker.failed = True
        worker.leave_by = now + self.settings.leave_grace_s  # a thread of the script may keep the process alive
        if self._managed.train_without(worker):
            self._leave_out(worker, words, now)
            return
        hopeless = self._will_not_mend(worker, error, "")
        if hopeless or now >= self._not_before:
            self._count_failure(words, traceback, now, hopeless=hopeless)

    def _ended_early(self, worker: Worker, spoke: bool, tail: str, now: float) -> None:
        """Handle a worker that ended with status 0 but cannot have trained."""
        if self._managed.train_without(worker):
            why = "ended with status 0 before it joined" if spoke else NEVER_CALLED
            self._leave_out(worker, f"{why} (on {worker.node})", now)
        else:
            self.fail(NEVER_CALLED, tail)

    def _judge(self, worker: Worker, status: int, tail: str, error: str, now: float) -> None:
        """Handle the unexpected end of a worker."""
        if status == 0:
            self._end("done", "")
            return
        if self.progress.samples > self._samples_at_failure:
            self._samples_at_failure = self.progress.samples
            self.failures = self.restarts = 0
        if was_taken(status, error):
            self.restarts += 1
            if self.restarts > self.settings.most_restarts:
                self.fail(f"workers were lost {self.restarts} times in a row without progress", tail)
            return
        last = last_line(tail)
        words = end_in_words(worker, status, error, last)
        if self._managed.train_without(worker):
            self._leave_out(worker, words, now)
            return
        if now < self._not_before:
            return  # one of several workers that failed together
        self._count_failure(words, tail, now, hopeless=self._will_not_mend(worker, last, error))

    def _count_failure(self, reason: str, tail: str, now: float, *, hopeless: bool) -> None:
        """Count a failure of the script. It is tried again later, unless it is `hopeless` or has failed too often."""
        self.reason = reason
        self.failures += 1
        self.failures_in_all += 1
        if hopeless:
            self.fail(f"{self.reason} ({self.failures} times, before it joined the training)", tail)
            return
        if self.failures >= self.settings.most_failures:
            self.fail(f"{self.reason} ({self.failures} times in a row)", tail)
            return
        self._not_before = now + self.settings.backoff_s(self.failures)

    def _will_not_mend(self, worker: Worker, last: str, error: str) -> bool:
        """Whether the script ended in the same way as before, and the trainer never trained."""
        if not last or error or worker.ready or self.ever_ran:
            self._same_end.forget()
            return False
        return self._same_end.again(worker.node, last)

    def _end(self, outcome: TrainerState, reason: str) -> None:
        self.outcome, self.reason = outcome, reason
        self.finishing = False
        self.nodes = ()
        for worker in self.workers.values():
            if not worker.killed:
                self._kill(worker)
