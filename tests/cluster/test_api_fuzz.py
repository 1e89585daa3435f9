"""The API under thousands of generated requests: never a failure, and never anything of another user's.

Cases come from the API's own description by schemathesis, also of routes that other modules add. Each is asked by an
admin, by a user and by nobody.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bftrainer.cluster.config.keys import Config, Server
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.controller.output.logbook import Logbook
from bftrainer.cluster.http.app import build
from bftrainer.cluster.store.rows import OwnerRow
from support.cluster.api import SECRET, SPEC, NoPool
from support.cluster.bench import Bench
from support.examples import examples

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports is nobody's fault here
    import schemathesis
    from schemathesis import GenerationMode

CASES = examples(2000, 400)
"""Each is asked three times."""
CANARY = "canary-of-another-user"
HIDDEN = "canary-in-the-environment"
STREAMS = ("/v1/stream",)


ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.lists(st.text(max_size=5))
)
SPECS = st.fixed_dictionaries(
    {"script": st.just("/train.py") | st.text(max_size=20)},
    optional={
        "nodes": st.sampled_from(["1-4", 2, "8-1"]) | ANYTHING,
        "name": st.sampled_from(["a", "mine", "t1", "<b>"]) | ANYTHING,
        "env": st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2) | ANYTHING,
        **dict.fromkeys(("args", "weight", "cwd", "launcher", "curve", "up_s", "work", "max_restarts"), ANYTHING),
    },
)
"""Descriptions of trainers that are nearly right, where the API's own description says only that there is a body."""


