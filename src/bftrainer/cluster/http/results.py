"""Routes of results: the files and metrics of one trainer, and the best trainers of a group."""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query
from fastapi import Path as PathParameter

from bftrainer.cluster.controller.active import ActiveTrainer
from bftrainer.cluster.history.best import GroupTrial, best_trials
from bftrainer.cluster.history.history import Viewer
from bftrainer.cluster.http.auth import Api, Caller, find_trainer, visible_owner
from bftrainer.cluster.owners import signatures
from bftrainer.cluster.wire.api import BestView, ResultsView
from bftrainer.cluster.wire.direction import Direction
from bftrainer.elastic import protocol
from bftrainer.util.folders import ListedFile, list_files
from bftrainer.util.text import text

router = APIRouter()

MOST_FILES = 5000
"""How many files of an output folder are listed."""
LISTING_S = 10.0
"""How long a request waits for the file system of an output folder."""


@router.get("/v1/trainers/{ref}/results", response_model=dict[str, Any])
async def results(api: Api, caller: Caller, ref: str) -> ResultsView:
    """The last metrics of a trainer, and the files in its output folder."""
    row = find_trainer(api, ref, caller)
    folder = api.output_folder(row.id, row.owner, row.spec.get("env", {}).get(protocol.OUTPUT, ""))
    view = api.status.trainer(row)
    files: list[ListedFile] = []
    exists, complete, problem = True, True, ""
    try:
        if row.spec.get(signatures.FIELD):
            raise OSError(errno.EACCES, f"the files are those of {row.owner}, and the controller does not read them")
        files, complete = await api.files.run(partial(list_files, Path(folder), MOST_FILES), LISTING_S)
    except TimeoutError:
        exists, problem = False, "its file system does not answer: try again later"
    except FileNotFoundError:
        exists = False
    except OSError as error:
        exists, problem = False, error.strerror or str(error)
    return {
        "id": view["id"],
        "name": view["name"],
        "state": view["state"],
        "reason": view["reason"],
        "started": view["started"],
        "ended": view["ended"],
        "epoch": view["epoch"],
        "step": view["step"],
        "samples": view["samples"],
        "metrics": view["metrics"],
        "metrics_at": view["metrics_at"],
        "host": socket.gethostname(),
        "folder": folder,
        "exists": exists,
        "files": [{"name": text(file.name), "bytes": file.bytes, "time": file.time} for file in files],
        "complete": complete,
        "problem": problem,
    }


@router.get("/v1/groups/{group}/best", response_model=dict[str, Any])
async def best(
    api: Api,
    caller: Caller,
    group: Annotated[str, PathParameter(max_length=64)],
    by: Annotated[str, Query(min_length=1, max_length=100)],
    direction: Direction | None = None,
    limit: Annotated[int | None, Query(ge=1, le=100_000)] = None,
) -> BestView:
    """The trainers of a group, the best by a metric first. Without a direction, the metric's name decides."""
    stored = await api.history.trials(group, Viewer(visible_owner(caller)))
    if not stored:
        raise HTTPException(404, f"there is no group {group!r}: `bftrainer status` lists all groups")
    now = time.time()
    trials = [_newest(trial, api.cluster.trainers.get(trial.id), now) for trial in stored]
    folders = {trial.id: api.output_folder(trial.id, trial.owner, trial.output) for trial in trials}
    return best_trials(group, trials, by, direction, limit, now, folders)


def _newest(trial: GroupTrial, live: ActiveTrainer | None, now: float) -> GroupTrial:
    """Return a trial with what the controller knows beyond its database."""
    if live is None:
        return trial
    progress = live.job.progress
    metrics, metrics_at = progress.reported.both()
    return replace(
        trial,
        state=live.present_state,
        reason=live.job.reason,
        started=live.started,
        epoch=progress.epoch,
        step=progress.step,
        metrics=metrics,
        metrics_at=metrics_at,
        node_seconds=live.held.node_seconds(now),
        extremes=progress.extremes.as_json() or trial.extremes,
    )
