"""The HTTP API: who is let in, what is answered, and that nothing anybody sends makes it fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from bftrainer.cluster.controller.output.logbook import Logbook
from bftrainer.cluster.wire.messages import Gpu, Join
from support.cluster.api import SECRET, SPEC, NoPool, by, play
from support.cluster.bench import Bench


def test_without_a_good_token_only_health_answers(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        assert (await client.get("/v1/health")).json()["ok"] is True
        bench.store.tokens.revoke("bob", 2.0)
        bad = ["", "Bearer", "Bearer nonsense", f"Basic {tokens['ann']}", f"Bearer {tokens['bob']}", f"Bearer {SECRET}"]
        paths = ["/v1/status", "/v1/trainers", "/v1/trainers/t1", "/v1/trainers/t1/logs", "/v1/nodes", "/v1/events"]
        for header in bad:
            for path in paths:
                answer = await client.get(path, headers={"Authorization": header} if header else {})
                assert answer.status_code == 401, (header, path)
                assert "token" in answer.json()["error"]
            for path in ("/v1/trainers", "/v1/pause", "/v1/resume", "/v1/drain", "/v1/trainers/t1/cancel"):
                assert (await client.post(path, json=SPEC, headers={"Authorization": header})).status_code == 401

    play(tmp_path, scene)


def test_a_mistyped_name_is_answered_with_the_likely_one_among_the_callers_own(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        async def told(caller: str, ref: str) -> str:
            answer = await client.get(f"/v1/trainers/{ref}", headers=by(tokens, caller))
            assert answer.status_code == 404
            return str(answer.json()["error"])

        for name in ("resnet", "gpt"):
            made = await client.post("/v1/trainers", json={**SPEC, "name": name}, headers=by(tokens, "ann"))
            assert made.status_code == 201
        assert await told("ann", "resnt") == "there is no trainer 'resnt': did you mean 'resnet'?"
        assert await told("root", "Res-Net") == "there is no trainer 'Res-Net': did you mean 'resnet'?"
        assert await told("bob", "resnt") == "there is no trainer 'resnt'"
        assert await told("ann", "vgg") == "there is no trainer 'vgg'"
        assert await told("ann", "r" * 500) == f"there is no trainer '{'r' * 64}'"

    play(tmp_path, scene)


def test_a_trainer_is_submitted_shown_and_cancelled(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        mine = by(tokens, "ann")
        made = await client.post("/v1/trainers", json={**SPEC, "name": "resnet"}, headers=mine)
        assert made.status_code == 201
        row = made.json()
        assert (row["id"], row["name"], row["owner"], row["state"]) == ("t1", "resnet", "ann", "queued")
        bench.join("n1", "n2")
        bench.settle()
        shown = (await client.get("/v1/trainers/resnet", headers=mine)).json()
        assert (shown["state"], shown["nodes"]) == ("running", ["n1", "n2"])
        assert shown["curve"]["nodes"][0] == 0
        assert shown["output"] == str(tmp_path / "trainers" / "t1" / "output")
        assert shown["pauses"]["count"] >= 0
        assert shown["snapshots"] is None
        bench.report("t1", snapshot_every_s=240.0, snapshot_stall_s=2.4, snapshot_step=3)
        shown = (await client.get("/v1/trainers/resnet", headers=mine)).json()
        assert shown["snapshots"] == {"step": 3, "every_s": 240.0, "stall_s": 2.4}
        status = (await client.get("/v1/status", headers=mine)).json()
        assert status["pool"] == {"kind": "none", "size": 2, "used": 2, "gpus": 0, "used_gpus": 0}
        assert status["last_decision"]["reasons"] == []  # of all trainers, also others'
        assert (await client.get("/v1/status", headers=by(tokens, "root"))).json()["last_decision"]["reasons"]
        others = (await client.get("/v1/nodes", headers=by(tokens, "bob"))).json()["nodes"]
        assert [(node["state"], node["trainer"]) for node in others] == [("assigned", None)] * 2
        nodes = (await client.get("/v1/nodes", headers=mine)).json()["nodes"]
        assert [(node["node"], node["state"], node["trainer"]) for node in nodes] == [
            ("n1", "assigned", "resnet"),
            ("n2", "assigned", "resnet"),
        ]
        for _ in range(2):
            done = await client.post("/v1/trainers/t1/cancel", headers=mine)
            assert done.json()["state"] == "cancelled"
        again = await client.post("/v1/trainers", json={**SPEC, "name": "resnet"}, headers=mine)
        assert again.json()["id"] == "t2"
        twice = await client.post("/v1/trainers", json={**SPEC, "name": "resnet"}, headers=mine)
        assert twice.status_code == 409

    play(tmp_path, scene)


def test_a_user_sees_and_ends_only_their_own_trainers(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        await client.post("/v1/trainers", json={**SPEC, "name": "of-ann"}, headers=by(tokens, "ann"))
        other, admin = by(tokens, "bob"), by(tokens, "root")
        for ref in ("t1", "of-ann"):
            for path in (f"/v1/trainers/{ref}", f"/v1/trainers/{ref}/logs", f"/v1/events?trainer={ref}"):
                assert (await client.get(path, headers=other)).status_code == 404
                assert (await client.get(path, headers=admin)).status_code == 200
            assert (await client.post(f"/v1/trainers/{ref}/cancel", headers=other)).status_code == 404
        assert (await client.get("/v1/trainers?all=true", headers=other)).json()["trainers"] == []
        assert (await client.get("/v1/status", headers=other)).json()["trainers"] == []
        assert (await client.get("/v1/events", headers=other)).status_code == 403
        for path in ("/v1/pause", "/v1/resume", "/v1/drain"):
            assert (await client.post(path, headers=other)).status_code == 403
        assert (await client.post("/v1/pause", headers=admin)).json() == {"paused": True}

    play(tmp_path, scene)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"script": "/x.py", "nodes": "1-4", "wieght": 2}, "weight"),
        ({"script": "/x.py", "nodes": "8-1"}, "nodes"),
        ({"nodes": "1-4"}, "script"),
        ({**SPEC, "name": "../../etc/passwd"}, "name"),
        ({**SPEC, "name": "<b>"}, "name"),
        ({**SPEC, "weight": -1}, "weight"),
        ([], "a trainer must be"),
        (None, ""),
        ("text", ""),
    ],
)
def test_a_bad_spec_is_refused_in_one_line(tmp_path: Path, body: object, says: str) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        answer = await client.post("/v1/trainers", json=body, headers=by(tokens, "ann"))
        assert answer.status_code == 422
        error = answer.json()["error"]
        assert says in error
        assert "\n" not in error
        assert bench.store.trainers() == []

    play(tmp_path, scene)


def test_whatever_is_sent_is_answered_and_never_with_a_failure(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        mine = by(tokens, "root")
        refs = ["..%2f..%2fetc", "%00", "x" * 5000, "t0", "t99999999999999999999", "-", "%F0%9F%98%80", "t1%0a"]
        for ref in refs:
            for path in (f"/v1/trainers/{ref}", f"/v1/trainers/{ref}/logs"):
                assert 400 <= (await client.get(path, headers=mine)).status_code < 500, ref
        queries = [
            "limit=0",
            "limit=99999",
            "after=-1",
            "after=abc",
            f"after={10**30}",
            "kind=" + "k" * 999,
            "trainer=%00",
        ]
        for query in queries:
            assert (await client.get(f"/v1/events?{query}", headers=mine)).status_code in (200, 404, 422), query
        assert (await client.get("/v1/nothing", headers=mine)).status_code == 404
        assert (await client.get("/v1/trainers/t1/cancel", headers=mine)).status_code in (404, 405)
        large = await client.post("/v1/trainers", content=b"x" * (2 << 20), headers=mine)
        assert large.status_code == 413
        broken = await client.post("/v1/trainers", content=b"{", headers={**mine, "Content-Type": "application/json"})
        assert broken.status_code == 422
        assert all("error" in answer.json() for answer in (large, broken))
        deep = await client.post("/v1/trainers", content=b"[" * 100_000, headers=mine)
        assert 400 <= deep.status_code < 500

    play(tmp_path, scene)


def test_logs_are_read_from_a_place_on_and_from_the_end(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        mine = by(tokens, "ann")
        await client.post("/v1/trainers", json=SPEC, headers=mine)
        book = Logbook(tmp_path / "t1", 1 << 20)
        place = 0
        for number in range(50):
            text = f"line {number} – ü\n"
            place = book.append(1e9, "t1-1", "n1", place, text, len(text.encode()))
        first = (await client.get("/v1/trainers/t1/logs?limit=500", headers=mine)).json()
        lines, offset = first["lines"], first["offset"]
        while found := (await client.get(f"/v1/trainers/t1/logs?limit=500&offset={offset}", headers=mine)).json():
            if not found["lines"]:
                break
            lines, offset = lines + found["lines"], found["offset"]
        assert [line["text"] for line in lines] == [f"line {number} – ü" for number in range(50)]
        last = (await client.get("/v1/trainers/t1/logs?tail=2", headers=mine)).json()
        assert [line["text"] for line in last["lines"]] == ["line 48 – ü", "line 49 – ü"]
        assert last["offset"] == offset

    play(tmp_path, scene)


def test_the_log_has_every_piece_once_whatever_was_sent_again(tmp_path: Path) -> None:
    book = Logbook(tmp_path, 1 << 20)
    assert book.append(1.0, "w", "n", 0, "a\nb\n", 4) == 4
    assert book.append(1.0, "w", "n", 0, "a\nb\n", 4) == 4  # again: the answer was lost
    again = Logbook(tmp_path, 1 << 20)  # a new controller
    assert again.place("w") == 4
    assert again.append(1.0, "w", "n", 9, "z\n", 2) == 4  # a piece is missing before it
    assert again.append(1.0, "w", "n", 4, "c\n", 2) == 6
    assert [line.text for line in again.read(0)[0]] == ["a", "b", "c"]


def test_where_agents_have_owners_a_user_sees_of_others_nodes_only_that_they_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"kind": "x", "lenders": {"ann": 1, "bob": 2}, "problem": "of ann", "warning": "of ann", "nodes": 2}
    monkeypatch.setattr(NoPool, "describe", lambda pool: said)

    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        shared = (await client.get("/v1/status", headers=by(tokens, "bob"))).json()["pool"]
        assert shared["problem"] == "of ann"
        bench.cluster.settings = replace(bench.cluster.settings, own_users=True)
        for node, owner in (("n1", "ann"), ("n2", "bob")):
            with bench.store.transaction():
                join = Join(node, node, "a", pid=7, gpus=(Gpu("0"),), slots=3)
                bench.act(bench.cluster.joined(join, bench.now, owner))
        rows = (await client.get("/v1/nodes", headers=by(tokens, "bob"))).json()["nodes"]
        anns, bobs = rows
        assert (bobs["state"], bobs["serves"], bobs["agent_pid"], bobs["slots"]) == ("free", "bob", 7, 3)
        assert anns == {
            **{"node": "n1", "host": "n1", "state": "other", "trainer": None, "owner": None, "worker": None},
            **{"since": 0.0, "agent_pid": 0, "heard_s": 0.0, "gpus": [], "slots": 0, "ranks": []},
        }
        rows = (await client.get("/v1/nodes", headers=by(tokens, "root"))).json()["nodes"]
        assert [row["serves"] for row in rows] == ["ann", "bob"]
        bobs = (await client.get("/v1/status", headers=by(tokens, "bob"))).json()["pool"]
        assert bobs["lenders"] == {"bob": 2}
        assert not {"problem", "warning"} & bobs.keys()
        all_of_it = (await client.get("/v1/status", headers=by(tokens, "root"))).json()["pool"]
        assert said.items() <= all_of_it.items()

    play(tmp_path, scene)
