"""`PilotActions` submits and cancels the pilots that the `slurm` pool has decided on.

Where pilots have owners, each owner's requests are a task of their own: an owner whose lender answers late delays
nobody else. A round waits for them for a moment; what takes longer goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence

from bftrainer.cluster.pools.base import PoolHost
from bftrainer.cluster.pools.slurm.commands import Slurm
from bftrainer.cluster.pools.slurm.decide import Cancellation, Refusals
from bftrainer.cluster.pools.slurm.hardware import SiteLayout
from bftrainer.cluster.pools.slurm.ledger import PilotLedger
from bftrainer.cluster.pools.slurm.owned import HandOver, PilotOwners
from bftrainer.cluster.pools.slurm.read import Pilot, SlurmNode
from bftrainer.cluster.pools.slurm.runner import SlurmCommandError, is_refusal
from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from bftrainer.cluster.pools.slurm.submit.base import OwnedPilot
from bftrainer.cluster.pools.slurm.submit.job import pilot_job
from bftrainer.cluster.pools.slurm.submit.limits import OF_ACCOUNT

_TOGETHER_S = 1.0
"""How long a round waits for requests of owners."""
HAND_OVER_S = 30.0
"""How long the former pilot of a node may take to end, and the next one to start."""

_log = logging.getLogger(__name__)


class PilotActions:
    """Submits and cancels pilots; notes what came of it in the ledger."""

    def __init__(
        self,
        settings: SlurmSettings,
        slurm: Slurm,
        ledger: PilotLedger,
        host: PoolHost,
        owners: PilotOwners | None,
        halted: Callable[[], bool],
    ) -> None:
        """`halted` says whether nothing is to be submitted any more. `owners`: None if pilots have no owners."""
        self.layout = SiteLayout()
        self._settings = settings
        self._slurm = slurm
        self._ledger = ledger
        self._host = host
        self._owners = owners
        self._halted = halted
        self._refusals: defaultdict[str, Refusals] = defaultdict(Refusals)
        """By owner; `` if pilots have none."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._submitting: set[str] = set()
        """Owners for whom pilots are being submitted."""
        self._heirs: dict[str, HandOver] = {}
        """The latest hand-over of each node, until it is done."""
        self._handing: dict[str, deque[HandOver]] = {}
        """Hand-overs to each owner for whom they are being carried out."""

    # What is known of refusals.

    @property
    def refusing(self) -> int:
        """Number of nodes that have refused."""
        return len({node for refusals in self._refusals.values() for node in refusals.nodes})

    @property
    def problem(self) -> str:
        """Why submissions are paused; empty if they are not."""
        return next((each.problem for each in self._refusals.values() if each.problem), "")

    def order(self, chosen: Sequence[str], nodes: Mapping[str, SlurmNode], now: float) -> dict[str, str]:
        """Return the nodes to try now with their owners, the most promising ones first."""
        for refusals in self._refusals.values():
            refusals.keep(nodes)
        if self._owners is None:
            return dict.fromkeys(self._refusals[""].order(chosen, self.layout, now), "")
        owned = self._owners.choose(chosen, self._ledger.pilots, now)
        ordered: dict[str, str] = {}
        for owner in dict.fromkeys(owned.values()):
            if owner not in self._submitting:
                mine = [node for node in owned if owned[node] == owner]
                ordered |= dict.fromkeys(self._refusals[owner].order(mine, self.layout, now), owner)
        return {node: ordered[node] for node in owned if node in ordered}

    def forget(self) -> None:
        """Try everything again, because causes may be over."""
        for refusals in self._refusals.values():
            refusals.forget()
        if self._owners is not None:
            self._owners.forget()

    # Submissions.

    async def submit_all(self, owned: Mapping[str, str], nodes: Mapping[str, SlurmNode]) -> None:
        """Submit the pilots of nodes for their owners."""
        by_owner: dict[str, list[str]] = {}
        for node, owner in owned.items():
            by_owner.setdefault(owner, []).append(node)
        if self._owners is None:
            for some in by_owner.values():
                await self._submit_in_turn("", some, nodes)
            return
        self._submitting.update(by_owner)
        await self._together([self._submit_in_turn(owner, some, nodes) for owner, some in by_owner.items()])

    async def _submit_in_turn(self, owner: str, left: list[str], nodes: Mapping[str, SlurmNode]) -> None:
        """Submit pilots of one owner. After a refusal the more promising nodes come first."""
        try:
            while left and not self._halted():
                node = left.pop(0)
                short = self._ledger.short.is_short(node, time.monotonic()) or not nodes[node].free()
                if not await self._submit(owner, node, left, short=short):
                    allowed = self._refusals[owner].order(left, self.layout, time.monotonic())
                    dropped = [other for other in left if other not in allowed]
                    self._ledger.not_submitted(dropped, time.monotonic())
                    left = list(allowed)
        finally:
            self._ledger.not_submitted(left, time.monotonic())
            self._submitting.discard(owner)

    async def _submit(self, owner: str, node: str, others: Sequence[str], *, short: bool) -> bool:
        """Submit the pilot of a node. Returns whether it was accepted."""
        kind = self.layout.kinds.get(node)
        gpus = kind.gpus if kind is not None else ""
        self._ledger.submitting(node, time.monotonic() + 4 * self._settings.command_timeout_s)
        try:
            pilot = await self._submitted(owner, node, self._new_id(owner, node), short=short, gpus=gpus)
        except SlurmCommandError as problem:
            now, text = time.monotonic(), str(problem)
            self._ledger.refused(node, now, 0.0 if is_refusal(text) else 2 * self._settings.command_timeout_s)
            if self._owners is not None:
                self._host.not_coming(node, text)
                if not is_refusal(text) or OF_ACCOUNT.search(text):
                    self._owners.failed(owner, text, now)
            if self._refusals[owner].refused(node, text, now, others, self.layout):
                self._host.note("submit_failed", node=node, error=text, **({"owner": owner} if owner else {}))
            return False
        self._refusals[owner].accepted(node, self.layout)
        self._ledger.submitted(node, pilot)
        return True

    def _new_id(self, owner: str, node: str) -> str:
        return "" if self._owners is None else self._owners.new_id(owner, node)

    async def _submitted(self, owner: str, node: str, id_: str, *, short: bool, gpus: str) -> Pilot:
        slurm = self._slurm
        if self._owners is None:
            return Pilot(await slurm.submit(node, short=short, gpus=gpus), node, "waiting", mark=slurm.mark)
        submitter = self._owners.submitters.of(owner)
        job = pilot_job(self._settings, node, slurm.name, slurm.mark, id_, short=short, gpus=gpus)
        job = job.at_most(self._owners.limits_of(owner).minutes)
        number = await submitter.submit(OwnedPilot(job, id_, self._host.invitation(node, owner)))
        return Pilot(number, node, "waiting", mark=slurm.mark, owner=owner, id=id_)

    def hand_over_soon(self, change: HandOver) -> None:
        """Have the next round hand a node over. The former agent may end before: that is no loss."""
        assert self._owners is not None
        self._owners.handing.append(change)
        self._ledger.handing_over(change.node, time.monotonic())

    async def hand_over(self, changes: Sequence[HandOver]) -> None:
        """Submit pilots of other owners on nodes; each starts when Slurm has the node back from the former one.

        `hand_over_soon` has announced the changes.
        """
        idle: list[str] = []
        for change in changes:
            self._heirs[change.node] = change
            if change.owner not in self._handing:
                self._handing[change.owner] = deque()
                idle.append(change.owner)
            self._handing[change.owner].append(change)
        await self._together([self._hand_over_in_turn(owner) for owner in idle])

    async def _hand_over_in_turn(self, owner: str) -> None:
        left = self._handing[owner]
        try:
            while left:
                if self._heirs.get(left[0].node) is left[0]:  # else it goes to somebody else by now
                    await self._hand_over(left[0])
                left.popleft()
        except Exception as problem:
            for change in left:
                self._not_handed_over(change, str(problem))
            raise
        finally:
            del self._handing[owner]

    async def _hand_over(self, change: HandOver) -> None:
        node, owner, former = change.node, change.owner, self._ledger.pilots.get(change.node)
        kind, id_ = self.layout.kinds.get(node), self._new_id(owner, node)
        gpus = kind.gpus if kind is not None else ""
        self._ledger.expect(node, id_)
        try:
            if self._halted():
                raise SlurmCommandError("the pool is paused or ends")
            pilot = await self._submitted(owner, node, id_, short=False, gpus=gpus)
        except SlurmCommandError as problem:
            self._not_handed_over(change, str(problem))
            return
        if self._heirs.get(node) is not change:
            await self.cancel([Cancellation(pilot, "handed over", "its node goes to another owner by now")])
            return
        del self._heirs[node]
        now = time.monotonic()
        self._ledger.handed_over(node, pilot, now, now + HAND_OVER_S)
        if former is not None:
            self._host.note("handed_over", node=node, job=pilot.job, owner=owner, former=former.owner)
            await self.cancel([Cancellation(former, "handed over", f"its node goes to {owner}")])

    def _not_handed_over(self, change: HandOver, why: str) -> None:
        self._host.note("submit_failed", node=change.node, owner=change.owner, error=why)
        if self._heirs.get(change.node) is change:
            del self._heirs[change.node]
            self._ledger.not_handed_over(change.node)
            self._host.not_coming(change.node, why)
            self._host.gone(change.node, f"it could not be handed over to {change.owner}: {why}")

    # Cancellations.

    async def cancel(self, cancellations: Sequence[Cancellation]) -> None:
        """Cancel pilots. Those that wait are cancelled only if they have not started meanwhile."""
        self._ledger.cancelling(cancellations)
        pilots = [each.pilot for each in cancellations]
        if self._owners is None:
            if waiting := [pilot.job for pilot in pilots if pilot.state == "waiting"]:
                await self._slurm.cancel(waiting, only_waiting=True)
            if others := [pilot.job for pilot in pilots if pilot.state != "waiting"]:
                await self._slurm.cancel(others)
            return
        by_owner: dict[str, list[Pilot]] = {}
        for pilot in pilots:
            by_owner.setdefault(pilot.owner, []).append(pilot)
        await self._together([self._cancel_of(owner, some) for owner, some in by_owner.items()])

    async def cancel_quietly(self, pilots: Sequence[Pilot]) -> None:
        """Cancel pilots without counting them: all are to go."""
        if self._owners is None:
            await self._slurm.cancel([pilot.job for pilot in pilots])
            return
        for owner in {pilot.owner for pilot in pilots}:
            await self._cancel_of(owner, [pilot for pilot in pilots if pilot.owner == owner])

    async def _cancel_of(self, owner: str, pilots: Sequence[Pilot]) -> None:
        assert self._owners is not None
        for only_waiting in (True, False):
            some = [pilot for pilot in pilots if (pilot.state == "waiting") == only_waiting]
            if some:
                try:
                    await self._owners.submitters.of(owner).cancel(some, only_waiting=only_waiting)
                except SlurmCommandError as problem:  # their agents are dismissed, or their time is up some day
                    _log.warning("pilots of %s cannot be cancelled: %s", owner, problem)

    async def _together(self, works: Sequence[Coroutine[None, None, None]]) -> None:
        """Do work for several owners at once, and wait for it for a moment."""
        tasks = {asyncio.create_task(work) for work in works}
        self._tasks |= tasks
        for task in tasks:
            task.add_done_callback(self._over)
        if tasks:
            await asyncio.wait(tasks, timeout=_TOGETHER_S)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            _log.error("a request for an owner failed", exc_info=problem)

    async def close(self, timeout_s: float) -> None:
        """Wait for requests that are on their way, and end those that take too long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
