"""Authentication identifies the caller of a request by a bearer token, and finds the trainers that a caller may see.

The routes declare what they need as dependencies: `Api`, `Caller` or `Admin`.
"""

from __future__ import annotations

import time
from typing import Annotated, cast

from fastapi import Depends, HTTPException
from starlette.requests import HTTPConnection

from bftrainer.cluster.http.limits import NO_TOKEN, bearer
from bftrainer.cluster.http.state import ApiState
from bftrainer.cluster.store.rows import TokenRow, TrainerRow
from bftrainer.cluster.store.store import ID
from bftrainer.util.suggest import closest

_LONGEST_REF = 64


async def api_state(connection: HTTPConnection) -> ApiState:
    """Return the objects that the routes share."""
    return cast(ApiState, connection.app.state.api)


Api = Annotated[ApiState, Depends(api_state)]


async def token_row(connection: HTTPConnection, api: Api) -> TokenRow | None:
    """Return the token of a request and note its use; None if it is missing, wrong, revoked or expired."""
    token = bearer(connection.headers.get("authorization"))
    return api.store.tokens.check(token, time.time()) if token else None


Token = Annotated[TokenRow | None, Depends(token_row)]


def token_refusal(api: ApiState, token: str) -> str:
    """Return why a token is refused; empty if it is valid."""
    if token and api.store.tokens.check(token) is not None:
        return ""
    return api.store.tokens.why_refused(token) or NO_TOKEN


async def current_user(connection: HTTPConnection, api: Api, token: Token) -> TokenRow:
    """Return the token of the caller. Refuses requests without a token and tokens of monitors."""
    if token is None:
        raise HTTPException(401, token_refusal(api, bearer(connection.headers.get("authorization"))) or NO_TOKEN)
    if token.role == "monitor":
        raise HTTPException(403, "this token has the role monitor: it may read /metrics only")
    return token


Caller = Annotated[TokenRow, Depends(current_user)]


async def current_admin(caller: Caller) -> TokenRow:
    """Return the token of the caller. Refuses callers that are not admins."""
    if caller.role != "admin":
        raise HTTPException(
            403,
            f"only an admin may do this, and {caller.owner} is a {caller.role}: use an admin's token",
        )
    return caller


Admin = Annotated[TokenRow, Depends(current_admin)]


def visible_owner(caller: TokenRow) -> str | None:
    """Return the owner whose trainers a caller may see; None: those of all owners."""
    return None if caller.role == "admin" else caller.owner


def find_trainer(api: ApiState, ref: str, caller: TokenRow) -> TrainerRow:
    """Return the trainer with an id or a name, if the caller may see it. An admin's own trainers come first."""
    row = None
    if len(ref) <= _LONGEST_REF:
        # A text that looks like an id is an id, also for an admin who owns an old trainer with such a name (no longer
        # allowed).
        by_id = caller.role == "admin" and ID.fullmatch(ref)
        row = api.store.trainer(ref, owner=None if by_id else caller.owner)
        if row is None and caller.role == "admin":
            row = api.store.trainer(ref)
    if row is None:
        near = closest(ref[:_LONGEST_REF], api.store.totals.newest_names(visible_owner(caller)))
        hint = f": did you mean {near!r}?" if near else ""
        raise HTTPException(404, f"there is no trainer {ref[:_LONGEST_REF]!r}{hint}")
    return row
