"""The failure judge decides what the failure of a worker means: for its node, for the script, for the trainer.

`ElasticJob` reports failures and gets a `Verdict`. A newcomer that fails while others train is left out, and its node
is tried again later. Otherwise the script is at fault: it is tried again after a pause, until it has failed too often.
`SameEnd`, also used by `OpaqueJob`, recognises a script that can never work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bftrainer.cluster.jobs.bad_nodes import BadNodes, NodeFailure
from bftrainer.cluster.jobs.worker import JobSettings, Worker, end_in_words, was_taken
from bftrainer.elastic.manager.workers import ManagedWorkers
from bftrainer.elastic.protocol import CANNOT_STAND_IN, Failed
from bftrainer.processes.unguided import NEVER_CALLED, with_advice
from bftrainer.util.text import last_line

_LONG_WAIT = 600
"""The factor on the usual wait before a node is tried again where a worker failed right after it had joined."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The consequence of a failure for the trainer. Without any, the failure was expected or is counted already."""

    error: str = ""
    """The trainer fails with this error, if there is one."""
    traceback: str = ""
    reason: str = ""
    """The trainer goes on, and this is shown as the reason of its state."""
    kill: tuple[Worker, ...] = ()
    """Workers to kill."""
    done: bool = False
    """The trainer is done: the script ended with status 0."""


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How a worker ended."""

    status: int
    tail: str
    """The end of its output."""
    error: str
    """Why it could not be started, if so."""
    spoke: bool
    """It had connected to its agent's channel."""


class SameEnd:
    """Recognises a script that ends the same way everywhere, such as one with a wrong argument.

    One node may be at fault, so the same last line of output must be seen on two nodes, or three times on one.
    """

    def __init__(self) -> None:
        self._last_line = ""
        self._nodes: list[str] = []

    def again(self, node: str, last_line: str) -> bool:
        """Record that a worker ended on a node with this last line. Returns whether the script will fail anywhere."""
        if last_line != self._last_line:
            self._nodes = []
        self._last_line = last_line
        self._nodes.append(node)
        return bool(last_line) and (len(set(self._nodes)) > 1 or len(self._nodes) > 2)

    def forget(self) -> None:
        """Forget the recorded ends: the next end is not a repetition."""
        self._last_line, self._nodes = "", []


