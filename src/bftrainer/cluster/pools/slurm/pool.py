"""The `slurm` pool runs a pilot, a preemptible single-node job, on every idle Slurm node that a trainer can use.

Each round asks Slurm for nodes and jobs (`commands.py`, `read.py`), decides (`decide.py`, `yielding.py`, `keeper.py`)
and submits or cancels. A pilot is the agent of its node: Slurm takes the node back by ending it. When Slurm does not
answer, the last known state stays, nothing is submitted, and training goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bftrainer.cluster.pools.base import PoolHost, PoolHostLink
from bftrainer.cluster.pools.keeper import Keeper, Orders, Timeouts
from bftrainer.cluster.pools.slurm import callbacks, decide
from bftrainer.cluster.pools.slurm.actions import PilotActions
from bftrainer.cluster.pools.slurm.commands import Slurm, require_programs
from bftrainer.cluster.pools.slurm.demand import HarvestTarget
from bftrainer.cluster.pools.slurm.figures import SlurmFigures
from bftrainer.cluster.pools.slurm.ledger import PilotLedger
from bftrainer.cluster.pools.slurm.naming import PilotComment
from bftrainer.cluster.pools.slurm.owned import HandOver, PilotOwners
from bftrainer.cluster.pools.slurm.read import Jobs, SlurmNode
from bftrainer.cluster.pools.slurm.runner import SlurmCommandError
from bftrainer.cluster.pools.slurm.settings import SlurmSettings, read_duration
from bftrainer.cluster.pools.slurm.submit.base import Submitters
from bftrainer.cluster.pools.slurm.submit.job import write_files
from bftrainer.cluster.pools.slurm.submit.lenders import Lenders
from bftrainer.cluster.pools.slurm.submit.limits import LimitsReader
from bftrainer.cluster.pools.slurm.submit.run_as import RunAsOwners
from bftrainer.cluster.pools.slurm.timer import RoundTimer
from bftrainer.cluster.pools.slurm.view import PoolView
from bftrainer.cluster.pools.slurm.yielding import YieldPlan, YieldRule, sort_nodes
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes import variables

FOLDER = "slurm"
_GLANCE_S = 0.1
_LAYOUT_S = 300.0
"""How often the kinds of nodes are read at most: they change when an administrator changes them."""
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
        self._host_link = PoolHostLink()
        self._ledger = PilotLedger(settings, self._keeper, self._host_link)
        self._yield_rule = YieldRule(settings.watch_partition)
        self._target = HarvestTarget(settings)
        self._timer = RoundTimer(settings)
        self._slurm: Slurm | None = None
        self._owners: PilotOwners | None = None
        self._actions: PilotActions | None = None
        self.lenders: Lenders | None = None
        """The lenders of users, where these submit the pilots."""
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._paused = False
        self._ending = False
        # Last known state.
        self._view = PoolView({}, 0, (), ())
        self._owned: Mapping[str, str] = {}  # nodes that may be tried now, and the owners of their pilots
        self._layout_at = -math.inf
        self._left_to_others = 0
        """Number of idle nodes that are left to waiting jobs."""
        self._problem = ""
        self._calls = callbacks.CallBacks()

    @property
    def _to(self) -> PoolHost:
        return self._host_link.host

    @property
    def _at(self) -> Slurm:
        if self._slurm is None:
            raise BFTrainerError("the pool is not open")
        return self._slurm

    @property
    def _act_on(self) -> PilotActions:
        if self._actions is None:
            raise BFTrainerError("the pool is not open")
        return self._actions

    async def open(self, host: PoolHost) -> None:
        """See `base.Pool`."""
        require_programs()
        self._host_link.open(host)
        state_id = host.agent_environment.get(variables.STATE_ID) or host.recall(_STATE_ID)
        if not state_id:
            state_id = secrets.token_hex(8)
            host.remember(_STATE_ID, state_id)
        owner_of = self._owner_of if host.own_users else None
        self._slurm = Slurm(self.settings, self._folder, state_id, self._host_link.agents_mark, owner_of)
        self._begin(host, self._slurm)
        await self._check_partitions()
        if not host.observing and not host.own_users:
            write_files(self.settings, self._folder, host.agent_environment)
        self._task = asyncio.create_task(self._run())

    def _begin(self, host: PoolHost, slurm: Slurm) -> None:
        """Make what submits and cancels pilots."""
        if host.own_users:
            limits = LimitsReader(slurm.runner, self.settings.account)
            self._owners = PilotOwners(host, self._submitters(host, slurm), limits)
        self._actions = PilotActions(self.settings, slurm, self._ledger, host, self._owners, self._is_halted)

    def _is_halted(self) -> bool:
        return self._ending or self._paused

    def _submitters(self, host: PoolHost, slurm: Slurm) -> Submitters:
        settings = self.settings
        if settings.submit == "run-as":
            python = (settings.python or sys.executable, *settings.agent)
            return RunAsOwners(host.accounts, slurm.name, settings.submit_as, python, slurm.runner)
        self.lenders = Lenders(slurm.name, host.accounts, settings.command_timeout_s)
        self.lenders.changed = self._wake.set
        return self.lenders

    def _owner_of(self, uid: str, comment: PilotComment) -> str | None:
        return None if self._owners is None else self._owners.owner_of(uid, comment)

    def hand_over(self, node: str, owner: str) -> None:
        """See `base.HandsOver`."""
        if self._owners is not None:
            self._act_on.hand_over_soon(HandOver(node, owner))
            self._wake.set()

    def why_not(self, owner: str) -> str:
        """See `base.KnowsOwners`."""
        return "" if self._owners is None else self._owners.why_not(owner, time.monotonic())

    def most_nodes(self, owner: str) -> int | None:
        """See `base.KnowsOwners`."""
        return None if self._owners is None else self._owners.most(owner)

    async def pause(self) -> None:
        """See `base.Pool`."""
        self._paused = True
        self._wake.set()

    async def resume(self) -> None:
        """See `base.Pool`."""
        self._paused = False
        self._keeper.forgive()
        self._act_on.forget()
        self._calls.forget()
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
            await self._act_on.close(self.settings.command_timeout_s)
            if drain and not self._to.observing:
                await self._drain()

    def describe(self) -> Mapping[str, Any]:
        """See `base.Pool`."""
        states = [pilot.state for pilot in self._ledger.pilots.values()]
        refused = self._actions.problem if self._actions is not None else ""
        return {
            "kind": "slurm",
            "partition": self.settings.partition,
            "nodes": self._view.usable,
            "idle": len(self._view.free),
            "left_to_others": self._left_to_others,
            "pilots": states.count("running"),
            "pending": states.count("waiting"),
            "wanted": self._wanted,
            "refusing": self._actions.refusing if self._actions is not None else 0,
            "interval_s": self.settings.interval_s,
            "job_name": self._slurm.name if self._slurm is not None else "",
            "problem": self._problem or self._calls.problem or ("" if states else refused),
            "warning": self._calls.warning,
            **(self._owners.describe() if self._owners is not None else {}),
        }

    def figures(self) -> SlurmFigures:
        """Return figures for metrics."""
        states = [pilot.state for pilot in self._ledger.pilots.values()]
        answers = {} if self._slurm is None else self._slurm.answers
        return self._ledger.counters.figures(states, self._wanted, answers)

    @property
    def _wanted(self) -> int:
        """Number of pilots that are wanted now."""
        return self._target.wanted(self._to.demand) if self._host_link.is_open and not self._paused else 0

    async def _check_partitions(self) -> None:
        """Raise an error at once for a partition that does not exist. A Slurm that does not answer may answer later."""
        with suppress(SlurmCommandError):
            self._act_on.layout, self._layout_at = await self._at.layout(), time.monotonic()
            for name in (self.settings.partition, *self.settings.watch_partition):
                if name not in self._act_on.layout.partitions:
                    known = ", ".join(sorted(self._act_on.layout.partitions))
                    raise InputError(f"there is no partition {name!r} in Slurm, only {known}")

    # Rounds.

    async def _run(self) -> None:
        while not self._ending:
            self._wake.clear()
            self._timer.begin(time.monotonic())
            next_at = self._timer.next
            try:
                soon, again_at = await self._round()
                self._answered()
                next_at = self._timer.at(soon, again_at)
            except SlurmCommandError as problem:
                self._failed(str(problem))
                with suppress(SlurmCommandError):
                    await self._act(self._settle((), may_start=False))
                next_at = self._timer.next
            except Exception as problem:
                _log.exception("the slurm pool continues after an error")
                self._to.note("failed", error=str(problem))
            await self._rest(next_at)

    async def _rest(self, until: float) -> None:
        """Wait for the next round. It begins early when an agent has gone, or when trainers could use more nodes.

        If an agent has gone, Slurm may have taken its node for a job that needs more nodes.
        """
        before, wanted = self._to.nodes, self._wanted
        while (left := until - time.monotonic()) > 0 and not self._wake.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, _GLANCE_S)):
                    await self._wake.wait()
            if (before - self._to.nodes or self._wanted > wanted) and not self._timer.failures:
                before, wanted = self._to.nodes, self._wanted
                until = min(until, max(time.monotonic(), self._timer.soonest))

    async def _round(self) -> tuple[bool, float]:
        """Ask Slurm, decide and act. Returns whether to look again soon, and when at the latest."""
        # Nodes before jobs: a pilot listed as waiting after its node was taken is not the job that took it.
        self._ledger.counters.rounds += 1
        if self._owners is not None:
            await self._act_on.hand_over(self._owners.take_handing())
        nodes = await self._at.nodes()
        if self._to.observing:
            self._view = PoolView.of(nodes, self.settings)
            offered = decide.choose(self._view.free, (), self.settings.reserve)
            self._timer.answered(time.monotonic(), offered, hungry=True)
            self._host_link.offer(offered, "it is not idle any more")
            return False, math.inf
        if self._owners is not None:
            await asyncio.to_thread(self._owners.look_up, time.monotonic())
            await self._owners.read_limits(time.monotonic())
        jobs = await self._at.jobs()
        asked_until = time.monotonic()
        self._view, pilots, states = await asyncio.to_thread(self._sort, nodes, jobs)
        self._to.could_have(self._view.usable)
        await callbacks.take(self._calls, self._folder, self._to, jobs.pilots)
        now = time.monotonic()
        cut_off = self._calls.pausing(now)
        cancel = self._ledger.reconcile(jobs.pilots, pilots, nodes, now, paused=self._paused, cut_off=cut_off)
        if self._owners is not None:
            self._owners.see(jobs.pilots, now)
        await self._act_on.cancel(cancel)
        plan = YieldPlan()
        if not self._paused:
            plan = await self._yield(jobs)
            await self._give_back()
        free = [node for node in self._view.free if node not in self._ledger.pilots]
        chosen = () if self._paused else decide.choose(free, plan.leave, self.settings.reserve)
        if chosen:
            await self._read_layout(chosen)
        seen = (self._view.free, states, plan, self._wanted)
        self._timer.answered(asked_until, seen, hungry=self._wanted > len(states))
        return plan.again, await self._act(self._settle(chosen, may_start=not self._paused))

    def _sort(self, nodes: Mapping[str, SlurmNode], jobs: Jobs) -> tuple[PoolView, decide.Sorted, dict[str, str]]:
        """Return the nodes, the pilots and the state of each node's pilot. Runs in a thread."""
        pilots = decide.sort_pilots(jobs.pilots, self._at.mark, self._ledger.successors)
        states: dict[str, str] = {node: pilot.state for node, pilot in pilots.kept.items()}
        return PoolView.of(nodes, self.settings), pilots, states

    def _answered(self) -> None:
        if self._timer.failures:
            self._to.note("slurm_works", failures=self._timer.failures)
        self._timer.failures, self._problem = 0, ""

    def _failed(self, problem: str) -> None:
        if problem != self._problem:
            self._to.note("slurm_failed", error=problem)
        self._timer.failures, self._problem = self._timer.failures + 1, problem

    # Decisions.

    async def _yield(self, jobs: Jobs) -> YieldPlan:
        """Decide what to leave to waiting jobs, and give up pilots whose nodes they need."""
        ledger = self._ledger
        free = [node for node in self._view.free if node not in ledger.pilots]
        if not free and not ledger.pilots:
            self._left_to_others = 0
            return YieldPlan()
        if jobs.waiting:
            await self._read_layout()
        now = time.monotonic()
        self._act_on.layout = replace(self._act_on.layout, reservations=self._at.reservations())
        soon_s = read_duration(self.settings.time_min or self.settings.time_limit)
        view, pilots, layout, used = self._view, dict(ledger.pilots), self._act_on.layout, self._to.used

        def decide_on_it() -> YieldPlan:
            nodes = sort_nodes(view.nodes, free, pilots, jobs.pilots, used)
            return self._yield_rule.plan(now, time.time(), jobs.waiting, nodes, layout, soon_s)

        plan = await asyncio.to_thread(decide_on_it)
        await self._act_on.cancel(ledger.give_up(plan.give, now))
        self._left_to_others = len(plan.leave)
        return plan

    async def _read_layout(self, needed: Sequence[str] = ()) -> None:
        """Read the kinds of nodes, if that was long ago or the kind of a node in `needed` is not known."""
        now = time.monotonic()
        if now - self._layout_at > _LAYOUT_S or any(node not in self._act_on.layout.kinds for node in needed):
            self._act_on.layout, self._layout_at = await self._at.layout(), now

    async def _give_back(self) -> None:
        """Give back pilots that no trainer can use."""
        staying = self._ledger.staying(self._keeper.unwanted)
        surplus = self._target.surplus(time.monotonic(), self._to.demand, staying, self._to.used)
        await self._act_on.cancel(self._ledger.give_back(surplus))

    def _settle(self, chosen: Sequence[str], *, may_start: bool) -> Orders:
        now = time.monotonic()
        self._owned = self._act_on.order(chosen, self._view.nodes, now)
        chosen = tuple(self._owned)
        starting = frozenset(chosen)
        pending = sum(pilot.state == "waiting" for pilot in self._ledger.pilots.values())
        room = min(self.settings.max_pending - pending, math.ceil(self.settings.submit_rate * self.settings.interval_s))
        rest = [node for node in self._view.may_stay if node not in starting]
        return self._keeper.settle(
            now,
            (*chosen, *rest),
            self._to.nodes,
            may_start=may_start,
            held=frozenset(rest) | self._calls.held(now),
            most=self._wanted,
            at_once=self._calls.room(max(0, room), len(self._ledger.pilots), now),
        )

    # Actions.

    async def _act(self, orders: Orders) -> float:
        for node in orders.leave:
            self._to.leaving(node, self.settings.grace_s)
        kill = self._ledger.overdue(orders.kill)
        await self._act_on.submit_all({node: self._owned[node] for node in orders.start}, self._view.nodes)
        await self._act_on.cancel(kill)
        return orders.again_at

    # Closing.

    async def _drain(self) -> None:
        """Cancel all pilots, and wait until none is left."""
        jobs, problem = await self._at.drain(_DRAIN_S, self._act_on.cancel_quietly)
        if problem:
            _log.warning("pilots %s are left (%s); end them with scancel --name=%s", jobs, problem, self._at.name)
            self._to.note("not_drained", jobs=jobs, error=problem, name=self._at.name)
        for node in list(self._ledger.pilots):
            self._to.gone(node, "the pool is closed")
        self._ledger.pilots.clear()
