"""The HTTP API, version 1, serves users and their programs and accepts agents.

A thin layer: it identifies the caller by a bearer token, lets pydantic and the controller check the request, and
returns the controller's answer as JSON. Errors are `{"error": "one line"}`.
"""

# No `from __future__ import annotations`: FastAPI reads annotations that are local names.

import hmac
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, HTTPException, Query, Request, WebSocket, WebSocketDisconnect
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from bftrainer import __version__
from bftrainer.cluster.controller import owners
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.http import dashboard, views
from bftrainer.cluster.http.health import add as add_health
from bftrainer.cluster.http.limits import NO_TOKEN, RequestLimits, bearer
from bftrainer.cluster.http.totals import Totals
from bftrainer.cluster.http.wait_reason import WaitReasons
from bftrainer.cluster.launchers.base import StateLayout
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.spec.trainer import parse_spec
from bftrainer.cluster.store.database import DiskFullError
from bftrainer.cluster.store.schema import TokenRow, TrainerRow
from bftrainer.cluster.store.store import ID
from bftrainer.cluster.wire import messages
from bftrainer.elastic import protocol
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.text import one_line

RECENT_S = 3600.0

_log = logging.getLogger(__name__)


def build(controller: Controller, secret: str) -> FastAPI:
    """Return the web application of a controller; agents join with `secret`."""
    app = FastAPI(title="BFTrainer", version=__version__, docs_url=None, redoc_url=None, openapi_url="/v1/openapi.json")
    cluster = controller.cluster
    store = cluster.store
    totals = Totals(store)

    async def who(request: Request) -> TokenRow:
        token = bearer(request.headers.get("authorization"))
        found = store.check_token(token, time.time()) if token else None
        if found is None:
            raise HTTPException(401, NO_TOKEN)
        if found.role == "monitor":
            raise HTTPException(403, "this token may read /metrics and nothing else")
        return found

    Caller = Annotated[TokenRow, Depends(who)]  # noqa: N806 - a type

    async def admin(caller: Caller) -> TokenRow:
        if caller.role != "admin":
            raise HTTPException(403, f"only an admin may do this, and {caller.owner} is none")
        return caller

    Admin = Annotated[TokenRow, Depends(admin)]  # noqa: N806

    def find(ref: str, caller: TokenRow) -> TrainerRow:
        # A text that looks like an id is an id, also for an admin who owns an old trainer with such a name (no longer
        # allowed).
        whose = None if caller.role == "admin" and ID.fullmatch(ref) else caller.owner
        row = store.trainer(ref, owner=whose) if len(ref) <= 64 else None
        if row is None and len(ref) <= 64 and caller.role == "admin":
            row = store.trainer(ref)  # the caller's own first: other owners may use the same name
        if row is None:
            raise HTTPException(404, f"there is no trainer {ref[:64]!r}")
        return row

    def show(row: TrainerRow, reasons: WaitReasons | None = None) -> dict[str, Any]:
        live = cluster.trainers.get(row.id)
        return views.trainer(row, live, time.time(), (reasons or WaitReasons(cluster)).of(live))

    def rows(caller: TokenRow, *, everything: bool) -> list[TrainerRow]:
        whose = None if caller.role == "admin" else caller.owner
        return store.trainers(ended_after=None if everything else time.time() - RECENT_S, brief=True, owner=whose)

    @app.get("/v1/health")
    async def health() -> dict[str, Any]:
        """Whether the controller is up."""
        return {"ok": not controller.failed.done(), "version": __version__}

    def status_of(caller: TokenRow) -> dict[str, Any]:
        """Return the status as a caller may see it."""
        now = time.time()
        whose = None if caller.role == "admin" else caller.owner
        reasons = WaitReasons(cluster)
        recent = store.trainers(ended_after=now - RECENT_S, brief=True, owner=whose)
        mine = [show(row, reasons) for row in recent]
        made = totals.of(whose, now - RECENT_S, mine)
        policy = controller.config.policy
        last, is_admin = cluster.last_decision, caller.role == "admin"
        return {
            "version": __version__,
            "now": now,
            "started": controller.began,
            "paused": cluster.paused,
            "dry_run": cluster.settings.dry_run,
            "pool": {**controller.pool.describe(), **views.pool(cluster)},
            "policy": {
                "allocator": policy.allocator,
                "decided_by": (last or {}).get("allocator") or policy.allocator,
                "objective": policy.objective,
                "horizon_s": policy.horizon_s,
                "max_parallel": policy.max_parallel,
            },
            "trainers": mine,
            "totals": {
                "samples": made["samples"],
                "node_seconds": cluster.pool_seconds(now),
                "used_node_seconds": made["node_seconds"],
                "rescales": made["rescales"],
                "decisions": cluster.decisions,
                "owner": whose,
            },
            "last_decision": last and {"time": last["time"], "reasons": last["reasons"] if is_admin else []},
        }

    @app.get("/v1/status")
    async def status(caller: Caller) -> dict[str, Any]:
        """The pool, the trainers and the last decision."""
        return status_of(caller)

    @app.get("/v1/trainers")
    async def trainers(
        caller: Caller,
        state: Annotated[str, Query(max_length=20)] = "",
        everything: Annotated[bool, Query(alias="all")] = False,
    ) -> dict[str, Any]:
        """Trainers that are not finished, and those that were within the last hour; with `all`, all."""
        reasons = WaitReasons(cluster)
        shown = [show(row, reasons) for row in rows(caller, everything=everything)]
        return {"trainers": [row for row in shown if not state or row["state"] == state]}

    @app.post("/v1/trainers", status_code=201)
    async def submit(caller: Caller, given: Annotated[Any, Body()]) -> dict[str, Any]:
        """Queue a trainer."""
        if controller.draining:
            raise HTTPException(409, "the controller is ending and takes no more trainers")
        spec = parse_spec(given)
        if spec.name is not None and cluster.is_taken(spec.name, caller.owner):
            raise HTTPException(409, f"there is a trainer {spec.name!r} already, and it is not finished")
        found = store.trainer(controller.submit(spec, caller.owner))
        assert found is not None
        return show(found)

    @app.get("/v1/trainers/{ref}")
    async def trainer(caller: Caller, ref: str) -> dict[str, Any]:
        """One trainer in detail."""
        row = find(ref, caller)
        lines, _ = controller.logbook(row.id).tail(20)
        tail = [f"{line.node} | {line.text}" for line in lines]
        live = cluster.trainers.get(row.id)
        output = row.spec.get("env", {}).get(protocol.OUTPUT) or str(
            StateLayout(controller.config.state, "").output(row.id)
        )
        return views.trainer_in_detail(row, live, time.time(), tail, WaitReasons(cluster).of(live), output)

    @app.post("/v1/trainers/{ref}/cancel")
    async def cancel(caller: Caller, ref: str) -> dict[str, Any]:
        """End a trainer; one that is finished stays as it is."""
        row = find(ref, caller)
        controller.cancel(row.id, caller.owner)
        return show(find(row.id, caller))

    @app.get("/v1/trainers/{ref}/logs")
    async def logs(
        caller: Caller,
        ref: str,
        offset: Annotated[int, Query(ge=0, le=1 << 60)] = 0,
        limit: Annotated[int, Query(ge=1, le=1 << 20)] = 1 << 18,
        tail: Annotated[int | None, Query(ge=0, le=100_000)] = None,
    ) -> dict[str, Any]:
        """What a trainer's workers printed, from a byte on or the last lines."""
        row = find(ref, caller)
        book = controller.logbook(row.id)
        lines, after = book.tail(tail) if tail is not None else book.read(offset, limit)
        finished = row.state in FINISHED and row.id not in cluster.trainers
        shown = [{"time": line.time, "worker": line.worker, "node": line.node, "text": line.text} for line in lines]
        return {"lines": shown, "offset": after, "finished": finished}

    @app.get("/v1/nodes")
    async def nodes(caller: Caller) -> dict[str, Any]:
        """The nodes that are here."""
        found = [views.node(view, cluster, time.time()) for view in cluster.nodes.values()]
        for row in found:
            if caller.role != "admin" and row["owner"] != caller.owner:
                row["trainer"] = row["owner"] = row["worker"] = None  # other owners must not see who uses the node
        return {"nodes": found}

    @app.get("/v1/events")
    async def events(
        caller: Caller,
        after: Annotated[int | None, Query(ge=0, le=1 << 60)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        trainer: Annotated[str, Query(max_length=64)] = "",
        kind: Annotated[str, Query(max_length=64)] = "",
    ) -> dict[str, Any]:
        """What happened."""
        if caller.role != "admin" and not trainer:
            raise HTTPException(403, "only an admin may see all events; name one of your trainers")
        about = find(trainer, caller).id if trainer else ""
        found = store.events(after=after, limit=limit, trainer=about, kind=kind)
        shown = [
            {"seq": e.seq, "time": e.time, "kind": e.kind, "trainer": e.trainer, "node": e.node, "data": e.data}
            for e in found
        ]
        return {"events": shown, "last": shown[-1]["seq"] if shown else after or 0}

    @app.get("/v1/me")
    async def me(caller: Caller) -> dict[str, Any]:
        """Who asks, what they may have and what they have."""
        cluster.rules.read()
        mine = owners.as_json(caller.owner, cluster, store.past_use(caller.owner), time.time())
        return {**mine, "role": caller.role, "token": caller.name}

    @app.get("/v1/owners")
    async def all_owners(caller: Admin) -> dict[str, Any]:
        """All who have trainers or of whom something was said, what they may have and what they have."""
        cluster.rules.read()
        past = store.past_use()
        names = {*past, *(row.owner for row in cluster.rules.rows), *(one.owner for one in cluster.trainers.values())}
        now = time.time()
        return {"owners": [owners.as_json(name, cluster, past, now) for name in sorted(names)]}

    @app.post("/v1/pause")
    async def pause(caller: Admin) -> dict[str, Any]:
        """Stop harvesting at once: all nodes are given back."""
        await controller.pause()
        return {"paused": True}

    @app.post("/v1/resume")
    async def resume(caller: Admin) -> dict[str, Any]:
        """Harvest again."""
        await controller.resume()
        return {"paused": False}

    @app.post("/v1/drain")
    async def drain(caller: Admin) -> dict[str, Any]:
        """Give all nodes back and end."""
        controller.draining = True
        return {"draining": True}

    @app.websocket(messages.PATH)
    async def agents(socket: WebSocket) -> None:
        token = bearer(socket.headers.get("authorization"))
        if not token or not hmac.compare_digest(token.encode(), secret.encode()):
            await socket.close(1008)  # closed before it is accepted: the agent receives 403
            return
        await socket.accept()
        try:
            await controller.serve_agent(_frames(socket), socket.send_text)
        except BFTrainerError as problem:  # the agent tries again
            _log.error("an agent cannot be served: %s", problem)
            await socket.close(1011)

    dashboard.add(app, controller, who, status_of, find)
    _add_errors(app)
    app.state.readiness = add_health(app, controller)
    app.add_middleware(RequestLimits, known=lambda token: bool(token) and store.check_token(token) is not None)
    return app


async def _frames(socket: WebSocket) -> AsyncIterator[str]:
    try:
        while True:
            yield await socket.receive_text()
    except (WebSocketDisconnect, KeyError, RuntimeError):
        return


def _add_errors(app: FastAPI) -> None:
    def answer(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
        headers = {**(headers or {}), **({"WWW-Authenticate": "Bearer"} if status == 401 else {})}
        # The message may quote the request, which may hold bytes that are no characters.
        said = message.encode(errors="backslashreplace").decode()
        return JSONResponse({"error": one_line(said)}, status, headers)

    @app.exception_handler(AnyHTTPException)
    async def refused(request: Request, problem: AnyHTTPException) -> JSONResponse:
        return answer(problem.status_code, str(problem.detail), problem.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, problem: RequestValidationError) -> JSONResponse:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part not in ("query", "path", "body"))
        return answer(422, f"{where or 'the request'}: {first['msg']}")

    @app.exception_handler(BFTrainerError)
    async def ours(request: Request, problem: BFTrainerError) -> JSONResponse:
        if isinstance(problem, DiskFullError):
            return answer(507, str(problem))
        if isinstance(problem, owners.QuotaError):
            return answer(409, str(problem))
        return answer(422 if isinstance(problem, InputError) else 503, str(problem))

    @app.exception_handler(Exception)
    async def bug(request: Request, problem: Exception) -> JSONResponse:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=problem)
        return answer(500, "the controller failed to answer; its log says why")
