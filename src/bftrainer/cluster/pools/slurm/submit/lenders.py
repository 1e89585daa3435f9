"""`Lenders` is the controller's end of the connections to users' lenders.

The route of lenders (`http/agents.py`) has each connection served here, for the owner of its token. The pool gets the
`Submitter` of an owner, which sends a request and waits for the answer. A lender that does not answer, or answers
nonsense, costs its own owner's pilots and nobody else's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from bftrainer.cluster.owners.accounts import Accounts
from bftrainer.cluster.pools.slurm.naming import PREFIX
from bftrainer.cluster.pools.slurm.read import Pilot
from bftrainer.cluster.pools.slurm.runner import REFUSES, SlurmCommandError
from bftrainer.cluster.pools.slurm.settings import read_duration
from bftrainer.cluster.pools.slurm.submit.base import OwnedPilot, Submitter
from bftrainer.cluster.wire.lender_messages import (
    CancelLent,
    LenderBeat,
    LenderHeard,
    LendPilot,
    Lent,
    NotLent,
    Offer,
    OfferTaken,
    PilotsCancelled,
    ToLender,
    Withdrawn,
    decode_lending,
    encode_lending,
)
from bftrainer.elastic.protocol import ProtocolError
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes import variables
from bftrainer.util.text import one_line

Send = Callable[[str], Awaitable[None]]

BUSY_S = 30.0
"""How long a lender that did not answer is left alone."""
_LAST_ANSWERS = 4
"""A lender is also left alone if its last answers, so many, took longer together than one may take."""
_MOST_PER_MESSAGE = 500

_log = logging.getLogger(__name__)


class LenderRefusedError(BFTrainerError):
    """The controller does not take a lender's offer; the lender is told why."""


class Lenders:
    """The connected lenders, at most one per owner. See `Submitters`."""

    def __init__(self, name: str, accounts: Accounts, answer_s: float) -> None:
        """`name` is that of all pilots' jobs. A lender must answer a request within `answer_s` seconds."""
        self.changed: Callable[[], None] = lambda: None
        """Called when a lender has come or gone."""
        self._state_id = name.removeprefix(PREFIX)
        self._accounts = accounts
        self._answer_s = answer_s
        self._connected: dict[str, _ConnectedLender] = {}
        self._gone: dict[str, str] = {}
        """Why each owner's last lender has gone."""

    # Connections.

    async def serve(self, owner: str, frames: AsyncIterator[str], send: Send) -> None:
        """Serve the connection of an owner's lender to its end. Raises `LenderRefusedError`."""
        lender: _ConnectedLender | None = None
        end = "its connection was lost"
        try:
            async for frame in frames:
                message = decode_lending(frame)
                if lender is None:
                    if not isinstance(message, Offer):
                        raise LenderRefusedError("the first message must be an offer")
                    lender = self._take(owner, message, send)
                    await lender.say(OfferTaken(self._state_id, owner))
                    self.changed()
                elif isinstance(message, LenderBeat):
                    await lender.say(LenderHeard())
                elif isinstance(message, Lent | NotLent | PilotsCancelled):
                    lender.answered(message)
                elif isinstance(message, Withdrawn):
                    end = f"it has ended: {one_line(message.reason)[:200]}"
                    break
        except ProtocolError as problem:
            raise LenderRefusedError(one_line(problem)[:300]) from None
        finally:
            if lender is not None:
                lender.lost(end)
                if self._connected.get(owner) is lender:
                    del self._connected[owner]
                    self._gone[owner] = end
                    _log.info("the lender of %s is gone: %s", owner, end)
                    self.changed()

    def _take(self, owner: str, offer: Offer, send: Send) -> _ConnectedLender:
        try:
            account = self._accounts.of(owner)
        except InputError as problem:
            raise LenderRefusedError(str(problem)) from None
        # A help for users who mix up accounts, not a proof: the token of the connection is the credential.
        if (offer.account, offer.uid) != (account.name, account.uid):
            raise LenderRefusedError(
                f"owner {owner} has the account {account.name} ({account.uid}), but this lender is run by "
                f"{offer.account[:60]} ({offer.uid}): run it as {account.name}, or have users.accounts changed"
            )
        former = self._connected.get(owner)
        if former is not None:
            former.lost("another lender of this owner has taken its place")
        lender = self._connected[owner] = _ConnectedLender(owner, offer, send, self._answer_s)
        self._gone.pop(owner, None)
        _log.info("the lender of %s is here: at most %d pilots", owner, offer.most_pilots)
        return lender

    # Submitters.

    def of(self, owner: str) -> Submitter:
        """See `Submitters`."""
        if why := self.why_not(owner):
            raise SlurmCommandError(why)
        return self._connected[owner]

    def why_not(self, owner: str) -> str:
        """See `Submitters`."""
        lender = self._connected.get(owner)
        if lender is None:
            last = f" (the last one: {self._gone[owner]})" if owner in self._gone else ""
            return f"no lender of {owner} is connected{last}: {owner} runs `bftrainer lend` on a login node"
        if lender.busy:
            return f"the lender of {owner} does not answer"
        return ""

    def most(self, owner: str) -> int | None:
        """See `Submitters`."""
        lender = self._connected.get(owner)
        return 0 if lender is None else lender.offer.most_pilots

    def log_of(self, owner: str, node: str) -> str:
        """See `Submitters`. The folder is the default one of `bftrainer lend --folder`."""
        return f"~{self._accounts.name_of(owner)}/.local/state/bftrainer-lend/logs/{node}.log"

    def describe(self) -> Mapping[str, Any]:
        """See `Submitters`."""
        return {
            "submit": "lend",
            "lenders": {owner: lender.offer.most_pilots for owner, lender in sorted(self._connected.items())},
        }


