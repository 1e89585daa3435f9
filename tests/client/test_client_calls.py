"""Calls that the commands need: events, logs of one worker, changes of state, pausing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from bftrainer.cli.common.connection import collected
from bftrainer.client import AsyncClient, Client
from bftrainer.cluster.spec.trainer import TrainerSpec
from support.cluster.fake_api import TOKEN, FakeState, make_app, serving


@pytest.fixture
def fake() -> FakeState:
    return FakeState()


@pytest.fixture
def client(fake: FakeState) -> Iterator[Client]:
    with serving(make_app(fake)) as url, Client(url, TOKEN) as client:
        yield client


def test_events_come_page_by_page_up_to_the_limit(
    fake: FakeState, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bftrainer.client.polling._MOST_EVENTS", 2)
    for n in range(7):
        fake.event("node.joined", node=f"n{n}")

    def numbers(**options: Any) -> list[int]:
        return [event["seq"] for event in client.events(**options)]

    assert numbers(limit=2) == [6, 7]
    assert numbers(after=1, limit=5) == [2, 3, 4, 5, 6]
    assert numbers(after=5) == [6, 7]
    assert numbers(after=7) == []
    assert collected(client.events(after=5))[1] == 7


def test_the_last_lines_of_one_worker_are_counted_without_those_of_others(fake: FakeState, client: Client) -> None:
    fake.add(state="done")
    for n in range(7):
        fake.log("t1", f"t1-{n % 2}", f"line {n}")
    lines, end = collected(client.logs("t1", tail=2, worker="t1-0", follow=True))
    assert [line.text for line in lines] == ["line 4", "line 6"]
    assert (end.offset, end.finished) == (7, True)
    assert [line.text for line in client.logs("t1", worker="t1-1")] == ["line 1", "line 3", "line 5"]
    assert [line.text for line in client.logs("t1", worker="t1-1", tail=0)] == []


def test_each_change_of_state_is_told_once(fake: FakeState, client: Client) -> None:
    fake.add(state="queued")
    fake.add(state="done")
    states = iter(["queued", "running", "running", "done"])

    def step(path: str) -> None:
        if path == "/v1/trainers/t1":
            fake.trainers["t1"]["state"] = next(states)

    fake.on_ask = step
    told: list[tuple[str, str]] = []
    rows = client.wait_all(
        ["t1", "t2", "t1"], poll_s=0.01, on_change=lambda row: told.append((row["id"], row["state"]))
    )
    assert [row["id"] for row in rows] == ["t1", "t2", "t1"]
    assert told == [("t1", "running"), ("t2", "done"), ("t1", "done")]


def test_harvesting_is_paused_and_the_caller_named(fake: FakeState, client: Client) -> None:
    assert client.pause() == {"paused": True}
    assert fake.paused
    assert client.resume() == {"paused": False}
    assert client.me()["owner"] == "alice"


def test_the_async_client_makes_the_same_calls(fake: FakeState) -> None:
    fake.event("node.joined", node="n1")

    async def scene(url: str) -> None:
        async with AsyncClient(url, TOKEN) as client:
            assert [event["seq"] async for event in client.events()] == [1]
            assert (await client.me())["owner"] == "alice"
            assert await client.pause() == {"paused": True}
            assert await client.resume() == {"paused": False}

    with serving(make_app(fake)) as url:
        asyncio.run(scene(url))


def test_both_clients_ask_when_trainers_will_be_done(fake: FakeState) -> None:
    spec = TrainerSpec(script="/other.py", name="b")

    async def ask(url: str) -> Any:
        async with AsyncClient(url, TOKEN) as other:
            return await other.eta("t1")

    with serving(make_app(fake)) as url, Client(url, TOKEN) as client:
        found = client.eta("t1", group="lr", specs=[spec], nodes=4)
        awaited = asyncio.run(ask(url))
    wanted = {"trainers": ["t1"], "group": "lr", "specs": [spec.as_json()], "nodes": "4"}
    assert dict(found["trainers"]) == {"asked": wanted}
    assert awaited["trainers"]["asked"] == {"trainers": ["t1"], "specs": []}
