"""The job runner connects the job of a trainer with the trainer's workers.

What workers did comes in from the `Reconciler` and is passed to the job. The job's intents become messages for agents.
Everything is stored before it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from bftrainer.cluster.controller.active import ActiveTrainer, ControllerSettings, make_job
from bftrainer.cluster.controller.effects import Effects
from bftrainer.cluster.controller.nodes.state import NodeState
from bftrainer.cluster.controller.start_up.preloads import Preloads
from bftrainer.cluster.jobs.base import Intent, JobRecord, StartWorker, StopWorker, TellWorker
from bftrainer.cluster.jobs.worker import Worker
from bftrainer.cluster.launchers.base import HEAD, Launcher, WorkerSlot
from bftrainer.cluster.owners.signatures import REFUSED
from bftrainer.cluster.store import events
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.messages import Ended, Forget, FromController, Say, Started, Stop, WorkerStatus
from bftrainer.cluster.wire.worker_messages import parse_worker_message
from bftrainer.elastic.protocol import CANNOT_STAND_IN, FirstStep, Generation, PreloadRefused, ProtocolError

AFTER_DDP: Literal["torchrun"] = "torchrun"
"""The launcher that takes over from ddp."""


class JobRunner:
    """Passes events of workers to the jobs of their trainers, and carries out the jobs' intents."""

    def __init__(self, store: Store, nodes: Mapping[str, NodeState], settings: ControllerSettings) -> None:
        self._store = store
        self._nodes = nodes
        self._settings = settings
        self.preloads = Preloads(store)

    def heard(self, live: ActiveTrainer, worker: str, message: Mapping[str, Any], now: float) -> bool:
        """Handle a worker's message. Returns whether it is valid; the trainer fails if not."""
        try:
            said = parse_worker_message(message)
        except ProtocolError as problem:
            live.job.fail(str(problem))
            return False
        match said:
            case FirstStep():
                live.learned.first_step(said.parts)
                self.preloads.learn(live.spec, said, now, live.owner)
            case PreloadRefused(variable, modules):
                self.preloads.refused(live.spec, said, now, live.owner)
                why = f"the script sets {variable}: {', '.join(modules)} are not imported ahead of it any more"
                node = live.job.workers[worker].node
                self._store.log(now, events.WorkerWarned(live.id, node, worker, why))
            case _:
                live.job.heard(worker, said, now)
        return True

    def reported(
        self, live: ActiveTrainer, worker: str, report: Mapping[str, Any], now: float, effects: Effects
    ) -> bool:
        """Handle a worker's report. Returns whether it is valid; the trainer fails if not."""
        if not self.heard(live, worker, {**report, "type": "report"}, now):
            return False
        if live.learned.rates(live.job.progress.rates):
            live.stale = True
            effects.decide = effects.decide or "soon"
        live.save(self._store, now)
        return True

    def started(self, live: ActiveTrainer, message: Started, now: float) -> None:
        """Handle the start of a worker."""
        if message.warning:
            node = live.job.workers[message.worker].node
            self._store.log(now, events.WorkerWarned(live.id, node, message.worker, message.warning))
        live.job.started(message.worker, message.pid)
        live.job.workers[message.worker].ranks = message.ranks

    def ended(self, live: ActiveTrainer, message: Ended, now: float, effects: Effects) -> None:
        """Handle the end of a worker."""
        worker = live.job.workers[message.worker]
        live.job.ended(worker.id, message.status, message.tail, message.error, now, spoke=message.spoke)
        if message.error.startswith(REFUSED):
            live.job.fail(message.error)
        node = self._nodes.get(worker.node)
        if node is not None and node.worker == worker.id:
            node.worker = None
        outcome = "done" if worker.said_done else "left" if worker.over else "killed" if worker.killed else "ended"
        self._store.end_worker(worker.id, ended=now, status=message.status, outcome=outcome)
        self._store.log(now, events.WorkerEnded(live.id, worker.node, worker.id, message.status, outcome))
        effects.tell(worker.node, Forget(worker.id))

    def reattach(self, live: ActiveTrainer, status: WorkerStatus, now: float, effects: Effects) -> None:
        """Take up a worker that an agent which has come back reports."""
        live.job.workers[status.worker].ranks = status.ranks
        live.job.reattach(status.worker, status, now)
        if status.report is not None:
            self.reported(live, status.worker, status.report, now, effects)
        if status.status is not None:
            self.ended(live, Ended(status.worker, status.status, status.tail, spoke=status.spoke), now, effects)

    def reconcile(self, live: ActiveTrainer, now: float, effects: Effects) -> None:
        """Act on the events of a trainer: carry out its job's intents, then store the changes."""
        self.give(live, effects)
        if not self._settings.dry_run:
            free = {name for name in (HEAD, *live.job.nodes) if self._is_free_for(live, name)}
            if live.launcher.traits.needs_new_agents or (live.launcher.traits.speaks and self._has_several_ranks(live)):
                free -= set(self._older(live))
            self._refuse_older(live)
            for intent in live.job.reconcile(now, free):
                effects.tell(intent.node, self._message(live, intent, now))
        live.take_news(self._store, now)
        live.count(now)
        live.save(self._store, now, at_once=True)

    def _is_free_for(self, live: ActiveTrainer, name: str) -> bool:
        """Whether a worker of a trainer can be started on a node: its agent serves the trainer's owner."""
        node = self._nodes.get(name)
        return node is not None and node.is_free and node.serves(live.owner)

    def fell_back(self, live: ActiveTrainer, launchers: Mapping[str, Launcher], now: float) -> bool:
        """Give a trainer whose script the ddp launcher cannot run torchrun instead. Return whether it had to be.

        All of its workers have ended. It is queued again, and starts anew from the script's own checkpoint.
        """
        if not live.falls_back:
            return False
        why, next_worker = live.job.error, live.job.record.next_worker
        row = self._store.trainer(live.id)
        assert row is not None
        stored = {name: value for name, value in row.spec.items() if name != "ranks"} | {"launcher": AFTER_DDP}
        live.spec = live.spec.model_copy(update={"launcher": AFTER_DDP, "ranks": None})
        live.launcher = launchers[AFTER_DDP]
        live.job = make_job(live.id, live.spec, live.launcher, self._settings.job)
        # Its workers get new numbers, so that no message of a former one is taken for theirs.
        record = JobRecord(Generation(0, ()), frozenset(), (), next_worker, 0, "", ever_ran=False)
        live.job.resume(record)
        live.given, live.stale = None, True
        self._store.update_trainer(live.id, spec=stored)
        self._store.log(now, events.LauncherChanged(live.id, "ddp", AFTER_DDP, why))
        live.save(self._store, now, at_once=True)
        return True

    def _older(self, live: ActiveTrainer) -> list[str]:
        """Return the nodes of a trainer whose agents are of a version that starts one rank per node."""
        return [name for name in live.job.nodes if name in self._nodes and not self._nodes[name].knows_ranks]

    def _refuse_older(self, live: ActiveTrainer) -> None:
        """Fail a trainer that could start only on nodes with older agents, which cannot run its launcher."""
        older = self._older(live) if live.launcher.traits.needs_new_agents and live.job.outcome is None else []
        if older and len(older) == len(live.job.nodes) and not live.job.workers:
            live.job.fail(
                f"{CANNOT_STAND_IN}: the agent of {older[0]} is of version 0.1.0, which does not know the launcher "
                f"{live.spec.launcher}; upgrade it"
            )

    def _has_several_ranks(self, live: ActiveTrainer) -> bool:
        """Whether a worker of a trainer has several ranks, or may get them because it is being started."""

        def ranks(worker: Worker) -> int:
            node = self._nodes.get(worker.node)
            return len(worker.ranks) or (live.spec.ranks_on(node.ranks) if node is not None and node.knows_ranks else 1)

        return any(ranks(worker) > 1 for worker in live.job.workers.values())

    def give(self, live: ActiveTrainer, effects: Effects) -> None:
        """Have a trainer's launcher write what it needs for its nodes, if they changed."""
        nodes = live.job.nodes
        if live.given is nodes or self._settings.dry_run:
            return
        live.given = nodes
        known = [self._nodes[node] for node in nodes if node in self._nodes]
        hosts = [(node.host, live.spec.ranks_on(node.ranks)) for node in known]
        effects.files.append((live.id, partial(live.launcher.given, live.launch, hosts)))

    def _message(self, live: ActiveTrainer, intent: Intent, now: float) -> FromController:
        """Return the message that carries out a job's intent. A worker to be started is stored first."""
        match intent:
            case StartWorker(worker, name):
                node = self._nodes[name]
                if name != HEAD:
                    node.worker = worker
                self._store.put_worker(worker, trainer=live.id, node=name, agent=node.agent, started=now)
                self._store.log(now, events.WorkerStarted(live.id, name, worker))
                # The workers of older agents can only be with workers that have one rank each.
                alone = live.launcher.traits.speaks and self._older(live)
                ranks = 1 if alone else live.spec.ranks_on(node.ranks)
                slot = WorkerSlot(worker, name, node.host, intent.head, intent.background, intent.settled, ranks)
                start = live.launcher.start(live.launch, slot)
                if live.spec.signature:
                    start = replace(start, spec=live.spec.as_json())
                speaks = live.launcher.traits.speaks
                return replace(start, preload=self.preloads.of(live.spec, live.owner)) if speaks else start
            case StopWorker(worker, _, grace_s):
                return Stop(worker, grace_s)
            case TellWorker(worker, _, message):
                return Say(worker, message)
