"""Routes of trainers: list, submit, show and cancel them, ask when they will be done, and read their logs."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, HTTPException, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from bftrainer.cluster.http import views
from bftrainer.cluster.http.auth import Api, Caller, find_trainer, visible_owner
from bftrainer.cluster.http.status import RECENT_S
from bftrainer.cluster.http.wait_reason import WaitReasons
from bftrainer.cluster.owners.accounts import Accounts
from bftrainer.cluster.owners.signatures import NOT_SIGNED, OWN_LAUNCHERS
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.spec.trainer import TrainerSpec, node_range, parse_spec
from bftrainer.cluster.store.json_columns import encoded
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.api import EtaAnswer, TrainerDetail, TrainerView
from bftrainer.elastic import protocol
from bftrainer.errors import InputError

router = APIRouter()

MOST_SPECS = 10_000
"""How many trainers that are not submitted a question may have."""
TAIL_S, LOG_S = 2.0, 10.0
"""How long a request waits for the file system of the logs: for the last lines of a trainer's page, and for the log."""


@router.get("/v1/trainers", response_model=dict[str, Any])
async def trainers(
    api: Api,
    caller: Caller,
    state: Annotated[str, Query(max_length=20)] = "",
    everything: Annotated[bool, Query(alias="all")] = False,
) -> Any:
    """Unfinished trainers, and those that finished within the last hour; with `all`, all trainers."""
    owner = visible_owner(caller)
    shown = api.status.trainers(owner, time.time() - RECENT_S)
    if everything:
        # There may be years of them: they are read and written as JSON in a thread.
        return Response(await api.read(lambda store: _all(store, owner, shown, state)), media_type="application/json")
    return {"trainers": [row for row in shown if not state or row["state"] == state]}


def _all(store: Store, owner: str | None, shown: list[TrainerView], state: str) -> bytes:
    """Return all trainers as JSON. `shown` are those that are not finished or ended lately."""
    fresh = {row["id"]: row for row in shown}
    rows = (fresh.get(row.id) or views.trainer(row, None, 0.0) for row in store.trainers(brief=True, owner=owner))
    return encoded({"trainers": [row for row in rows if not state or row["state"] == state]}).encode()


@router.post("/v1/trainers", status_code=201, response_model=dict[str, Any])
async def submit(api: Api, caller: Caller, given: Annotated[Any, Body()]) -> TrainerView:
    """Queue a trainer."""
    if api.controller.draining:
        raise HTTPException(409, "the controller is ending and accepts no more trainers: submit again later")
    spec = parse_spec(given)
    if api.controller.config.users.own:
        check_own(spec, caller.owner, api.controller.config.users.as_accounts())
    else:
        spec = spec.model_copy(update={"signature": ""})
        await api.access.check(spec)
    environments = api.store.environments
    staged = await asyncio.to_thread(environments.stage, spec.env) if spec.env else None
    try:
        if spec.name is not None and api.cluster.is_taken(spec.name, caller.owner):
            why = f"an unfinished trainer has the name {spec.name!r}: choose another name, or cancel it"
            raise HTTPException(409, why)
        row = api.store.trainer(api.controller.submit(spec, caller.owner, staged))
    except Exception:
        await asyncio.to_thread(environments.discard, staged)
        raise
    assert row is not None
    return api.status.trainer(row)


def check_own(spec: TrainerSpec, owner: str, accounts: Accounts) -> None:
    """Refuse a trainer that cannot run as its owner."""
    accounts.of(owner)
    if spec.launcher not in OWN_LAUNCHERS:
        raise InputError(
            f"launcher {spec.launcher} needs a program on the controller's machine, and here trainers run as their "
            f"owners, on nodes only (users.mode is own): use {' or '.join(OWN_LAUNCHERS)}"
        )
    if not spec.signature:
        raise HTTPException(
            NOT_SIGNED,
            "trainers run as their owners here (users.mode is own), and agents start only what their owner has signed: "
            "submit it with `bftrainer submit` or bftrainer.client of this version",
        )


