"""Routes of the dashboard serve the page, its history data and a stream of the status.

The page consists of plain files (`bftrainer.dashboard`) without secrets. It requests all data with the viewer's token,
like every other client.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import FileResponse, Response, StreamingResponse

from bftrainer.cluster.history.history import LONGEST_S, SHORTEST_S, Asked, JsonBody, Viewer
from bftrainer.cluster.http.auth import Api, Caller, find_trainer, visible_owner
from bftrainer.cluster.http.limits import bearer
from bftrainer.dashboard import files
from bftrainer.dashboard.timeline import MOST_CELLS

router = APIRouter()

Seconds = Annotated[float, Query(ge=SHORTEST_S, le=LONGEST_S, allow_inf_nan=False)]
CellCount = Annotated[int, Query(ge=16, le=MOST_CELLS)]
End = Annotated[float | None, Query(ge=0, le=1e11, allow_inf_nan=False)]

# Plotly sets inline styles, and creates the pictures that it saves as `data:` and `blob:` URLs.
POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_NO_STORE = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """The page."""
    return _file(request, "index.html", "text/html; charset=utf-8")


@router.get("/static/{name}", include_in_schema=False)
async def static(request: Request, name: str) -> Response:
    """A file of the page."""
    if name == "plotly.min.js":
        path = files.plotly()
        if path is None:
            raise HTTPException(404, "plotly is not installed: pip install 'bftrainer[live]'")
        kept = {**HEADERS, "Cache-Control": "private, max-age=86400"}
        return FileResponse(path, media_type="text/javascript; charset=utf-8", headers=kept)
    if name not in files.STATIC:
        raise HTTPException(404, f"there is no file {name[:64]!r}")
    return _file(request, name, files.STATIC[name])


@router.get("/v1/history/pool")
async def pool(
    api: Api, request: Request, caller: Caller, seconds: Seconds = 3600.0, cells: CellCount = 600, end: End = None
) -> Response:
    """The pool's size and use over time: lowest, mean and highest in each of `cells` equal parts of the window."""
    return _json(request, await api.history.pool(Asked(seconds, cells, end), Viewer(visible_owner(caller))))


@router.get("/v1/history/nodes")
async def nodes(
    api: Api, request: Request, caller: Caller, seconds: Seconds = 3600.0, cells: CellCount = 600, end: End = None
) -> Response:
    """Who was on which node over time, as runs of cells: first cell, length, who (0: free) for each node."""
    return _json(request, await api.history.nodes(Asked(seconds, cells, end), Viewer(visible_owner(caller))))


@router.get("/v1/decisions")
async def decisions(
    api: Api,
    request: Request,
    caller: Caller,
    before: Annotated[int | None, Query(ge=0, le=1 << 60)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Response:
    """Decisions that changed something or followed a loss, newest first; to a user, of the user's own trainers."""
    return _json(request, await api.history.decisions(before, limit, Viewer(visible_owner(caller))))


@router.get("/v1/finished")
async def finished(
    api: Api,
    request: Request,
    caller: Caller,
    search: Annotated[str, Query(max_length=100)] = "",
    before: Annotated[int | None, Query(ge=0, le=1 << 60)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Response:
    """Finished trainers, newest first, with a text in name, id, group, owner or state; to a user, their own."""
    return _json(request, await api.history.finished(search, before, limit, Viewer(visible_owner(caller))))


@router.get("/v1/trainers/{ref}/history")
async def trainer_history(api: Api, request: Request, caller: Caller, ref: str) -> Response:
    """What a trainer reported over time, and its newest rescales with what they cost."""
    return _json(request, await api.history.trainer(find_trainer(api, ref, caller).id))


@router.get("/v1/insight")
async def insight(api: Api, caller: Caller) -> dict[str, Any]:
    """Efficiency of the last day against the bound, and samples lost; null until they are computed."""
    newest = api.insights.newest()
    if newest is not None and caller.role != "admin":
        newest = {**newest, "lost": None}
    return {"insight": newest}


@router.get("/v1/stream", include_in_schema=False)  # endless, so clients generated from the schema cannot use it
async def stream(api: Api, request: Request, caller: Caller) -> Response:
    """The status as server-sent events: at once, and then whenever it has changed, at most once a second."""
    if refusal := api.feed.refusal(caller.owner):
        raise HTTPException(503, refusal)
    token = bearer(request.headers.get("authorization"))
    lines = api.feed.events(caller, lambda: api.store.tokens.check(token) is not None, lambda: api.ending)
    return StreamingResponse(lines, media_type="text/event-stream", headers=_NO_STORE)


def _file(request: Request, name: str, kind: str) -> Response:
    body = files.read(name)
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    headers = {**HEADERS, "Cache-Control": "no-cache", "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=kind, headers=headers)


def _json(request: Request, answer: JsonBody) -> Response:
    if answer.packed is None or "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(answer.plain, media_type="application/json", headers=_NO_STORE)
    headers = {**_NO_STORE, "Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return Response(answer.packed, media_type="application/json", headers=headers)
