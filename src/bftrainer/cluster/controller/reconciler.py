"""The reconciler moves nodes and trainers towards the scheduler's decisions.

It keeps nodes, trainers, their jobs, the scheduler's state and the store consistent. The controller reports events to
it (an agent joined, a worker sent a message, a user submitted a trainer) and carries out the `Effects` that each event
returns. The reconciler uses no clock and no socket: time is passed in. It writes only to the store, so a restarted
controller can restore everything (`restore.py`).
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from bftrainer.cluster.controller.active import PROGRESS_EVERY_S, ActiveTrainer, ControllerSettings, NodeState
from bftrainer.cluster.controller.effects import Effects
from bftrainer.cluster.controller.owners import OwnerLimits
from bftrainer.cluster.jobs.base import Intent, StartWorker, StopWorker, TellWorker
from bftrainer.cluster.launchers.base import HEAD, Launcher, WorkerSlot
from bftrainer.cluster.spec.trainer import TrainerSpec, free_name
from bftrainer.cluster.store import events
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.messages import (
    Bye,
    Ended,
    Forget,
    FromAgent,
    FromController,
    Going,
    Heard,
    Join,
    Say,
    Started,
    Stop,
    WorkerStatus,
)
from bftrainer.cluster.wire.worker_messages import understood
from bftrainer.core.pool import Event
from bftrainer.core.trainer import Trainer
from bftrainer.elastic import protocol
from bftrainer.scheduler import Scheduler, State
from bftrainer.util import ids


class Reconciler:
    """The state of the live system, and the rules that change it."""

    def __init__(
        self, store: Store, scheduler: Scheduler, settings: ControllerSettings, launchers: Mapping[str, Launcher]
    ) -> None:
        self.store = store
        self.scheduler = scheduler
        self.settings = settings
        self.state = State()
        self.nodes: dict[str, NodeState] = {}
        self.trainers: dict[str, ActiveTrainer] = {}
        self.paused = False
        self.last_decision: Mapping[str, Any] | None = None
        self.decisions = 0
        self.pool_node_s = 0.0
        self.pool_counted_at = 0.0
        self._totals_at = 0.0
        self._launchers = launchers
        self._decided = self.state
        """The state after the last decision."""
        self.rules = OwnerLimits(store)
        self._obey_rules()

    # Nodes.

    def joined(self, join: Join, now: float) -> Effects:
        """Handle an agent that connected."""
        effects, name = Effects(), join.node
        node = self.nodes.get(name)
        if node is not None and (node.here or node.agent != join.agent):
            effects.add(self.lost(name, "its agent began anew", now))
            node = None
        if node is not None:  # the same agent, after a restart of the controller
            node.here, node.heard, node.host = True, now, join.host
            touched = self._reattach(node, join.workers, now, effects)
            if node.leave_by is not None:
                touched += self._leave(node, node.leave_by)
            self._reconcile(touched, now, effects)
            self._dismiss_if_empty(node, now, effects)
            return effects
        self._clear(name, join.workers, effects)
        if self.paused and name != HEAD:
            effects.tell(name, Bye("harvesting is paused"))
            return effects
        self.nodes[name] = NodeState(name, join.host, join.agent, join.pid, now, now)
        self.store.put_node(name, host=join.host, agent=join.agent, pid=join.pid, joined=now)
        data = {"host": join.host, "agent": join.agent}
        self.store.log(now, "head.joined" if name == HEAD else "node.joined", node=name, data=data)
        if name == HEAD:
            self._reconcile((live.id for live in self._on_head()), now, effects)
        else:
            self._pool_changed(Event(now, joined=(name,)), now, effects)
        return effects

    def available(self, name: str, now: float) -> Effects:
        """In a dry run, add a node that the pool could get."""
        if self.settings.dry_run and name not in self.nodes:
            return self.joined(Join(name, name, "none"), now)
        return Effects()

    def beat(self, name: str, now: float) -> None:
        """Record that an agent is alive."""
        node = self.nodes.get(name)
        if node is not None:
            node.heard = now

    def leaving(self, name: str, grace_s: float, now: float) -> Effects:
        """Handle the announcement that a node will be taken in `grace_s` seconds."""
        effects = Effects()
        node = self.nodes.get(name)
        if node is None or node.leave_by is not None:
            return effects
        node.leave_by = now + grace_s
        self.store.update_node(name, leaving=now)
        self.store.log(now, "node.leaving", node=name, data={"grace_s": grace_s})
        touched = self._pool_changed(Event(now, left=(name,)), now, effects)
        self._reconcile([*touched, *self._leave(node, node.leave_by)], now, effects)
        self._dismiss_if_empty(node, now, effects)
        return effects

    def lost(self, name: str, reason: str, now: float) -> Effects:
        """Handle the loss of a node."""
        effects = Effects()
        self._reconcile(self._lost(name, reason, now, effects), now, effects)
        return effects

    def _lost(self, name: str, reason: str, now: float, effects: Effects) -> list[str]:
        """Remove a node. Returns the trainers that it concerned."""
        node = self.nodes.pop(name, None)
        if node is None:
            return []
        self.store.update_node(name, left=now)
        self.store.log(now, "head.left" if name == HEAD else "node.left", node=name, data={"reason": reason})
        touched = self._pool_changed(Event(now, left=(name,)), now, effects) if node.in_pool else []
        for live in self._concerned(node):
            worker = live.job.worker_on(name)
            if worker is not None:
                self.store.end_worker(worker.id, ended=now, status=None, outcome="lost")
            live.job.lost(name)
            touched.append(live.id)
        return touched

    def _leave(self, node: NodeState, by: float) -> list[str]:
        """Tell the trainers on a node that it leaves, and return them."""
        concerned = self._concerned(node)
        for live in concerned:
            live.job.leave(node.name, by)
        return [live.id for live in concerned]

    def _pool_changed(self, event: Event, now: float, effects: Effects) -> list[str]:
        """Update the scheduler's state. Returns the trainers that lost a node."""
        self.pool_node_s += len(self.state.pool) * (now - self.pool_counted_at if self.pool_counted_at else 0.0)
        self.pool_counted_at = now
        self.state, lost = self.state.pool_changed(event)
        for trainer in lost:
            if trainer in self.trainers:
                self.trainers[trainer].preemptions += 1
                self.trainers[trainer].stale = True
        effects.decide = "now"
        return list(lost)

    def _reattach(self, node: NodeState, statuses: Sequence[WorkerStatus], now: float, effects: Effects) -> list[str]:
        """Take up the workers that an agent reports after a restart. Returns the trainers that it concerned."""
        touched = [live.id for live in self._concerned(node)]
        told = {status.worker for status in statuses}
        for status in statuses:
            live = self._trainer_of(status.worker)
            if live is None or status.worker not in live.job.workers:
                self._clear(node.name, (status,), effects)
                continue
            touched.append(live.id)
            live.job.reattach(status.worker, status, now)
            if status.report is not None:
                self._reported(live, status.worker, status.report, now, effects)
            if status.status is not None:
                self._ended(live, Ended(status.worker, status.status, status.tail, spoke=status.spoke), now, effects)
        for live in self._concerned(node):
            waiting = live.job.worker_on(node.name)
            if waiting is not None and waiting.id not in told:
                # The earlier controller ended before its order to start this worker reached the agent.
                self._ended(live, Ended(waiting.id, protocol.RESTART), now, effects)
        return touched

    def _clear(self, name: str, statuses: Iterable[WorkerStatus], effects: Effects) -> None:
        """End workers on a node that belong to no known trainer."""
        for status in statuses:
            effects.tell(name, Forget(status.worker) if status.status is not None else Stop(status.worker))

    def _dismiss_if_empty(self, node: NodeState, now: float, effects: Effects) -> None:
        if node.leave_by is not None and (node.worker is None or now >= node.leave_by):
            effects.tell(node.name, Bye("the node is wanted elsewhere"))

    # Workers.

    def agents_said(self, said: Iterable[tuple[str, FromAgent]], now: float) -> Effects:
        """Handle messages of agents, each with the name of its node. Each trainer is reconciled once, at the end.

        A trainer's thirty workers may all send messages at the same time.
        """
        effects, touched = Effects(), list[str]()
        for name, message in said:
            match message:
                case Heard(worker, words):
                    touched += self._heard(worker, words, now)
                case Started():
                    touched += self._started(message, now)
                case Ended():
                    touched += self._ended_on(name, message, now, effects)
                case Going(reason):
                    touched += self._lost(name, reason, now, effects)
                case _:
                    pass
        self._reconcile(touched, now, effects)
        return effects

    def reports(self, reports: Mapping[str, Mapping[str, Any]], now: float) -> Effects:
        """Handle the reports of a node's workers since the last heartbeat."""
        effects = Effects()
        for worker, report in reports.items():
            live = self._trainer_of(worker)
            if (
                live is not None
                and worker in live.job.workers
                and not self._reported(live, worker, report, now, effects)
            ):
                self._reconcile([live.id], now, effects)
        return effects

    def _heard(self, worker: str, message: Mapping[str, Any], now: float) -> list[str]:
        live = self._trainer_of(worker)
        if live is None or worker not in live.job.workers:
            return []
        try:
            said = understood(message)
        except protocol.ProtocolError as problem:
            live.job.fail(str(problem))
        else:
            live.job.heard(worker, said, now)
        return [live.id]

    def _reported(
        self, live: ActiveTrainer, worker: str, report: Mapping[str, Any], now: float, effects: Effects
    ) -> bool:
        """Handle a worker's report. Returns whether it is valid; the trainer fails if not."""
        try:
            said = understood({**report, "type": "report"})
        except protocol.ProtocolError as problem:
            live.job.fail(str(problem))
            return False
        live.job.heard(worker, said, now)
        if live.learned.rates(live.job.progress.rates):
            live.stale = True
            effects.decide = effects.decide or "soon"
        live.save(self.store, now)
        return True

    def _started(self, message: Started, now: float) -> list[str]:
        worker = message.worker
        live = self._trainer_of(worker)
        if live is None or worker not in live.job.workers:
            return []
        if message.warning:
            node, data = live.job.workers[worker].node, {"worker": worker, "warning": message.warning}
            self.store.log(now, "worker.warned", trainer=live.id, node=node, data=data)
        live.job.started(worker, message.pid)
        return [live.id]

    def _ended_on(self, name: str, message: Ended, now: float, effects: Effects) -> list[str]:
        """Handle the end of a worker on a node. Returns the trainers that can act on it."""
        touched = []
        live = self._trainer_of(message.worker)
        if live is not None and message.worker in live.job.workers:
            self._ended(live, message, now, effects)
            touched.append(live.id)
        effects.tell(name, Forget(message.worker))
        node = self.nodes.get(name)
        if node is not None:
            self._dismiss_if_empty(node, now, effects)
            if node.trainer is not None:  # the trainer that was assigned the node can use it now
                touched.append(node.trainer)
        return touched

    def _ended(self, live: ActiveTrainer, message: Ended, now: float, effects: Effects) -> None:
        worker = live.job.workers[message.worker]
        live.job.ended(worker.id, message.status, message.tail, message.error, now, spoke=message.spoke)
        node = self.nodes.get(worker.node)
        if node is not None and node.worker == worker.id:
            node.worker = None
        outcome = "done" if worker.said_done else "left" if worker.over else "killed" if worker.killed else "ended"
        self.store.end_worker(worker.id, ended=now, status=message.status, outcome=outcome)
        data = {"worker": worker.id, "status": message.status, "outcome": outcome}
        self.store.log(now, "worker.ended", trainer=live.id, node=worker.node, data=data)
        effects.tell(worker.node, Forget(worker.id))

    # Trainers.

    def submit(self, spec: TrainerSpec, owner: str, now: float) -> tuple[str, Effects]:
        """Queue a trainer and return its id and the effects. Raises `QuotaError` if it exceeds its owner's limits."""
        self.rules.read()
        unfinished = sum(live.owner == owner and live.job.outcome is None for live in self.trainers.values())
        self.rules.check(owner, spec, unfinished)
        name = spec.name or free_name(spec.script, {one.name for one in self.trainers.values() if one.owner == owner})
        row = self.store.add_trainer(name=name, owner=owner, spec=spec.as_json(), time=now)
        live = self.make_live(row.id, name, owner, now, spec, None)
        self.trainers[row.id] = live
        self.store.log(now, "trainer.submitted", trainer=row.id, data={"name": name, "owner": owner})
        self.store.log(now, "trainer.state", trainer=row.id, data={"from": "", "to": "queued", "reason": ""})
        self.state = self.state.submitted(self.tell_scheduler(live, now))
        return row.id, Effects(decide="now")

    def cancel(self, trainer: str, reason: str, now: float) -> Effects:
        """End a trainer. Cancelling a finished trainer changes nothing."""
        effects = Effects()
        live = self.trainers.get(trainer)
        if live is not None:
            live.job.cancel(reason)
            self._reconcile([trainer], now, effects)
        return effects

    def make_live(
        self, trainer: str, name: str, owner: str, submitted: float, spec: TrainerSpec, learned: Any
    ) -> ActiveTrainer:
        """Return a trainer with its job. `learned` is its stored measurements, if any (`Learned.as_json`)."""
        launcher = self._launchers[spec.launcher]
        return ActiveTrainer.make(trainer, name, owner, submitted, spec, launcher, self.settings, learned)

    def tell_scheduler(self, live: ActiveTrainer, now: float, usual_rate: float | None = None) -> Trainer:
        """Return the scheduler's description of a trainer, and log it so that decisions can be replayed."""
        live.known = live.as_trainer(self._usual_rate() if usual_rate is None else usual_rate)
        live.stale = False
        self.store.log(now, "trainer.learned", trainer=live.id, data=events.trainer_as_json(live.known))
        return live.known

    def _usual_rate(self) -> float:
        """Return the best measured rate per node. It is assumed for unmeasured trainers, so that they are tried."""
        rates = (rate / size for live in self.trainers.values() for size, rate in live.learned.measured.items())
        return max(rates, default=1.0)

    def is_taken(self, name: str, owner: str) -> bool:
        """Whether an unfinished trainer of this owner has this name."""
        mine = (live for live in self.trainers.values() if live.owner == owner and live.name == name)
        return any(live.job.outcome is None for live in mine)

    def _concerned(self, node: NodeState) -> list[ActiveTrainer]:
        """Return the trainers that run on a node or are assigned it."""
        if node.name == HEAD:
            return [live for live in self._on_head() if live.job.worker_on(HEAD) is not None]
        names = dict.fromkeys((node.trainer or "", ids.trainer_of(node.worker or "")))
        return [self.trainers[name] for name in names if name in self.trainers]

    def _on_head(self) -> list[ActiveTrainer]:
        """Return the trainers that need a worker on the head."""
        return [live for live in self.trainers.values() if live.launcher.traits.on_head]

    @property
    def head_wanted(self) -> bool:
        """Whether a head agent must run."""
        return not self.settings.dry_run and any(live.job.nodes or live.job.workers for live in self._on_head())

    def give(self, live: ActiveTrainer) -> None:
        """Pass a trainer's nodes to its launcher, if they changed."""
        nodes = live.job.nodes
        if live.given is nodes or self.settings.dry_run:
            return
        live.given = nodes
        live.give([self.nodes[node].host for node in nodes if node in self.nodes])

    def _trainer_of(self, worker: str) -> ActiveTrainer | None:
        return self.trainers.get(ids.trainer_of(worker))

    # Harvesting.

    def pause(self, grace_s: float, now: float) -> Effects:
        """Stop harvesting and give all nodes back after `grace_s` seconds."""
        effects = Effects()
        self.paused = True
        self.store.keep("paused", True)
        self.store.log(now, "pool.paused")
        for name in list(self.nodes):
            if name != HEAD:
                effects.add(self.leaving(name, grace_s, now))
        return effects

    def resume(self, now: float) -> Effects:
        """Resume harvesting."""
        self.paused = False
        self.store.keep("paused", False)
        self.store.log(now, "pool.resumed")
        return Effects(decide="now")

    # Decisions.

    def _obey_rules(self) -> None:
        self.scheduler.policy = replace(self.scheduler.policy, quotas=self.rules.quotas)

    def look_at_rules(self, now: float) -> Effects:
        """Read the owners' limits, which commands change in the store. If the quotas changed, a decision follows."""
        self.rules.read()
        if self.rules.quotas == self.scheduler.policy.quotas:
            return Effects()
        self._obey_rules()
        self.store.log(now, "owners.changed", data={"owners": [asdict(row) for row in self.rules.rows]})
        return Effects(decide="now")

    @property
    def undecided(self) -> bool:
        """Whether nodes or trainers changed since the last decision."""
        return self.state is not self._decided

    def decide(self, now: float) -> Effects:
        """Ask the scheduler for a decision, and carry it out."""
        effects = Effects()
        usual_rate = self._usual_rate()
        for live in self.trainers.values():
            if live.stale and live.known is not None:
                self.state = self.state.relearned(self.tell_scheduler(live, now, usual_rate))
        began = clock.perf_counter()
        plan = self.scheduler.decide(self.state)
        took_ms = (clock.perf_counter() - began) * 1e3
        before = self.state.assigned
        self.state = self._decided = self.state.after(plan)
        self.decisions += 1
        names = {name: live.name for name, live in self.trainers.items()}
        decision = events.decision_as_json(plan, self.state, names, took_ms)
        self.last_decision = {"time": now, **decision}
        self.store.log(now, "decision", data=decision)
        self.store.keep("admitted", [trainer.name for trainer in self.state.admitted])
        if not math.isnan(self.state.seen.since):
            self.store.keep("seen", asdict(self.state.seen))
        self._keep_totals(now)
        holders = {node: name for name, nodes in self.state.assigned.items() for node in nodes}
        for node in self.nodes.values():
            node.trainer = holders.get(node.name)
        if self.settings.dry_run:
            return effects
        touched = []
        for name, live in self.trainers.items():
            nodes = self.state.assigned.get(name, ())
            if nodes != before.get(name, ()) or nodes != live.job.nodes:
                live.job.want(nodes)
                live.stale = True
                touched.append(name)
        self._reconcile(touched, now, effects)
        return effects

    def tick(self, now: float) -> Effects:
        """Act on deadlines that have passed: silent nodes, leaving nodes, due jobs."""
        effects = self.look_at_rules(now)
        head = self.nodes.get(HEAD)
        if head is not None and head.here and head.leave_by is None and not self._on_head():
            head.leave_by = now
        for node in list(self.nodes.values()):
            if self.settings.dry_run:
                continue
            patience = self.settings.silence_s if node.here else self.settings.reattach_s
            if now - node.heard > patience:
                effects.add(self.lost(node.name, "silent" if node.here else "did not come back", now))
            else:
                self._dismiss_if_empty(node, now, effects)
        if now - self._totals_at >= PROGRESS_EVERY_S:
            self._keep_totals(now)
        for live in list(self.trainers.values()):
            due = live.job.due
            if due is not None and now >= due:
                self._reconcile([live.id], now, effects)
            elif live.counted_nodes:
                live.save(self.store, now)  # also without reports: node time must survive a kill
        return effects

    def _keep_totals(self, now: float) -> None:
        self._totals_at = now
        self.store.keep("totals", {"pool_node_s": self.pool_seconds(now), "decisions": self.decisions})

    def was_away(self, seconds: float) -> None:
        """Shift all deadlines by `seconds`, a time in which the controller itself did not run and heard no messages."""
        for node in self.nodes.values():
            node.heard += seconds
            node.leave_by = None if node.leave_by is None else node.leave_by + seconds
        for live in self.trainers.values():
            live.job.shift(seconds)

    # Bookkeeping.

    def _is_free(self, name: str) -> bool:
        """Whether a worker can be started on a node."""
        node = self.nodes.get(name)
        return node is not None and node.here and node.leave_by is None and node.worker is None

    def _reconcile(self, trainers: Iterable[str], now: float, effects: Effects) -> None:
        """Act on events of trainers: reconcile their jobs, then store the changes."""
        for live in [self.trainers[name] for name in dict.fromkeys(trainers) if name in self.trainers]:
            job = live.job
            self.give(live)
            if not self.settings.dry_run:
                free = {node for node in (HEAD, *job.nodes) if self._is_free(node)}
                for intent in job.reconcile(now, free):
                    effects.tell(intent.node, self._message(live, intent, now))
            live.take_news(self.store, now)
            live.count(now)
            live.save(self.store, now, at_once=True)
            if job.outcome is not None and live.known is not None:
                live.known = None
                self.state = self.state.finished(live.id)
                effects.decide = "now"
            if job.over:
                del self.trainers[live.id]
                self.scheduler.forget(live.id)
                self.store.keep(f"job.{live.id}", None)
                effects.over.append(live.id)

    def _message(self, live: ActiveTrainer, intent: Intent, now: float) -> FromController:
        """Return the message that carries out a job's intent. Workers to be started are stored first."""
        match intent:
            case StartWorker(worker, name):
                node = self.nodes[name]
                if name != HEAD:
                    node.worker = worker
                self.store.put_worker(worker, trainer=live.id, node=name, agent=node.agent, started=now)
                self.store.log(now, "worker.started", trainer=live.id, node=name, data={"worker": worker})
                slot = WorkerSlot(worker, name, node.host, intent.head, intent.background, intent.settled)
                return live.launcher.start(live.launch, slot)
            case StopWorker(worker, _, grace_s):
                return Stop(worker, grace_s)
            case TellWorker(worker, _, message):
                return Say(worker, message)

    # Queries.

    def on(self, name: str) -> tuple[ActiveTrainer | None, str | None]:
        """Return the trainer that has a node, and the worker there."""
        node = self.nodes[name]
        return self.trainers.get(node.trainer or ids.trainer_of(node.worker or "")), node.worker

    def pool_seconds(self, now: float) -> float:
        """Return the node-seconds that the pool has had up to now."""
        since = self.pool_counted_at
        return self.pool_node_s + (len(self.state.pool) * (now - since) if since else 0.0)
