"""A controller of cardboard: it serves the page's own files and answers with what a test wrote down.

For tests of what the page makes of an answer. Whether a controller answers so is for `test_history.py`, and both
together for `test_browser.py`.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from bftrainer.cluster.http import dashboard
from bftrainer.dashboard import files

TOKEN = "bft_" + "x" * 40
NOW = 1_760_000_000.0


def trainer(number: int = 1, name: str = "digits", **more: Any) -> dict[str, Any]:
    """A trainer as the API tells of one."""
    row: dict[str, Any] = {
        "id": f"t{number}", "name": name, "owner": "ann", "group": "", "params": {}, "state": "running", "reason": "",
        "script": "/train.py", "launcher": "elastic", "min_nodes": 1, "max_nodes": 4, "weight": 1.0,
        "submitted": NOW - 600, "started": NOW - 590, "ended": None, "nodes": ["n1"], "samples": 1000, "total": 9000,
        "progress": 0.1, "rate": 10.0, "eta_s": 800.0, "metrics": {}, "epoch": 1, "step": 7, "rescales": 2,
        "preemptions": 1, "failures": 0, "samples_redone": 0, "node_seconds": 600.0, "gpu_seconds": 0.0, "ranks": 1,
    }  # fmt: skip
    return row | more


def in_detail(row: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The same with all there is to know of it."""
    curve = {"nodes": [0, 1, 4], "rates": [0.0, 10.0, 30.0], "measured": {"1": 10.0}, "prior": None}
    pauses = {"count": 0, "median_s": None, "form_s": None, "sync_s": None}
    rest = {"spec": {}, "curve": curve, "up_s": 1.0, "down_s": 1.0, "pauses": pauses, "workers": [], "log_tail": []}
    return {**row, **rest, "error": "", "traceback": "", **more}


def status(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What the stream says."""
    found: dict[str, Any] = {
        "version": "0", "now": NOW, "started": NOW - 7200, "paused": False, "dry_run": False,
        "pool": {"kind": "local", "size": 2, "used": 1, "gpus": 0, "used_gpus": 0},
        "policy": {"allocator": "exact", "decided_by": "exact", "objective": "throughput", "horizon_s": 120.0,
                   "max_parallel": 10},
        "trainers": list(rows),
        "totals": {"samples": 1000, "node_seconds": 7200.0, "used_node_seconds": 3600.0, "gpu_seconds": 0.0,
                   "used_gpu_seconds": 0.0, "rescales": 2, "decisions": 3},
        "last_decision": None,
    }  # fmt: skip
    return found | more


def window(start: float, end: float, cells: int = 60) -> dict[str, dict[str, Any]]:
    """Two nodes in a window, one of them in use: the answers of both routes."""
    span = {"start": start, "end": end, "cells": cells}

    def line(value: float) -> dict[str, list[float]]:
        return {key: [value] * cells for key in ("low", "mean", "high")}

    hours = (end - start) / 3600
    pool = {**span, "pool": line(2), "used": line(1), "node_hours": 2 * hours, "used_node_hours": hours}
    nodes = {**span, "nodes": ["n1", "n2"], "of_nodes": 2, "runs": [[0, cells, 1], [0, cells, 0]]}
    nodes["who"] = [{"id": "t1", "name": "digits", "place": 1}]
    return {
        "pool": {**pool, "preemptions": 1, "rescales": 2},
        "nodes": {**nodes, "taken": [], "taken_every": 1, "preemptions": [[5, 1]], "rescales": [[7, 2]]},
    }


def node(name: str, gpus: int = 0, **more: Any) -> dict[str, Any]:
    """A node as the API tells of one. Its trainer has a rank on each of its GPUs, which are half busy."""
    kind = {"kind": "cuda", "name": "NVIDIA A100", "memory_mb": 81920, "percent": 50, "used_mb": 20480}
    row: dict[str, Any] = {
        "node": name, "host": name, "state": "assigned", "trainer": "digits", "owner": "ann", "worker": "t1-1",
        "since": NOW - 600, "agent_pid": 7, "heard_s": 0.5, "gpus": [{"id": str(i), **kind} for i in range(gpus)],
        "slots": gpus or 1, "ranks": [{"pid": 100 + i, "device": str(i) if gpus else ""} for i in range(gpus or 1)],
    }  # fmt: skip
    return row | more


class Stage:
    """The server. `answers` has a value by path, or what makes one of the query; a pair is a status and a value."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, Any] = {}
        self.told = threading.Condition()
        self._status: dict[str, Any] | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.reset()

    def reset(self) -> None:
        """Nothing of the last test."""
        self.asked.clear()
        self.answers = {
            "/v1/history/pool": lambda query: _asked(query)["pool"],
            "/v1/history/nodes": lambda query: _asked(query)["nodes"],
            "/v1/decisions": {"decisions": [], "before": None},
            "/v1/insight": {"insight": None},
            "/v1/nodes": {"nodes": []},
        }
        self.tell(status())

    def tell(self, found: dict[str, Any] | None) -> None:
        """What the stream says from now on; None: it ends, and there is no other."""
        with self.told:
            self._status = found
            self.told.notify_all()

    def show(self, row: dict[str, Any], points: list[dict[str, Any]] | None = None, **more: Any) -> None:
        """There is one trainer, with these details."""
        self.tell(status(row))
        self.answers[f"/v1/trainers/{row['id']}"] = in_detail(row, **more)
        self.answers[f"/v1/trainers/{row['id']}/history"] = {"points": points or [], "rescales": []}

    def __enter__(self) -> Stage:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.tell(None)
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stage = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                asked = urlsplit(self.path)
                stage.asked.append(self.path)
                if asked.path == "/v1/stream":
                    self._stream()
                elif asked.path in stage.answers:
                    answer = stage.answers[asked.path]
                    if callable(answer):
                        answer = answer({key: values[0] for key, values in parse_qs(asked.query).items()})
                    code, value = answer if isinstance(answer, tuple) else (200, answer)
                    self._send(json.dumps(value).encode(), "application/json", code)
                elif asked.path == "/v1/status":
                    self._send(b"{}", "application/json")
                elif asked.path == "/":
                    self._send(files.read("index.html"), "text/html; charset=utf-8")
                elif asked.path == "/static/plotly.min.js":
                    self._send((files.plotly() or files.STATIC).read_bytes(), "text/javascript")  # type: ignore[union-attr]
                elif (name := asked.path.removeprefix("/static/")) in files.STATIC:
                    self._send(files.read(name), files.STATIC[name])
                else:
                    self._send(b'{"error": "there is no such thing"}', "application/json", 404)

            def _send(self, body: bytes, kind: str, code: int = 200) -> None:
                self.send_response(code)
                for key, value in {**dashboard.HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(body)

            def _stream(self) -> None:
                if stage._status is None:
                    self._send(b'{"error": "the controller is ending"}', "application/json", 503)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                said = None
                with stage.told:
                    while (now := stage._status) is not None:
                        if now is not said:
                            self.wfile.write(f"event: status\ndata: {json.dumps(now)}\n\n".encode())
                            self.wfile.flush()
                            said = now
                        stage.told.wait(5)

        return Handler


def _asked(query: dict[str, str]) -> dict[str, dict[str, Any]]:
    end = float(query.get("end", NOW))
    return window(end - float(query["seconds"]), end)
