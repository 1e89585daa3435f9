"""The controller connects agents, a pool and the API to the `Reconciler`, using asyncio.

It owns the life cycle and all timing: when to decide, when to tick. `EventRunner` passes each event to the reconciler
and carries out its effects. `AgentHub` serves the agents, `ControllerPoolHost` the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from bftrainer.cluster.config.keys import Config
from bftrainer.cluster.controller.agents import AgentHub
from bftrainer.cluster.controller.connection import Connections
from bftrainer.cluster.controller.event_runner import EventRunner
from bftrainer.cluster.controller.head_agent import HeadAgent
from bftrainer.cluster.controller.nodes.invitations import Invitations
from bftrainer.cluster.controller.output.logbook import Logbook, Logbooks
from bftrainer.cluster.controller.pool_host import ControllerPoolHost
from bftrainer.cluster.controller.reconciler import Reconciler
from bftrainer.cluster.controller.restore import restore
from bftrainer.cluster.controller.start_up.preparing import Preparer
from bftrainer.cluster.controller.tick_clock import LATE_S, TickClock
from bftrainer.cluster.eta.service import EtaService
from bftrainer.cluster.owners.join_secrets import JoinSecrets
from bftrainer.cluster.owners.modes import MODE_KEY
from bftrainer.cluster.pools.base import HandsOver, Pool
from bftrainer.cluster.retention.housekeeper import Housekeeper
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store import events
from bftrainer.cluster.store.scripts.beliefs import BeliefKey
from bftrainer.errors import BFTrainerError
from bftrainer.util.serial_thread import SerialThread

TICK_S = 0.25
COLLECT_S = 600.0
"""How often all objects are garbage-collected. With a thousand connections that takes 0.3 s, too much every few
seconds.
"""
HEAD_S = 2.0
"""How long a controller that ends waits for a head agent that is being started."""
READ_TURNS = 4
"""After a late tick, how often other tasks get a turn before nodes are judged: enough to read what agents sent."""


class Controller:
    """The live system. Call its methods only in the thread of the running event loop."""

    def __init__(
        self,
        cluster: Reconciler,
        pool: Pool,
        config: Config,
        logbook: Callable[[str], Logbook],
        agents: Mapping[str, str],
    ) -> None:
        """`logbook` opens the log of a trainer. `agents` has the environment variables that agents need."""
        connections, self._logbooks = Connections(), Logbooks(logbook)
        self._runner = EventRunner(cluster, connections, self._logbooks)
        self.cluster = cluster
        self.pool = pool
        self.config = config
        self.began = time.time()
        self.draining = False
        self.failed = self._runner.failed
        """Set when the controller cannot continue."""
        self.decisions = self._runner.decisions
        self.give_up_s = min(config.agents.give_up_s, getattr(pool, "give_up_s", config.agents.give_up_s))
        """Seconds after which agents without a controller end."""
        times = replace(config.agents, give_up_s=self.give_up_s)
        self.agents = AgentHub(self._runner, connections, self._logbooks, times, config.trainers)
        self.on_decision: Callable[[float], None] = lambda waited_s: None
        """Called after every decision with the seconds since the first event that led to it."""
        self.housekeeper = Housekeeper(cluster.store, config, cluster.planner.limits, cluster.trainers)
        self.eta = EtaService(cluster.store.path, config, cluster)
        accounts = config.users.as_accounts() if config.users.own else None
        if accounts is not None:
            invitations = self.agents.invitations = Invitations(cluster.store, JoinSecrets.at(config.state, accounts))
            self._runner.left = self.agents.left
            cluster.hand_overs.more_come = lambda now: bool(invitations.pending(now))
        self._pool_host = ControllerPoolHost(self._runner, self.agents, agents, accounts)
        self._runner.hand_over = self._hand_over
        self._head = HeadAgent(config.state, agents)
        self._preparer = Preparer(cluster.jobs.preloads)
        self._head_thread = SerialThread("head agent")
        self._head_kept = True
        self._collector = gc.get_threshold()
        self._tasks: list[asyncio.Task[None]] = []

    # Life cycle.

    async def start(self) -> None:
        """Restore the state from the store, start the tasks, and open the pool."""
        gc.set_threshold(*self._collector[:2], 1 << 30)  # no automatic collection of all objects: see `COLLECT_S`
        with self._runner.event() as effects:
            effects.add(restore(self.cluster, time.time()))
            self.cluster.store.log(time.time(), events.ServeStarted(self.config.pool.kind))
            self.cluster.store.keep(MODE_KEY, self.config.users.mode)
        loops = (
            self.agents.keep_handling,
            self._keep_deciding,
            self._keep_ticking,
            self.housekeeper.keep,
            self.eta.keep,
        )
        self._tasks = [asyncio.create_task(self._guarded(loop)) for loop in loops]
        await self.pool.open(self._pool_host)
        if self.cluster.paused:
            await self.pool.pause()

    async def stop(self, *, drain: bool) -> None:
        """Stop. With `drain` all nodes are given back; without, agents keep running and wait for a new controller."""
        self.draining = drain
        if drain:
            self.agents.dismiss_all("the controller ends")
        await self.pool.close(drain=drain)
        if drain:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await self.agents.all_gone()
            self._head_thread.close(HEAD_S)  # a head agent may be starting
            await self._head.end()
        self.agents.keep_nodes()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        gc.set_threshold(*self._collector)
        self.agents.close()
        self.agents.output.close()
        with contextlib.suppress(BFTrainerError):
            self.agents.handle_rest()
            self.cluster.store.log(time.time(), events.ServeStopped(drain))

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()  # called here: a task cancelled before it starts would leave the coroutine unawaited
        except asyncio.CancelledError:
            raise
        except BaseException as problem:
            self._runner.fail(problem)

    async def _keep_deciding(self) -> None:
        while True:
            first_event_at = await self.decisions.due()
            with self._runner.event() as effects:
                effects.add(self.cluster.decide(time.time()))
            self.on_decision(time.monotonic() - first_event_at)

    async def _keep_ticking(self) -> None:
        collected = ticked = time.monotonic()
        clock = TickClock(time.time(), ticked, self.cluster.settings.silence_s / 2)
        while True:
            await asyncio.sleep(TICK_S)
            late_s, ticked = time.monotonic() - ticked - TICK_S, time.monotonic()
            # First of all, before anything sets a new deadline.
            if missed_s := clock.missed(time.time(), ticked):
                self.cluster.was_away(missed_s, time.time())
            for _ in range(READ_TURNS if late_s > LATE_S else 0):
                await asyncio.sleep(0)
            if ticked - collected > COLLECT_S:
                collected = ticked
                gc.collect()
            self.housekeeper.tick(time.time())
            await self.agents.handle_reports()
            self.decisions.tick()
            self._pool_host.see_reach(self.pool)
            before = set(self.cluster.nodes)
            with self._runner.event() as effects:
                effects.add(self.cluster.tick(time.time()))
                effects.add(self._preparer.prepare(self.cluster.nodes, self.cluster.trainers))
            self.agents.cut_off(before - self.cluster.nodes.keys())
            trainers = {*self.cluster.trainers, *self.agents.output.printing()}
            self._logbooks.keep_only(trainers)
            self.agents.output.tick(trainers)
            self._runner.files.tick()
            self._keep_head()

    def _keep_head(self) -> None:
        """Start or end the head agent as needed, unless the last look at it is not finished."""
        if not self._head_kept:
            return
        self._head_kept = False
        wanted = self.cluster.head_wanted and not self.draining

        def kept(_: None, problem: BaseException | None) -> None:
            self._head_kept = True
            if problem is not None:
                self._runner.fail(problem)

        self._head_thread.do(partial(self._head.keep, wanted=wanted, here=self.agents.has_head), kept)

    def _hand_over(self, node: str, owner: str) -> None:
        """Tell the pool that a node goes to another owner. A pool that cannot do that loses it, and starts again."""
        assert self.agents.invitations is not None, "only agents that have owners are replaced"
        with self._runner.event():
            self.agents.invitations.withdraw(node)  # the former agent may not come back
        if isinstance(self.pool, HandsOver):
            self.pool.hand_over(node, owner)
        else:
            self._pool_host.not_coming(node, f"it goes to {owner}")

    # Requests of the API.

    def logbook(self, trainer: str) -> Logbook:
        """Return the log of a trainer."""
        return self._logbooks.of(trainer)

    def submit(self, spec: TrainerSpec, owner: str, staged: Path | None = None) -> str:
        """Queue a trainer and return its id. `staged`: the file with the values of its environment."""
        with self._runner.event() as effects:
            trainer, submitted = self.cluster.submit(spec, owner, time.time(), staged=staged)
            effects.add(submitted)
        return trainer

    def cancel(self, trainer: str, by: str) -> None:
        """End a trainer."""
        with self._runner.event() as effects:
            effects.add(self.cluster.cancel(trainer, f"cancelled by {by}", time.time()))

    def forget_curve(self, key: BeliefKey) -> None:
        """Forget what was learned of a script."""
        with self._runner.event():
            self.cluster.planner.beliefs.forget(key)

    async def pause(self) -> None:
        """Stop harvesting and give all nodes back, after a short grace period."""
        with self._runner.event() as effects:
            effects.add(self.cluster.pause(self.config.agents.pause_grace_s, time.time()))
            if self.agents.invitations is not None:
                self.agents.invitations.withdraw_all({name: node.agent for name, node in self.cluster.nodes.items()})
        await self.pool.pause()

    async def resume(self) -> None:
        """Resume harvesting."""
        with self._runner.event() as effects:
            effects.add(self.cluster.resume(time.time()))
        await self.pool.resume()
