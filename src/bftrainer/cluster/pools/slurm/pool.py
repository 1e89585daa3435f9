"""The `slurm` pool runs a pilot, a preemptible single-node job, on every idle Slurm node.

Each round asks Slurm for nodes and pilots (`commands.py`, `read.py`), decides (`decide.py`, `keeper.py`) and submits or
cancels. A pilot is the agent of its node: Slurm takes the node back by ending it. When Slurm does not answer, the last
known state stays, nothing is submitted, and training goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bftrainer.cluster.pools.base import PoolHost, PoolHostLink
from bftrainer.cluster.pools.keeper import Keeper, Orders, Timeouts
from bftrainer.cluster.pools.slurm import decide
from bftrainer.cluster.pools.slurm.commands import Slurm, SlurmCommandError, missing_programs, write_files
from bftrainer.cluster.pools.slurm.decide import Cancellation
from bftrainer.cluster.pools.slurm.figures import PilotCounters, SlurmFigures
from bftrainer.cluster.pools.slurm.read import Pilot, SlurmNode, WaitingJob
from bftrainer.cluster.pools.slurm.settings import SlurmSettings, read_duration
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes import variables
from bftrainer.util.backoff import Backoff

FOLDER = "slurm"
_BUSY = 3.0
"""Least time between rounds, as a multiple of the time Slurm took to answer: a slow Slurm is not kept busy."""
_LONGEST_WAIT_S = 15.0
_GLANCE_S = 0.1
_SOONEST_S = 0.3
"""Least seconds between rounds, unless one is asked for. It is the interval while a job waits."""
_LAYOUT_S = 60.0
_DRAIN_S = 30.0
_STATE_ID = "slurm.id"

_log = logging.getLogger(__name__)


class SlurmPool:
    """See `base.Pool`."""

    def __init__(self, settings: SlurmSettings, folder: Path, *, retry_s: float = decide.RETRY_S) -> None:
        """Keep the environment of pilots below `folder`, which must be on a file system that the nodes see.

        After a pilot has failed, its node is left alone for `retry_s`; the time doubles with each further failure.
        """
        self.settings = settings
        self._folder = folder / FOLDER
        self._keeper = Keeper(
            Timeouts(
                grace_s=settings.grace_s,
                overdue_s=10.0,
                silent_s=settings.join_s,
                retry_s=retry_s,
                longest_retry_s=decide.LONGEST_RETRY_S,
            )
        )
        self._yield_rule = decide.YieldRule(settings.watch_partition)
        self._host_link = PoolHostLink()
        self._counters = PilotCounters()
        self._slurm: Slurm | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._paused = False
        self._ending = False
        # Last known state.
        self._nodes: Mapping[str, SlurmNode] = {}
        self._pilots: dict[str, Pilot] = {}
        """One per node, both running and waiting."""
        self._layout: Mapping[str, frozenset[str]] = {}
        self._layout_at = -math.inf
        self._left_to_others = 0
        """Number of idle nodes that are left to waiting jobs."""
        self._short_pilots = decide.ShortPilots()
        self._doubts: dict[str, float] = {}
        """Nodes whose pilots may have been submitted: until this time a missing pilot does not count as ended."""
        self._given: set[int] = set()  # pilots that were given up for waiting jobs
        self._cancelled: set[int] = set()
        self._told: set[int] = set()  # pilots that were cancelled while pilots were reconciled in this round
        self._asking_s = 0.0  # how long Slurm took to answer in the last round
        # Problems.
        self._failures = 0
        self._problem = ""
        self._refusals = decide.Refusals()

    @property
    def _to(self) -> PoolHost:
        return self._host_link.host

    @property
    def _at(self) -> Slurm:
        if self._slurm is None:
            raise BFTrainerError("the pool is not open")
        return self._slurm

    async def open(self, host: PoolHost) -> None:
        """See `base.Pool`."""
        missing = missing_programs()
        if missing:
            raise InputError(
                f"the pool slurm needs Slurm's commands, but {', '.join(missing)} is not on the PATH: "
                "start the controller where they are, such as on a login node"
            )
        self._host_link.open(host)
        state_id = host.agent_environment.get(variables.STATE_ID) or host.recall(_STATE_ID)
        if not state_id:
            state_id = secrets.token_hex(8)
            host.remember(_STATE_ID, state_id)
        self._slurm = Slurm(self.settings, self._folder, state_id, self._host_link.agents_mark)
        await self._check_partitions()
        if not host.observing:
            write_files(self.settings, self._folder, host.agent_environment)
        self._task = asyncio.create_task(self._run())

    async def pause(self) -> None:
        """See `base.Pool`."""
        self._paused = True
        self._wake.set()

    async def resume(self) -> None:
        """See `base.Pool`."""
        self._paused = False
        self._keeper.forgive()
        self._refusals.forget()
        self._wake.set()

    async def close(self, *, drain: bool) -> None:
        """See `base.Pool`."""
        task, self._task = self._task, None
        if task is not None:
            self._ending = True
            self._wake.set()
            # Wait for a submission in progress: if it were cut off, its job could appear after `drain`.
            await asyncio.wait((task,), timeout=2 * self.settings.command_timeout_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if drain and not self._to.observing:
                await self._drain()

    def describe(self) -> Mapping[str, Any]:
        """See `base.Pool`."""
        states = [pilot.state for pilot in self._pilots.values()]
        return {
            "kind": "slurm",
            "partition": self.settings.partition,
            "nodes": len(decide.usable(self._nodes, self.settings)),
            "idle": len(decide.free_nodes(self._nodes, self.settings)),
            "left_to_others": self._left_to_others,
            "pilots": states.count("running"),
            "pending": states.count("waiting"),
            "interval_s": self.settings.interval_s,
            "job_name": self._slurm.name if self._slurm is not None else "",
            "problem": self._problem or self._refusals.problem,
        }

    def figures(self) -> SlurmFigures:
        """Return figures for metrics."""
        states = [pilot.state for pilot in self._pilots.values()]
        return self._counters.figures(states, len(states), {} if self._slurm is None else self._slurm.answers)

    async def _check_partitions(self) -> None:
        """Raise an error at once for a partition that does not exist. A Slurm that does not answer may answer later."""
        with suppress(SlurmCommandError):
            self._layout, self._layout_at = await self._at.layout(), time.monotonic()
            for name in (self.settings.partition, *self.settings.watch_partition):
                if name not in self._layout:
                    raise InputError(f"there is no partition {name!r} in Slurm, only {', '.join(sorted(self._layout))}")

    # Rounds.

    async def _run(self) -> None:
        while not self._ending:
            self._wake.clear()
            began = time.monotonic()
            again_at = math.inf
            try:
                again_at = await self._round()
                self._answered()
            except SlurmCommandError as problem:
                self._failed(str(problem))
                with suppress(SlurmCommandError):
                    again_at = await self._act(self._settle((), may_start=False))
            except Exception as problem:
                _log.exception("the slurm pool continues after an error")
                self._to.note("failed", error=str(problem))
            await self._rest(began, min(began + self._wait_s(), again_at))

    async def _rest(self, began: float, until: float) -> None:
        """Wait for the next round. It begins early when an agent has gone.

        Slurm may have taken that node for a job that needs more nodes.
        """
        before = self._to.nodes
        while (left := until - time.monotonic()) > 0 and not self._wake.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, _GLANCE_S)):
                    await self._wake.wait()
            if before - self._to.nodes and not self._failures:
                before = self._to.nodes
                until = min(until, max(time.monotonic(), began + _SOONEST_S))

    def _wait_s(self) -> float:
        """Return the seconds from the beginning of a round to the beginning of the next one."""
        interval_s = self.settings.interval_s
        if self._failures:
            return max(interval_s, Backoff(2 * interval_s, _LONGEST_WAIT_S).wait_s(self._failures))
        return max(interval_s, min(_BUSY * self._asking_s, _LONGEST_WAIT_S))

    async def _round(self) -> float:
        """Ask Slurm, decide and act. Returns when there is more to do, by the monotonic clock."""
        # Nodes before pilots: a pilot listed as waiting after its node was taken is not the job that took it.
        began = time.monotonic()
        self._counters.rounds += 1
        self._nodes = await self._at.nodes()
        if self._to.observing:
            free = decide.free_nodes(self._nodes, self.settings)
            self._host_link.offer(decide.choose(free, (), 0, self.settings.reserve), "it is not idle any more")
            return math.inf
        pilots, queue = await asyncio.gather(self._at.pilots(), self._at.queue())
        self._asking_s = time.monotonic() - began
        await self._reconcile(pilots)
        chosen, again_at = ((), math.inf) if self._paused else await self._choose(pilots, queue)
        return min(again_at, await self._act(self._settle(chosen, may_start=not self._paused)))

    def _answered(self) -> None:
        if self._failures:
            self._to.note("slurm_works", failures=self._failures)
        self._failures, self._problem = 0, ""

    def _failed(self, problem: str) -> None:
        if problem != self._problem:
            self._to.note("slurm_failed", error=problem)
        self._failures, self._problem = self._failures + 1, problem

    # State of the pilots.

    async def _reconcile(self, listed: Sequence[Pilot]) -> None:
        now = time.monotonic()
        pilots = decide.sort_pilots(listed, self._at.mark)
        cancel = list(pilots.cancel)
        for node in self._keeper.running:
            if node not in pilots.kept:
                if now < self._doubts.get(node, -math.inf):
                    continue
                self._ended(node, pilots.ended, now)
            self._doubts.pop(node, None)
        for node, pilot in pilots.kept.items():
            before = self._pilots.get(node)
            if before is not None and before.job != pilot.job:  # it ended and was replaced between two rounds
                self._ended(node, pilots.ended, now)
            self._keeper.found(node, now)
            if pilot.state == "waiting":
                cancellation = self._why_cancel(pilot, now)
                if cancellation is not None:
                    self._keeper.unwant(node)
                    cancel.append(cancellation)
            elif pilot.left_s is not None and pilot.left_s < self.settings.renew_s:
                self._keeper.unwant(node)
        self._pilots = dict(pilots.kept)
        jobs = {pilot.job for pilot in listed}
        self._short_pilots.keep(jobs)
        self._cancelled &= jobs
        self._told = {each.pilot.job for each in cancel}
        await self._cancel(cancel)

    def _ended(self, node: str, ended: Mapping[int, Pilot], now: float) -> None:
        """Handle the end of the pilot of a node."""
        before = self._pilots.get(node)
        how, reason = decide.fate(ended.get(before.job) if before is not None else None)
        if before is not None and before.job in self._given:
            self._given.discard(before.job)
            how, reason = "it was given up for a job that waited", "given up"
        failed = self._keeper.ended(node, now, expected=self._paused or reason != "failed")
        if before is not None:  # else it was never submitted
            self._counters.ended["not wanted" if reason == "failed" and not failed else reason] += 1
            self._to.gone(node, how)
            if failed:
                self._to.note("pilot_ended", node=node, job=before.job, how=how)

    def _why_cancel(self, pilot: Pilot, now: float) -> Cancellation | None:
        """Return why a waiting pilot must be cancelled; None if it may wait."""
        if self._paused:
            return Cancellation(pilot, "paused", "the pool is paused")
        node = self._nodes.get(pilot.node)
        if node is None or not node.free(planned=True):
            return Cancellation(pilot, "node taken", "its node is taken")
        if self._short_pilots.waits(pilot, now):
            why = f"it does not start ({pilot.reason or 'no reason given'}), a shorter one may"
            return Cancellation(pilot, "does not start", why)
        return None

    async def _cancel(self, cancellations: Sequence[Cancellation]) -> None:
        for each in cancellations:
            pilot = each.pilot
            if pilot.job not in self._cancelled:
                self._to.note("cancelled", node=pilot.node, job=pilot.job, why=each.why)
                self._counters.cancelled[each.reason] += 1
                self._cancelled.add(pilot.job)
        pilots = [each.pilot for each in cancellations]
        waiting = [pilot.job for pilot in pilots if pilot.state == "waiting"]
        others = [pilot.job for pilot in pilots if pilot.state != "waiting"]
        if waiting:
            await self._at.cancel(waiting, only_waiting=True)
        if others:
            await self._at.cancel(others)

    # Decisions.

    async def _choose(self, listed: Sequence[Pilot], queue: Sequence[WaitingJob]) -> tuple[tuple[str, ...], float]:
        """Return the idle nodes to run pilots on, and when to look again. Gives up pilots if jobs need their nodes."""
        free = [node for node in decide.free_nodes(self._nodes, self.settings) if node not in self._pilots]
        if not free and not self._pilots:
            self._left_to_others = 0
            return (), math.inf
        now = time.monotonic()
        if queue and now - self._layout_at > _LAYOUT_S:
            self._layout, self._layout_at = await self._at.layout(), now
        soon_s = read_duration(self.settings.time_min or self.settings.time_limit)
        nodes = decide.sort_nodes(self._nodes, free, self._pilots, listed)
        plan = self._yield_rule.plan(now, time.time(), queue, nodes, self._layout, soon_s)
        await self._give_way([self._pilots[node] for node in plan.give], now)
        self._left_to_others = min(len(free), len(plan.reserved) + plan.more)
        chosen = decide.choose(free, plan.reserved, plan.more, self.settings.reserve)
        return chosen, now + max(_SOONEST_S, self._asking_s) if plan.again else math.inf

    async def _give_way(self, pilots: Sequence[Pilot], now: float) -> None:
        """Cancel pilots for a job that waits for their nodes."""
        new = [pilot for pilot in pilots if pilot.job not in self._cancelled]
        for pilot in new:
            self._keeper.killed(pilot.node, now)
            self._given.add(pilot.job)
        await self._cancel([Cancellation(pilot, "a job waits", "a job waits for nodes") for pilot in new])

    def _settle(self, chosen: Sequence[str], *, may_start: bool) -> Orders:
        now = time.monotonic()
        wanted = [name for name, node in decide.usable(self._nodes, self.settings).items() if node.may_stay]
        pending = sum(pilot.state == "waiting" for pilot in self._pilots.values())
        room = min(self.settings.max_pending - pending, math.ceil(self.settings.submit_rate * self.settings.interval_s))
        return self._keeper.settle(
            now,
            wanted,
            self._to.nodes,
            may_start=may_start,
            held=frozenset(wanted).difference(chosen),
            most=self.settings.max_pilots or None,
            at_once=0 if now < self._refusals.until else max(0, room),
        )

    async def _act(self, orders: Orders) -> float:
        for node in orders.leave:
            self._to.leaving(node, self.settings.grace_s)
        overdue = [(self._pilots[node], why) for node, why in orders.kill if node in self._pilots]
        kill = [Cancellation(pilot, "overdue", why) for pilot, why in overdue if pilot.job not in self._told]
        for index, node in enumerate(orders.start):
            if self._ending or self._paused or not await self._submit(node):
                for other in orders.start[index:]:
                    if other not in self._doubts:
                        self._keeper.ended(other, time.monotonic(), expected=True)
                break
        await self._cancel(kill)
        return orders.again_at

    async def _submit(self, node: str) -> bool:
        """Submit the pilot of a node. Returns whether to go on with others."""
        now = time.monotonic()
        short = self._short_pilots.is_short(node, now) or not self._nodes[node].free()  # planned for another job
        # Recorded before the attempt: whatever goes wrong, the next list of jobs shows whether the pilot exists.
        self._doubts[node] = now + 4 * self.settings.command_timeout_s
        try:
            job = await self._at.submit(node, short=short)
        except SlurmCommandError as problem:
            self._counters.refused += 1
            self._doubts[node] = time.monotonic() + 2 * self.settings.command_timeout_s
            if self._refusals.refused(str(problem), time.monotonic()):
                self._to.note("submit_failed", node=node, error=str(problem))
            return self._refusals.until < time.monotonic()
        self._counters.submitted += 1
        self._refusals.forget()
        self._doubts[node] = -math.inf
        self._pilots[node] = Pilot(job, node, "waiting", mark=self._at.mark)
        return True

    # Closing.

    async def _drain(self) -> None:
        """Cancel all pilots, and wait until none is left."""
        jobs, problem = await self._at.drain(_DRAIN_S)
        if problem:
            _log.warning("pilots %s are left (%s); end them with scancel --name=%s", jobs, problem, self._at.name)
            self._to.note("not_drained", jobs=jobs, error=problem, name=self._at.name)
        for node in list(self._pilots):
            self._to.gone(node, "the pool is closed")
        self._pilots.clear()
