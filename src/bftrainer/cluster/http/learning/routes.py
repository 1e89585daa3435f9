"""Routes of what was learned of scripts: list it, show it, and forget it. Users have their own scripts, admins all."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, HTTPException
from fastapi import Path as PathParameter

from bftrainer.cluster.http.auth import Api, Caller, visible_owner
from bftrainer.cluster.http.learning.curve_views import LETTER, belief, belief_in_detail
from bftrainer.cluster.http.state import ApiState
from bftrainer.cluster.store.rows import TokenRow
from bftrainer.cluster.store.scripts.beliefs import BeliefRow
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.api import BeliefDetail, BeliefView

router = APIRouter()

BeliefId = Annotated[str, PathParameter(pattern=rf"^{LETTER}[1-9][0-9]{{0,17}}$")]


@router.get("/v1/curves")
async def curves(api: Api, caller: Caller) -> dict[str, Any]:
    """What is known of the scripts, those that were learned about last first."""

    def read(store: Store) -> list[BeliefView]:
        return [belief(row) for row in store.beliefs.all(visible_owner(caller))]

    return {"curves": await api.read(read)}


@router.get("/v1/curves/{belief_id}", response_model=dict[str, Any])
async def curve(api: Api, caller: Caller, belief_id: BeliefId) -> BeliefDetail:
    """What is known of one script, with its curve."""
    return await api.read(lambda store: belief_in_detail(_found(store, belief_id, caller)))


@router.delete("/v1/curves/{belief_id}", response_model=dict[str, Any])
async def forget(api: Api, caller: Caller, belief_id: BeliefId) -> BeliefView:
    """Forget what is known of a script, and return what that was. Its trainers begin to measure anew."""
    row = await _row(api, belief_id, caller)
    api.controller.forget_curve(row.key)
    return belief(row)


async def _row(api: ApiState, belief_id: str, caller: TokenRow) -> BeliefRow:
    return await api.read(lambda store: _found(store, belief_id, caller))


def _found(store: Store, belief_id: str, caller: TokenRow) -> BeliefRow:
    """Return a belief, if the caller may see it."""
    row = store.beliefs.row(int(belief_id.removeprefix(LETTER)))
    if row is None or visible_owner(caller) not in (None, row.key.owner):
        raise HTTPException(404, f"there is no curve {belief_id!r}: `bftrainer curves` lists all")
    return row
