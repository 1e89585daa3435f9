"""Routes of operators report health and figures: `/v1/health`, `/healthz`, `/readyz` and `/metrics`.

`/healthz` tells whether the process works; if not, restart it. `/readyz` tells whether the controller can do its work:
the store accepts writes and the pool answers. Neither needs a token; without one, a caller learns only one word per
check.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from bftrainer import __version__
from bftrainer.cluster.http.auth import Api, token_row
from bftrainer.cluster.http.limits import bearer
from bftrainer.cluster.http.prometheus import CONTENT_TYPE

router = APIRouter()


@router.get("/v1/health")
async def health(api: Api) -> dict[str, Any]:
    """Whether the controller is up."""
    return {"ok": not api.controller.failed.done(), "version": __version__}


@router.get("/healthz")
async def healthz(api: Api) -> JSONResponse:
    """Whether the controller works: 200, or 503 when it is ending because of an error."""
    failed = api.controller.failed.done()
    return JSONResponse({"ok": not failed, "version": __version__}, 503 if failed else 200)


@router.get("/readyz")
async def readyz(api: Api, request: Request) -> JSONResponse:
    """Whether the controller can do its work: 200 or 503. Callers with a token also get the reasons."""
    problems = api.readiness.problems()
    ready = not any(problems.values())
    explain = not ready and await token_row(request, api) is not None
    checks = {name: "ok" if not problem else problem if explain else "failed" for name, problem in problems.items()}
    return JSONResponse({"ready": ready, "checks": checks}, 200 if ready else 503)


@router.get("/metrics")
async def figures(api: Api, request: Request) -> Response:
    """Figures for Prometheus. Admins and monitors see all trainers and owners, a user their own."""
    token = await token_row(request, api)
    open_to_all = api.controller.config.api.open_metrics and "authorization" not in request.headers
    if token is None and not open_to_all:
        expired = api.store.tokens.why_refused(bearer(request.headers.get("authorization")))
        raise HTTPException(401, expired or "the token is missing, wrong or revoked (or set api.open_metrics)")

    def may_see(owner: str) -> bool:
        return token is not None and (token.role in ("admin", "monitor") or token.owner == owner)

    return Response(await api.metrics.text(may_see, with_nodes=not open_to_all), media_type=CONTENT_TYPE)
