"""The reconciler moves nodes and trainers towards the scheduler's decisions.

It keeps nodes, trainers, their jobs, the planner and the store consistent. The controller reports events to it and
carries out the `Effects` that each one returns. It uses no clock and no socket, and writes only to the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bftrainer.cluster.controller.active import ActiveTrainer, ControllerSettings, Disconnected
from bftrainer.cluster.controller.effects import Effects
from bftrainer.cluster.controller.job_runner import JobRunner
from bftrainer.cluster.controller.nodes.boundary import may_speak_of
from bftrainer.cluster.controller.nodes.hand_over import HandOvers
from bftrainer.cluster.controller.nodes.reattach import clear, reattach
from bftrainer.cluster.controller.nodes.state import NodeState
from bftrainer.cluster.controller.planner import Planner
from bftrainer.cluster.launchers.base import HEAD, Launcher
from bftrainer.cluster.spec.names import free_name
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store import events
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.messages import (
    Bye,
    Ended,
    Forget,
    FromAgent,
    Going,
    GpuUse,
    Heard,
    Join,
    Started,
)
from bftrainer.core.pool import Event
from bftrainer.scheduler import Scheduler
from bftrainer.util import ids


class Reconciler:
    """The state of the live system, and the rules that change it."""

    def __init__(
        self, store: Store, scheduler: Scheduler, settings: ControllerSettings, launchers: Mapping[str, Launcher]
    ) -> None:
        self.store = store
        self.planner = Planner(store, scheduler, settings.max_weight)
        self.settings = settings
        self.launchers = launchers
        self.nodes: dict[str, NodeState] = {}
        self.trainers: dict[str, ActiveTrainer] = {}
        self.jobs = JobRunner(store, self.nodes, settings)
        self.hand_overs = self.planner.hand_overs = HandOvers(store, self.nodes)
        self.paused = False

    # Nodes.

    def joined(self, join: Join, now: float, owner: str = "") -> Effects:
        """Handle an agent that connected. It is good for trainers of `owner`; empty: of all owners."""
        effects, name = Effects(), join.node
        node = self.nodes.get(name)
        if self.hand_overs.succeeds(join, owner, now) and node is not None:
            clear(name, join.workers, effects)
            self.planner.see_gpus(node, len(join.gpus), now)
            for live in self._concerned(node):
                live.given = None  # its launcher gets the address of the new agent
            self._reconcile([live.id for live in self._concerned(node)], now, effects)
            effects.decide = "now"
            return effects
        if node is not None and node.agent != join.agent:
            effects.add(self.lost(name, "its agent restarted", now))
            node = None
        if node is not None:  # the same agent, after a restart of the controller or a broken connection
            self.planner.see_gpus(node, len(join.gpus), now)
            if node.rejoined(join, now):
                for live in self._concerned(node):
                    live.given = None  # its launcher gets the node again, with the number of ranks
            node.owner = owner or node.owner
            around = (self._concerned, self._trainer_of, self.jobs)
            touched = reattach(node, join.workers, *around, now, effects)
            if node.leave_by is not None:
                touched += self._leave(node, node.leave_by)
            self._reconcile(touched, now, effects)
            self._dismiss_if_empty(node, now, effects)
            return effects
        clear(name, join.workers, effects)
        if self.paused and name != HEAD:
            effects.tell(name, Bye("harvesting is paused"))
            return effects
        node = self.nodes[name] = NodeState.from_join(join, now, owner)
        node.save_joined(self.store)
        if name == HEAD:
            self._reconcile((live.id for live in self._on_head()), now, effects)
        else:
            self._pool_changed(Event(now, joined=(name,)), now, effects, gpus=node.gpu_count)
            self.planner.owned((node,))
        return effects

    def available(self, name: str, now: float) -> Effects:
        """In a dry run, add a node that the pool could get."""
        if self.settings.dry_run and name not in self.nodes:
            return self.joined(Join(name, name, "none"), now)
        return Effects()

    def beat(self, name: str, now: float, gpus: tuple[GpuUse, ...] = ()) -> None:
        """Record that an agent is alive, and the reading of its GPUs if it sent one."""
        if (node := self.nodes.get(name)) is not None and node.dismissed is None:
            node.beat(now, gpus)

    def leaving(self, name: str, grace_s: float, now: float) -> Effects:
        """Handle the announcement that a node will be taken in `grace_s` seconds."""
        effects = Effects()
        node = self.nodes.get(name)
        if node is None or node.leave_by is not None:
            return effects
        node.leave_by, node.heir = now + grace_s, ""
        self.store.update_node(name, leaving=now)
        self.store.log(now, events.NodeLeaving(name, grace_s))
        touched = self._pool_changed(Event(now, left=(name,)), now, effects)
        self._reconcile([*touched, *self._leave(node, node.leave_by)], now, effects)
        self._dismiss_if_empty(node, now, effects)
        return effects

    def _disconnected(self, name: str, reason: str, now: float, effects: Effects) -> list[str]:
        """Await an agent whose connection broke, unless peers of its worker lost it too. Returns the trainers."""
        node = self.nodes.get(name)
        if node is None or self.hand_overs.vacated(name):
            return []
        if not self.settings.reconnect_s or any(live.job.is_missed(name) for live in self._concerned(node)):
            return self._lost(name, reason, now, effects)
        node.here, node.cut, node.heard = False, True, now
        return []

    def _missed(self, live: ActiveTrainer, now: float, effects: Effects) -> list[str]:
        """Give up the disconnected nodes of a trainer whose group has broken. Returns the trainers concerned."""
        gone = [name for name, node in self.nodes.items() if node.cut and live.job.is_missed(name)]
        return [trainer for name in gone for trainer in self._lost(name, "connection closed", now, effects)]

    def lost(self, name: str, reason: str, now: float, *, for_good: bool = False) -> Effects:
        """Handle the loss of a node. Its agent may come back, unless it is lost `for_good` or was leaving."""
        effects = Effects()
        self._reconcile(self._lost(name, reason, now, effects, for_good=for_good), now, effects)
        return effects

    def _lost(self, name: str, reason: str, now: float, effects: Effects, *, for_good: bool = False) -> list[str]:
        """Remove a node. Returns the trainers that it concerned."""
        node = self.nodes.pop(name, None)
        if node is None:
            return []
        if for_good or node.leave_by is not None:
            effects.left.append((name, node.agent))
        self.store.update_node(name, left=now)
        self.store.log(now, events.HeadLeft(name, reason) if name == HEAD else events.NodeLeft(name, reason))
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

    def _pool_changed(self, event: Event, now: float, effects: Effects, gpus: int = 0) -> list[str]:
        """Update the scheduler's state. A node that joins has `gpus` GPUs. Returns the trainers that lost a node."""
        lost = self.planner.pool_changed(event, now, gpus)
        for trainer in lost:
            if trainer in self.trainers:
                self.trainers[trainer].preemptions += 1
                self.trainers[trainer].stale = True
        effects.decide = "now"
        return lost

    def _dismiss_if_empty(self, node: NodeState, now: float, effects: Effects) -> None:
        if node.leave_by is not None and (node.worker is None or now >= node.leave_by):
            effects.tell(node.name, Bye("the node is wanted elsewhere"))
        self.hand_overs.proceed(node, now, effects)

    # Workers.

    def agents_said(self, said: Iterable[tuple[str, FromAgent | Disconnected]], now: float) -> Effects:
        """Handle messages of agents, each with the name of its node. Each trainer is reconciled once, at the end.

        A trainer's thirty workers may all send messages at the same time.
        """
        effects = Effects()
        touched: list[str] = []
        for name, message in said:
            if self.settings.own_users and name not in self.nodes:
                continue  # refused, or lost: it speaks for nobody
            match message:
                case Heard(worker, words):
                    if live := self._trainer_of(worker, name):
                        self.jobs.heard(live, worker, words, now)
                        touched.append(live.id)
                        if words.get("type") == "broken":
                            touched += self._missed(live, now, effects)
                case Started(worker):
                    if live := self._trainer_of(worker, name):
                        self.jobs.started(live, message, now)
                        touched.append(live.id)
                case Ended(worker):
                    if live := self._trainer_of(worker, name):
                        self.jobs.ended(live, message, now, effects)
                        touched.append(live.id)
                    effects.tell(name, Forget(worker))
                    touched += self._freed(name, now, effects)
                case Going(reason) if not self.hand_overs.vacated(name):
                    touched += self._lost(name, reason, now, effects, for_good=True)
                case Disconnected(reason):
                    touched += self._disconnected(name, reason, now, effects)
                case _:
                    pass
        self._reconcile(touched, now, effects)
        return effects

    def reports(self, reports: Mapping[str, Mapping[str, Any]], now: float, node: str = "") -> Effects:
        """Handle the reports of a node's workers since the last heartbeat."""
        effects = Effects()
        failed: list[str] = []
        for worker, report in reports.items():
            live = self._trainer_of(worker, node)
            if live is not None and not self.jobs.reported(live, worker, report, now, effects):
                failed.append(live.id)
        self._reconcile(failed, now, effects)
        return effects

    def _freed(self, name: str, now: float, effects: Effects) -> list[str]:
        """Handle a node whose worker has ended. Returns the trainer that can use the node now, if there is one."""
        if (node := self.nodes.get(name)) is None:
            return []
        self._dismiss_if_empty(node, now, effects)
        return [node.trainer] if node.trainer is not None else []

    # Trainers.

    def submit(self, spec: TrainerSpec, owner: str, now: float, *, staged: Path | None = None) -> tuple[str, Effects]:
        """Queue a trainer and return its id and the effects. Raises `QuotaError` if it exceeds its owner's limits."""
        planner, limits = self.planner, self.planner.limits
        limits.read()
        mine = [live for live in self.trainers.values() if live.owner == owner]
        limits.check(owner, spec, sum(live.job.outcome is None for live in mine))
        name = spec.name or free_name(spec.script, {live.name for live in mine})
        row = self.store.add_trainer(name=name, owner=owner, spec=spec.as_json(), time=now, staged=staged)
        live = self.trainers[row.id] = ActiveTrainer.from_row(
            row, self.launchers, self.settings, now, spec=spec, gpu_counts=planner.gpus, beliefs=planner.beliefs
        )
        self.store.log(now, events.TrainerSubmitted(row.id, name, owner))
        self.store.log(now, events.StateChanged(row.id, "", "queued", ""))
        self.planner.submitted(live, self.trainers, now)
        return row.id, Effects(decide="now")

    def cancel(self, trainer: str, reason: str, now: float) -> Effects:
        """End a trainer. Cancelling a finished trainer changes nothing."""
        effects, live = Effects(), self.trainers.get(trainer)
        if live is not None:
            live.job.cancel(reason)
            self._reconcile([trainer], now, effects)
        return effects

    def fail(self, trainer: str, error: str, now: float) -> Effects:
        """End a trainer as failed."""
        effects = Effects()
        if trainer in self.trainers:
            self.trainers[trainer].job.fail(error)
            self._reconcile([trainer], now, effects)
        return effects

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

    def _trainer_of(self, worker: str, name: str) -> ActiveTrainer | None:
        """Return the trainer of a worker that the agent of a node speaks of; None if it may not speak of it."""
        live, node, own = self.trainers.get(ids.trainer_of(worker)), self.nodes.get(name), self.settings.own_users
        return live if live is not None and may_speak_of(worker, live, node, own_users=own) else None

    # Harvesting.

    def pause(self, grace_s: float, now: float) -> Effects:
        """Stop harvesting and give all nodes back after `grace_s` seconds."""
        effects = Effects()
        self.paused = True
        self.store.keep("paused", True)
        self.store.log(now, events.PoolPaused())
        for name in list(self.nodes):
            if name != HEAD:
                effects.add(self.leaving(name, grace_s, now))
        return effects

    def resume(self, now: float) -> Effects:
        """Resume harvesting."""
        self.paused = False
        self.store.keep("paused", False)
        self.store.log(now, events.PoolResumed())
        return Effects(decide="now")

    # Decisions.

    def decide(self, now: float) -> Effects:
        """Make a decision, and carry it out."""
        effects, before = Effects(), self.planner.state.assigned
        assigned = self.planner.decide(self.trainers, now)
        holders = {node: name for name, nodes in assigned.items() for node in nodes}
        for node in self.nodes.values():
            node.trainer = holders.get(node.name)
        if self.settings.dry_run:
            return effects
        self.planner.owned([self.nodes[name] for name in self.hand_overs.decided(self.trainers, now, effects)])
        touched = []
        for name, live in self.trainers.items():
            nodes = assigned.get(name, ())
            if nodes != before.get(name, ()) or nodes != live.job.nodes:
                live.job.want(nodes)
                live.stale = True
                touched.append(name)
        self._reconcile(touched, now, effects)
        return effects

    def tick(self, now: float) -> Effects:
        """Act on deadlines that have passed: silent nodes, leaving nodes, due jobs."""
        effects = Effects(decide="now" if self.planner.tick(now) else None)
        head = self.nodes.get(HEAD)
        if head is not None and head.here and head.leave_by is None and not self._on_head():
            head.leave_by = now
        for node in list(self.nodes.values()):
            if self.settings.dry_run:
                continue
            if node.dismissed is not None and node.in_pool:
                continue
            awaited_s = self.settings.reconnect_s if node.cut else self.settings.reattach_s
            if now - node.heard > (self.settings.silence_s if node.here else awaited_s):
                effects.add(self.lost(node.name, "silent" if node.here else "did not come back", now))
            else:
                self._dismiss_if_empty(node, now, effects)
        for name in self.hand_overs.overdue(now):
            effects.add(self.lost(name, "the agent of its next owner did not come", now))
        for live in list(self.trainers.values()):
            due = live.job.due
            if due is not None and now >= due:
                self._reconcile([live.id], now, effects)
            elif live.held.nodes:
                live.save(self.store, now)  # also without reports: node time must survive a kill
        return effects

    def was_away(self, seconds: float, now: float) -> None:
        """Move all deadlines by `seconds`, in which the controller could not listen: see `TickClock`."""
        for node in self.nodes.values():
            node.shift(seconds, now)
        for live in self.trainers.values():
            live.job.shift(seconds)

    # Bookkeeping.

    def _reconcile(self, trainers: Iterable[str], now: float, effects: Effects) -> None:
        """Act on the events of trainers, and remove those that have ended."""
        for live in [self.trainers[name] for name in dict.fromkeys(trainers) if name in self.trainers]:
            self.jobs.reconcile(live, now, effects)
            if live.job.outcome is not None and live.known is not None:
                self.planner.finished(live)
                effects.decide = "now"
            if live.job.over and self.jobs.fell_back(live, self.launchers, now):
                self.planner.submitted(live, self.trainers, now)
                effects.decide = "now"
            elif live.job.over:
                del self.trainers[live.id]
                self.store.forget(f"job.{live.id}")
                effects.over.append(live.id)

    # Queries.

    def on(self, name: str) -> tuple[ActiveTrainer | None, str | None]:
        """Return the trainer that has a node, and the worker there."""
        node = self.nodes[name]
        return self.trainers.get(node.trainer or ids.trainer_of(node.worker or "")), node.worker
