"""Invitations say which agent may join for which owner, where agents have owners (`users.mode = "own"`).

A pool gets one for each agent that it starts. It has a join secret (`owners.join_secrets`), which the agent shows. Only
the last invitation of a node counts, and once an agent has joined with it, no other agent can. They survive a restart
of the controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from bftrainer.cluster.owners.join_secrets import AGAIN_S, FIRST_S, JoinRight, JoinSecrets, new_pilot
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.messages import Join

_KEY = "invitation."


@dataclass(frozen=True, slots=True)
class Invitation:
    """The last invitation of a node."""

    owner: str
    pilot: str
    until: float
    agent: str = ""
    """The agent that has joined with it."""


class Invitations:
    """The last invitation of every node."""

    def __init__(self, store: Store, secrets: JoinSecrets) -> None:
        self._store = store
        self._secrets = secrets
        self._of: dict[str, Invitation] = {}

    def invite(self, node: str, owner: str, now: float, within_s: float | None = None) -> str:
        """Return the secret with which one agent may join. Earlier ones of the node are good no more."""
        until = now + (FIRST_S if within_s is None else within_s)
        invitation = Invitation(owner, new_pilot(node), until)
        self._keep(node, invitation)
        return self._secrets.issue(JoinRight(owner, node, invitation.pilot, until))

    def right(self, secret: str, now: float) -> JoinRight | None:
        """Return what a secret is good for; None if it is none of this controller, or has expired."""
        return self._secrets.verify(secret, now)

    def refusal(self, right: JoinRight, join: Join) -> str:
        """Return why an agent may not join as it says; empty if it may."""
        if join.node != right.node:
            return f"its secret is for the node {right.node}, and it says that it is {join.node}"
        invited = self._invited(right.node)
        if invited is None or (invited.pilot, invited.owner) != (right.pilot, right.owner):
            return f"its secret for the node {right.node} and the owner {right.owner} is good no more"
        if (invited.agent and join.agent != invited.agent) or (right.agent and join.agent != right.agent):
            return f"another agent has joined with its secret for the node {right.node}"
        return ""

    def joined(self, right: JoinRight, join: Join, now: float) -> str:
        """Record that an agent has joined. Return the secret with which it, and no other, connects again."""
        invited = self._invited(right.node)
        assert invited is not None, "its right was looked at before"
        if not invited.agent:
            self._keep(right.node, replace(invited, agent=join.agent))
        return self._secrets.issue(replace(right, agent=join.agent, expires=now + AGAIN_S))

    def pending(self, now: float) -> dict[str, str]:
        """Return the owners of the nodes whose agents were invited by this controller and have not joined yet."""
        return {node: one.owner for node, one in self._of.items() if not one.agent and now < one.until}

    def withdraw(self, node: str) -> None:
        """End the invitation of a node: its agent will not come, or has gone."""
        self._of.pop(node, None)
        self._store.forget(f"{_KEY}{node}")

    def left(self, node: str, agent: str) -> None:
        """End the invitation with which an agent has joined: its node has left. A newer one of the node stays."""
        invited = self._invited(node)
        if invited is not None and invited.agent == agent:
            self.withdraw(node)

    def withdraw_all(self, but: Mapping[str, str]) -> None:
        """End all invitations but those with which these agents, by node, have joined."""
        for key in self._store.kept_keys(_KEY):
            node = key.removeprefix(_KEY)
            invited = self._invited(node)
            if invited is None or not invited.agent or but.get(node) != invited.agent:
                self.withdraw(node)

    def _invited(self, node: str) -> Invitation | None:
        if node not in self._of:
            kept = self._store.kept(f"{_KEY}{node}")
            if not isinstance(kept, dict):
                return None
            self._of[node] = Invitation(**kept)
        return self._of[node]

    def _keep(self, node: str, invitation: Invitation) -> None:
        self._of[node] = invitation
        self._store.keep(f"{_KEY}{node}", asdict(invitation))
