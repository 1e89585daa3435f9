"""Which agents to start, to ask to leave and to kill: the same question for every pool that starts agents itself.

A `Keeper` is told what happens (`found`, `ended`) and asked what to do (`settle`). It has no clock and starts nothing;
the pool passes the time in and carries the orders out.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
"""A host name. It begins with a letter or digit, so that no command takes it for an option."""


def fingerprint(*values: object) -> str:
    """A short text that changes when one of the values does, and says nothing about them."""
    return hashlib.sha256(repr(values).encode(errors="surrogateescape")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what, in seconds."""

    grace_s: float = 0.0
    """A node that leaves has so long."""
    overdue_s: float = 2.0
    """An agent is killed so long after its time was up."""
    silent_s: float = 60.0
    """An agent that runs and is not in the pool for so long is killed: it hangs, or cannot reach the controller."""
    retry_s: float = 1.0
    """Wait so long after an agent ended by itself, and twice as long after every further time."""
    longest_retry_s: float = 30.0
    steady_s: float = 60.0
    """An agent that ran for so long did start well: its end counts as the first."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What to do now."""

    start: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    """Nodes to be announced as leaving."""
    kill: tuple[tuple[str, str], ...] = ()
    """Nodes whose agents to kill, and why. Ordered again until they have ended."""
    again_at: float = math.inf
    """When there will be more to do, if nothing happens."""


@dataclass(slots=True)
class _Agent:
    started: float
    heard: float
    joined: bool = False
    """It was in the pool, or may have been."""
    end_by: float | None = None
    unwanted: bool = False
    why: str = ""


@dataclass(slots=True)
class _Failures:
    count: int
    retry_at: float


class Keeper:
    """The agents that run, and the nodes that failed."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._agents: dict[str, _Agent] = {}
        self._failures: dict[str, _Failures] = {}

    @property
    def running(self) -> tuple[str, ...]:
        """Nodes whose agents were started or found and have not ended."""
        return tuple(self._agents)

    def found(self, node: str, now: float) -> None:
        """An agent runs already."""
        self._agents.setdefault(node, _Agent(now, now, joined=True))

    def unwant(self, node: str) -> None:
        """Its agent shall go, whatever is wanted when `settle` is called."""
        if node in self._agents:
            self._agents[node].unwanted = True

    def killed(self, node: str, now: float) -> None:
        """Its agent was killed because the node is not wanted."""
        if node in self._agents:
            agent = self._agents[node]
            agent.unwanted, agent.end_by, agent.why = True, now + self._patience.overdue_s, "it was to be gone"

    def ended(self, node: str, now: float, *, expected: bool = False) -> bool:
        """An agent has ended, or could not be started. Whether that counts as a failure, so that a retry must wait."""
        agent = self._agents.pop(node, None)
        if agent is None:
            return False
        if expected or agent.unwanted:
            self._failures.pop(node, None)
            return False
        before = self._failures.get(node)
        steady = now - agent.started >= self._patience.steady_s
        count = 0 if before is None or steady else before.count
        wait = min(self._patience.retry_s * 2.0 ** min(count, 30), self._patience.longest_retry_s)
        self._failures[node] = _Failures(count + 1, now + wait)
        return True

    def forgive(self) -> None:
        """Forget failures: whatever caused them may be over."""
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
        """What to do at time `now`, when the nodes `wanted` should be in the pool and those in `here` are.

        `held` nodes are not started yet, no more than `most` run, and no more than `at_once` are started by one call.
        Those to start count as running from now on.
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
            for node in wanted:
                if len(start) >= room:
                    break
                failures = self._failures.get(node)
                waits = failures is not None and now < failures.retry_at
                if not (waits or node in self._agents or node in here or node in held):
                    self._agents[node] = _Agent(now, now)
                    start.append(node)
        for node in self._failures.keys() - wished:
            del self._failures[node]
        times = [agent.end_by for agent in self._agents.values() if agent.end_by is not None]
        times += [failures.retry_at for failures in self._failures.values() if may_start and failures.retry_at > now]
        return Orders(tuple(start), tuple(leave), tuple(kill), min(times, default=math.inf))
