"""`Lender` carries out the requests of a controller: it submits and cancels pilots as its user.

Every request is checked by `rules.py` first. Requests are carried out one after the other. `tend` compares the ledger
with Slurm's list, and removes secrets that no pilot can need any more; `withdraw` ends it in good order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from bftrainer.cluster.lend.jobs import LenderJobs
from bftrainer.cluster.lend.ledger import LentLedger
from bftrainer.cluster.lend.pilot_files import PilotFiles
from bftrainer.cluster.lend.rules import (
    OWNER,
    STATE_ID,
    LendRules,
    RefusedByRules,
    SubmissionRate,
    check_submission,
)
from bftrainer.cluster.pools.slurm.naming import PREFIX
from bftrainer.cluster.pools.slurm.runner import SlurmCommandError, is_refusal
from bftrainer.cluster.wire.lender_messages import (
    CancelLent,
    FromLender,
    LendPilot,
    Lent,
    NotLent,
    Offer,
    OfferTaken,
    PilotsCancelled,
    ToLender,
)
from bftrainer.errors import BFTrainerError

_log = logging.getLogger(__name__)


class Lender:
    """The pilots of one user, and what may be done with them."""

    def __init__(
        self,
        rules: LendRules,
        files: PilotFiles,
        ledger: LentLedger,
        jobs: LenderJobs,
        state_id: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rules = rules
        self.ledger = ledger
        self.state_id = state_id
        """The controller's, as its pilots are named; empty until an offer was taken."""
        self._files = files
        self._jobs = jobs
        self._clock = clock
        self._rate = SubmissionRate(rules.per_minute)
        self._one_at_a_time = asyncio.Lock()

    def offer(self) -> Offer:
        """Return the first message to a controller."""
        user = pwd.getpwuid(os.getuid()).pw_name
        return Offer(user, os.getuid(), self.rules.most_pilots)

    async def answer(self, message: ToLender) -> FromLender | None:
        """Carry out a request. Returns the answer, if there is one."""
        async with self._one_at_a_time:
            match message:
                case OfferTaken(state_id, owner):
                    await self._taken(state_id, owner)
                case LendPilot():
                    return await self._submit(message)
                case CancelLent():
                    return await self._cancel(message)
                case _:
                    pass
            return None

    async def tend(self) -> None:
        """Compare the ledger with Slurm's list, and remove the secrets of pilots that have ended."""
        async with self._one_at_a_time:
            if self.ledger.present or self._files.unread():
                await self._compare()

    async def withdraw(self) -> str:
        """Cancel the pilots that wait, and remove all secrets. Those that run go on. Returns what went wrong."""
        async with self._one_at_a_time:
            problem = ""
            try:
                if self.ledger.present or self._files.unread():
                    await self._compare()
                    for state_id, jobs in self.ledger.jobs(self.ledger.present_ids).items():
                        await self._jobs.cancel(jobs, state_id, only_waiting=True)
                    await self._compare()
            except SlurmCommandError as failure:
                problem = str(failure)
            self._files.sweep(())
            return problem

    async def _taken(self, state_id: str, owner: str) -> None:
        if not STATE_ID.fullmatch(state_id):
            raise RefusedByRules(f"the controller's id {state_id!r:.60} is not one that this lender accepts")
        if not OWNER.fullmatch(owner):
            raise RefusedByRules(f"the owner {owner!r:.60} is not one that this lender accepts")
        if {self.state_id, *self.ledger.state_ids} - {"", state_id}:
            await self._leave_former(state_id)
        self._files.write_script(state_id, owner)
        self.state_id = state_id
        with suppress(SlurmCommandError):  # `tend` tries again
            await self._compare()

    async def _leave_former(self, state_id: str) -> None:
        """Raise an error while there are pilots of another controller: the limit of pilots is for all together."""
        try:
            await self._compare()  # some may have ended
        except SlurmCommandError as problem:
            raise RefusedByRules(
                f"the controller has another id than before ({state_id}), and Slurm does not say whether pilots of "
                f"the former one are left: {problem}"
            ) from None
        if others := sorted(self.ledger.state_ids - {state_id}):
            names = ",".join(PREFIX + each for each in others)
            raise RefusedByRules(
                f"the controller has another id than before ({state_id}), and pilots of the former one are left: "
                f"wait for their end, or end them with scancel --me --name={names}"
            )

    async def _compare(self) -> None:
        """Compare the ledger with Slurm's lists: of this controller, and of former ones that have pilots."""
        for state_id in sorted({self.state_id, *self.ledger.state_ids} - {""}):
            for pilot in self.ledger.listed(await self._jobs.listed(state_id), time.time(), state_id):
                self._files.remove_secret(pilot)
        self._files.sweep(self.ledger.present_ids)

    async def _submit(self, request: LendPilot) -> FromLender:
        try:
            self._check(request)
            if self.ledger.present >= self.rules.most_pilots:  # some may have ended
                await self._compare()
            check_submission(self.rules, request, self.ledger.known, self.ledger.present)
            self._rate.take(self._clock())
        except (RefusedByRules, SlurmCommandError) as refusal:
            _log.warning("refused: %s", refusal)
            return NotLent(request.request, str(refusal))
        try:
            self._files.write_secret(request.pilot, request.secret)
            self.ledger.submitting(request.pilot, request.node, time.time(), self.state_id)
            job = await self._jobs.submit(request, self.state_id)
        except SlurmCommandError as problem:
            refused = is_refusal(str(problem))
            if refused:
                self._forget([request.pilot])
            return NotLent(request.request, str(problem), not refused)
        except (OSError, BFTrainerError) as problem:
            self._forget([request.pilot])
            return NotLent(request.request, f"the lender cannot write its files: {problem}")
        self.ledger.submitted(request.pilot, job)
        return Lent(request.request, job)

    def _check(self, request: LendPilot) -> None:
        if not self.state_id:
            raise RefusedByRules("the controller has not said who it is")
        check_submission(self.rules, request, self.ledger.known, 0)

    async def _cancel(self, request: CancelLent) -> FromLender:
        try:
            for state_id, jobs in self.ledger.jobs(request.pilots).items():
                await self._jobs.cancel(jobs, state_id, only_waiting=request.only_waiting)
        except SlurmCommandError as problem:
            return PilotsCancelled(request.request, str(problem))
        return PilotsCancelled(request.request)

    def _forget(self, pilots: Collection[str]) -> None:
        self.ledger.ended(*pilots)
        for pilot in pilots:
            self._files.remove_secret(pilot)
