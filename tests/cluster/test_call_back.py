"""An agent in a batch job that cannot reach its controller says why in a file, and ends soon."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import ssl
from pathlib import Path

import pytest

from bftrainer.cluster.agent import call_back, link
from bftrainer.cluster.agent.agent import Agent
from bftrainer.cluster.agent.call_back import TELL_AFTER_S, CallBack, call_back_of, why_unreached
from bftrainer.cluster.agent.link import Lost, Refused
from bftrainer.cluster.agent.options import ResolvedAgent
from bftrainer.cluster.wire.messages import Join
from bftrainer.errors import InputError
from bftrainer.processes import variables
from support.clocks import Clock
from support.cluster.fake_controller import FakeController
from support.waiting import until

URL = "http://127.0.0.1:1"


def said(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(path.read_text())
    return found


def test_reasons_are_told_apart() -> None:
    untrusted = ssl.SSLCertVerificationError(1, "x")
    untrusted.verify_message = "certificate is not yet valid"
    broken = ssl.SSLError(1, "x")
    broken.reason = "WRONG_VERSION_NUMBER"
    problems = {
        ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('10.0.0.1', 1)"): "refused",
        TimeoutError("timed out during opening handshake"): "timeout",
        TimeoutError(errno.ETIMEDOUT, "x"): "timeout",
        OSError(errno.ENETUNREACH, "x"): "route",
        OSError(errno.EHOSTUNREACH, "x"): "route",
        socket.gaierror(-2, "Name or service not known"): "name",
        untrusted: "tls",
        broken: "tls",
        OSError(errno.ECONNRESET, "x"): "other",
        EOFError("no answer"): "other",
    }
    for problem, kind in problems.items():
        assert why_unreached(problem)[0] == kind, problem
        assert why_unreached(problem)[1]
        assert "\n" not in why_unreached(problem)[1]
    assert why_unreached(untrusted)[1] == "the certificate is not to be trusted: certificate is not yet valid"
    assert why_unreached(OSError(errno.ENETUNREACH, "x"))[1] == "there is no route: network is unreachable"


def test_a_moment_without_a_controller_is_not_told_and_what_was_told_is_taken_back(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "n1"
    calls = CallBack(path, URL, clock)
    calls.failed("refused", "the connection is refused")
    assert not path.exists()
    clock.wait(TELL_AFTER_S)
    calls.failed("refused", "the connection is refused")
    assert said(path) == {"url": URL, "kind": "refused", "reason": "the connection is refused"}
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()  # the pool has read it
    calls.failed("refused", "the connection is refused")
    calls.ended(InputError("it ends"))
    assert not path.exists()
    calls.failed("timeout", "the connection timed out")
    assert said(path)["kind"] == "timeout"
    calls.reached()
    assert not path.exists()
    calls.ended(InputError("the node was taken much later"))
    assert not path.exists()


def test_only_agents_of_batch_jobs_tell_and_their_workers_do_not_inherit_it(tmp_path: Path) -> None:
    environment = {variables.CALL_BACK: str(tmp_path / "n1"), variables.URL: URL}
    assert call_back_of(environment) is not None
    assert environment == {variables.URL: URL}
    assert call_back_of(environment) is None
    CallBack(tmp_path / "none" / "n1", URL).failed("tls", "x", for_good=True)  # a folder that is gone harms nothing


@pytest.mark.waits
def test_a_pilot_without_a_controller_tells_why_and_ends_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "TRY_S", 1.0)
    monkeypatch.setattr(call_back, "TELL_AFTER_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        port = taken.getsockname()[1]
        told = CallBack(tmp_path / "n1", f"http://127.0.0.1:{port}")
        settings = ResolvedAgent(f"ws://127.0.0.1:{port}/v1/agents", "n1", "127.0.0.1", "secret")
        agent = Agent(settings, os.environ, preload=(), call_back=told)
        with pytest.raises(Lost, match="for 1 s: the connection is refused"):
            asyncio.run(agent.run())
    assert said(tmp_path / "n1")["kind"] == "refused"


@pytest.mark.waits
def test_a_wrong_secret_is_told_at_once_and_a_welcome_ends_the_matter(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeController() as controller:
            url = f"ws://127.0.0.1:{controller.port}/v1/agents"
            path = tmp_path / "n1"
            wrong = ResolvedAgent(url, "n1", "127.0.0.1", "another")
            with pytest.raises(Refused):
                await Agent(wrong, os.environ, preload=(), call_back=CallBack(path, controller.url)).run()
            assert said(path)["reason"] == "the controller refuses the secret of this agent"
            path.unlink()
            right = ResolvedAgent(url, "n1", "127.0.0.1", controller.secret)
            agent = Agent(right, os.environ, preload=(), call_back=CallBack(path, controller.url))
            running = asyncio.create_task(agent.run())
            await controller.hears(Join)
            await until(lambda: agent._link.welcome)
            assert agent._link.give_up_s > link.TRY_S  # from now on it waits for its controller as others do
            agent.leave("enough")
            await running
            assert not path.exists()

    asyncio.run(scene())