class FailureJudge:
    """The failures of one elastic trainer, on which nodes they happened, and when the script is tried again."""

    def __init__(self, settings: JobSettings, managed: ManagedWorkers[Worker]) -> None:
        self.in_all = 0
        self._settings = settings
        self._managed = managed
        self._failures = self._restarts = 0
        """Failures of the script, and losses of workers, both in a row without progress in between."""
        self._samples_at_failure = 0
        self._not_before = 0.0
        self._same_end = SameEnd()
        self._bad_nodes = BadNodes(settings.restart_backoff_s)
        self._news: list[NodeFailure] = []

    @property
    def reason(self) -> str:
        """Why the trainer runs without its latest bad node; empty if there is none."""
        return self._bad_nodes.reason

    def may_start(self, node: str, now: float) -> bool:
        """Whether a worker may be started on a node now."""
        return now >= self._not_before and self._bad_nodes.may_start(node, now)

    def deadlines(self, nodes: Iterable[str]) -> list[float]:
        """Return the times at which workers may be started on these nodes, where they must wait."""
        nodes = list(nodes)
        return self._bad_nodes.deadlines(nodes) + ([self._not_before] if self._not_before and nodes else [])

    def shift(self, seconds: float) -> None:
        """Move all times by `seconds`: the clock was set, or stood still."""
        self._managed.breaks.shift(seconds)
        self._bad_nodes.shift(seconds)
        self._not_before += seconds if self._not_before else 0.0

    def take_news(self) -> tuple[NodeFailure, ...]:
        """Return the failures of newcomers since the last call."""
        news = tuple(self._news)
        self._news.clear()
        return news

    # Good signs.

    def formed(self, node: str, world: int) -> None:
        """Record that a worker on a node has formed a group."""
        self._bad_nodes.worked(node)
        if world > 1:  # neither the network nor the script is at fault
            self._bad_nodes.broke_alone.clear()

    # Failures.

    def broke(self, error: str, now: float) -> Verdict:
        """Judge a group that broke too often. If it has newcomers that the others can do without, they are blamed."""
        members = [
            self._managed.workers[name] for name in self._managed.roster.going.members if name in self._managed.workers
        ]
        newcomers = [worker for worker in members if not worker.joined]
        if len(newcomers) == 1:
            self._bad_nodes.broke_alone.add(newcomers[0].node)
        if not newcomers or len(newcomers) == len(members) or len(self._bad_nodes.broke_alone) > 1:
            return Verdict(error)
        for turn, worker in enumerate(newcomers, 1):
            self._leave_out(worker, error, now, turn=turn)
        self._managed.breaks.lost()
        return Verdict(reason=self.reason, kill=tuple(newcomers))

    def raised(self, worker: Worker, failed: Failed, now: float, *, ever_ran: bool, finishing: bool) -> Verdict:
        """Judge an exception of the script on one node. If the worker is a newcomer, the node may be at fault.

        A `fresh` worker has joined, which cost the others a rescale. Its node is not tried again for long.
        """
        words = f"{failed.error} (on {worker.node})"
        spared = failed.fresh and self._managed.others_joined(worker) and not finishing
        first = not ever_ran and (len(self._managed.workers) == 1 or worker.id in self._managed.roster.going.members)
        if not spared and (worker.joined or first or finishing):
            worker.over = True
            return Verdict(words, failed.traceback)
        worker.failed = True
        worker.leave_by = now + self._settings.leave_grace_s  # a thread of the script may keep the process alive
        if spared or self._managed.train_without(worker):
            return self._leave_out(worker, words, now, turn=_LONG_WAIT if spared else 1)
        hopeless = self._will_not_mend(worker, failed.error, "", ever_ran=ever_ran)
        if not hopeless and now < self._not_before:
            return Verdict()  # one of several workers that failed together
        return self._count(words, failed.traceback, now, hopeless=hopeless)

    def ended(self, worker: Worker, end: WorkerEnd, now: float, samples: int, *, ever_ran: bool) -> Verdict:
        """Judge the unexpected end of a worker. `samples` is the trainer's progress."""
        if end.status == 0:
            return self._ended_early(worker, end, now)
        if samples > self._samples_at_failure:
            self._samples_at_failure = samples
            self._failures = self._restarts = 0
        if was_taken(end.status, end.error):
            self._restarts += 1
            too_often = self._restarts > self._settings.most_restarts
            lost = f"workers were lost {self._restarts} times in a row without progress"
            return Verdict(lost, end.tail) if too_often else Verdict()
        last = last_line(end.tail)
        words = end_in_words(worker, end.status, end.error, with_advice(last))
        if self._managed.train_without(worker):
            return self._leave_out(worker, words, now)
        if now < self._not_before:
            return Verdict()  # one of several workers that failed together
        hopeless = self._will_not_mend(worker, last, end.error, ever_ran=ever_ran)
        return self._count(words, end.tail, now, hopeless=hopeless)

    def _ended_early(self, worker: Worker, end: WorkerEnd, now: float) -> Verdict:
        """Judge a worker that ended with status 0 and never said that training is complete."""
        if self._managed.train_without(worker):
            reason = "ended with status 0 before it joined" if end.spoke else NEVER_CALLED
            return self._leave_out(worker, f"{reason} (on {worker.node})", now)
        return Verdict(done=True) if end.spoke else Verdict(NEVER_CALLED, end.tail)

    def _leave_out(self, worker: Worker, reason: str, now: float, *, turn: int = 1) -> Verdict:
        """Continue without a newcomer that failed. Its node is tried again later."""
        self._news.append(self._bad_nodes.failed(worker.node, worker.id, reason, now, turn=turn))
        self.in_all += 1
        return Verdict(reason=self.reason)

    def _count(self, reason: str, traceback: str, now: float, *, hopeless: bool) -> Verdict:
        """Count a failure of the script. It is tried again later, unless it is `hopeless` or has failed too often."""
        self._failures += 1
        self.in_all += 1
        if hopeless:
            return Verdict(f"{reason} ({self._failures} times, before it joined the training)", traceback)
        if self._failures >= self._settings.most_failures:
            return Verdict(f"{reason} ({self._failures} times in a row)", traceback)
        self._not_before = now + self._settings.backoff_s(self._failures)
        return Verdict(reason=reason)

    def _will_not_mend(self, worker: Worker, last: str, error: str, *, ever_ran: bool) -> bool:
        """Whether the script ended in the same way as before, and the trainer never trained."""
        if CANNOT_STAND_IN in last:
            return True
        if not last or error or worker.ready or ever_ran:
            self._same_end.forget()
            return False
        return self._same_end.again(worker.node, last)
