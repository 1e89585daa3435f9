"""Operator endpoints report health and figures: `/healthz`, `/readyz` and `/metrics`.

`/healthz` tells whether the process works; if not, restart it. `/readyz` tells whether the controller can do its work:
the store accepts writes and the pool answers. Neither needs a token; without one, a caller learns only one word per
check.
"""

# No `from __future__ import annotations`: FastAPI reads annotations that are local names.

import time
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from bftrainer import __version__
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.http.prometheus import CONTENT_TYPE, Counted, PrometheusMetrics
from bftrainer.cluster.store.rows import TokenRow
from bftrainer.errors import BFTrainerError

CHECK_EVERY_S = 1.0
"""Shortest time between two test writes to the store, however many requests arrive."""
_PROBE = "operations.probe"


class Readiness:
    """Checks whether a controller can do its work; store and pool at most once per `CHECK_EVERY_S`."""

    def __init__(self, controller: Controller) -> None:
        self.opened = False
        """True once the pool is open and the controller listens to agents."""
        self._controller = controller
        self._looked_at = -CHECK_EVERY_S
        self._found: dict[str, str] = {}

    def look(self) -> dict[str, str]:
        """Return the problem found by each check; an empty text means none."""
        now = time.monotonic()
        if now - self._looked_at >= CHECK_EVERY_S:
            self._looked_at = now
            self._found = {"store": self._store(), "pool": self._pool()}
        return {"controller": self._itself(), **self._found}

    def _itself(self) -> str:
        if self._controller.failed.done():
            return "it has failed and is ending"
        if self._controller.draining:
            return "it is ending"
        return "" if self.opened else "it is starting"

    def _store(self) -> str:
        store = self._controller.cluster.store
        try:
            store.keep(_PROBE, time.time())
        except BFTrainerError as problem:
            return str(problem)
        return ""

    def _pool(self) -> str:
        if not self.opened:
            return "it is not open yet"
        try:
            return str(self._controller.pool.describe().get("problem") or "")
        except Exception as problem:  # a pool may be a user's class and raise anything
            return f"{type(problem).__name__}: {problem}"


def add(app: FastAPI, controller: Controller) -> Readiness:
    """Add the three endpoints to the API, and count the responses of the API."""
    metrics, readiness = PrometheusMetrics(controller), Readiness(controller)
    store, settings = controller.cluster.store, controller.config.api

    def caller(request: Request) -> TokenRow | None:
        kind, _, token = (request.headers.get("authorization") or "").partition(" ")
        return store.tokens.check(token.strip(), time.time()) if kind.lower() == "bearer" and token.strip() else None

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        """Whether the controller works: 200, or 503 when it is ending because of an error."""
        failed = controller.failed.done()
        return JSONResponse({"ok": not failed, "version": __version__}, 503 if failed else 200)

    @app.get("/readyz")
    async def readyz(request: Request) -> JSONResponse:
        """Whether it can do what it is for: 200 or 503; why not is for those with a token."""
        found = readiness.look()
        known = any(found.values()) and caller(request) is not None
        checks = {what: "ok" if not why else why if known else "failed" for what, why in found.items()}
        ready = not any(found.values())
        return JSONResponse({"ready": ready, "checks": checks}, 200 if ready else 503)

    @app.get("/metrics")
    async def figures(request: Request) -> Response:
        """Figures for Prometheus. Admins and monitors see all trainers and owners, a user their own."""
        who: Any = caller(request)
        if who is None and not (settings.open_metrics and "authorization" not in request.headers):
            raise HTTPException(401, "the token is missing, wrong or revoked; or set api.open_metrics")

        def may_see(owner: str) -> bool:
            return who is not None and (who.role in ("admin", "monitor") or who.owner == owner)

        return Response(await metrics.text(may_see), media_type=CONTENT_TYPE)

    app.add_middleware(Counted, metrics=metrics)
    return readiness
