"""The frames between agents and controller stay as they were, and an invalid one is refused with one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from bftrainer.cluster.wire.codec import MOST_BYTES, MOST_JOIN_BYTES, MOST_PARTS, decode, decode_from_agent, encode
from bftrainer.cluster.wire.messages import (
    MOST_MODULES,
    MOST_WORKERS,
    Beat,
    Bye,
    Ended,
    Forget,
    Going,
    GpuUse,
    Heard,
    Join,
    Log,
    Logged,
    Message,
    Prepare,
    RankStatus,
    Say,
    Start,
    Started,
    Stop,
    Welcome,
    WorkerStatus,
)
from bftrainer.cluster.wire.worker_messages import parse_worker_message
from bftrainer.elastic.protocol import Broken, Failed, FirstStep, Formed, ProtocolError, Report

FULL_STATUS = WorkerStatus(
    *("t1-2", "t1", 12, True, True, 4, 3, 4, "10.0.0.1:1", True, True, "Error: x", "Traceback", -15, "tail\n"),
    *({"generation": 3}, False, False),
)
MESSAGES: list[Message] = [
    Join("n1", "10.0.0.1", "agent-1"),
    Join("n1", "10.0.0.1", "agent-1", (WorkerStatus("t1-1", "t1"), FULL_STATUS), 42, 1),
    Beat(),
    Beat({"t1-1": {"generation": 3, "step": 7, "rates": {"2": 190.5}}}),
    Heard("t1-1", {"type": "arrived", "generation": 3, "address": "10.0.0.1:1234"}),
    Started("t1-1", 4711),
    Started("t1-1", 4711, "Python 3.11 instead of 3.12"),
    Ended("t1-1", -9, "the end\n", "", False),
    Ended("t1-1", 0),
    Log("t1-1", 100, "a line\nhalf a l\u00efne \udcff", 18),
    Going(),
    Going("taken"),
    Welcome(),
    Welcome(0.5, 20.0, 60.0, {"t1-1": 12}, 1.5),
    Start("t1-1", "t1", ("train.py",)),
    Start(
        "t1-1",
        "t1",
        ("-m", "pkg.train", "\udcff"),
        {"A": "b"},
        "/home",
        "/usr/bin/python3",
        True,
        True,
        False,
        "/venv/bin/python",
    ),
    Stop("t1-1"),
    Stop("t1-1", 2.5),
    Say("t1-1", {"type": "generation", "id": 3, "members": ["t1-1", "t1-2"], "cut": False}),
    Forget("t1-1"),
    Logged("t1-1", 118),
    Bye(),
    Bye("paused"),
]
FRAMES = Path(__file__).with_name("frames_0_1_0.jsonl").read_text().splitlines()
"""The frames that version 0.1.0 made of these messages."""
RECORDED = list(zip(MESSAGES, FRAMES, strict=True))
IDS = [f"{type(message).__name__}{number}" for number, (message, _) in enumerate(RECORDED)]


NEWER: list[Message] = [
    Prepare(("train.py",), ("transformers", "datasets"), {"A": "b"}, "/home", "", "/venv/bin/python", 2),
    Start("t1-1", "t1", ("train.py",), preload=("transformers",)),
]
"""Messages that version 0.1.0 does not have, or fields of them."""


def test_every_kind_of_message_is_recorded() -> None:
    assert {type(message) for message in (*MESSAGES, *NEWER)} == set(get_args(Message))


@pytest.mark.parametrize("message", NEWER, ids=lambda message: type(message).__name__)
def test_a_message_that_is_newer_than_version_0_1_0_arrives_as_it_was_sent(message: Message) -> None:
    assert decode(encode(message)) == message


def test_what_a_worker_says_at_its_first_step_is_bounded() -> None:
    said = parse_worker_message(
        {"type": "firststep", "parts": {"imports": 9.5}, "modules": {f"m{n}": 0.1 for n in range(5000)}}
    )
    assert isinstance(said, FirstStep)
    assert (said.parts, len(said.modules)) == ({"imports": 9.5}, MOST_MODULES)
    with pytest.raises(ProtocolError, match=r"parts.imports"):
        parse_worker_message({"type": "firststep", "parts": {"imports": float("nan")}})


@pytest.mark.parametrize(("message", "frame"), RECORDED, ids=IDS)
def test_a_message_travels_as_it_did_in_version_0_1_0(message: Message, frame: str) -> None:
    assert encode(message) == frame
    assert decode(frame) == decode(frame.encode()) == message


@pytest.mark.parametrize(("message", "frame"), RECORDED, ids=IDS)
def test_unknown_fields_of_a_frame_are_ignored(message: Message, frame: str) -> None:
    assert decode(json.dumps({**json.loads(frame), "later": {"worker": 1}})) == message


def test_an_unknown_kind_of_message_is_ignored() -> None:
    assert decode('{"type": "dance", "worker": 7}') is None
    assert parse_worker_message({"type": "dance", "step": "x"}) is None
    assert parse_worker_message({"type": "go"}) is None


def sentence(caught: pytest.ExceptionInfo[ProtocolError]) -> str:
    told = str(caught.value)
    assert "\n" not in told
    assert "pydantic" not in told
    assert len(told) < 500
    return told


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (
            {"type": "log", "worker": "t1-1", "offset": -1, "text": "", "size": 0},
            "`offset` must be 0 or more, but got -1",
        ),
        ({"type": "log", "worker": "t1-1", "offset": 0, "text": 7, "size": 0}, "`text` must be a text, but got 7"),
        ({"type": "started", "worker": "t1-1", "pid": True}, "`pid` must be a whole number, but got True"),
        ({"type": "started", "worker": "t1-1", "pid": 1 << 62}, "`pid` must be below 4611686018427387904, but got"),
        ({"type": "started", "worker": "t1-1"}, "invalid message `started`: `pid` is missing"),
        ({"type": "started", "worker": "a\nb", "pid": 1}, "`worker` must have 1 to 256 characters that can be printed"),
        ({"type": "heard", "worker": "t1-1", "message": []}, "`message` must be an object, but got []"),
        ({"type": "beat", "reports": {"t1-1": 3}}, "`reports.t1-1` must be an object, but got 3"),
        (
            {"type": "join", "node": "n", "host": "n", "agent": "a", "workers": [{"worker": "t1-1"}]},
            "`workers.0.trainer` is",
        ),
        ({"type": "join", "node": "n", "host": "n", "agent": "a", "workers": [7]}, "`workers.0` must be an object"),
        (
            {
                "type": "join",
                "node": "n",
                "host": "n",
                "agent": "a",
                "workers": [{"worker": "t1-1", "trainer": "t1"}] * 1001,
            },
            "`workers` must have at most 1000 entries",
        ),
        ({"type": "start", "worker": "t1-1", "trainer": "t1", "argv": "x"}, "`argv` must be a list, but got 'x'"),
        ({"type": "going", "reason": ["x" * 9999] * 99}, "`reason` must be a text, but got ['xxx"),
        ({"worker": "t1-1"}, "a frame must be a JSON object with a `type`"),
        ({"type": ["log"]}, "a frame must be a JSON object with a `type`"),
        (["log"], "a frame must be a JSON object with a `type`"),
    ],
)
def test_an_invalid_frame_is_refused_with_one_sentence_that_names_the_field(frame: Any, said: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(json.dumps(frame))
    assert said in sentence(caught)


def test_what_a_script_said_wrongly_does_not_make_its_agent_s_frame_invalid() -> None:
    row = {"worker": "t1-1", "trainer": "t1", "newest": "x", "formed": 1 << 70, "address": 7, "failed": "\ud800"}
    join = decode(
        json.dumps({"type": "join", "node": "n", "host": "n", "agent": "a", "workers": [{**row, "report": 1}]})
    )
    assert isinstance(join, Join)
    (status,) = join.workers
    assert (status.newest, status.formed, status.address, status.failed) == (-1, -1, "nonsense", "\\ud800")
    assert status.report is None


def test_endless_words_of_an_agent_are_cut_to_what_can_be_stored() -> None:
    much = "first" + "x" * 200_000 + "last"

    def read(kind: str, **fields: Any) -> Any:
        return decode(json.dumps({"type": kind, **fields}))

    going = read("going", reason=much)
    assert going == Going(much[:4096])
    assert read("going", reason="\ud800" * 99_999) == Going(("\\ud800" * 4096)[:4096])
    assert read("started", worker="t1-1", pid=1, warning=much).warning == much[:4096]
    ended = read("ended", worker="t1-1", status=0, tail=much, error=much)
    assert (ended.tail, ended.error) == (much[-65536:], much[:65536])
    row = {"worker": "t1-1", "trainer": "t1", "failed": much, "traceback": much, "tail": much}
    (status,) = read("join", node="n", host="n", agent="a", workers=[row]).workers
    assert (status.failed, status.traceback, status.tail) == (much[:65536], much[:65536], much[-65536:])


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"type": "report"}, "`generation` is missing"),
        ({"type": "report", "generation": 1, "samples": -1}, "`samples` must be 0 or more, but got -1"),
        ({"type": "report", "generation": 1, "epochs": 1.0}, "`epochs` must be a whole number, but got 1.0"),
        ({"type": "report", "generation": 1, "metrics": {"loss": "x"}}, "`metrics.loss` must be a number, but got 'x'"),
        (
            {"type": "report", "generation": 1, "metrics": {"loss": 10**400}},
            "`metrics.loss` must be a number, but got 1000",
        ),
        (
            {"type": "report", "generation": 1, "metrics_at": {"a": [1, 2]}},
            "`metrics_at.a` must have at least 3 entries",
        ),
        ({"type": "report", "generation": 1, "rates": {"x": 1}}, "`rates.x.[key]` must be a whole number, but got 'x'"),
        (
            {"type": "formed", "generation": 1, "world": 1, "pause_s": 1e10, "form_s": 0, "sync_s": 0},
            "`pause_s` must be at",
        ),
        ({"type": "failed", "error": 1, "traceback": ""}, "`error` must be a text, but got 1"),
        ({"generation": 1}, "it must be an object with a `type`"),
        ({"type": {}}, "it must be an object with a `type`"),
    ],
)
def test_an_invalid_message_of_a_worker_is_refused_with_one_sentence(message: Any, said: str) -> None:
    with pytest.raises(ProtocolError, match="a worker said ") as caught:
        parse_worker_message(message)
    assert said in sentence(caught)


def test_a_worker_s_message_is_cut_to_what_can_be_stored() -> None:
    metrics = {f"m{number}": float(number) for number in range(500)}
    rates = {"1": 5.0, "2": float("nan"), "3": 1e300, str(1 << 30): 1.0}
    report = parse_worker_message({"type": "report", "generation": 1, "metrics": metrics, "rates": rates, "later": 1})
    assert isinstance(report, Report)
    assert len(report.metrics) == 100
    assert report.rates == {"1": 5.0}
    failed = parse_worker_message({"type": "failed", "error": "\ud800" * 9999, "traceback": "x" * 99_999, "fresh": 1})
    assert failed == Failed("\\ud800" * 4000, "x" * 20_000, fresh=False)
    assert parse_worker_message({"type": "broken", "generation": 4}) == Broken(4)
    formed = parse_worker_message(
        {"type": "formed", "generation": 1, "world": 2, "pause_s": -1, "form_s": 0, "sync_s": 1}
    )
    assert isinstance(formed, Formed)
    assert (str(formed.pause_s), formed.form_s, formed.sync_s) == ("nan", 0.0, 1.0)
    assert formed.parts == {}
    times = {"generation": 1, "world": 2, "pause_s": 1, "form_s": 0, "sync_s": 1}
    formed = parse_worker_message({"type": "formed", **times, "parts": {"send": 1, "wait": 0.5}})
    assert isinstance(formed, Formed)
    assert formed.parts == {"send": 1.0, "wait": 0.5}
    with pytest.raises(ProtocolError):
        parse_worker_message({"type": "formed", **times, "parts": {"send": "long"}})


REPORT = {
    **{"generation": 3, "step": 10**6, "epoch": 12, "samples": 10**9, "world": 64, "snapshot_step": 10**6},
    "rates": {str(nodes): 123.456789 for nodes in range(1, 17)},
    "metrics": {f"a metric with a long name {i}": 0.123456789 for i in range(16)},
    "metrics_at": {f"a metric with a long name {i}": [12, 10**6, 10**9] for i in range(16)},
}


@pytest.mark.parametrize(
    "message",
    [
        Beat({f"t1-{i}": REPORT for i in range(MOST_WORKERS)}, tuple(GpuUse(str(i), 99, 80_000) for i in range(8))),
        Log("t1-1", 0, "\x00" * (256 << 10), 256 << 10),
        Log("t1-1", 0, "," * (256 << 10), 256 << 10),
        Heard("t1-1", {"type": "failed", "error": "\x00" * 20_000, "traceback": "\x00" * 20_000}),
        Ended("t1-1", 1, "\x00" * 4000, "\x00" * 20_000),
        Join(
            *("n1", "n1", "a"),
            tuple(
                WorkerStatus(f"t1-{i}", "t1", 1, status=1, tail="x" * 4000, report=REPORT, ranks=(RankStatus(1),) * 8)
                for i in range(MOST_WORKERS)
            ),
        ),
    ],
    ids=["beat", "log", "log of commas", "failed", "ended", "join"],
)
def test_the_limits_of_an_agents_frames_are_far_above_what_agents_send(message: Message) -> None:
    frame = encode(message)
    assert decode_from_agent(frame) is not None
    most = MOST_JOIN_BYTES if isinstance(message, Join) else MOST_BYTES
    assert len(frame) * 3 / 2 < most
    assert frame.count(",") * 3 / 2 < MOST_PARTS


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        ('{"type": "beat", "x": "' + "x" * MOST_BYTES + '"}', "characters"),
        ('{"type": "log", "worker": "t1-1", "text": "' + "x" * MOST_BYTES + '"}', "characters"),
        ('{"type": "join", "x": "' + "x" * MOST_JOIN_BYTES + '"}', "characters"),
        ('{"type": "beat", "x": [' + "1," * MOST_PARTS + "1, 1]}", "commas"),
        (json.dumps({"type": "beat", "reports": {str(i): {} for i in range(MOST_WORKERS + 1)}}), "1000 entries"),
    ],
    ids=["beat", "log", "join", "parts", "reports"],
)
def test_an_agents_frame_that_would_take_long_to_decode_is_refused(frame: str, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        decode_from_agent(frame)


def test_of_many_mistakes_in_a_frame_one_is_looked_for() -> None:
    with pytest.raises(ProtocolError, match=r"workers.0.worker") as refused:
        decode(json.dumps({"type": "join", "node": "n", "host": "h", "agent": "a", "workers": [{}] * MOST_WORKERS}))
    cause = refused.value.__context__
    assert isinstance(cause, ValidationError)
    assert {error["loc"][:2] for error in cause.errors()} == {("workers", 0)}
