"""The Python client against a fake controller: what it asks, what it yields, and how it bears one that is away."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bftrainer
from bftrainer.client import (
    AsyncClient,
    Client,
    ClosedError,
    LogLine,
    Point,
    RefusedError,
    TrainerFailedError,
    UnreachableError,
    describe,
    polling,
)
from bftrainer.client.polling import Request, RetryPolicy, Sleep, patiently
from bftrainer.errors import BFTrainerError, InputError
from support.cluster.fake_api import TOKEN, FakeState, make_app, serving

QUICK = {"poll_s": 0.001}


@pytest.fixture
def fake() -> FakeState:
    return FakeState()


@pytest.fixture
def url(fake: FakeState) -> Iterator[str]:
    with serving(make_app(fake)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, TOKEN) as client:
        yield client


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


def progressing(fake: FakeState, *, end: str = "done", reason: str = "") -> None:
    """A trainer makes an epoch whenever it is asked for, and ends after three."""

    def on_ask(path: str) -> None:
        for row in fake.trainers.values():
            if path.startswith("/v1/trainers") and row["state"] not in polling.FINISHED:
                row.update(
                    state="running", epoch=row["epoch"] + 1, step=row["step"] + 10, metrics={"loss": row["epoch"]}
                )
                if row["epoch"] == 3:
                    row.update(state=end, reason=reason)

    fake.on_ask = on_ask


@pytest.mark.waits
def test_importing_the_package_loads_no_client_until_one_is_asked_for() -> None:
    code = "import bftrainer, sys; assert 'bftrainer.client' not in sys.modules; assert 'httpx' not in sys.modules\n"
    code += "assert {'Client', 'AsyncClient'} <= set(dir(bftrainer)); bftrainer.Client; assert 'httpx' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert bftrainer.Client is Client
    assert bftrainer.AsyncClient is AsyncClient
    with pytest.raises(AttributeError, match="Cleint"):
        bftrainer.Cleint  # type: ignore[attr-defined] # noqa: B018


@pytest.mark.waits
def test_without_the_packages_of_the_live_system_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['httpx'] = None\nimport bftrainer\n"
    code += "try: bftrainer.Client\nexcept ImportError as problem: print(problem)"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout == "bftrainer.Client needs the package httpx: pip install 'bftrainer[live]'\n"


def test_a_script_is_submitted_with_what_the_command_would_send(client: Client, fake: FakeState, script: Path) -> None:
    row = client.submit(
        "train.py", ["--lr", 1e-4], nodes="1-8", name="a", group="g", weight=2, env={"K": 3}, ranks_per_node=2
    )
    assert (row["id"], row["name"]) == ("t1", "a")
    (spec,) = fake.specs
    assert (spec["script"], spec["cwd"], spec["args"]) == (str(script), str(script.parent), ["--lr", "0.0001"])
    assert (spec["min_nodes"], spec["max_nodes"], spec["weight"], spec["env"]) == (1, 8, 2.0, {"K": "3"})
    assert (spec["group"], spec["ranks_per_node"]) == ("g", 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"args": "--lr 3"}, "args must be a list"),
        ({"nodes": "8-1"}, "nodes must be a range"),
        ({"ranks_per_node": 0}, "ranks_per_node must be .* but got 0"),
        ({"wieght": 1}, "did you mean 'weight'"),
        ({"group": "a/b"}, "group must be"),
        ({"script": "trian.py"}, "did you mean 'train.py'"),
        ({"params": {"a": ["b"]}}, "params must be a mapping"),
        ({"params": {str(i): "" for i in range(101)}}, "at most 100 names"),
    ],
)
def test_what_is_wrong_is_said_before_it_is_sent(
    client: Client, fake: FakeState, script: Path, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        client.submit(**{"script": "train.py", **given})
    assert fake.asked == []
    assert describe("train.py", nodes=4).min_nodes == 4


def test_waiting_ends_with_the_last_rows(client: Client, fake: FakeState) -> None:
    first, second = fake.add(), fake.add()
    progressing(fake)
    row = client.wait(first, **QUICK)
    assert (row["id"], row["state"], row["epoch"]) == ("t1", "done", 3)
    assert [row["id"] for row in client.wait_all([second, "job1", "t2"], **QUICK)] == ["t2", "t1", "t2"]
    assert client.wait_all([]) == []


def test_waiting_for_many_asks_once_a_look(client: Client, fake: FakeState) -> None:
    rows = [fake.add() for _ in range(20)]
    progressing(fake)
    fake.asked.clear()
    client.wait_all(rows, **QUICK)
    assert len(fake.asked) <= 2 * len(rows) + 3  # each at first and at its end, and the list in between


def test_a_trainer_that_fails_is_an_error_if_asked_for(client: Client, fake: FakeState) -> None:
    fake.add()
    progressing(fake, end="failed", reason="no data")
    assert client.wait("job1", **QUICK)["state"] == "failed"
    with pytest.raises(TrainerFailedError, match=r"trainer job1 \(t1\) failed: no data") as caught:
        client.wait("job1", check=True)
    assert caught.value.row["epoch"] == 3


def test_waiting_has_a_limit(client: Client, fake: FakeState) -> None:
    fake.add(state="running")
    with pytest.raises(TimeoutError, match="not finished after 0.01 s: job1"):
        client.wait("t1", timeout_s=0.01, **QUICK)


def test_metrics_come_as_they_are_reported(client: Client, fake: FakeState) -> None:
    fake.add()
    progressing(fake)
    points = list(client.metrics("job1", **QUICK))
    assert [(point.epoch, point.step, point.metrics["loss"]) for point in points] == [
        (1, 10, 0),
        (2, 20, 1),
        (3, 30, 2),
    ]
    assert points[-1].state == "done"
    assert list(client.metrics("job1")) == [Point(3, 30, 0, {"loss": 2.0}, "done")]


def test_a_point_says_of_which_epoch_its_values_are(client: Client, fake: FakeState) -> None:
    places = {"score": {"epoch": 3, "step": 30, "samples": 300}}
    fake.add(state="done", epoch=4, step=33, metrics={"score": 0.5}, metrics_at=places)
    (point,) = client.metrics("job1")
    assert (point.epoch, point.at["score"].epoch, point.at["score"].samples) == (4, 3, 300)


def test_logs_are_read_to_their_end(client: Client, fake: FakeState) -> None:
    row = fake.add(state="running")
    for number in range(8):
        fake.log("t1", "t1-1", f"line {number}")
    assert [line.text for line in client.logs("job1")] == [f"line {number}" for number in range(8)]
    assert [line.text for line in client.logs("job1", tail=2)] == ["line 6", "line 7"]
    more = ["line 8", "line 9"]

    def on_ask(path: str) -> None:
        if path.endswith("/logs") and more:
            fake.log("t1", "t1-1", more.pop(0))
        elif path.endswith("/logs"):
            row["state"] = "done"

    fake.on_ask = on_ask
    lines = list(client.logs(row, tail=1, follow=True, **QUICK))
    assert [line.text for line in lines] == ["line 8", "line 9"]
    assert isinstance(lines[0], LogLine)


def test_the_rest_of_what_can_be_asked(client: Client, fake: FakeState) -> None:
    fake.add(group="g")
    fake.add()
    assert [row["id"] for row in client.trainers()] == ["t1", "t2"]
    assert [row["id"] for row in client.trainers(group="g")] == ["t1"]
    assert client.status()["policy"]["max_parallel"] == 10
    assert client.nodes() == []
    assert client.cancel("job2")["state"] == "cancelled"
    assert client.trainer("t2")["state"] == "cancelled"
    with pytest.raises(RefusedError, match="no trainer"):
        client.trainer("t9")
    with pytest.raises(InputError, match="id or its name"):
        client.trainer("../x")


def test_it_finds_a_controller_that_comes_back_elsewhere(
    fake: FakeState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BFTRAINER_URL", "BFTRAINER_TOKEN", "BFTRAINER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "client.json").write_text("{}")
    fake.add()

    def at(url: str) -> None:
        (tmp_path / "client.json").write_text(json.dumps({"url": url, "token": TOKEN}))

    with Client(state=tmp_path) as client:
        with serving(make_app(fake)) as first:
            at(first)
            assert client.trainer("t1")["id"] == "t1"
        with serving(make_app(fake)) as second:
            real = polling.Sleep

            def moved(seconds: float) -> Sleep:  # while it waits, the controller writes where it is now
                at(second)
                return real(0.0)

            monkeypatch.setattr(polling, "Sleep", moved)
            assert client.trainer("t1")["id"] == "t1"
    nowhere = Client(state=tmp_path / "nothing")
    with pytest.raises(UnreachableError, match="bftrainer serve"):
        nowhere.status()


def test_patience_backs_off_and_ends() -> None:
    now, told, pauses = [0.0], [], []
    patience = RetryPolicy(lambda: 40.0, lambda: now[0], told.append)
    talk = patiently(lambda c: c.status(), patience)
    step = next(talk)
    while now[0] < 40:
        assert isinstance(step, Request)
        step = talk.throw(RefusedError(507, "the disk is full"))
        assert isinstance(step, Sleep)
        pauses.append(step.seconds)
        now[0] += step.seconds
        step = next(talk)
    with pytest.raises(RefusedError, match="disk"):
        talk.throw(RefusedError(507, "the disk is full"))
    assert pauses == [0.5, 1, 2, 4, 8, 15, 9.5]
    assert told == ["the disk is full (waiting for it)"]
    talk = patiently(lambda c: c.status(), patience)
    next(talk)
    with pytest.raises(RefusedError):  # being refused is no reason to wait
        talk.throw(RefusedError(404, "there is no trainer"))


def test_the_async_client_says_the_same(fake: FakeState, url: str, script: Path) -> None:
    async def scene() -> None:
        async with AsyncClient(url, TOKEN) as client:
            row = await client.submit("train.py", nodes="1-2", name="a", ranks_per_node="4")
            assert fake.specs[0]["ranks_per_node"] == 4
            fake.log("t1", "t1-1", "hello")
            assert [line.text async for line in client.logs(row)] == ["hello"]
            progressing(fake)
            points, last = await asyncio.gather(collect(client, "a"), client.wait("t1", **QUICK))
            assert last["state"] == points[-1].state == "done"
            assert [row["id"] for row in await client.trainers(all=True)] == ["t1"]
            assert (await client.trainer("a"))["id"] == (await client.cancel(row))["id"] == "t1"
            assert (await client.status())["paused"] is False
            assert await client.history("a") == []
            fake.add(id="t9", group="g", state="running")
            assert [row["state"] for row in await client.cancel_group("g")] == ["cancelled"]
            assert [row["id"] for row in await client.wait_all(group="g")] == ["t9"]
            del fake.trainers["t9"]
            assert await client.nodes() == []
            with pytest.raises(RefusedError, match="no trainer"):
                await client.trainer("t9")
            fake.add(state="running")
            fake.on_ask = lambda path: None
            with pytest.raises(TimeoutError):
                await client.wait("t2", timeout_s=0.01, **QUICK)
            task = asyncio.create_task(client.wait("t2", poll_s=60))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async for _ in client.metrics("a"):
                break  # a stream may be left

    async def collect(client: AsyncClient, ref: str) -> list[Point]:
        return [point async for point in client.metrics(ref, **QUICK)]

    asyncio.run(scene())


def test_a_group_is_all_of_its_members_however_long_ago_they_finished(client: Client, fake: FakeState) -> None:
    fake.add(group="g", state="done", old=True)
    fake.add(group="g", state="running")
    fake.add(state="running")
    assert [row["id"] for row in client.trainers(group="g")] == ["t1", "t2"]
    assert [row["id"] for row in client.cancel_group("g")] == ["t2"]
    assert [row["state"] for row in client.wait_all(group="g", **QUICK)] == ["done", "cancelled"]
    assert fake.trainers["t3"]["state"] == "running"
    for call in (client.cancel_group, lambda group: client.wait_all(group=group)):
        with pytest.raises(InputError, match="no group 'h'"):
            call("h")
    with pytest.raises(InputError, match="either trainers or a group"):
        client.wait_all(["t1"], group="g")
    with pytest.raises(InputError, match="must be a list of them"):
        client.wait_all("t1")


def test_what_was_reported_over_time_can_be_read(client: Client, fake: FakeState) -> None:
    fake.add()
    fake.points = [{"time": 5.0, "samples": 7, "metrics": {"loss": None}, "metrics_at": {"loss": [1, 2, 3]}}]
    (moment,) = client.history("job1")
    assert (moment.time, moment.samples, moment.at["loss"].epoch) == (5.0, 7, 1)
    assert math.isnan(moment.metrics["loss"])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.trainer(5), "its id, its name or its row, but got 5"),
        (lambda c: c.cancel(None), "its id, its name or its row, but got None"),
        (lambda c: c.wait({}), "its id, its name or its row"),
        (lambda c: c.wait("t1", poll_s=0), "poll_s must be a number of seconds above 0, but got 0"),
        (lambda c: c.metrics("t1", poll_s=-1), "poll_s must be a number of seconds above 0"),
        (lambda c: c.wait("t1", timeout_s="5"), "timeout_s must be a number of seconds from 0 on"),
        (lambda c: c.trainers(state="runing"), "state must be one of queued, .*did you mean 'running'"),
    ],
)
def test_what_makes_no_sense_is_said_before_it_is_asked(client: Client, fake: FakeState, call: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        call(client)
    assert fake.asked == []


def test_a_wait_ends_in_time_though_the_controller_is_away() -> None:
    now = [0.0]
    patience = RetryPolicy(lambda: 100.0, lambda: now[0], lambda text: None)
    talk = polling.waiting(["t1"], patience, 1.0, 3.0)

    def nobody_answers() -> None:
        step = next(talk)
        while True:
            if isinstance(step, Sleep):
                now[0] += step.seconds
                step = next(talk)
            else:
                step = talk.throw(UnreachableError("nobody answers"))

    with pytest.raises(TimeoutError, match="the controller does not answer: nobody answers"):
        nobody_answers()
    assert now[0] == 3.0


def test_a_closed_client_says_so(url: str) -> None:
    client = Client(url, TOKEN)
    client.status()
    client.close()
    client.close()
    with pytest.raises(ClosedError, match="the client is closed"):
        client.status()

    async def scene() -> None:
        other = AsyncClient(url, TOKEN)
        await other.status()
        waits = asyncio.create_task(other.wait_all(["job1"], poll_s=0.001))
        await other.close()
        await other.close()
        with pytest.raises(ClosedError, match="the client is closed"):
            await other.status()
        with pytest.raises(BFTrainerError):
            await waits

    asyncio.run(scene())


def test_the_async_client_has_all_that_the_other_one_has() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
