"""Routes of owners: their limits and current use."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from bftrainer.cluster.controller import owners
from bftrainer.cluster.http.auth import Admin, Api, Caller

router = APIRouter()


@router.get("/v1/me")
async def me(api: Api, caller: Caller) -> dict[str, Any]:
    """The caller: owner, role, limits and current use."""
    api.cluster.planner.limits.read()
    past = await api.read(lambda store: store.totals.of_finished(caller.owner))
    mine = owners.as_json(caller.owner, api.cluster, past, time.time())
    return {**mine, "role": caller.role, "token": caller.name}


@router.get("/v1/owners")
async def all_owners(api: Api, caller: Admin) -> dict[str, Any]:
    """All owners that have trainers or limits, with their limits and current use."""
    cluster = api.cluster
    cluster.planner.limits.read()
    past = await api.read(lambda store: store.totals.of_finished())
    limited = (row.owner for row in cluster.planner.limits.rows)
    names = {*past, *limited, *(live.owner for live in cluster.trainers.values())}
    now = time.time()
    return {"owners": [owners.as_json(name, cluster, past, now) for name in sorted(names)]}
