"""A cluster without processes: agents and workers that answer as real ones do, driven by the test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bftrainer.cluster.controller.active import ActiveTrainer, ControllerSettings, Disconnected
from bftrainer.cluster.controller.effects import Effects
from bftrainer.cluster.controller.reconciler import Reconciler
from bftrainer.cluster.controller.restore import restore
from bftrainer.cluster.launchers import HEAD, LauncherTraits, WorkerSlot, make_launchers
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.messages import (
    Bye,
    Ended,
    Forget,
    FromAgent,
    Gpu,
    Heard,
    Join,
    RankStatus,
    Say,
    Start,
    Started,
    Stop,
    WorkerStatus,
)
from bftrainer.core.objective import find_objective
from bftrainer.elastic import protocol
from bftrainer.elastic.protocol import Arrived, Done, Formed, Left, Ready
from bftrainer.scheduler import Policy, Scheduler


@dataclass
class FakeWorker:
    """One worker that does at once what it is told."""

    id: str
    node: str
    trainer: str
    ready: bool = False
    generation: int = 0
    formed: int = 0
    over: bool = False
    done: bool = False
    hangs: bool = False
    """It evaluates, or hangs: it comes to no new generation until `Bench.wake`."""
    status: int | None = None
    speaks: bool = True
    unheard: Mapping[str, Any] | None = None


class InName:
    """The launcher of elastic scripts without its folders: hundreds of times a test."""

    traits = LauncherTraits(speaks=True, on_head=False)

    def start(self, live: ActiveTrainer, place: WorkerSlot) -> Start:
        """See `Launcher`."""
        return Start(place.worker, live.id, ("train.py",), {}, "/", background=place.background, ranks=place.ranks)

    def given(self, live: ActiveTrainer, hosts: Sequence[tuple[str, int]]) -> None:
        """See `Launcher`."""

    def said(self, tail: str) -> str:
        """See `Launcher`."""
        return tail


@dataclass
class Bench:
    """The cluster under test, its store, and its imaginary nodes."""

    folder: Path
    settings: ControllerSettings = field(default_factory=ControllerSettings)
    now: float = 1000.0
    slow: bool = False
    """Workers become ready only when the test says so."""
    forms: Callable[[set[str]], bool] = lambda nodes: True
    """Whether a group of these nodes forms; otherwise the test says how it breaks."""
    gpus: dict[str, int] = field(default_factory=dict)
    """How many GPUs nodes have. Nodes that are not here have none, and their agents say nothing of ranks."""

    def __post_init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}
        self.agents: dict[str, str] = {}
        self.cut: set[str] = set()
        """Nodes whose agents are not connected: messages from and to them are lost."""
        self.slots: dict[str, int] = {}
        """What the pool says of nodes' ranks, for those that join from now on."""
        self.older: set[str] = set()
        """Nodes whose agents are of version 0.1.0, and start one rank only."""
        self.dismissed: list[str] = []
        self.started: list[Start] = []
        self.effects = Effects()
        """What the controller would have to do by now."""
        self._incarnation = 0
        self.open()

    def open(self) -> None:
        """Begin a controller's life on the store."""
        self.store = Store.open(self.folder / "bftrainer.db")
        self.policy = Policy(objective=find_objective("weighted-efficiency"))
        launchers = {
            **make_launchers(self.folder, "bench", "127.0.0.1", self.store.keep, self.store.kept),
            "elastic": InName(),
        }
        self.cluster = Reconciler(self.store, Scheduler(self.policy), self.settings, launchers)
        with self.store.transaction():
            self.act(restore(self.cluster, self.now))

    def crash(self) -> None:
        """The controller is killed; agents and workers go on. What was to be sent is lost."""
        self.effects = Effects()
        self.store.close()

    def restart(self, *back: str) -> None:
        """A new controller, and the agents that come back to it."""
        self.crash()
        self.open()
        for node in back or tuple(self.agents):
            self.rejoin(node)
        self.settle()

    def act(self, effects: Effects) -> None:
        """Do with the effects of an event what the controller does: they are carried out when things settle."""
        files, effects.files = effects.files, []
        self.effects.add(effects)
        for trainer, work in files:
            try:
                work()
            except OSError as problem:
                error = f"cannot write {problem.filename}: {problem.strerror}"
                self.effects.add(self.cluster.fail(trainer, error, self.now))

    def tell(self, node: str, message: FromAgent) -> None:
        """An agent says something."""
        if node in self.cut:
            return
        with self.store.transaction():
            self.act(self.cluster.agents_said([(node, message)], self.now))

    # What happens.

    def submit(self, nodes: str = "1-8", **more: Any) -> str:
        """Queue a trainer and let things settle."""
        spec = TrainerSpec.model_validate({"script": "/train.py", "nodes": nodes, **more})
        with self.store.transaction():
            trainer, effects = self.cluster.submit(spec, "someone", self.now)
            self.act(effects)
        self.settle()
        return trainer

    def join(self, *nodes: str) -> None:
        """Nodes come."""
        for node in nodes:
            self._incarnation += 1
            self.agents[node] = f"agent-{self._incarnation}"
            self.rejoin(node)
        self.settle()

    def rejoin(self, node: str) -> None:
        """An agent connects and tells all it knows."""
        self.cut.discard(node)
        statuses = tuple(
            WorkerStatus(
                w.id, w.trainer, 1, w.ready, w.formed > 0, w.generation, w.formed, over=w.over, done=w.done,
                status=w.status, speaks=w.speaks, ranks=self.ranks_on(node),
            )
            for w in self.workers.values()
            if w.node == node
        )  # fmt: skip
        with self.store.transaction():
            gpus = tuple(Gpu(str(i), "cuda", "NVIDIA A100", 81920) for i in range(self.gpus.get(node, 0)))
            join = Join(node, node, self.agents[node], statuses, gpus=gpus, slots=self.slots.get(node, 0))
            self.act(self.cluster.joined(replace(join, knows_ranks=node not in self.older), self.now))

    def disconnect(self, *nodes: str) -> None:
        """The connections of agents break; the agents and their workers go on."""
        for node in nodes:
            with self.store.transaction():
                self.act(self.cluster.agents_said([(node, Disconnected("connection closed"))], self.now))
            self.cut.add(node)
        self.settle()

    def reconnect(self, *nodes: str) -> None:
        """Agents whose connections broke come back."""
        for node in nodes:
            self.rejoin(node)
        self.settle()

    def take(self, *nodes: str) -> None:
        """Nodes vanish, and what ran there."""
        for node in nodes:
            self.cut.discard(node)
            del self.agents[node]
            self.workers = {w.id: w for w in self.workers.values() if w.node != node}
            with self.store.transaction():
                self.act(self.cluster.lost(node, "taken", self.now))
        self.settle()

    def pass_time(self, seconds: float) -> None:
        """Agents beat; the clock goes on."""
        self.now += seconds
        for node in self.agents.keys() - self.cut:
            self.cluster.beat(node, self.now)
        with self.store.transaction():
            self.act(self.cluster.tick(self.now))
        self.settle()

    def say(self, worker: str, message: protocol.Message) -> None:
        """A worker says something."""
        self.tell(self.workers[worker].node, Heard(worker, protocol.as_json(message)))

    def end(self, worker: str, status: int, tail: str = "", *, spoke: bool = True) -> None:
        """A worker ends."""
        found = self.workers[worker]
        found.status = status
        self.tell(found.node, Ended(worker, status, tail, spoke=spoke))
        self.settle()

    def fail_to_start(self, worker: str, error: str) -> None:
        """A worker could not be started."""
        found = self.workers[worker]
        found.status = -1
        self.tell(found.node, Ended(worker, -1, "", error))
        self.settle()

    def finish(self, trainer: str) -> None:
        """A trainer's members are done, one after the other."""
        members = [worker for worker in self.members(trainer) if worker in self.workers]
        for worker in members:
            self.workers[worker].over = self.workers[worker].done = True
            self.say(worker, Done(7))
        for worker in members:
            self.end(worker, 0)

    def report(self, trainer: str, **values: Any) -> None:
        """Rank 0 reports."""
        worker = self.members(trainer)[0]
        values = {"generation": self.workers[worker].formed, "world": len(self.members(trainer)), **values}
        with self.store.transaction():
            self.act(self.cluster.reports({worker: values}, self.now, self.workers[worker].node))

    def settle(self) -> None:
        """Deliver messages and decide until nothing happens any more."""
        for _ in range(1000):
            orders, self.effects.messages = self.effects.messages, []
            for node, message in orders:
                self._obey(node, message)
            if not self.effects.messages:
                if self.effects.decide is None:
                    if self.cluster.head_wanted and HEAD not in self.agents:
                        self.join(HEAD)
                    return
                self.decide()
        raise AssertionError("the cluster does not settle")

    def decide(self) -> None:
        """The controller decides; what follows from it is not carried out yet."""
        self.effects.decide = None
        with self.store.transaction():
            self.act(self.cluster.decide(self.now))

    def _obey(self, node: str, message: object) -> None:
        if node not in self.agents or node in self.cut:
            return
        match message:
            case Start(worker, trainer):
                alone = not any(w.node == node and w.status is None for w in self.workers.values())
                assert alone or node == HEAD, "two on one node"
                self.workers[worker] = FakeWorker(worker, node, trainer, speaks=message.speaks)
                self.started.append(message)
                if not message.speaks or node in self.gpus:
                    self.tell(node, Started(worker, 1, ranks=self.ranks_on(node)))
                if not message.speaks:
                    return
                if not self.slow:
                    self.make_ready(worker)
            case Stop(worker):
                if worker in self.workers and self.workers[worker].status is None:
                    self.end_later(worker, -9)
            case Say(worker, said):
                self._hear(self.workers.get(worker), said)
            case Forget(worker):
                self.workers.pop(worker, None)
            case Bye():
                self.dismissed.append(node)
                self.agents.pop(node, None)
                self.workers = {w.id: w for w in self.workers.values() if w.node != node}
                with self.store.transaction():
                    self.act(self.cluster.lost(node, "dismissed", self.now))

    def make_ready(self, worker: str) -> None:
        """A worker has done its imports."""
        self.workers[worker].ready = True
        self.say(worker, Ready())

    def wake(self, worker: str) -> None:
        """What kept a worker is over: it does what it was told last."""
        found = self.workers[worker]
        found.hangs = False
        if found.unheard is not None:
            self._hear(found, found.unheard)
        self.settle()

    def end_later(self, worker: str, status: int) -> None:
        """A worker ends, within the delivery of messages."""
        found = self.workers[worker]
        found.status = status
        self.tell(found.node, Ended(worker, status))

    def _hear(self, worker: FakeWorker | None, said: Mapping[str, Any]) -> None:
        if worker is None or worker.status is not None:
            return
        if said["type"] == "generation" and worker.hangs:
            worker.unheard = said
        elif said["type"] == "generation":
            worker.generation = said["id"]
            if worker.id in said["members"]:
                self.say(worker.id, Arrived(said["id"], f"{worker.node}:1"))
            else:
                worker.over = True
                self.say(worker.id, Left(1))
                self.end_later(worker.id, 0)
        elif said["type"] == "go" and said["generation"] == worker.generation:
            if not self.forms({address.partition(":")[0] for address in said["addresses"]}):
                return
            worker.formed = said["generation"]
            self.say(worker.id, Formed(worker.formed, len(said["addresses"]), 0.2, 0.1, 0.05))

    # What is.

    def members(self, trainer: str) -> list[str]:
        """The workers that train together."""
        return sorted(self.cluster.trainers[trainer].job.trained_by)

    def state(self, trainer: str) -> str:
        """As it is stored."""
        row = self.store.trainer(trainer)
        assert row is not None
        return row.state

    def ranks_on(self, node: str) -> tuple[RankStatus, ...]:
        """The processes of a worker on a node: one per GPU."""
        return tuple(RankStatus(100 + i, str(i)) for i in range(self.gpus.get(node, 0)))

    def nodes_of(self, trainer: str) -> set[str]:
        """Where it trains."""
        return {self.workers[worker].node for worker in self.members(trainer)}
