"""A controller's HTTP API without a controller: the same paths and answers, and a state that tests may change."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from bftrainer.cluster.spec.names import default_name
from bftrainer.cluster.spec.trainer import parse_spec
from bftrainer.errors import InputError

TOKEN = "bft_right"
NOW = 1_800_000_000.0
FINISHED = ("done", "failed", "cancelled")


@dataclass
class FakeState:
    """State of the fake API. `on_ask` is called before every answer, so that time can be made to pass."""

    trainers: dict[str, dict[str, Any]] = field(default_factory=dict)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    logs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    specs: list[dict[str, Any]] = field(default_factory=list)
    paused: bool = False
    problem: str = ""
    max_trainers: int | None = None
    points: list[dict[str, Any]] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    pool: dict[str, int] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)
    """What the controller knows of output folders: `host`, `folder`, `exists`, `files`, `complete`, `problem`."""
    trials: list[dict[str, Any]] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)
    """What was learned of scripts, in detail."""
    compared: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Group, metric and direction of each comparison that was asked for."""
    asked: list[str] = field(default_factory=list)
    on_ask: Callable[[str], None] = lambda path: None
    refuse: tuple[int, str] | None = None
    unknown: tuple[str, ...] = ()
    """Keys of a spec that this controller is too old to know."""

    def add(self, **columns: Any) -> dict[str, Any]:
        number = len(self.trainers) + 1
        row = {
            **{"id": f"t{number}", "name": f"job{number}", "owner": "alice", "state": "queued", "reason": ""},
            **{"script": "/home/alice/train.py", "launcher": "elastic", "min_nodes": 1, "max_nodes": 8, "weight": 1.0},
            **{"submitted": NOW, "started": None, "ended": None, "nodes": [], "samples": 0, "total": None},
            **{"progress": None, "rate": 0, "eta_s": None, "metrics": {}, "epoch": 0, "step": 0, "rescales": 0},
            **{"preemptions": 0, "failures": 0, "samples_redone": 0, "node_seconds": 0.0},
            **columns,
        }
        self.trainers[row["id"]] = row
        return row

    def log(self, trainer: str, worker: str, text: str) -> None:
        lines = self.logs.setdefault(trainer, [])
        lines.append({"time": NOW, "worker": worker, "node": "node-1", "text": text})

    def event(self, kind: str, *, trainer: str = "", node: str = "", **data: Any) -> None:
        row = {"seq": len(self.events) + 1, "time": NOW, "kind": kind, "trainer": trainer, "node": node, "data": data}
        self.events.append(row)

    def find(self, ref: str) -> dict[str, Any]:
        for row in reversed(self.trainers.values()):
            if ref in (row["id"], row["name"]):
                return row
        raise AnswerError(404, f"no trainer is called {ref!r}")


class AnswerError(Exception):
    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status, self.error = status, error


