"""The reconciler moves nodes and trainers towards the scheduler's decisions.

It keeps nodes, trainers, their jobs, the scheduler's state and the store consistent. The controller reports events to
it (an agent joined, a worker sent a message, a user submitted a trainer) and sends the messages that it finds in
`outbox`. The reconciler uses no clock and no socket: time is passed in. It writes only to the store, so a restarted
controller can restore everything (`restore.py`).
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from bftrainer.cluster.controller.active import PROGRESS_EVERY_S, ActiveTrainer, ControllerSettings, NodeState
from bftrainer.cluster.controller.factory import Launching
from bftrainer.cluster.controller.owners import OwnerLimits
from bftrainer.cluster.jobs.worker import Order
from bftrainer.cluster.launchers.base import HEAD, Launcher
from bftrainer.cluster.spec.trainer import TrainerSpec, free_name
from bftrainer.cluster.store import events
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.messages import Bye, Ended, Forget, FromController, Join, Start, Stop, WorkerStatus
from bftrainer.cluster.wire.worker_messages import parse_worker_message
from bftrainer.core.pool import Event
from bftrainer.core.trainer import Trainer
from bftrainer.elastic import protocol
from bftrainer.scheduler import Scheduler, State


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
        self.outbox: list[Order] = []
        self.over: list[str] = []
        """Trainers that have ended and have no worker left. The controller takes them from here."""
        self.paused = False
        self.undecided = False
        """Whether something happened that requires a decision."""
        self.last_decision: Mapping[str, Any] | None = None
        self.decisions = 0
        self.pool_node_s = 0.0
        self.pool_counted_at = 0.0
        self._totals_at = 0.0
        self._launching = Launching(launchers, settings, lambda node: self.nodes[node].host)
        self.given_to: dict[str, str] = {}
        """The trainer that each node is assigned to, by node."""
        self.occupied: dict[str, str] = {}
        """The worker that runs on each node, by node."""
        self.rules = OwnerLimits(store)
        self._obey_rules()
        self._later: dict[str, None] | None = None
        """Trainers affected by events so far, while events are handled `together`; otherwise None."""

    # Nodes.

    def joined(self, join: Join, now: float) -> None:
        """Handle an agent that connected."""
        name = join.node
        node = self.nodes.get(name)
        if node is not None and (node.here or node.agent != join.agent):
            self.lost(name, "its agent began anew", now)
            node = None
        if node is not None:  # the same agent, after a restart of the controller
            node.here, node.heard, node.host = True, now, join.host
            self._reattach(name, join.workers, now)
            if node.leave_by is not None:
                for live in self._concerned(name):
                    live.job.leave(name, node.leave_by)
                    self._after(live.id, now)
                self._dismiss_if_empty(node, now)
            return
        self._clear(name, join.workers)
        if self.paused and name != HEAD:
            self._tell(name, Bye("harvesting is paused"))
            return
        self.nodes[name] = NodeState(name, join.host, join.agent, join.pid, now, now)
        self.store.put_node(name, host=join.host, agent=join.agent, pid=join.pid, joined=now)
        data = {"host": join.host, "agent": join.agent}
        self.store.log(now, "head.joined" if name == HEAD else "node.joined", node=name, data=data)
        if name == HEAD:
            for live in self._on_head():
                self._after(live.id, now)
        else:
            self._pool_changed(Event(now, joined=(name,)), now)

    def available(self, name: str, now: float) -> None:
        """In a dry run, add a node that the pool could get."""
        if self.settings.dry_run and name not in self.nodes:
            self.joined(Join(name, name, "none"), now)

    def beat(self, name: str, now: float) -> None:
        """Record that an agent is alive."""
        node = self.nodes.get(name)
        if node is not None:
            node.heard = now

    def leaving(self, name: str, grace_s: float, now: float) -> None:
        """Handle the announcement that a node will be taken in `grace_s` seconds."""
        node = self.nodes.get(name)
        if node is None or node.leave_by is not None:
            return
        node.leave_by = now + grace_s
        self.store.update_node(name, leaving=now)
        self.store.log(now, "node.leaving", node=name, data={"grace_s": grace_s})
        touched = self._pool_changed(Event(now, left=(name,)), now)
        for live in self._concerned(name):
            live.job.leave(name, node.leave_by)
            touched.add(live.id)
        for trainer in touched:
            self._after(trainer, now)
        self._dismiss_if_empty(node, now)

    def lost(self, name: str, reason: str, now: float) -> None:
        """Handle the loss of a node."""
        node = self.nodes.pop(name, None)
        if node is None:
            return
        self.store.update_node(name, left=now)
        self.store.log(now, "head.left" if name == HEAD else "node.left", node=name, data={"reason": reason})
        touched = self._pool_changed(Event(now, left=(name,)), now) if node.in_pool else set()
        for live in self._concerned(name):
            worker = live.job.worker_on(name)
            if worker is not None:
                self.store.end_worker(worker.id, ended=now, status=None, outcome="lost")
            live.job.lost(name)
            touched.add(live.id)
        self.occupied.pop(name, None)
        for trainer in touched:
            self._after(trainer, now)

    def _pool_changed(self, event: Event, now: float) -> set[str]:
        """Update the scheduler's state. Returns the trainers that lost a node."""
        self.pool_node_s += len(self.state.pool) * (now - self.pool_counted_at if self.pool_counted_at else 0.0)
        self.pool_counted_at = now
        self.state, lost = self.state.pool_changed(event)
        for trainer in lost:
            if trainer in self.trainers:
                self.trainers[trainer].preemptions += 1
                self.trainers[trainer].stale = True
        self.undecided = True
        return set(lost)

    def _reattach(self, name: str, statuses: tuple[WorkerStatus, ...], now: float) -> None:
        touched = {live.id for live in self._concerned(name)}
        told = {status.worker for status in statuses}
        for status in statuses:
            live = self._trainer_of(status.worker)
            if live is None or status.worker not in live.job.workers:
                self._clear(name, (status,))
                continue
            touched.add(live.id)
            live.job.reattach(status.worker, status, now)
            if status.report is not None:
                self._reported(live, status.worker, status.report, now)
            if status.status is not None:
                self._ended(live, Ended(status.worker, status.status, status.tail, spoke=status.spoke), now)
        for live in self._concerned(name):
            touched.add(live.id)  # the trainer that was assigned the node can use it now
            waiting = live.job.worker_on(name)
            if waiting is not None and waiting.id not in told:
                # The earlier controller ended before its order to start this worker reached the agent.
                self._ended(live, Ended(waiting.id, protocol.RESTART), now)
                touched.add(live.id)
        for trainer in touched:
            self._after(trainer, now)

    def _clear(self, name: str, statuses: tuple[WorkerStatus, ...]) -> None:
        """End workers on a node that belong to no known trainer."""
        for status in statuses:
            self._tell(name, Forget(status.worker) if status.status is not None else Stop(status.worker))

    def _dismiss_if_empty(self, node: NodeState, now: float) -> None:
        if node.leave_by is None:
            return
        if node.name not in self.occupied or now >= node.leave_by:
            self._tell(node.name, Bye("the node is wanted elsewhere"))

    # Workers.

    @contextmanager
    def together(self, now: float) -> Iterator[None]:
        """Act on the events within the block once per trainer, at the end of the block.

        A trainer's thirty workers may all send messages at the same time.
        """
        self._later = {}
        try:
            yield
        finally:
            touched, self._later = self._later, None
        for trainer in touched:
            self._after(trainer, now)

    def heard(self, name: str, worker: str, message: Mapping[str, Any], now: float) -> None:
        """Handle a worker's message."""
        live = self._trainer_of(worker)
        if live is None or worker not in live.job.workers:
            return
        try:
            said = parse_worker_message(message)
        except protocol.ProtocolError as problem:
            live.job.fail(str(problem))
        else:
            live.job.heard(worker, said, now)
        self._after(live.id, now)

    def reports(self, name: str, reports: Mapping[str, Mapping[str, Any]], now: float) -> None:
        """Handle the reports of a node's workers since the last heartbeat."""
        for worker, report in reports.items():
            live = self._trainer_of(worker)
            if live is not None and worker in live.job.workers:
                self._reported(live, worker, report, now)

    def _reported(self, live: ActiveTrainer, worker: str, report: Mapping[str, Any], now: float) -> None:
        try:
            said = parse_worker_message({**report, "type": "report"})
        except protocol.ProtocolError as problem:
            live.job.fail(str(problem))
            self._after(live.id, now)
            return
        live.job.heard(worker, said, now)
        if live.learned.rates(live.job.progress.rates):
            live.stale = self.undecided = True
        live.save(self.store, now)

    def started(self, worker: str, pid: int, now: float, warning: str = "") -> None:
        """Handle the start of a worker. `warning` tells its user about an unexpected setup."""
        live = self._trainer_of(worker)
        if live is not None and worker in live.job.workers:
            if warning:
                node, data = live.job.workers[worker].node, {"worker": worker, "warning": warning}
                self.store.log(now, "worker.warned", trainer=live.id, node=node, data=data)
            live.job.started(worker, pid)
            self._after(live.id, now)

    def ended(self, name: str, message: Ended, now: float) -> None:
        """Handle the end of a worker."""
        live = self._trainer_of(message.worker)
        if live is not None and message.worker in live.job.workers:
            self._ended(live, message, now)
            self._after(live.id, now)
        self._tell(name, Forget(message.worker))
        node = self.nodes.get(name)
        if node is not None:
            self._dismiss_if_empty(node, now)
        waits = self.given_to.get(name)  # the trainer that was assigned the node can use it now
        if waits is not None and (live is None or waits != live.id):
            self._after(waits, now)

    def _ended(self, live: ActiveTrainer, message: Ended, now: float) -> None:
        worker = live.job.workers[message.worker]
        how = (message.status, message.tail, message.error)
        live.job.ended(message.worker, *how, now, spoke=message.spoke)
        if self.occupied.get(worker.node) == message.worker:
            del self.occupied[worker.node]
        outcome = "done" if worker.said_done else "left" if worker.over else "killed" if worker.killed else "ended"
        self.store.end_worker(message.worker, ended=now, status=message.status, outcome=outcome)
        data = {"worker": message.worker, "status": message.status, "outcome": outcome}
        self.store.log(now, "worker.ended", trainer=live.id, node=worker.node, data=data)
        self._tell(worker.node, Forget(message.worker))

    # Trainers.

    def submit(self, spec: TrainerSpec, owner: str, now: float) -> str:
        """Queue a trainer and return its id. Raises `QuotaError` if it exceeds its owner's limits."""
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
        self.undecided = True
        return row.id

    def cancel(self, trainer: str, reason: str, now: float) -> None:
        """End a trainer. Cancelling a finished trainer changes nothing."""
        live = self.trainers.get(trainer)
        if live is not None:
            live.job.cancel(reason)
            self._after(trainer, now)

    def make_live(
        self, trainer: str, name: str, owner: str, submitted: float, spec: TrainerSpec, learned: Any
    ) -> ActiveTrainer:
        """Return a trainer with its job. `learned` is its stored measurements, if any (`Learned.as_json`)."""
        return self._launching.make(trainer, name, owner, submitted, spec, learned)

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

    def _concerned(self, node: str) -> list[ActiveTrainer]:
        """Return the trainers that run on a node or are assigned it."""
        if node == HEAD:
            return [live for live in self._on_head() if live.job.worker_on(HEAD) is not None]
        found = {self.given_to.get(node, ""), self.occupied.get(node, "").rpartition("-")[0]}
        return [self.trainers[name] for name in found if name in self.trainers]

    def _on_head(self) -> list[ActiveTrainer]:
        """Return the trainers that need a worker on the head."""
        return [live for live in self.trainers.values() if self._launching.needs_head(live)]

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
        self._launching.give(live, [node for node in nodes if node in self.nodes])

    def _trainer_of(self, worker: str) -> ActiveTrainer | None:
        return self.trainers.get(worker.rpartition("-")[0])

    # Harvesting.

    def pause(self, grace_s: float, now: float) -> None:
        """Stop harvesting and give all nodes back after `grace_s` seconds."""
        self.paused = True
        self.store.keep("paused", True)
        self.store.log(now, "pool.paused")
        for name in list(self.nodes):
            if name != HEAD:
                self.leaving(name, grace_s, now)

    def resume(self, now: float) -> None:
        """Resume harvesting."""
        self.paused = False
        self.store.keep("paused", False)
        self.store.log(now, "pool.resumed")
        self.undecided = True

    # Decisions.

    def _obey_rules(self) -> None:
        self.scheduler.policy = replace(self.scheduler.policy, quotas=self.rules.quotas)

    def look_at_rules(self, now: float) -> None:
        """Read the owners' limits, which commands change in the store. If the quotas changed, a decision follows."""
        self.rules.read()
        if self.rules.quotas != self.scheduler.policy.quotas:
            self._obey_rules()
            self.store.log(now, "owners.changed", data={"owners": [asdict(row) for row in self.rules.rows]})
            self.undecided = True

    def decide(self, now: float) -> None:
        """Ask the scheduler for a decision, if anything happened since the last one, and carry it out."""
        if not self.undecided:
            return
        self.undecided = False
        usual_rate = self._usual_rate()
        for live in self.trainers.values():
            if live.stale and live.known is not None:
                self.state = self.state.relearned(self.tell_scheduler(live, now, usual_rate))
        began = clock.perf_counter()
        plan = self.scheduler.decide(self.state)
        took_ms = (clock.perf_counter() - began) * 1e3
        before = self.state.assigned
        self.state = self.state.after(plan)
        self.decisions += 1
        names = {name: live.name for name, live in self.trainers.items()}
        decision = events.decision_as_json(plan, self.state, names, took_ms)
        self.last_decision = {"time": now, **decision}
        self.store.log(now, "decision", data=decision)
        self.store.keep("admitted", [trainer.name for trainer in self.state.admitted])
        if not math.isnan(self.state.seen.since):
            self.store.keep("seen", asdict(self.state.seen))
        self._keep_totals(now)
        self.given_to = {node: name for name, nodes in self.state.assigned.items() for node in nodes}
        if self.settings.dry_run:
            return
        for name, live in list(self.trainers.items()):
            nodes = self.state.assigned.get(name, ())
            if nodes != before.get(name, ()) or nodes != live.job.nodes:
                live.job.want(nodes)
                live.stale = True
                self._after(name, now)

    def tick(self, now: float) -> None:
        """Act on deadlines that have passed: silent nodes, leaving nodes, due jobs."""
        self.look_at_rules(now)
        head = self.nodes.get(HEAD)
        if head is not None and head.here and head.leave_by is None and not self._on_head():
            head.leave_by = now
        for node in list(self.nodes.values()):
            if self.settings.dry_run:
                continue
            patience = self.settings.silence_s if node.here else self.settings.reattach_s
            if now - node.heard > patience:
                self.lost(node.name, "silent" if node.here else "did not come back", now)
            elif node.leave_by is not None:
                self._dismiss_if_empty(node, now)
        if now - self._totals_at >= PROGRESS_EVERY_S:
            self._keep_totals(now)
        for live in list(self.trainers.values()):
            due = live.job.due
            if due is not None and now >= due:
                self._after(live.id, now)
            elif live.counted_nodes:
                live.save(self.store, now)  # also without reports: node time must survive a kill

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

    def _free(self, name: str) -> bool:
        """Whether a worker can be started on a node."""
        node = self.nodes.get(name)
        if node is None or not node.here or node.leave_by is not None:
            return False
        return name not in self.occupied

    def _after(self, trainer: str, now: float) -> None:
        """Act on an event of a trainer: reconcile its job, then store the changes."""
        if self._later is not None:
            self._later[trainer] = None
            return
        live = self.trainers.get(trainer)
        if live is None:
            return
        job, store = live.job, self.store
        self.give(live)
        if not self.settings.dry_run:
            for node, message in job.reconcile(now, self._free):
                if isinstance(message, Start):
                    agent = self.nodes[node].agent
                    if node != HEAD:
                        self.occupied[node] = message.worker
                    store.put_worker(message.worker, trainer=trainer, node=node, agent=agent, started=now)
                    store.log(now, "worker.started", trainer=trainer, node=node, data={"worker": message.worker})
                self._tell(node, message)
        live.take_rescales(store, now)
        live.count(now)
        live.save(self.store, now, at_once=True)
        if job.outcome is not None and live.known is not None:
            live.known = None
            self.state = self.state.finished(trainer)
            self.undecided = True
        if job.over:
            del self.trainers[trainer]
            self.scheduler.forget(trainer)
            store.keep(f"job.{trainer}", None)
            self.over.append(trainer)

    def _tell(self, node: str, message: FromController) -> None:
        self.outbox.append((node, message))

    # Queries.

    def on(self, node: str) -> tuple[ActiveTrainer | None, str | None]:
        """Return the trainer that has a node, and the worker there."""
        worker = self.occupied.get(node)
        trainer = self.given_to.get(node) or (worker or "").rpartition("-")[0]
        return self.trainers.get(trainer), worker

    def pool_seconds(self, now: float) -> float:
        """Return the node-seconds that the pool has had up to now."""
        since = self.pool_counted_at
        return self.pool_node_s + (len(self.state.pool) * (now - since) if since else 0.0)
