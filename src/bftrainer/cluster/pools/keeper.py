"""The keeper decides which agents to start, to ask to leave and to kill.

Every pool that starts agents itself uses it. The pool reports what happens (`found`, `ended`) and asks for orders
(`settle`). A `Keeper` has no clock and starts nothing: the pool passes the time in and carries the orders out.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from bftrainer.util.backoff import Backoff

NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
"""A host name. It begins with a letter or digit, so that no command takes it for an option."""


def fingerprint(*values: object) -> str:
    """Return a short text that changes when one of the values does, and does not reveal them."""
    return hashlib.sha256(repr(values).encode(errors="surrogateescape")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Times to wait, in seconds."""

    grace_s: float = 0.0
    """Time that a node has to leave."""
    overdue_s: float = 2.0
    """Time after the end of `grace_s` until an agent is killed."""
    silent_s: float = 60.0
    """Time until a running agent that is not in the pool is killed: it hangs, or cannot reach the controller."""
    retry_s: float = 1.0
    """Wait after an agent ended by itself; it doubles with each further time."""
    longest_retry_s: float = 30.0
    steady_s: float = 60.0
    """Running time after which an agent counts as well started: its end counts as a first failure."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Actions that a pool must take now."""

    start: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    """Nodes to be announced as leaving."""
    kill: tuple[tuple[str, str], ...] = ()
    """Nodes whose agents to kill, and why. The order is repeated until they have ended."""
    again_at: float = math.inf
    """When to call `settle` again, if nothing happens before."""


@dataclass(slots=True)
class _KeptAgent:
    started: float
    heard: float
    joined: bool = False
    """True if the agent was in the pool, or may have been."""
    end_by: float | None = None
    unwanted: bool = False
    why: str = ""


@dataclass(slots=True)
class _Failures:
    count: int
    retry_at: float


class Keeper:
    """Tracks the running agents of a pool, and the nodes whose agents failed."""

    def __init__(self, patience: Timeouts) -> None:
        self._patience = patience
        self._agents: dict[str, _KeptAgent] = {}
        self._failures: dict[str, _Failures] = {}

    @property
    def running(self) -> tuple[str, ...]:
        """Nodes whose agents were started or found and have not ended."""
        return tuple(self._agents)

    @property
    def unwanted(self) -> frozenset[str]:
        """Nodes whose agents are to end."""
        return frozenset(node for node, agent in self._agents.items() if agent.unwanted)

    def found(self, node: str, now: float) -> None:
        """Record an agent that is already running."""
        self._agents.setdefault(node, _KeptAgent(now, now, joined=True))

    def unwant(self, node: str) -> None:
        """Mark the agent of a node to be ended, even if `settle` is called with the node in `wanted`."""
        if node in self._agents:
            self._agents[node].unwanted = True

    def killed(self, node: str, now: float) -> None:
        """Record that the agent of a node was killed because the node is not wanted."""
        if node in self._agents:
            agent = self._agents[node]
            agent.unwanted, agent.end_by, agent.why = True, now + self._patience.overdue_s, "it was to be gone"

    def ended(self, node: str, now: float, *, expected: bool = False) -> bool:
        """Record that an agent has ended, or could not be started.

        Returns whether this counts as a failure, so that a retry must wait.
        """
        agent = self._agents.pop(node, None)
        if agent is None:
            return False
        if expected or agent.unwanted:
            self._failures.pop(node, None)
            return False
        before = self._failures.get(node)
        steady = now - agent.started >= self._patience.steady_s
        count = 0 if before is None or steady else before.count
        wait_s = Backoff(self._patience.retry_s, self._patience.longest_retry_s).wait_s(count + 1)
        self._failures[node] = _Failures(count + 1, now + wait_s)
        return True

    def forgive(self) -> None:
        """Forget all failures, because their cause may be over."""
        self._failures.clear()

    def settle(
        self,
        now: float,
        wanted: Sequence[str],
        here: Collection[str],
        *,
        may_start: bool = True,
        held: Collection[str] = (),
        most: int | None = None,
        at_once: int | None = None,
    ) -> Orders:
        """Return the orders for time `now`, when the pool should hold the nodes `wanted` and holds those in `here`.

        Nodes in `held` are not started yet; nodes whose agents have failed are started after the others. At most `most`
        agents run, and at most `at_once` are started by one call. Agents to be started count as running from now on.
        """
        start, leave = list[str](), list[str]()
        kill = list[tuple[str, str]]()
        wished = set(wanted)
        for node, agent in self._agents.items():
            agent.joined |= node in here
            agent.unwanted |= node not in wished
            if node in here or not may_start:
                agent.heard = now
            if agent.end_by is None:
                if agent.unwanted and node in here:
                    leave.append(node)
                    agent.end_by = now + self._patience.grace_s + self._patience.overdue_s
                    agent.why = "its time to leave is over"
                elif agent.unwanted and not agent.joined:
                    agent.end_by, agent.why = now, "it is not wanted any more"
                elif now - agent.heard >= self._patience.silent_s:
                    agent.end_by, agent.why = now, f"its agent did not join for {now - agent.heard:.0f} s"
            if agent.end_by is not None and now >= agent.end_by:
                agent.end_by = now + self._patience.overdue_s
                kill.append((node, agent.why))
        if may_start:
            room = len(wished) if most is None else most - len(self._agents)
            room = room if at_once is None else min(room, at_once)
            for node in self._in_order(wanted, now) if room > 0 else ():
                if not (node in self._agents or node in here or node in held):
                    self._agents[node] = _KeptAgent(now, now)
                    start.append(node)
                    if len(start) >= room:
                        break
        for node in self._failures.keys() - wished:
            del self._failures[node]
        times = [agent.end_by for agent in self._agents.values() if agent.end_by is not None]
        times += [failures.retry_at for failures in self._failures.values() if may_start and failures.retry_at > now]
        return Orders(tuple(start), tuple(leave), tuple(kill), min(times, default=math.inf))

    def _in_order(self, wanted: Sequence[str], now: float) -> Iterator[str]:
        """Yield the nodes to start agents on: first those that have not failed, then those to be tried again."""
        yield from (node for node in wanted if node not in self._failures)
        yield from (node for node in wanted if node in self._failures and now >= self._failures[node].retry_at)
