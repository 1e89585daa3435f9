"""Who may see what, and that nobody can stop the controller from answering others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from bftrainer.client.api import Address, ApiClient
from bftrainer.cluster.controller.output.logbook import Logbook
from bftrainer.cluster.http import limits
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.store import FILE, Store
from support.cluster.api import SPEC, by, play
from support.cluster.bench import Bench
from support.cluster.live import Live
from support.cluster.served import echo, limited_listener, served
from support.waiting import wait_until

WORKER = Path(__file__).with_name("tiny_worker.py")
PLANTED = "planted-secret-value"
HTML = "<img src=x onerror=alert(1)>"


# Names.


def test_no_trainer_is_named_as_an_id_and_ids_win_over_names_from_before(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        for name in ("t1", "t007", "t99999999999999999999"):
            refused = await client.post("/v1/trainers", json={**SPEC, "name": name}, headers=by(tokens, "root"))
            assert refused.status_code == 422
            assert "must not look like a trainer's id" in refused.json()["error"]
        made = await client.post("/v1/trainers", json={**SPEC, "script": "/t1.py"}, headers=by(tokens, "ann"))
        assert (made.json()["id"], made.json()["name"]) == ("t1", "trainer-t1")
        with bench.store.transaction():  # as an older version took it
            spec = TrainerSpec.model_validate({**SPEC, "name": "t1"})
            bench.cluster.submit(spec, "root", 1.0)
        assert (await client.post("/v1/trainers/t1/cancel", headers=by(tokens, "root"))).json()["owner"] == "ann"
        assert (await client.get("/v1/trainers/t2", headers=by(tokens, "root"))).json()["name"] == "t1"
        bench.restart()
        assert bench.cluster.trainers["t2"].name == "t1"

    play(tmp_path, scene)


# Answers.


def test_whose_nodes_others_have_is_nobodys_business(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        await client.post("/v1/trainers", json={**SPEC, "name": "canary"}, headers=by(tokens, "ann"))
        bench.join("n1")
        found = (await client.get("/v1/nodes", headers=by(tokens, "bob"))).json()["nodes"]
        assert [(n["state"], n["trainer"], n["owner"], n["worker"]) for n in found] == [("assigned", None, None, None)]
        taken = await client.post("/v1/trainers", json={**SPEC, "name": "canary"}, headers=by(tokens, "bob"))
        assert taken.status_code == 201  # a refusal would tell that somebody has one of that name

    play(tmp_path, scene)


def test_a_revoked_token_is_refused_at_once_and_another_users_finds_nothing(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        await client.post("/v1/trainers", json={**SPEC, "name": "mine"}, headers=by(tokens, "ann"))
        described = (await client.get("/v1/openapi.json")).json()["paths"]
        routes = [path for path in described if "{ref}" in path]
        assert len(routes) >= 3
        for route in routes:
            for ref in ("t1", "mine"):
                method = "POST" if route.endswith("cancel") else "GET"
                answer = await client.request(method, route.format(ref=ref), headers=by(tokens, "bob"))
                assert answer.status_code == 404, route
        assert (await client.get("/v1/me", headers=by(tokens, "ann"))).status_code == 200
        bench.store.tokens.revoke("ann", 2.0)
        assert (await client.get("/v1/me", headers=by(tokens, "ann"))).status_code == 401
        assert (await client.get("/v1/trainers/t1", headers=by(tokens, "ann"))).status_code == 401

    play(tmp_path, scene)


def test_an_expired_token_is_refused_with_a_sentence_of_its_own(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        for role in ("user", "monitor"):
            tokens[role] = bench.store.tokens.create(name=role, owner="old", role=role, time=1.0, expires=86400.0)
        answers = [
            await client.get("/v1/me", headers=by(tokens, "user")),
            await client.post("/v1/trainers", json=SPEC, headers=by(tokens, "user")),
            await client.get("/metrics", headers=by(tokens, "monitor")),
        ]
        for answer in answers:
            assert answer.status_code == 401
            assert "has expired at 1970-01-02 00:00 UTC: ask the operator" in answer.json()["error"]
        unknown = await client.get("/v1/me", headers={"Authorization": "Bearer bft_" + "x" * 40})
        assert "expired" not in unknown.json()["error"]

    play(tmp_path, scene)


REFS = [
    *("..", "../t1", "..%2ft1", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%252e%252e", "t1%00", "%00", "t1%0a", "t1/../t2"),
    *("x" * 20_000, "t" + "9" * 400, "%F0%9F%98%80", "%ff%fe", "\N{OVERLINE}", "t1;", "t1'--", "t1%20", "T1", "t01"),
]


@pytest.mark.parametrize("ref", REFS, ids=range(len(REFS)))
def test_a_trainers_name_leads_to_no_other_file_and_to_nobody_elses_trainer(tmp_path: Path, ref: str) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        await client.post("/v1/trainers", json=SPEC, headers=by(tokens, "ann"))
        Logbook(tmp_path / "t1", 1 << 20).append(1.0, "t1-1", "n1", 0, "canary\n", 7)
        for who in ("bob", "root"):
            for path in (f"/v1/trainers/{ref}", f"/v1/trainers/{ref}/logs", f"/v1/events?trainer={ref}"):
                answer = await client.get(path, headers=by(tokens, who))
                assert answer.status_code in (400, 404, 405, 414, 422), (path[:60], answer.text[:100])
                assert "canary" not in answer.text
                assert len(answer.text) < 1000
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["t1"]

    play(tmp_path, scene)


def test_what_scripts_report_is_data_whatever_is_in_it(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        mine = by(tokens, "ann")
        for name in (HTML, "a b", "", "-a", "é", "a\n", "a" * 65):
            assert (await client.post("/v1/trainers", json={**SPEC, "name": name}, headers=mine)).status_code == 422
        await client.post("/v1/trainers", json=SPEC, headers=mine)
        bench.join("n1")
        bench.report("t1", step=1, samples=10, metrics={HTML: 1.0})
        bench.end(bench.members("t1")[0], 1, HTML)
        for path in ("/v1/trainers/t1", "/v1/status", "/v1/events?trainer=t1"):
            answer = await client.get(path, headers=mine)
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"
        assert HTML in (await client.get("/v1/trainers/t1", headers=mine)).json()["metrics"]
        wrong = await client.get(f"/v1/trainers/{HTML}", headers=mine)
        assert (wrong.status_code, wrong.headers["content-type"]) == (404, "application/json")
        assert wrong.headers["x-content-type-options"] == "nosniff"

    play(tmp_path, scene)


def test_what_is_no_character_is_refused_and_can_be_answered(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        mine = {**by(tokens, "ann"), "Content-Type": "application/json"}
        for body in (
            '{"script": "/x.py", "\\ud800": 1}',
            '{"script": "/\\ud800.py"}',
            '{"script": "/x.py", "args": ["\\udfff"]}',
            '{"script": "/x.py", "env": {"A": "\\ud800"}}',
            '{"script": "/x.py", "name": "\\ud800"}',
            '{"script": "/x.py", "weight": NaN}',
            '{"script": "/x.py", "min_nodes": ' + "9" * 5000 + "}",
        ):
            answer = await client.post("/v1/trainers", content=body, headers=mine)
            assert answer.status_code in (400, 422), body[:60]
            assert list(answer.json()) == ["error"]
        assert bench.store.trainers() == []

    play(tmp_path, scene)


def test_a_body_is_read_only_of_those_who_may_and_only_so_far(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        given = 0

        async def pieces(number: int) -> AsyncIterator[bytes]:
            nonlocal given
            for _ in range(number):
                given += 1
                yield b"x" * (1 << 16)

        mine = by(tokens, "ann")
        for headers, status in ((mine, 413), ({}, 401), ({"Authorization": "Bearer wrong"}, 401)):
            given = 0
            answer = await client.post("/v1/trainers", content=pieces(1000), headers=headers)
            assert (answer.status_code, list(answer.json())) == (status, ["error"])
            assert given <= (18 if status == 413 else 1)
        for method in ("POST", "GET", "PUT", "DELETE"):
            large = await client.request(
                method, "/v1/trainers", content=b"x" * (limits.MOST_BODY_BYTES + 1), headers=mine
            )
            assert large.status_code == 413
        for length in ("-1", "1e3", "9" * 30, "²"):
            odd = await client.post("/v1/trainers", content=b"{}", headers={**mine, "Content-Length": length.encode()})
            assert odd.status_code == 413
        whole = await client.post("/v1/trainers", content=pieces(0), headers=mine)
        assert whole.status_code == 422
        assert bench.store.trainers() == []

    play(tmp_path, scene)


# Clients that take their time.


def answered(connection: socket.socket) -> bytes:
    """One answer of `echo`."""
    found = b""
    connection.settimeout(30)
    while not found.endswith(b"ok"):
        found += connection.recv(4096)
    return found


def closed(connection: socket.socket) -> bytes:
    """What was answered until the other end closed the connection."""
    found = b""
    connection.settimeout(30)
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(4096):
            found += piece
    connection.close()
    return found


def test_a_connection_that_says_nothing_or_too_little_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUEST_S", 0.3)
    with served(echo, timeout_keep_alive=600) as port:

        def connect(first: bytes) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(first)
            return connection

        silent, begun = connect(b""), connect(b"GET / HTTP/1.1\r\nHost:")
        later = connect(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answered(later).startswith(b"HTTP/1.1 200 OK")
        later.sendall(b"GET / HT")
        assert closed(silent) == closed(begun) == closed(later) == b""

        dripping = connect(b"")
        with contextlib.suppress(OSError):
            for byte in b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000:
                dripping.sendall(bytes([byte]))
                time.sleep(0.01)
            raise AssertionError("it may go on for ever")
        dripping.close()

        idle = connect(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answered(idle).startswith(b"HTTP/1.1 200 OK")
        time.sleep(2 * limits.REQUEST_S)  # between two requests it may take longer than within one
        idle.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in closed(idle)


def test_connections_are_bounded_and_those_beyond_are_closed_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "LEAST_EACH", 2)
    listener = limited_listener(8)
    with served(echo, listener) as port:
        here = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        wait_until(lambda: listener.open_connections == 4)
        for _ in range(20):
            assert closed(socket.create_connection(("127.0.0.1", port))) == b""
        there = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))  # others are not hurt
        there.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answered(there).startswith(b"HTTP/1.1 200 OK")
        here.pop().close()
        wait_until(lambda: listener.open_connections == 4)
        again = socket.create_connection(("127.0.0.1", port))
        again.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in closed(again)
        for connection in (*here, there):
            connection.close()
        wait_until(lambda: listener.open_connections == 0)
    assert [record.levelname for record in caplog.records if record.name == limits.__name__] == ["WARNING"]


def test_the_agents_of_a_large_machine_and_of_one_do_not_feel_the_bounds() -> None:
    most = limits.MOST_FILES - limits.SPARE_FILES
    assert limits.each_of("127.0.0.1", most) == limits.each_of("::1", most) > 8000
    assert limits.each_of("10.0.0.1", most) == limits.each_of("fe80::1%eth0", most) > 4000
    assert limits.each_of("127.0.0.1", 1024 - limits.SPARE_FILES) >= 64 + 100
    assert limits.each_of("10.0.0.1", 64) == 64


def test_whoever_does_not_read_the_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNREAD_S", 0.3)
    over = threading.Event()
    size = 64 << 20  # more than the buffers of both ends

    async def much(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        for _ in range(64):
            await send({"type": "http.response.body", "body": bytes(size // 64), "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        over.set()

    with served(much) as port:
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert over.wait(30), "it is still waited for"
        assert len(closed(connection)) < size


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_S", 0.2)

    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        async def slowly() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(600)

        answer = await client.post("/v1/trainers", content=slowly(), headers=by(tokens, "ann"))
        assert (answer.status_code, list(answer.json())) == (408, ["error"])
        assert answer.headers["connection"] == "close"

    play(tmp_path, scene)


# The whole of it.


@pytest.mark.waits
def test_secrets_stay_secret_and_slow_clients_stop_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    with Store.open(folder / FILE) as store:
        token = store.tokens.create(name="ann", owner="ann", role="user", time=1.0)
    with Live(folder, "--nodes", "2") as live:
        known = json.loads((folder / "client.json").read_text())
        secrets = [PLANTED, token, known["token"], (folder / "agent-secret").read_text().strip()]
        user = ApiClient(Address(known["url"], token))
        row = user.submit({"script": str(WORKER), "nodes": "1-2", "env": {"PASSWORD": PLANTED}, "cwd": str(tmp_path)})
        wait_until(lambda: live.trainer(row["id"])["step"] > 0, "its first step", 60)

        port = int(known["url"].rpartition(":")[2])
        head = f"POST /v1/trainers HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 1000\r\n\r\n"
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        for number, connection in enumerate(slow):
            connection.sendall((b"", b"GET /v1/sta", b"G", head.encode() + b"{")[number % 4])
        for _ in range(3):
            assert user.status()["trainers"][0]["id"] == row["id"]
        step = live.trainer(row["id"])["step"]
        wait_until(lambda: live.trainer(row["id"])["step"] > step, "a step while others take their time", 30)
        for connection in slow:
            connection.close()

        answers = [
            httpx.get(known["url"] + path, headers={"Authorization": f"Bearer {known['token']}"}).text
            for path in (
                "/v1/status",
                "/v1/trainers/t1",
                "/v1/events?limit=1000",
                "/v1/nodes",
                "/v1/owners",
                "/metrics",
            )
        ]
        answers.append(
            httpx.get(known["url"] + "/v1/trainers/t1/logs", headers={"Authorization": f"Bearer {token}"}).text
        )
        assert '"PASSWORD":"(hidden)"' in answers[1]
        shown = {"the API": "".join(answers), "serve.log": live.log.read_text()}
        pids = _family(folder)
        assert len(pids) >= 5  # the controller, the host of its agents, two of those and their workers
        for pid in pids:
            with contextlib.suppress(OSError):
                shown[f"the arguments of {pid}"] = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        user.cancel(row["id"])
        live.until_state(row["id"], "cancelled")
        live.stop()
        for path in (*folder.glob("*.log*"), *folder.glob("trainers/*/log"), live.log):
            shown[str(path)] = path.read_text(errors="replace")
        for where, text in shown.items():
            for secret in secrets:
                assert secret not in text, where
        # The database has tokens only as hashes, and no values of environments. All of it is its owner's.
        for path in folder.rglob("*"):
            assert not path.stat().st_mode & 0o077 or path.parent.stat().st_mode & 0o077 == 0 or path.is_dir(), path
        assert folder.stat().st_mode & 0o777 == 0o700
        stored = b"".join(path.read_bytes() for path in folder.glob("bftrainer.db*"))
        assert token.encode() not in stored
        assert PLANTED.encode() not in stored
        user.close()


def _family(folder: Path) -> list[int]:
    """The processes that work for a state folder: they all have it in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found