@router.get("/v1/trainers/{ref}", response_model=dict[str, Any])
async def trainer(api: Api, caller: Caller, ref: str) -> TrainerDetail:
    """One trainer in detail."""
    row = find_trainer(api, ref, caller)
    try:
        lines, _ = await api.files.run(partial(api.controller.logbook(row.id).tail, 20), TAIL_S)
        log_tail = [f"{line.node} | {line.text}" for line in lines]
    except TimeoutError:
        log_tail = ["(the log cannot be read now: its file system does not answer)"]
    live = api.cluster.trainers.get(row.id)
    output = api.output_folder(row.id, row.owner, row.spec.get("env", {}).get(protocol.OUTPUT, ""))
    waits, nodes = WaitReasons(api.cluster).of(live), api.cluster.nodes
    return views.trainer_in_detail(row, live, time.time(), log_tail, waits, output, nodes, api.status.eta(row))


class EtaQuestion(BaseModel):
    """The trainers that a caller asks about: of the controller, or specifications that are not submitted."""

    model_config = ConfigDict(extra="forbid")

    trainers: list[str] = Field(default_factory=list, max_length=MOST_SPECS)
    group: str = Field("", max_length=64)
    specs: list[Any] = Field(default_factory=list, max_length=MOST_SPECS)
    nodes: str = Field("", max_length=40)
    """Another range of nodes for all of them."""


@router.post("/v1/eta", response_model=dict[str, Any])
async def eta(api: Api, caller: Caller, asked: EtaQuestion) -> EtaAnswer:
    """When trainers, a group, or trainers that are not submitted would be done, computed now."""
    mine = visible_owner(caller)
    rows = [find_trainer(api, ref, caller) for ref in asked.trainers]
    live = [one for one in api.cluster.trainers.values() if mine is None or one.owner == mine]
    if asked.group:
        rows += [api.store.trainer(one.id) for one in live if one.spec.group == asked.group]  # type: ignore[misc]
    ids = list(dict.fromkeys(row.id for row in rows if row.id in api.cluster.trainers))
    if not ids and not asked.specs:
        raise HTTPException(409, "none of these trainers is unfinished: nothing is to be predicted")
    sizes = None
    try:
        sizes = node_range(asked.nodes) if asked.nodes else None
    except ValueError as problem:
        raise InputError(str(problem)) from None
    specs = [parse_spec(spec) for spec in asked.specs]
    return await api.controller.eta.what_if(ids, specs, sizes, caller.owner)


@router.post("/v1/trainers/{ref}/cancel", response_model=dict[str, Any])
async def cancel(api: Api, caller: Caller, ref: str) -> TrainerView:
    """End a trainer; one that is finished stays as it is."""
    row = find_trainer(api, ref, caller)
    api.controller.cancel(row.id, caller.owner)
    return api.status.trainer(find_trainer(api, row.id, caller))


@router.get("/v1/trainers/{ref}/logs")
async def logs(
    api: Api,
    caller: Caller,
    ref: str,
    offset: Annotated[int, Query(ge=0, le=1 << 60)] = 0,
    limit: Annotated[int, Query(ge=1, le=1 << 20)] = 1 << 18,
    tail: Annotated[int | None, Query(ge=0, le=100_000)] = None,
) -> dict[str, Any]:
    """Output of a trainer's workers: from a byte offset on, or the last lines."""
    row = find_trainer(api, ref, caller)
    logbook = api.controller.logbook(row.id)
    read = partial(logbook.read, offset, limit) if tail is None else partial(logbook.tail, tail)
    finished = row.state in FINISHED and row.id not in api.cluster.trainers
    finished = finished and api.controller.agents.output.is_complete(row.id)
    try:
        lines, after = await api.files.run(read, LOG_S)
    except TimeoutError:
        raise HTTPException(
            503, f"{logbook.path}: the file system of the log does not answer: try again later"
        ) from None
    shown = [{"time": line.time, "worker": line.worker, "node": line.node, "text": line.text} for line in lines]
    return {"lines": shown, "offset": after, "finished": finished}
