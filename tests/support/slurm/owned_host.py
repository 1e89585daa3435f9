"""The controller's side of a pool whose pilots have owners: `FakePoolHost` with owners, invitations and lenders."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from bftrainer.cluster.owners.accounts import Accounts
from bftrainer.cluster.pools.slurm.pool import SlurmPool
from bftrainer.cluster.pools.slurm.submit.lenders import LenderRefusedError
from bftrainer.cluster.wire.lender_messages import (
    LENDER_PATH,
    REFUSED_CODE,
    OfferRefused,
    close_reason,
    encode_lending,
)
from bftrainer.processes import variables
from support.cluster.fake_pool_host import FakePoolHost


class OwnedPoolHost(FakePoolHost):
    """Each node goes to the owner in `wishes`, or else to the first owner. Tokens of lenders are names of owners."""

    def __init__(self, owners: Mapping[str, str], *, follows: Any = None) -> None:
        """`owners` maps owners to the names of their accounts."""
        super().__init__(follows=follows)
        self.own_users = True
        self.accounts = Accounts(dict(owners))
        self.names = tuple(owners)
        self.wishes: dict[str, str] = {}
        self.invited: dict[str, tuple[str, str]] = follows.invited if follows else {}
        """Owner and secret of the last invitation of each node."""
        self.all_secrets: list[str] = follows.all_secrets if follows else []
        self.owner_here: dict[str, str] = {}
        self.pool: SlurmPool | None = None

    @property
    def owners(self) -> Mapping[str, str]:
        return {node: owner for node, (owner, _) in self.invited.items()}

    def owners_for(self, nodes: Sequence[str]) -> Mapping[str, str]:
        return {node: owner for node in nodes if (owner := self.wishes.get(node, self.names[0]))}

    def invitation(self, node: str, owner: str, *, within_s: float | None = None) -> Mapping[str, str]:
        secret = f"bfj1.{secrets.token_urlsafe(24)}"
        self.invited[node] = (owner, secret)
        self.all_secrets.append(secret)
        return {**self.agent_environment, variables.SECRET: secret}

    def not_coming(self, node: str, reason: str) -> None:
        self.said.append(("not_coming", node, reason))
        self.invited.pop(node, None)

    async def _serve(self, connection: ServerConnection) -> None:
        request = connection.request
        assert request is not None
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if request.path == LENDER_PATH:
            await self._serve_lender(connection, token)
            return
        for node, (owner, secret) in self.invited.items():
            if token == secret:
                self.owner_here[node] = owner
                break
        else:
            self.said.append(("stranger", token[:8]))
            await connection.close(1008)
            return
        del request.headers["Authorization"]
        request.headers["Authorization"] = f"Bearer {self.secret}"
        await super()._serve(connection)

    async def _serve_lender(self, connection: ServerConnection, owner: str) -> None:
        assert self.pool is not None
        assert self.pool.lenders is not None
        try:
            await self.pool.lenders.serve(owner, _texts(connection), connection.send)
        except LenderRefusedError as refusal:
            self.said.append(("lender refused", owner, str(refusal)))
            await connection.send(encode_lending(OfferRefused(str(refusal))))
            await connection.close(REFUSED_CODE, close_reason(str(refusal)))


async def _texts(connection: ServerConnection) -> AsyncIterator[str]:
    try:
        while True:
            frame = await connection.recv()
            assert isinstance(frame, str)
            yield frame
    except ConnectionClosed:
        return
