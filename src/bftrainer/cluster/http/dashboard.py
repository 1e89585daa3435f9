"""Dashboard routes serve the page, its history data and a stream of the status.

`app.build` calls `add` and passes functions that identify callers and build the status. The page consists of plain
files (`dashboard`) without secrets. It requests all data with the viewer's token, like every other client.
"""

# No `from __future__ import annotations`: FastAPI reads annotations that are local names.

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import FileResponse, Response, StreamingResponse

from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.history.history import LONGEST_S, SHORTEST_S, Asked, History, JsonBody, Viewer
from bftrainer.cluster.http.limits import bearer
from bftrainer.cluster.report.daily import DailyEfficiency
from bftrainer.cluster.store.json_columns import encoded
from bftrainer.cluster.store.rows import TokenRow, TrainerRow
from bftrainer.dashboard import files
from bftrainer.dashboard.timeline import MOST_CELLS

MOST_STREAMS, MOST_STREAMS_EACH = 200, 50
"""Limits of open streams: of all owners, and of one owner."""
STREAM_EVERY_S = 1.0
_BYTES_A_SECOND = 200_000
"""Limits the data rate: a long status is streamed less often."""
_QUIET_S = 15.0
_CHECK_S = 5.0
"""Seconds between two checks of a stream's token."""
_LOOK_S = 0.2
"""Seconds between two checks whether the controller is ending, because it does not wait long for a stream."""

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