class Asked:
    """An application, asked directly: whatever a path or a header holds gets there as it is."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def ask(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], str]:
        """Status, headers and text of an answer; of one that never ends, the first piece."""
        path, _, query = target.partition("?")
        scope = {
            **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": ""},
            **{"method": method, "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode()},
            "headers": [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()],
            **{"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)},
        }
        sent: list[dict[str, Any]] = []
        enough, given = asyncio.Event(), False

        async def receive() -> dict[str, Any]:
            nonlocal given
            if given:
                await enough.wait()
                return {"type": "http.disconnect"}
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if message["type"] == "http.response.body" and (path in STREAMS or not message.get("more_body")):
                enough.set()

        running = asyncio.create_task(self._app(scope, receive, send))
        waiting = asyncio.create_task(enough.wait())
        await asyncio.wait({running, waiting}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert sent, f"{method} {target[:200]} was not answered"
        found = {name.decode().lower(): value.decode("latin-1") for name, value in sent[0]["headers"]}
        text = b"".join(message.get("body", b"") for message in sent[1:])
        return sent[0]["status"], found, text.decode(errors="replace")


@pytest.mark.waits
def test_generated_requests_never_fail_and_never_show_what_is_anothers(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    try:
        with asyncio.Runner() as runner:  # which ends what a request has started
            _fuzz(runner.get_loop(), bench, tmp_path)
    finally:
        bench.store.close()


def _fuzz(loop: asyncio.AbstractEventLoop, bench: Bench, folder: Path) -> None:
    tokens = {
        name: bench.store.tokens.create(name=name, owner=name, role=role, time=1.0)
        for name, role in (("victim", "user"), ("bob", "user"), ("root", "admin"))
    }
    for owner in ("bob", "root"):
        bench.store.put_owner(OwnerRow(owner, max_trainers=5))

    async def begin() -> tuple[Controller, Asked]:
        config = dataclasses.replace(Config(), server=Server(state=folder))
        controller = Controller(bench.cluster, NoPool(), config, lambda name: Logbook(folder / name, 1 << 20), {})
        return controller, Asked(build(controller, SECRET))

    controller, app = loop.run_until_complete(begin())

    def ask(who: str, method: str, target: str, headers: dict[str, str] | None = None, body: bytes = b"") -> Any:
        mine = {"Authorization": f"Bearer {tokens[who]}"} if who else {}
        return loop.run_until_complete(app.ask(method, target, {**(headers or {}), **mine}, body))

    theirs = {"script": f"/{CANARY}.py", "args": [CANARY], "env": {"A": HIDDEN}, "model": CANARY, "cwd": f"/{CANARY}"}
    for who, spec in (("victim", {**SPEC, **theirs, "name": CANARY}), ("bob", {**SPEC, "name": "mine"})):
        body = json.dumps(spec).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        assert ask(who, "POST", "/v1/trainers", headers, body)[0] == 201
    bench.join("n1", "n2", "n3")
    bench.report("t1", step=1, samples=10, metrics={CANARY: 1.0})
    text = f"{CANARY}\n"
    Logbook(folder / "t1", 1 << 20).append(1.0, "t1-1", "n1", 0, text, len(text))
    assert CANARY in ask("victim", "GET", "/v1/trainers/t1")[2]

    described = json.loads(ask("", "GET", "/v1/openapi.json")[2])
    schema = schemathesis.openapi.from_dict(described)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {"/v1/trainers", "/v1/me", "/v1/events"} <= {operation.path for operation in operations}
    statuses: Counter[int] = Counter()
    paths: Counter[str] = Counter()
    refs = st.sampled_from(["t1", "t2", "mine", CANARY, "..%2Ft1", "t1%00"])

    @settings(max_examples=CASES, suppress_health_check=list(HealthCheck), database=None)
    @given(st.data())
    def case(data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(operations))
        wrong = len(operation.query) > 0 and data.draw(st.booleans())  # without a query there is nothing to get wrong
        mode = GenerationMode.NEGATIVE if wrong else GenerationMode.POSITIVE
        drawn = data.draw(operation.as_strategy(generation_mode=mode))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kwargs = drawn.as_transport_kwargs(base_url="http://127.0.0.1")
            kwargs["url"] = kwargs["url"].replace("{ref}", "t1")
            prepared = requests.Request(**{k: v for k, v in kwargs.items() if k != "allow_redirects"}).prepare()
        at = urlsplit(str(prepared.url))
        path = at.path
        if "{ref}" in operation.path and data.draw(st.booleans()):
            path = operation.path.replace("{ref}", data.draw(refs))
        target = path + (f"?{at.query}" if at.query else "")
        body = prepared.body.encode(errors="replace") if isinstance(prepared.body, str) else prepared.body or b""
        if body and data.draw(st.booleans()):
            body = json.dumps(data.draw(SPECS)).encode()
        headers = {k: v if isinstance(v, str) else v.decode("latin-1") for k, v in prepared.headers.items()}
        headers.pop("Authorization", None)
        headers = {k: v for k, v in headers.items() if k.lower() != "content-length"} | {
            "Content-Length": str(len(body))
        }
        asked = target + str(headers) + repr(body)
        for who in ("", "bob", "root"):
            status, found, answer = ask(who, str(prepared.method), target, headers, body)
            where = f"{who or 'nobody'}: {prepared.method} {target[:300]} {body[:300]!r} -> {status} {answer[:300]}"
            statuses[status] += 1
            paths[operation.path] += 1
            assert status < 500 or (status == 503 and operation.path == "/readyz"), where
            assert found.get("x-content-type-options") == "nosniff", where
            if status >= 400 and status != 503:
                assert list(json.loads(answer)) == ["error"], where
                assert "\n" not in json.loads(answer)["error"], where
            assert HIDDEN not in answer, where
            assert SECRET not in answer, where
            assert not any(token in answer for token in tokens.values()), where
            if who != "root" and CANARY not in unquote(asked):
                assert CANARY not in answer, where
                assert "victim" not in answer, where
            if who == "":
                open_to_all = ("/v1/health", "/healthz", "/readyz")
                assert status >= 400 or operation.path in open_to_all, where
        controller.draining = False
        bench.effects.messages.clear()

    case()
    assert sum(statuses.values()) >= CASES
    assert {200, 401, 403, 404, 422} <= statuses.keys()
    assert paths.keys() == {operation.path for operation in operations}
    assert CANARY in ask("victim", "GET", "/v1/trainers/t1")[2]
