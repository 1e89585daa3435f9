"""Route that removes files of finished trainers: an owner's own, or those of all owners for an admin."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from bftrainer.cluster.http.auth import Api, Caller, find_trainer
from bftrainer.cluster.retention.prune import as_json, check_finished
from bftrainer.errors import InputError

router = APIRouter()


class PruneRequest(BaseModel):
    """What to remove. Without `trainers` and `mine`: files of all owners, which needs an admin."""

    model_config = ConfigDict(extra="forbid")
    trainers: Annotated[list[str], Field(max_length=1000)] = []
    """Ids or names; all their files go."""
    mine: bool = False
    """All files of the caller's finished trainers go."""
    older_than_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Only trainers that ended so long ago. For all owners, None: what goes by the settings."""
    dry_run: bool = False


@router.post("/v1/prune")
async def prune(api: Api, caller: Caller, wanted: PruneRequest) -> dict[str, Any]:
    """Remove files of finished trainers, and say which and how many bytes."""
    if wanted.trainers and wanted.mine:
        raise HTTPException(422, "trainers and mine exclude each other: name trainers, or choose all of yours")
    house, named, owner = api.controller.housekeeper, None, caller.owner if wanted.mine else None
    if wanted.trainers:
        rows = [find_trainer(api, ref, caller) for ref in wanted.trainers]
        for row in rows:
            try:
                check_finished(row, handled=row.id in api.cluster.trainers)
            except InputError as problem:
                raise HTTPException(409, str(problem)) from None
        named = {row.id for row in rows}
    elif not wanted.mine and caller.role != "admin":
        raise HTTPException(403, "only an admin may remove other owners' files: name trainers, or choose all of yours")
    if named is None and owner is None and wanted.older_than_s is None:
        done = await house.clean(time.time(), dry_run=wanted.dry_run)
    else:
        done = await house.prune(named, owner, wanted.older_than_s or 0.0, caller.owner, dry_run=wanted.dry_run)
    return as_json(done, dry_run=wanted.dry_run)