def make_app(fake: FakeState) -> FastAPI:
    app = FastAPI()

    @app.exception_handler(AnswerError)
    def _problem(request: Request, problem: AnswerError) -> JSONResponse:
        return JSONResponse({"error": problem.error}, problem.status)

    @app.middleware("http")
    async def _guard(request: Request, call_next: Any) -> Any:
        path = request.url.path
        if path != "/v1/health" and request.headers.get("authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"error": "wrong token"}, 401)
        fake.asked.append(path)
        fake.on_ask(path)
        if fake.refuse is not None:
            return JSONResponse({"error": fake.refuse[1]}, fake.refuse[0])
        return await call_next(request)

    @app.get("/v1/health")
    def health() -> Any:
        return {"ok": True, "version": "0.1.0"}

    @app.get("/v1/me")
    def me() -> Any:
        unfinished = sum(row["state"] not in ("done", "failed", "cancelled") for row in fake.trainers.values())
        return {"owner": "alice", "limits": {"max_trainers": fake.max_trainers}, "use": {"trainers": unfinished}}

    @app.get("/v1/status")
    def status() -> Any:
        decisions = [e for e in fake.events if e["kind"] == "decision"]
        used = sum(1 for node in fake.nodes if node["trainer"])
        return {
            **{"version": "0.1.0", "now": NOW + 60, "started": NOW, "paused": fake.paused, "dry_run": False},
            "pool": {"kind": "local", "size": len(fake.nodes), "used": used, "problem": fake.problem, **fake.pool},
            "policy": {
                "allocator": "exact",
                "objective": "weighted-efficiency",
                "horizon_s": 120.0,
                "max_parallel": 10,
            },
            "trainers": [row for row in fake.trainers.values() if not row.get("old")],
            "totals": {
                **{"samples": 123456, "node_seconds": 7200.0, "used_node_seconds": 6500.0},
                **{"rescales": 12, "decisions": len(decisions), **fake.totals},
            },
            "last_decision": {"time": NOW + 50, "reasons": decisions[-1]["data"]["reasons"]} if decisions else None,
        }

    @app.get("/v1/trainers")
    def trainers(state: str = "", all: bool = False) -> Any:  # noqa: A002
        rows = [row for row in fake.trainers.values() if not state or row["state"] == state]
        return {"trainers": rows if all else [row for row in rows if not row.get("old")]}

    @app.post("/v1/trainers", status_code=201)
    async def submit(request: Request) -> Any:
        body = await request.json()
        if unknown := [key for key in fake.unknown if key in body]:
            return JSONResponse({"error": f"unknown key {unknown[0]!r}"}, 422)
        try:
            spec = parse_spec(body)
        except InputError as problem:
            raise AnswerError(422, str(problem)) from None
        name = spec.name or default_name(spec.script)
        mine = [row for row in fake.trainers.values() if row["owner"] == "alice"]
        if any(row["name"] == name and row["state"] not in FINISHED for row in mine):
            raise AnswerError(409, f"there is a trainer called {name!r} already")
        fake.specs.append(body)
        return fake.add(name=name, script=spec.script, min_nodes=spec.min_nodes, max_nodes=spec.max_nodes)

    @app.get("/v1/trainers/{ref}")
    def trainer(ref: str) -> Any:
        row = fake.find(ref)
        return {
            "spec": {}, "curve": {"nodes": [], "rates": [], "measured": {}, "prior": None}, "up_s": 1.0, "down_s": 1.0,
            "pauses": {"count": 0}, "workers": [], "error": "", "traceback": "", "log_tail": [], **row,
        }  # fmt: skip

    @app.get("/v1/trainers/{ref}/history")
    def history(ref: str) -> Any:
        fake.find(ref)
        return {"points": fake.points, "rescales": []}

    @app.get("/v1/trainers/{ref}/results")
    def results(ref: str) -> Any:
        row = fake.find(ref)
        keys = ("id", "name", "state", "reason", "started", "ended", "epoch", "step", "samples", "metrics")
        folder = {"host": "elsewhere", "folder": "/nowhere/output", "exists": False, "files": [], "complete": True}
        known = {**{key: row[key] for key in keys}, "metrics_at": row.get("metrics_at", {}), "problem": ""}
        return {**known, **folder, **fake.output}

    @app.get("/v1/groups/{group}/best")
    def best(group: str, by: str, direction: str | None = None, limit: int | None = None) -> Any:
        fake.compared.append((group, by, direction))
        rows = fake.trials[:limit]
        found = {"group": group, "by": by, "direction": direction, "metrics": [by], "count": len(fake.trials)}
        return {**found, "trainers": rows}

    @app.get("/v1/curves")
    def curves() -> Any:
        return {"curves": [{key: row[key] for key in row if key not in ("noise", "curve")} for row in fake.curves]}

    @app.get("/v1/curves/{curve}")
    def curve(curve: str) -> Any:
        return next(row for row in fake.curves if row["id"] == curve)

    @app.delete("/v1/curves/{curve}")
    def forget_curve(curve: str) -> Any:
        return fake.curves.pop(next(place for place, row in enumerate(fake.curves) if row["id"] == curve))

    @app.post("/v1/eta")
    async def eta(request: Request) -> dict[str, Any]:
        eta = dict.fromkeys(("point", "low", "high", "deadline", "likely")) | {"why": "", "basis": "", "futures": 0}
        return {"eta": eta, "trainers": {"asked": await request.json()}}

    @app.post("/v1/trainers/{ref}/cancel")
    def cancel(ref: str) -> Any:
        row = fake.find(ref)
        if row["state"] not in FINISHED:
            row["state"] = "cancelled"
        return row

    @app.get("/v1/trainers/{ref}/logs")
    def logs(ref: str, offset: int = 0, limit: int = 1 << 20, tail: int | None = None) -> Any:
        row = fake.find(ref)
        lines = fake.logs.get(row["id"], [])
        # An offset here is a count of lines, and pages are short: all that a client may rely on.
        first = max(0, len(lines) - tail) if tail is not None else offset
        page = lines[first:] if tail is not None else lines[first : first + 3]
        return {"lines": page, "offset": first + len(page), "finished": row["state"] in FINISHED}

    @app.get("/v1/nodes")
    def nodes() -> Any:
        return {"nodes": fake.nodes}

    @app.get("/v1/events")
    def events(after: int | None = None, limit: int = 100, trainer: str = "", kind: str = "") -> Any:
        if limit > 1000:
            raise AnswerError(422, "limit must be at most 1000")
        rows = [e for e in fake.events if (not trainer or e["trainer"] == trainer) and (not kind or e["kind"] == kind)]
        rows = rows[-limit:] if after is None else [e for e in rows if e["seq"] > after][:limit]
        return {"events": rows, "last": len(fake.events)}

    @app.post("/v1/pause")
    def pause() -> Any:
        fake.paused = True
        return {"paused": True}

    @app.post("/v1/resume")
    def resume() -> Any:
        fake.paused = False
        return {"paused": False}

    return app


@contextmanager
def serving(app: Any, port: int = 0) -> Iterator[str]:
    """The app on a loopback port, in a thread; its URL."""
    sock = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert server.started
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        sock.close()
