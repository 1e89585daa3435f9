"""Agents that are not there: websocket connections that say what agents and their workers would say.

`benchmarks/controller.py` runs it as a process of its own. It connects nodes to a controller, answers as workers do
(start, become ready, arrive, form, report, print, end), and has nodes come and go. Commands come on stdin, a line each:
`churn` begins the coming and going, `die` has a node fall silent, `stop` ends it all. What happened is written to a
file, as JSON: the events, and every command of the controller with the time it came.

With `--ranks-per-node K` a node has K GPUs and its workers K ranks, and it says what the agent of such a node says: the
GPUs when it joins, the ranks of a worker that has started, their addresses when it arrives, the use of the GPUs every
ten seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, WebSocketException

from bftrainer.cluster.wire import codec, messages
from bftrainer.cluster.wire.messages import (
    Beat,
    Bye,
    Ended,
    Forget,
    Going,
    Gpu,
    GpuUse,
    Heard,
    Join,
    Log,
    Logged,
    RankStatus,
    Say,
    Start,
    Started,
    Stop,
)
from bftrainer.elastic import protocol
from bftrainer.elastic.protocol import Arrived, Broken, Done, Formed, Left, Ready
from simulated_workers import Training, Worker

BEAT_S = 1.0
READ_GPUS_S = 10.0
"""From one reading of the use of a node's GPUs to the next."""
GPU_MEMORY_MB = 81_559
READY_S = (1.0, 3.0)
"""From a worker's start to its readiness; those of a warm start."""
ARRIVE_S = (0.01, 0.06)
"""Up to a step boundary."""
FORM_S = (0.05, 0.15)
BREAK_S = (0.001, 0.01)
"""From the death of a peer's process to the error in the group."""
PRINTS_S = 10.0
"""A worker prints a line so often."""
AT_ONCE = 50
"""Connections that are made at a time at the beginning."""
SPREAD_S = 0.5
"""Agents of nodes that come together begin within so long of each other."""
TOGETHER = 0.5
"""The share of leaves in which agents have time to say that they go; the others are cut off."""


@dataclass(slots=True)
class Node:
    """One agent."""

    name: str
    incarnation: int = 0
    connection: ClientConnection | None = None
    outbox: asyncio.Queue[messages.FromAgent] | None = None
    workers: dict[str, Worker] = field(default_factory=dict)
    beat_at: float = 0.0
    read_gpus_at: float = 0.0
    gpus: tuple[Gpu, ...] = ()

    def post(self, message: messages.FromAgent) -> None:
        """Have it sent."""
        if self.outbox is not None:
            self.outbox.put_nowait(message)

    def started(self, worker: str) -> Started:
        """What it says of a worker that runs."""
        pid = os.getpid()
        return Started(worker, pid, ranks=tuple(RankStatus(pid, gpu.id) for gpu in self.gpus) or (RankStatus(pid),))

    def arrived(self, generation: int) -> Arrived:
        """What its worker says when it waits for the others of a generation."""
        addresses = tuple(f"{self.name}:{29500 + rank}" for rank in range(len(self.gpus) or 1))
        return Arrived(generation, addresses[0], addresses if len(addresses) > 1 else ())

    def gpu_use(self, now: float, rng: random.Random) -> tuple[GpuUse, ...]:
        """The use of its GPUs, if it is time to read it."""
        if now - self.read_gpus_at < READ_GPUS_S:
            return ()
        self.read_gpus_at = now
        return tuple(GpuUse(gpu.id, rng.randrange(101), rng.randrange(GPU_MEMORY_MB)) for gpu in self.gpus)