def add(
    app: FastAPI,
    controller: Controller,
    who: Callable[..., Any],
    status_of: Callable[[TokenRow], dict[str, Any]],
    find: Callable[[str, TokenRow], TrainerRow],
) -> None:
    """Add the page and its routes to an application."""
    store = controller.cluster.store
    history = History(store.path)
    insights = DailyEfficiency(store.path, controller.config.policy)
    feed = _Feed(status_of)
    Caller = Annotated[TokenRow, Depends(who)]  # noqa: N806 - a type
    Seconds = Annotated[float, Query(ge=SHORTEST_S, le=LONGEST_S, allow_inf_nan=False)]  # noqa: N806
    CellCount = Annotated[int, Query(ge=16, le=MOST_CELLS)]  # noqa: N806
    End = Annotated[float | None, Query(ge=0, le=1e11, allow_inf_nan=False)]  # noqa: N806

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _file(request, "index.html", "text/html; charset=utf-8")

    @app.get("/static/{name}", include_in_schema=False)
    async def static(request: Request, name: str) -> Response:
        if name == "plotly.min.js":
            path = files.plotly()
            if path is None:
                raise HTTPException(404, "plotly is not installed: pip install 'bftrainer[live]'")
            kept = {**HEADERS, "Cache-Control": "private, max-age=86400"}
            return FileResponse(path, media_type="text/javascript; charset=utf-8", headers=kept)
        if name not in files.STATIC:
            raise HTTPException(404, f"there is no file {name[:64]!r}")
        return _file(request, name, files.STATIC[name])

    @app.get("/v1/history/pool")
    async def pool(
        request: Request, caller: Caller, seconds: Seconds = 3600.0, cells: CellCount = 600, end: End = None
    ) -> Response:
        """The pool's size and use over time: lowest, mean and highest in each of `cells` equal parts of the window."""
        return _json(request, await history.pool(Asked(seconds, cells, end), _viewer(caller)))

    @app.get("/v1/history/nodes")
    async def nodes(
        request: Request, caller: Caller, seconds: Seconds = 3600.0, cells: CellCount = 600, end: End = None
    ) -> Response:
        """Who was on which node over time, as runs of cells: first cell, length, who (0: free) for each node."""
        return _json(request, await history.nodes(Asked(seconds, cells, end), _viewer(caller)))

    @app.get("/v1/decisions")
    async def decisions(
        request: Request,
        caller: Caller,
        before: Annotated[int | None, Query(ge=0, le=1 << 60)] = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> Response:
        """Decisions that changed something or followed a loss, newest first; to a user, of the user's own trainers."""
        return _json(request, await history.decisions(before, limit, _viewer(caller)))

    @app.get("/v1/finished")
    async def finished(
        request: Request,
        caller: Caller,
        search: Annotated[str, Query(max_length=100)] = "",
        before: Annotated[int | None, Query(ge=0, le=1 << 60)] = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> Response:
        """Finished trainers, newest first, with a text in name, id, group, owner or state; to a user, their own."""
        return _json(request, await history.finished(search, before, limit, _viewer(caller)))

    @app.get("/v1/trainers/{ref}/history")
    async def trainer_history(request: Request, caller: Caller, ref: str) -> Response:
        """What a trainer reported over time, and its newest rescales with what they cost."""
        return _json(request, await history.trainer(find(ref, caller).id))

    @app.get("/v1/insight")
    async def insight(caller: Caller) -> dict[str, Any]:
        """Efficiency of the last day against the bound, and samples lost; null until they are worked out."""
        found = insights.newest()
        if found is not None and caller.role != "admin":
            found = {**found, "lost": None}
        return {"insight": found}

    @app.get("/v1/stream", include_in_schema=False)  # endless, so clients generated from the schema cannot use it
    async def stream(request: Request, caller: Caller) -> Response:
        """The status as server-sent events: at once, and then whenever it has changed, at most once a second."""
        if feed.open[caller.owner] >= MOST_STREAMS_EACH:
            raise HTTPException(503, f"{MOST_STREAMS_EACH} of your pages are open already; close some")
        if feed.open.total() >= MOST_STREAMS:
            raise HTTPException(503, f"{MOST_STREAMS} pages are open already; try again when others have closed theirs")

        def good() -> bool:
            return store.tokens.check(bearer(request.headers.get("authorization"))) is not None

        def ending() -> bool:
            return controller.draining or getattr(app.state, "ending", False)

        return StreamingResponse(feed.events(caller, good, ending), media_type="text/event-stream", headers=_NO_STORE)


class _Feed:
    """Status streams of all viewers. The status is built once a second for each owner and role."""

    def __init__(self, status_of: Callable[[TokenRow], dict[str, Any]]) -> None:
        self.open: Counter[str] = Counter()
        """Number of open streams by owner."""
        self._status_of = status_of
        self._made: dict[tuple[str, str], tuple[float, str, str]] = {}

    async def events(
        self, caller: TokenRow, good: Callable[[], bool], ending: Callable[[], bool]
    ) -> AsyncGenerator[str, None]:
        """Yield the lines of a stream until the token is revoked, the reader disconnects or `ending` is true."""
        self.open[caller.owner] += 1
        try:
            sent, quiet_since = "", time.monotonic()
            checked = time.monotonic()
            while not ending():
                text, what = self._text(caller)
                if what != sent:
                    sent, quiet_since = what, time.monotonic()
                    yield f"event: status\ndata: {text}\n\n"
                elif time.monotonic() - quiet_since > _QUIET_S:
                    quiet_since = time.monotonic()
                    yield ": nothing new\n\n"
                following = time.monotonic() + max(STREAM_EVERY_S, len(text) / _BYTES_A_SECOND)
                while not ending() and (left := following - time.monotonic()) > 0:
                    await asyncio.sleep(min(left, _LOOK_S))
                if time.monotonic() - checked > _CHECK_S:
                    checked = time.monotonic()
                    if not good():
                        return
        finally:
            self.open -= Counter([caller.owner])  # this also drops entries that reach 0

    def _text(self, caller: TokenRow) -> tuple[str, str]:
        """Return the status as JSON, and the same without the time, to detect changes."""
        key = (caller.owner, caller.role)
        now = time.monotonic()
        made = self._made.get(key)
        if made is None or now - made[0] >= 0.9 * STREAM_EVERY_S:
            status = self._status_of(caller)
            text = encoded(status)
            made = now, text, encoded({**status, "now": None})
            self._made = {k: m for k, m in self._made.items() if now - m[0] < 10}
            self._made[key] = made
        return made[1], made[2]


def _viewer(caller: TokenRow) -> Viewer:
    return Viewer(None if caller.role == "admin" else caller.owner)


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
