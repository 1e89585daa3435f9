"""An opaque job manages one trainer's workers that send no messages.

All that is known of such a worker is that it runs, and how it ends. The job is the counterpart of `elastic.py` for the
launchers `torchrun` and `hosts`, with the same interface to the `Reconciler`. A *group* is a worker on the head and the
workers on nodes that depend on it. Those start after the worker on the head and end before it. A broken group is ended
to the last worker before the next group starts, so that two groups never overwrite one checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from bftrainer.cluster.jobs.base import Intent, JobNews, JobRecord, StartWorker, StopWorker
from bftrainer.cluster.jobs.failures import SameEnd
from bftrainer.cluster.jobs.progress import Rescale, TrainerProgress
from bftrainer.cluster.jobs.worker import JobSettings, JobWorkers, Worker, end_in_words, was_taken
from bftrainer.cluster.launchers.base import HEAD, Launcher
from bftrainer.cluster.spec.states import TrainerState
from bftrainer.cluster.wire.messages import WorkerStatus
from bftrainer.elastic.protocol import Generation
from bftrainer.elastic.roster import Roster
from bftrainer.util import ids
from bftrainer.util.text import last_line

FINISH_S = 60.0
"""How long the other workers have to end, once one worker has ended with status 0."""
AFTERMATH_S = 60.0
"""A failure within this time after the loss of a node is attributed to the loss. A group that runs for this long is
settled.
"""


class OpaqueJob:
    """The workers of one trainer that send no messages. The interface is that of `ElasticJob`."""

    def __init__(
        self, trainer: str, min_nodes: int, settings: JobSettings, launcher: Launcher, work: int | None = None
    ) -> None:
        self.id = trainer
        self.settings = settings
        self.roster = Roster(min_nodes)
        """Its generations are sent to no worker: they only count the changes."""
        self.next_worker = 1
        self.workers = JobWorkers()
        self.nodes: tuple[str, ...] = ()
        self.progress = TrainerProgress()
        self.outcome: TrainerState | None = None
        self.error = self.traceback = self.reason = ""
        self.ever_ran = False
        self.settled = False
        """Whether a group once ran for `AFTERMATH_S`, so the script can work. Until then a failure is the script's."""
        self._same_end = SameEnd()
        self._retrying: set[str] = set()
        """The workers that restart a failed script by themselves: those of a settled trainer."""
        self.failures_in_all = self.restarts = 0
        self._rescales: list[Rescale] = []
        self._traits = launcher.traits
        self._said = launcher.said
        self._work = work
        self._size = 0
        self._preempted = self._broken = False
        self._losses = 0
        self._lost_at = -math.inf
        self._losses_before: dict[str, int] = {}
        """How many members had been lost when a worker was started. Workers from before a restart are missing here."""
        self._not_before = 0.0
        self._steady_since = math.inf
        self._intents: list[Intent] = []

    # State.

    @property
    def record(self) -> JobRecord:
        """The part of the job to be stored."""
        shape = (self.roster.generation, self.trained_by, self.nodes)
        return JobRecord(*shape, self.next_worker, self.failures_in_all, self.reason, self.ever_ran)

    @property
    def trained_by(self) -> frozenset[str]:
        """The workers that run and are not being stopped: on the nodes, or on the head if only that is used."""
        seats = self._seats()
        return frozenset(w.id for w in self.workers.values() if w.node in seats and w.formed and not w.killed)

    @property
    def world(self) -> int:
        """On how many nodes the trainer runs now."""
        up = len(self.trained_by)
        return up if self._traits.on_nodes else up * len(self.nodes)

    @property
    def state(self) -> TrainerState:
        """The trainer's state."""
        if self.outcome is not None:
            return self.outcome
        up = self.trained_by
        if self.workers.awaited:
            return "running" if up else "starting"
        if not self.workers and not self._wanted:
            return "waiting" if self.ever_ran else "queued"
        if self._wanted and self._complete():
            return "starting" if self._failing else "running"
        return "rescaling" if up or not self._wanted else "starting"

    @property
    def over(self) -> bool:
        """Whether the trainer has ended and has no worker left."""
        return self.outcome is not None and not self.workers

    def worker_on(self, node: str) -> Worker | None:
        """Return the trainer's worker on a node."""
        return self.workers.on(node)

    @property
    def _wanted(self) -> bool:
        """Whether a group should run and the present one may."""
        return self.outcome is None and not self._broken and len(self.nodes) >= self.roster.min_nodes

    @property
    def _failing(self) -> bool:
        """Whether the script has failed and never run for long. Then running processes do not mean that it trains."""
        return self.failures_in_all > 0 and not self.settled

    def _seats(self) -> frozenset[str]:
        """Return the nodes where workers must run for the trainer to train."""
        return frozenset(self.nodes if self._traits.on_nodes else (HEAD,))

    def _complete(self) -> bool:
        """Whether exactly the wanted workers run."""
        up = {worker.node for worker in self.workers.values() if worker.formed and not worker.killed}
        return up == self._seats() | {HEAD} and len(up) == len(self.workers)

    # Events.

    def want(self, nodes: tuple[str, ...]) -> None:
        """Assign these nodes to the trainer."""
        self._have(nodes if self.outcome is None else ())

    def heard(self, worker_id: str, message: object, now: float) -> None:
        """Ignore the message: real workers of this job send none."""

    def started(self, worker_id: str, pid: int) -> None:
        """Record that a worker runs."""
        worker = self.workers[worker_id]
        worker.pid, worker.formed = pid, 1

    def ended(self, worker_id: str, status: int, tail: str, error: str, now: float, *, spoke: bool = False) -> None:
        """Handle the end of a worker. `spoke` is ignored: these workers send no messages."""
        worker = self._drop(worker_id)
        if worker is None or self.outcome is not None:
            return
        runs_script = (worker.node != HEAD) == self._traits.on_nodes
        if status == 0 and runs_script and not worker.killed:
            worker.over = worker.said_done = True
            self._end("done", "")
            if self._work is not None:
                self.progress.samples = self.progress.total = self._work
            for other in self._on_nodes():
                other.leave_by = now + FINISH_S
        elif not (worker.killed or self._broken):
            self._judge(worker, status, tail, error, now)

    def lost(self, node: str) -> None:
        """Handle the loss of a node and of its worker."""
        self._preempted |= node in self.nodes
        self._have(tuple(name for name in self.nodes if name != node))
        worker = self.worker_on(node)
        if worker is not None:
            self._drop(worker.id)
        if node == HEAD:
            self._broken = bool(self.workers)

    def is_missed(self, node: str) -> bool:
        """Return False: these workers do not tell."""
        return False

    def leave(self, node: str, by: float) -> None:
        """Make the worker on a node end before the time at which the node goes."""
        self._have(tuple(name for name in self.nodes if name != node))
        worker = self.worker_on(node)
        if worker is not None and not worker.killed:
            worker.leave_by = by if worker.leave_by is None else min(by, worker.leave_by)

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
        trained_by, nodes = record.trained_by, record.nodes
        self.roster.resume(record.generation, whole=True)
        self.nodes = nodes
        self.next_worker, self.failures_in_all, self.reason = record.next_worker, record.failures, record.reason
        self.ever_ran = record.ever_ran
        self._size = len(trained_by) if self._traits.on_nodes else len(nodes) * bool(trained_by)
        for name in trained_by & self.workers.keys():
            self.workers[name].formed = 1

    def reattach(self, worker_id: str, status: WorkerStatus, now: float) -> None:
        """Handle the return of a worker's agent. See `TrainerJob`."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        self.workers.awaited.discard(worker_id)
        worker.pid, worker.formed = status.pid, int(status.pid > 0)
        if worker.killed and status.status is None:
            worker.killed = False  # the order may be lost: its agent was not connected
            self._stop(worker, now)

    # Reconciliation.

    def reconcile(self, now: float, free: Collection[str]) -> list[Intent]:
        """Return the intents that bring the workers closer to the assignment. See `TrainerJob`."""
        if self._lost_at == math.inf:
            self._lost_at = now
        self._see_whether_settled(now)
        if not self.workers.awaited:
            if self._on_nodes() and self.worker_on(HEAD) is None:
                self._broken = True
            if self._wanted:
                self._end_unwanted(now)
                self._start_missing(now, free)
            else:
                self._end_all(now)
            self._count_change(now)
        intents, self._intents = self._intents, []
        return intents

    @property
    def due(self) -> float | None:
        """When to call `reconcile` next, if nothing happens until then."""
        times = self.workers.deadlines()
        if self._wanted and not self._complete():
            times.append(self._not_before)
        if self._failing and self._steady_since < math.inf:
            times.append(self._steady_since + AFTERMATH_S)
        return min(times, default=None)

    def take_news(self) -> JobNews:
        """Return the rescales since the last call. No node fails alone: a group starts and ends as a whole."""
        news = JobNews(tuple(self._rescales))
        self._rescales.clear()
        return news

    def shift(self, seconds: float) -> None:
        """Move all times by `seconds`: the clock was set, or stood still."""
        self.workers.shift(seconds)
        self._lost_at += seconds
        self._steady_since += seconds
        self._not_before += seconds if self._not_before else 0.0

    def _on_nodes(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.node != HEAD]

    def _end_unwanted(self, now: float) -> None:
        for worker in self._on_nodes():
            if worker.node not in self.nodes:
                self._stop(worker, now)

    def _start_missing(self, now: float, free: Collection[str]) -> None:
        if now < self._not_before:
            return
        head = self.worker_on(HEAD)
        if head is None:
            if HEAD in free:
                self._begin(HEAD, now)
        elif head.formed and not head.killed and self._traits.on_nodes:
            for node in self.nodes:
                if self.worker_on(node) is None and node in free:
                    self._begin(node, now)

    def _begin(self, node: str, now: float) -> None:
        if node == HEAD:
            self._losses_before.clear()
            self._retrying.clear()
        worker = Worker(ids.worker_id(self.id, self.next_worker), node, now)
        self.next_worker += 1
        self.workers.add(worker)
        self._losses_before[worker.id] = self._losses
        if self._traits.retries and self.settled and node != HEAD:
            self._retrying.add(worker.id)
        head = self.worker_on(HEAD)
        self._intents.append(StartWorker(worker.id, node, head.id if head else "", settled=self.settled))

    def _end_all(self, now: float) -> None:
        """End the workers on nodes, then the worker on the head, which they need.

        When the trainer is done, each may take until its `leave_by`.
        """
        for worker in self._on_nodes() or self.workers.values():
            if self.outcome != "done" or worker.leave_by is None or now >= worker.leave_by:
                self._stop(worker, now)

    def _stop(self, worker: Worker, now: float) -> None:
        if worker.killed:
            return
        grace_s = self.settings.leave_grace_s
        if worker.leave_by is not None:
            grace_s = min(grace_s, max(worker.leave_by - now, 0.0))
        worker.killed, worker.leave_by = True, now + grace_s
        self._intents.append(StopWorker(worker.id, worker.node, grace_s))

    def _count_change(self, now: float) -> None:
        """Record a rescale as complete when exactly the wanted workers run."""
        if not self._wanted or not self._complete():
            self._steady_since = math.inf
            return
        self._steady_since = min(self._steady_since, now)
        if self._failing:
            return
        if self._size != self.world:
            before, self._size = self._size, self.world
            generation = Generation(self.roster.generation.id + 1, tuple(sorted(self.trained_by)))
            self.roster.resume(generation, whole=True)
            unknown = math.nan  # workers do not say when they train again
            change = Rescale(generation.id, before, self._size, unknown, unknown, unknown, self._preempted)
            self._rescales.append(change)
        self._preempted = False
        self.ever_ran = True
        self.reason = ""

    # Failures and the end of a trainer.

    def _drop(self, worker_id: str) -> Worker | None:
        worker = self.workers.drop(worker_id)
        if not self.trained_by:
            self._size = 0
        if not self.workers:
            self._broken = False
        return worker

    def _have(self, nodes: tuple[str, ...]) -> None:
        if not set(self.nodes) <= set(nodes):
            self._lose(math.inf)  # the next `reconcile` sets the time
        self.nodes = nodes

    def _lose(self, now: float) -> None:
        """Record the loss of a member: the others may fail because of it."""
        self._losses += 1
        self._lost_at = now

    def _see_whether_settled(self, now: float) -> None:
        self.settled = self.settled or now - self._steady_since >= AFTERMATH_S

    def _judge(self, worker: Worker, status: int, tail: str, error: str, now: float) -> None:
        """Handle the unexpected end of a worker."""
        taken = was_taken(status, error)
        self._see_whether_settled(now)
        if now - self._steady_since > AFTERMATH_S:
            self.restarts = 0
        if worker.node != HEAD and taken:
            self._lose(now)  # the others continue, and this worker is started again
        else:
            self._broken = bool(self.workers)
        said = self._said(tail)
        last = last_line(said)
        self.reason = end_in_words(worker, status, error, last)
        undisturbed = not taken and self._losses_before.get(worker.id) == self._losses
        if not self.settled and undisturbed:
            runs_script = (worker.node != HEAD) == self._traits.on_nodes
            if runs_script and not error and self._same_end.again(worker.node, last):
                self.failures_in_all += 1
                self.fail(f"{self.reason} ({self.failures_in_all} times, before it ran for {AFTERMATH_S:g} s)", said)
                return
        elif taken or now - self._lost_at < AFTERMATH_S:
            self.restarts += 1
            if self.restarts > self.settings.most_restarts:
                self.fail(f"{self.reason} ({self.restarts} times)", said)
            self._not_before = now + self.settings.restart_backoff_s * (not taken)
            return
        # A worker that retries by itself has used up all attempts on the script, unless lost nodes caused some of the
        # failures.
        used_up = worker.id in self._retrying and undisturbed and not error
        self.failures_in_all += self.settings.most_failures if used_up else 1
        if self.failures_in_all >= self.settings.most_failures:
            self.fail(f"{self.reason} ({self.failures_in_all} times)", said)
            return
        self._not_before = now + self.settings.backoff_s(self.failures_in_all)

    def _end(self, outcome: TrainerState, reason: str) -> None:
        self.outcome, self.reason = outcome, reason
        self.nodes = ()