class Fleet:
    """All nodes, and what is written down of them."""

    def __init__(
        self, url: str, secret: str, agents: int, churn: Mapping[str, Any], seed: int, ranks_per_node: int = 0
    ) -> None:
        self._url = url.replace("http", "ws", 1) + messages.PATH
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._random = random.Random(seed)
        self._churn = churn
        spare = max(agents // 10, 1)
        gpus = tuple(Gpu(str(rank), "cuda", "NVIDIA H100", GPU_MEMORY_MB) for rank in range(ranks_per_node))
        self.nodes = [Node(f"n{number:05d}", gpus=gpus) for number in range(agents + spare)]
        self.here: dict[str, Node] = {}
        self.away: list[Node] = self.nodes[agents:]
        self.trainings: dict[str, Training] = {}
        self.events: list[dict[str, Any]] = []
        self.commands: list[tuple[float, str, str, str, int]] = []
        self.problems: list[str] = []
        self.lag_s: list[float] = []
        self.sizes: list[int] = []
        self.heard = 0
        self._lives: set[asyncio.Task[None]] = set()

    # One agent.

    def come(self, node: Node) -> None:
        """Have an agent begin."""
        task = asyncio.create_task(self._live(node))
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)

    async def _live(self, node: Node) -> None:
        node.incarnation += 1
        node.read_gpus_at = time.time() - self._random.uniform(0, READ_GPUS_S)
        node.workers = {}
        sending: asyncio.Task[None] | None = None
        try:
            async with connect(
                self._url,
                additional_headers=self._headers,
                open_timeout=60,
                close_timeout=0.2,
                ping_interval=None,
                max_size=16 << 20,
                compression=None,
                proxy=None,
            ) as connection:
                node.connection, node.outbox = connection, asyncio.Queue()
                agent = f"{node.name}-{node.incarnation}"
                node.post(Join(node.name, "127.0.0.1", agent, pid=os.getpid(), gpus=node.gpus, knows_ranks=True))
                sending = asyncio.create_task(_pump(node.outbox, connection))
                self.here[node.name] = node
                async for frame in connection:
                    self.heard += 1
                    self._obey(node, codec.decode(frame))
        except (OSError, TimeoutError, EOFError, InvalidHandshake, WebSocketException) as problem:
            if node.connection is None or node.name in self.here:  # not our own doing
                self.problems.append(f"{node.name}: {type(problem).__name__}: {problem}")
        finally:
            if sending is not None:
                sending.cancel()
            node.connection = node.outbox = None
            self.here.pop(node.name, None)
            self.away.append(node)

    def _obey(self, node: Node, message: messages.Message | None) -> None:
        now = time.time()
        if node.name not in self.here:
            return
        match message:
            case Start(worker, trainer, argv):
                self.commands.append((now, node.name, "start", worker, 0))
                if any(not other.ended for other in node.workers.values()):
                    self.problems.append(f"{node.name}: {worker} was started beside {', '.join(node.workers)}")
                training = self.trainings.setdefault(trainer, Training.of(argv))
                node.workers[worker] = found = Worker(worker, trainer, training)
                node.post(node.started(worker))
                self._later(node, READY_S, lambda: self._become_ready(node, found))
            case Stop(worker):
                self.commands.append((now, node.name, "stop", worker, 0))
                self._end(node, node.workers.get(worker), -9)
            case Say(worker, said):
                found_worker = node.workers.get(worker)
                if found_worker is not None and not found_worker.ended:
                    self._hear(node, found_worker, said, now)
            case Forget(worker):
                node.workers.pop(worker, None)
            case Logged(worker):
                if worker in node.workers:
                    node.workers[worker].logged = True
            case Bye() if node.connection is not None:
                node.connection.transport.abort()
            case _:
                pass

    def _hear(self, node: Node, worker: Worker, said: Mapping[str, Any], now: float) -> None:
        if said["type"] == "generation":
            generation = worker.newest = int(said["id"])
            worker.members = tuple(said["members"])
            self.commands.append((now, node.name, "generation", worker.id, generation))
            if worker.id in worker.members:
                self._later(node, ARRIVE_S, lambda: self._arrive(node, worker, generation))
            else:
                self._later(node, ARRIVE_S, lambda: self._leave(node, worker))
        elif said["type"] == "go" and said["generation"] == worker.newest:
            generation, world = worker.newest, len(said.get("ranks") or said["addresses"])
            self._later(node, FORM_S, lambda: self._form(node, worker, generation, world))

    def _become_ready(self, node: Node, worker: Worker) -> None:
        if not worker.ended:
            worker.ready = True
            self._said(node, worker, Ready())

    def _arrive(self, node: Node, worker: Worker, generation: int) -> None:
        if not worker.ended and worker.newest == generation:
            worker.formed = 0
            self._said(node, worker, node.arrived(generation))

    def _leave(self, node: Node, worker: Worker) -> None:
        if not worker.ended:
            self._said(node, worker, Left(int(worker.training.samples)))
            self._end(node, worker, 0)

    def _form(self, node: Node, worker: Worker, generation: int, world: int) -> None:
        if worker.ended or worker.newest != generation:
            return
        now = time.time()
        worker.formed = generation
        worker.training.advance(now)
        worker.training.world = world
        self._said(node, worker, Formed(generation, world, 0.2, 0.1, 0.05))

    def _end(self, node: Node, worker: Worker | None, status: int) -> None:
        if worker is not None and not worker.ended:
            worker.ended = True
            node.post(Ended(worker.id, status))

    def _said(self, node: Node, worker: Worker, message: protocol.Message) -> None:
        node.post(Heard(worker.id, protocol.as_json(message)))

    def _later(self, node: Node, between: tuple[float, float], act: Callable[[], None]) -> None:
        incarnation = node.incarnation

        def if_still_there() -> None:
            if node.incarnation == incarnation and node.connection is not None:
                act()

        asyncio.get_running_loop().call_later(self._random.uniform(*between), if_still_there)

    # All of them.

    async def begin(self, agents: int) -> None:
        """Connect the first nodes, some at a time."""
        for number in range(0, agents, AT_ONCE):
            for node in self.nodes[number : min(number + AT_ONCE, agents)]:
                self.come(node)
            wanted = min(number + AT_ONCE, agents)
            while len(self.here) < wanted:
                if self.problems:
                    raise SystemExit(f"simulated agents: {self.problems[0]}")
                await asyncio.sleep(0.01)

    async def beat(self) -> None:
        """Every node's beat once a second, one after the other."""
        count = len(self.nodes)
        began, done = time.monotonic(), 0
        while True:
            await asyncio.sleep(0.005)
            due = int((time.monotonic() - began) / BEAT_S * count)
            for number in range(done, due):
                node = self.nodes[number % count]
                if node.name in self.here:
                    self._beat(node, time.time())
            done = due

    def _beat(self, node: Node, now: float) -> None:
        reports = {}
        for worker in list(node.workers.values()):
            if worker.ended or not worker.formed:
                continue
            training = worker.training
            training.advance(now)
            if training.samples >= training.total:
                self._said(node, worker, Done(int(training.samples)))
                self._end(node, worker, 0)
                continue
            worker.measure(now, self._random)
            reports[worker.id] = worker.report(self._random)
            if worker.logged and now - worker.printed_at > PRINTS_S:
                worker.printed_at, worker.logged = now, False
                text = f"step {int(training.samples) // 64} loss {self._random.random():.4f}\n"
                node.post(Log(worker.id, worker.printed, text, len(text)))
                worker.printed += len(text)
        node.post(Beat(reports, node.gpu_use(now, self._random)))
        node.beat_at = now

    async def watch(self) -> None:
        """How late this process itself is, and how many nodes there are."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.1)
            self.lag_s.append(time.monotonic() - began - 0.1)
            self.sizes.append(len(self.here))

    # Coming and going.

    async def join(self) -> None:
        """Nodes come, again and again."""
        while True:
            await asyncio.sleep(self._random.expovariate(self._churn["joins_per_hour"] / 3600))
            count = min(self._random.choice(self._churn["join_sizes"]), len(self.away))
            for _ in range(count):
                node = self.away.pop(self._random.randrange(len(self.away)))
                asyncio.get_running_loop().call_later(self._random.uniform(0, SPREAD_S), self._come, node)

    def _come(self, node: Node) -> None:
        self.events.append({"kind": "join", "time": time.time(), "nodes": [node.name], "survivors": []})
        self.come(node)

    async def leave(self) -> None:
        """Nodes are taken, again and again."""
        while True:
            await asyncio.sleep(self._random.expovariate(self._churn["leaves_per_hour"] / 3600))
            count = min(self._random.choice(self._churn["leave_sizes"]), len(self.here) // 4)
            if count:
                taken = [self.here[name] for name in self._random.sample(sorted(self.here), count)]
                self._take(taken, cut=self._random.random() > TOGETHER)

    def _take(self, taken: list[Node], *, cut: bool) -> None:
        lost = {worker.id: worker for node in taken for worker in node.workers.values() if not worker.ended}
        broken = {worker.trainer for worker in lost.values() if worker.id in worker.members}
        names = {node.name for node in taken}
        survivors = [
            (name, worker.id)
            for name, node in self.here.items()
            if name not in names
            for worker in node.workers.values()
            if worker.trainer in broken and worker.ready and not worker.ended
        ]
        kind = "cut" if cut else "leave"
        self.events.append({"kind": kind, "time": time.time(), "nodes": sorted(names), "survivors": survivors})
        for name, worker_id in survivors if cut else ():
            self._lose_peer(self.here[name], self.here[name].workers[worker_id])
        for node in taken:
            del self.here[node.name]
            assert node.connection is not None
            if cut:
                node.connection.transport.abort()
            else:
                node.post(Going("taken"))
            node.workers = {}

    def _lose_peer(self, node: Node, worker: Worker) -> None:
        """Have a worker say that its group broke: the processes of a node that is cut off are dead."""
        generation = worker.formed

        def broken() -> None:
            if generation and worker.formed == generation and not worker.ended:
                self._said(node, worker, Broken(generation, "connection reset by peer"))

        self._later(node, BREAK_S, broken)

    def die(self) -> None:
        """Have one node fall silent, as if its power had failed: nothing is closed, and peers hang."""
        node = self.here.pop(self._random.choice(sorted(self.here)))
        node.outbox, node.workers = None, {}
        self.events.append({"kind": "dead", "time": node.beat_at, "nodes": [node.name], "survivors": []})

    def story(self) -> dict[str, Any]:
        """What happened."""
        return {
            "events": self.events,
            "commands": self.commands,
            "problems": self.problems,
            "lag_s": self.lag_s,
            "sizes": self.sizes,
            "frames": self.heard,
            "here": {name: [w.id for w in node.workers.values() if not w.ended] for name, node in self.here.items()},
        }

    async def end(self) -> None:
        """Cut all connections."""
        for task in list(self._lives):
            task.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)


async def _pump(outbox: asyncio.Queue[messages.FromAgent], connection: ClientConnection) -> None:
    with suppress(WebSocketException, OSError):
        while True:
            message = await outbox.get()
            await connection.send(codec.encode(message))
            if isinstance(message, Going):
                await connection.close()


async def _lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def play(args: argparse.Namespace) -> None:
    """Do as stdin says."""
    found = json.loads(Path(args.state, "client.json").read_text())
    secret = Path(args.state, "agent-secret").read_text().strip()
    fleet = Fleet(found["url"], secret, args.agents, json.loads(args.churn), args.seed, args.ranks_per_node)
    commands = await _lines()
    began = time.monotonic()
    tasks = [asyncio.create_task(work) for work in (fleet.beat(), fleet.watch())]
    await fleet.begin(args.agents)
    gc.freeze()  # a collection of all connections would be a pause of this process, not of the controller
    print(json.dumps({"connected_s": time.monotonic() - began}), flush=True)
    churning: list[asyncio.Task[None]] = []
    while line := await commands.readline():
        if line == b"churn\n":
            fleet.lag_s.clear()
            fleet.sizes.clear()
            churning = [asyncio.create_task(work) for work in (fleet.join(), fleet.leave())]
        elif line == b"die\n":
            fleet.die()
        elif line == b"calm\n":
            for task in churning:
                task.cancel()
        elif line == b"stop\n":
            break
    Path(args.out).write_text(json.dumps(fleet.story()))
    for task in (*tasks, *churning):
        task.cancel()
    results = await asyncio.gather(*tasks, *churning, return_exceptions=True)
    await fleet.end()
    for problem in results:
        if isinstance(problem, Exception):
            raise problem


def main() -> None:
    """Read the arguments and play."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", required=True)
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--churn", required=True, help="rates and sizes, as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks-per-node", type=int, default=0, help="GPUs of each node, with one rank each; 0: none")
    parser.add_argument("--out", required=True)
    asyncio.run(play(parser.parse_args()))


if __name__ == "__main__":
    main()
