"""The HTTP API, version 1, serves users and their programs and accepts agents.

`build` makes the web application of a controller: one router per resource, the limits of requests, and the form of
errors. Routes identify the caller (`auth`), let pydantic and the controller check the request, and return the
controller's answer as JSON. Errors are `{"error": "one line"}`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from bftrainer import __version__
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.controller.owners import QuotaError
from bftrainer.cluster.eta.service import NoPredictionError
from bftrainer.cluster.http import agents, dashboard, health, owners, pool, prune, results, trainers
from bftrainer.cluster.http.auth import token_refusal
from bftrainer.cluster.http.limits import RequestLimits
from bftrainer.cluster.http.prometheus import Counted
from bftrainer.cluster.http.state import ApiState
from bftrainer.cluster.store.database import DiskFullError
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.text import one_line

ROUTERS = (
    trainers.router,
    results.router,
    prune.router,
    pool.router,
    owners.router,
    agents.router,
    dashboard.router,
    health.router,
)

_log = logging.getLogger(__name__)


def build(controller: Controller, secret: str) -> FastAPI:
    """Return the web application of a controller; agents join with `secret`. Its `state.api` is an `ApiState`."""
    app = FastAPI(title="BFTrainer", version=__version__, docs_url=None, redoc_url=None, openapi_url="/v1/openapi.json")
    api = app.state.api = ApiState(controller, secret)
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(BFTrainerError, _failed)
    app.add_exception_handler(Exception, _crashed)
    app.add_middleware(Counted, metrics=api.metrics)
    app.add_middleware(RequestLimits, refusal=partial(token_refusal, api))
    return app


def _answer(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    headers = {**(headers or {}), **({"WWW-Authenticate": "Bearer"} if status == 401 else {})}
    # The message may quote the request, which may hold bytes that are no characters.
    text = message.encode(errors="backslashreplace").decode()
    return JSONResponse({"error": one_line(text)}, status, headers)


async def _refused(request: Request, problem: Exception) -> JSONResponse:
    assert isinstance(problem, HTTPException)
    return _answer(problem.status_code, str(problem.detail), problem.headers)


async def _invalid(request: Request, problem: Exception) -> JSONResponse:
    assert isinstance(problem, RequestValidationError)
    first = problem.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("query", "path", "body"))
    return _answer(422, f"{where or 'the request'}: {first['msg']}")


async def _failed(request: Request, problem: Exception) -> JSONResponse:
    if isinstance(problem, DiskFullError):
        return _answer(507, str(problem))
    if isinstance(problem, QuotaError | NoPredictionError):
        return _answer(409, str(problem))
    return _answer(422 if isinstance(problem, InputError) else 503, str(problem))


async def _crashed(request: Request, problem: Exception) -> JSONResponse:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=problem)
    return _answer(500, "the controller failed to answer; its log says why")
