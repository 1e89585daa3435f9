"""Routes of the pool: the status, the nodes, the events, and pausing, resuming and draining."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query

from bftrainer.cluster.http import views
from bftrainer.cluster.http.auth import Admin, Api, Caller, find_trainer
from bftrainer.cluster.wire.api import NodeView, StatusView

router = APIRouter()

OTHERS = "other"
"""The state of a node that serves another owner, as users see it who are no admins."""


@router.get("/v1/status", response_model=dict[str, Any])
async def status(api: Api, caller: Caller) -> StatusView:
    """The pool, the trainers and the last decision."""
    return api.status.read(caller)


@router.get("/v1/nodes")
async def nodes(api: Api, caller: Caller) -> dict[str, Any]:
    """The nodes in the pool."""
    rows = [views.node(node, api.cluster, time.time()) for node in api.cluster.nodes.values()]
    return {"nodes": rows if caller.role == "admin" else [_as_seen_by(caller.owner, row) for row in rows]}


def _as_seen_by(owner: str, row: NodeView) -> NodeView:
    """Leave out what a user who is no admin must not see of a node: who else uses it, and how."""
    if row["owner"] != owner:
        row["trainer"] = row["owner"] = row["worker"] = None
        row["ranks"] = []
    if row.get("serves", owner) != owner:  # an agent of another owner runs there, under that owner's account
        del row["serves"]
        row["state"], row["agent_pid"], row["slots"], row["since"], row["heard_s"] = OTHERS, 0, 0, 0.0, 0.0
        row["gpus"] = []
    return row


@router.get("/v1/events")
async def events(
    api: Api,
    caller: Caller,
    after: Annotated[int | None, Query(ge=0, le=1 << 60)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    trainer: Annotated[str, Query(max_length=64)] = "",
    kind: Annotated[str, Query(max_length=64)] = "",
) -> dict[str, Any]:
    """Events: the newest, or those after a sequence number."""
    if caller.role != "admin" and not trainer:
        raise HTTPException(403, "only an admin may see all events: name one of your trainers")
    about = find_trainer(api, trainer, caller).id if trainer else ""
    rows = [views.event(row) for row in api.store.events(after=after, limit=limit, trainer=about, kind=kind)]
    return {"events": rows, "last": rows[-1]["seq"] if rows else after or 0}


@router.post("/v1/pause")
async def pause(api: Api, caller: Admin) -> dict[str, Any]:
    """Stop harvesting at once: all nodes are given back."""
    await api.controller.pause()
    return {"paused": True}


@router.post("/v1/resume")
async def resume(api: Api, caller: Admin) -> dict[str, Any]:
    """Harvest again after a pause."""
    await api.controller.resume()
    return {"paused": False}


@router.post("/v1/drain")
async def drain(api: Api, caller: Admin) -> dict[str, Any]:
    """Give all nodes back and end."""
    api.controller.draining = True
    return {"draining": True}