class _ConnectedLender:
    """A lender that is connected. See `Submitter`."""

    def __init__(self, owner: str, offer: Offer, send: Send, answer_s: float) -> None:
        self.offer = offer
        self._owner = owner
        self._send = send
        self._answer_s = answer_s
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Lent | NotLent | PilotsCancelled]] = {}
        self._busy_until = -math.inf
        self._took_s: deque[float] = deque(maxlen=_LAST_ANSWERS)
        self._end = ""

    @property
    def busy(self) -> bool:
        """Whether it did not answer a moment ago, or took too long for its last answers together."""
        return time.monotonic() < self._busy_until

    async def say(self, message: ToLender) -> None:
        """Send a message."""
        await self._send(encode_lending(message))

    def answered(self, message: Lent | NotLent | PilotsCancelled) -> None:
        """Take an answer. One that nobody waits for is dropped."""
        waiting = self._waiting.pop(message.request, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def lost(self, why: str) -> None:
        """Fail all requests without an answer, and all that follow."""
        self._end = self._end or why
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(SlurmCommandError(f"the lender of {self._owner}: {why}"))
        self._waiting.clear()

    async def submit(self, pilot: OwnedPilot) -> int:
        """See `Submitter`."""
        job, number = pilot.job, next(self._numbers)
        request = LendPilot(
            number,
            pilot.id,
            job.node,
            job.partition,
            _minutes(job.time_limit),
            pilot.invitation[variables.SECRET],
            _minutes(job.time_min) if job.time_min else 0,
            job.account,
            job.qos,
            job.constraint,
            job.gpus,
            job.mark,
        )
        answer = await self._ask(number, request)
        if isinstance(answer, Lent):
            return answer.job
        if isinstance(answer, NotLent):
            words = "did not hear of Slurm: " if answer.maybe else REFUSES
            raise SlurmCommandError(f"the lender of {self._owner} {words}{one_line(answer.reason)[:300]}")
        raise self._nonsense()

    async def cancel(self, pilots: Sequence[Pilot], *, only_waiting: bool = False) -> None:
        """See `Submitter`."""
        for begin in range(0, len(pilots), _MOST_PER_MESSAGE):
            some = tuple(pilot.id for pilot in pilots[begin : begin + _MOST_PER_MESSAGE])
            number = next(self._numbers)
            answer = await self._ask(number, CancelLent(number, some, only_waiting))
            if not isinstance(answer, PilotsCancelled):
                raise self._nonsense()
            if answer.problem:
                raise SlurmCommandError(f"the lender of {self._owner}: {one_line(answer.problem)[:300]}")

    def _nonsense(self) -> SlurmCommandError:
        self._busy_until = time.monotonic() + BUSY_S
        return SlurmCommandError(f"the lender of {self._owner} gives an answer to another question")

    def _answered_after(self, took_s: float) -> None:
        self._took_s.append(took_s)
        if sum(self._took_s) > self._answer_s:
            self._busy_until = time.monotonic() + BUSY_S
            self._took_s.clear()

    async def _ask(self, number: int, message: ToLender) -> Lent | NotLent | PilotsCancelled:
        if self._end:
            raise SlurmCommandError(f"the lender of {self._owner}: {self._end}")
        waiting: asyncio.Future[Lent | NotLent | PilotsCancelled] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        asked = time.monotonic()
        try:
            async with asyncio.timeout(self._answer_s):
                await self.say(message)
                return await waiting
        except TimeoutError:
            self._busy_until = time.monotonic() + BUSY_S
            raise SlurmCommandError(
                f"the lender of {self._owner} did not answer: it did not end within {self._answer_s:g} s"
            ) from None
        except (OSError, RuntimeError) as problem:  # the connection broke meanwhile
            raise SlurmCommandError(f"the lender of {self._owner}: {one_line(problem)[:200]}") from None
        finally:
            self._waiting.pop(number, None)
            self._answered_after(time.monotonic() - asked)


def _minutes(duration: str) -> int:
    """Return a time limit in whole minutes, as Slurm rounds it."""
    return max(1, math.ceil(read_duration(duration) / 60))
