"""`PilotLedger` keeps what is known about the pilots of the `slurm` pool, and says which of them to cancel.

`pool.py` passes in what Slurm lists; the ledger compares it with what was known, tells the `Keeper` and the controller
which pilots have ended, and returns the pilots to be cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence

from bftrainer.cluster.pools.base import PoolHostLink
from bftrainer.cluster.pools.keeper import Keeper
from bftrainer.cluster.pools.slurm import decide
from bftrainer.cluster.pools.slurm.decide import Cancellation, Sorted
from bftrainer.cluster.pools.slurm.figures import PilotCounters
from bftrainer.cluster.pools.slurm.read import Pilot, SlurmNode
from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from bftrainer.cluster.pools.slurm.submit.limits import OF_ACCOUNT


class PilotLedger:
    """The pilots, as last known."""

    def __init__(self, settings: SlurmSettings, keeper: Keeper, host_link: PoolHostLink) -> None:
        self.pilots: dict[str, Pilot] = {}
        """One per node, both running and waiting."""
        self.counters = PilotCounters()
        self.short = decide.ShortPilots()
        self._settings = settings
        self._keeper = keeper
        self._host_link = host_link
        self.successors: dict[str, str] = {}
        """The ids of pilots to which nodes were handed over, while the former ones may not have ended."""
        self._handing: dict[str, float] = {}
        """Until when such a node may be occupied by its former pilot."""
        self._unseen: set[str] = set()
        """Such nodes whose successors Slurm has not listed yet. Their former pilots may end: that is no loss."""
        self._doubts: dict[str, float] = {}
        """Nodes whose pilots may have been submitted: until this time a missing pilot does not count as ended."""
        self._given: set[int] = set()
        """Pilots that were given up for waiting jobs."""
        self._cancelled: set[int] = set()
        self._told: set[int] = set()
        """Pilots that were cancelled by `reconcile` in this round."""

    # What Slurm lists.

    def reconcile(
        self,
        listed: Sequence[Pilot],
        pilots: Sorted,
        nodes: Mapping[str, SlurmNode],
        now: float,
        *,
        paused: bool,
        cut_off: bool = False,
    ) -> list[Cancellation]:
        """Take over the listed pilots, sorted as `pilots`. Returns those to be cancelled.

        `cut_off` says that pilots cannot reach the controller: those that wait need not start.
        """
        cancel = list(pilots.cancel)
        self._see_successors(pilots, now)
        for node in self._keeper.running:
            if node not in pilots.kept:
                if node in self._unseen or now < self._doubts.get(node, -math.inf):
                    continue
                self._ended(node, pilots.ended, now, paused=paused)
            self._doubts.pop(node, None)
        self._forget_handed_over(pilots, now)
        for node, pilot in pilots.kept.items():
            before = self.pilots.get(node)
            handed_over = node in self._unseen or pilot.id == self.successors.get(node)
            if before is not None and before.job != pilot.job and not handed_over:  # replaced between two rounds
                self._ended(node, pilots.ended, now, paused=paused)
            self._keeper.found(node, now)
            if pilot.state == "waiting":
                cancellation = self._why_cancel(pilot, nodes.get(node), now, paused=paused, cut_off=cut_off)
                if cancellation is not None:
                    self._keeper.unwant(node)
                    cancel.append(cancellation)
            elif pilot.left_s is not None and pilot.left_s < self._settings.renew_s:
                self._keeper.unwant(node)
        self.pilots = dict(pilots.kept)
        jobs = {pilot.job for pilot in listed}
        self.short.keep(jobs)
        self._cancelled &= jobs
        self._told = {each.pilot.job for each in cancel}
        return cancel

    def _see_successors(self, pilots: Sorted, now: float) -> None:
        listed = {pilot.id for pilot in (*pilots.kept.values(), *pilots.ended.values())}
        for node in list(self._unseen):
            if self.successors[node] in listed or now >= self._handing[node]:
                self._unseen.discard(node)

    def _forget_handed_over(self, pilots: Sorted, now: float) -> None:
        """Forget hand-overs that are done: the successor runs, or has ended, or the time is up."""
        for node, until in list(self._handing.items()):
            pilot = pilots.kept.get(node)
            if node in self._unseen:
                continue
            if now >= until or node not in self._keeper.running or (pilot is not None and pilot.state == "running"):
                del self._handing[node], self.successors[node]

    def _ended(self, node: str, ended: Mapping[int, Pilot], now: float, *, paused: bool) -> None:
        """Handle the end of the pilot of a node."""
        before = self.pilots.get(node)
        how, reason = decide.fate(ended.get(before.job) if before is not None else None)
        if before is not None and before.job in self._given:
            self._given.discard(before.job)
            how, reason = "it was given up for a job that waited", "given up"
        failed = self._keeper.ended(node, now, expected=paused or reason != "failed")
        if before is not None:  # else it was never submitted
            self.counters.ended["not wanted" if reason == "failed" and not failed else reason] += 1
            host = self._host_link.host
            if before.owner and node not in host.nodes:
                host.not_coming(node, how)
            host.gone(node, how)
            if failed:
                self._host_link.host.note("pilot_ended", node=node, job=before.job, how=how)

    def _why_cancel(
        self, pilot: Pilot, node: SlurmNode | None, now: float, *, paused: bool, cut_off: bool
    ) -> Cancellation | None:
        """Return why a waiting pilot must be cancelled; None if it may wait."""
        if paused:
            return Cancellation(pilot, "paused", "the pool is paused")
        if cut_off:
            return Cancellation(pilot, "cut off", "pilots cannot reach the controller")
        if pilot.owner and OF_ACCOUNT.search(pilot.reason):
            return Cancellation(pilot, "account limit", f"the limits of its account hold it back ({pilot.reason})")
        if pilot.node in self._handing:
            return None
        if node is None or not node.free(planned=True):
            return Cancellation(pilot, "node taken", "its node is taken")
        if self.short.waits(pilot, now):
            why = f"it does not start ({pilot.reason or 'no reason given'}), a shorter one may"
            return Cancellation(pilot, "does not start", why)
        return None

    # Submissions.

    def submitting(self, node: str, until: float) -> None:
        """Record an attempt before it is made: whatever goes wrong, the next list shows whether the pilot exists."""
        self._doubts[node] = until

    def refused(self, node: str, now: float, doubt_s: float) -> None:
        """Record a failed submission; for `doubt_s` seconds the pilot may appear all the same."""
        self.counters.refused += 1
        if doubt_s:
            self._doubts[node] = now + doubt_s
        else:
            self._doubts.pop(node, None)
            self._keeper.ended(node, now)

    def submitted(self, node: str, pilot: Pilot, listed_by: float = -math.inf) -> None:
        """Record a pilot that was submitted. Lists of jobs that Slurm was asked for before may lack it."""
        self.counters.submitted += 1
        self._doubts[node] = listed_by
        self.pilots[node] = pilot

    def handing_over(self, node: str, now: float) -> None:
        """Record that a pilot will take the place of another one, which may end before the new one is submitted."""
        self._keeper.ended(node, now, expected=True)
        self._keeper.found(node, now)
        self._handing[node], self.successors[node] = math.inf, ""
        self._unseen.add(node)

    def expect(self, node: str, pilot: str) -> None:
        """Record the id of that pilot before it is submitted: Slurm may list it before its submission is answered."""
        self.successors[node] = pilot

    def not_handed_over(self, node: str) -> None:
        """Record that it was not submitted."""
        self._unseen.discard(node)
        self._handing.pop(node, None)
        self.successors.pop(node, None)

    def handed_over(self, node: str, pilot: Pilot, now: float, until: float) -> None:
        """Record the pilot that takes the place of another one, whose job may last until then."""
        self._keeper.ended(node, now, expected=True)
        self._keeper.found(node, now)
        self.submitted(node, pilot, until)
        self._handing[node], self.successors[node] = until, pilot.id

    def not_submitted(self, nodes: Sequence[str], now: float) -> None:
        """Take nodes back whose pilots were ordered and not submitted."""
        for node in nodes:
            if node not in self._doubts:
                self._keeper.ended(node, now, expected=True)

    # Cancellations.

    def give_up(self, nodes: Sequence[str], now: float) -> list[Cancellation]:
        """Mark the pilots of nodes as given up for a waiting job. Returns those that are not cancelled yet."""
        new = [pilot for node in nodes if (pilot := self.pilots[node]).job not in self._cancelled]
        for pilot in new:
            self._keeper.killed(pilot.node, now)
            self._given.add(pilot.job)
        return [Cancellation(pilot, "a job waits", "a job waits for nodes") for pilot in new]

    def give_back(self, nodes: Sequence[str]) -> list[Cancellation]:
        """Mark the pilots of nodes as not wanted. Returns those that wait; running ones are asked to leave."""
        if not nodes:
            return []
        for node in nodes:
            self._keeper.unwant(node)
        self._host_link.host.note("given_back", nodes=list(nodes), why="no trainer can use them")
        waiting = [self.pilots[node] for node in nodes if self.pilots[node].state == "waiting"]
        self.counters.cancelled["no demand"] += len(nodes) - len(waiting)
        return [Cancellation(pilot, "no demand", "no trainer can use its node") for pilot in waiting]

    def overdue(self, kill: Sequence[tuple[str, str]]) -> list[Cancellation]:
        """Return the pilots of nodes that must be killed, with the reason, if they are not cancelled already."""
        pilots = [(self.pilots[node], why) for node, why in kill if node in self.pilots]
        return [Cancellation(pilot, "overdue", why) for pilot, why in pilots if pilot.job not in self._told]

    def cancelling(self, cancellations: Sequence[Cancellation]) -> None:
        """Count and report the pilots that are about to be cancelled, each once."""
        for each in cancellations:
            pilot = each.pilot
            if pilot.job not in self._cancelled:
                self._host_link.host.note("cancelled", node=pilot.node, job=pilot.job, why=each.why)
                self.counters.cancelled[each.reason] += 1
                self._cancelled.add(pilot.job)

    def staying(self, ending: Container[str]) -> dict[str, Pilot]:
        """Return the pilots that are not cancelled or ending."""
        pilots = self.pilots.items()
        return {node: pilot for node, pilot in pilots if pilot.job not in self._cancelled and node not in ending}
