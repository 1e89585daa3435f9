"""How an agent is told where to join, and by what."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bftrainer.cli.main import run as run_command
from bftrainer.cluster.agent.options import AgentOptions, read_environment, resolve
from bftrainer.cluster.controller.head_agent import HeadAgent
from bftrainer.cluster.pools.local.pool import LocalPool, LocalSettings
from bftrainer.cluster.pools.script import discovery
from bftrainer.errors import InputError
from bftrainer.processes import variables


def test_settings_come_from_options_then_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from-file\n")
    environment = {variables.URL: "https://head.example:1/x/", variables.SECRET: "s", variables.NODE: "n"}
    settings = resolve(AgentOptions(), dict(environment))
    assert (settings.url, settings.node, settings.secret) == ("wss://head.example:1/x/v1/agents", "n", "s")
    assert settings.host == os.uname().nodename
    assert not settings.on_loopback
    assert "'s'" not in repr(settings)
    options = AgentOptions("http://localhost:2", "m", None, tmp_path / "secret", tmp_path / "new")
    settings = resolve(options, environment)
    assert (settings.url, settings.node, settings.secret) == ("ws://localhost:2/v1/agents", "m", "from-file")
    assert settings.host == "127.0.0.1"
    assert settings.on_loopback
    assert (tmp_path / "new").is_dir()
    assert variables.SECRET not in environment


def test_slots_come_from_the_option_then_from_the_environment_which_workers_do_not_see() -> None:
    given = {variables.URL: "http://h:1", variables.SECRET: "s"}
    environment = {**given, variables.SLOTS: "4"}
    assert resolve(AgentOptions(), environment).slots == 4
    assert variables.SLOTS not in environment
    assert resolve(AgentOptions(slots="2"), {**given, variables.SLOTS: "4"}).slots == 2
    assert (
        resolve(AgentOptions(), dict(given)).slots == resolve(AgentOptions(), {**given, variables.SLOTS: ""}).slots == 0
    )


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (AgentOptions(), {variables.SECRET: "s"}, "the address of the controller is missing"),
        (AgentOptions("http://h"), {}, "there is no secret"),
        (AgentOptions("http://h", secret_file=Path("/no/file")), {}, "cannot read the secret: /no/file"),
        (AgentOptions("http://h"), {variables.SECRET: "a b"}, "one word of ASCII"),
        (AgentOptions("h:1"), {variables.SECRET: "s"}, "`--url` must be such as"),
        (AgentOptions("http://h:port"), {variables.SECRET: "s"}, "`--url` must be such as"),
        (AgentOptions("http://"), {variables.SECRET: "s"}, "`--url` must be such as"),
        (AgentOptions("http://h", "a\nb"), {variables.SECRET: "s"}, "`--node` must be a name"),
        *(
            (
                AgentOptions("http://h", slots=wrong),
                {variables.SECRET: "s"},
                "`--slots` must be a whole number from 1 to 256",
            )
            for wrong in ("0", "257", "-1", "two", "", "1.5", "²", "9" * 5000)
        ),
        (AgentOptions("http://h"), {variables.SECRET: "s", variables.SLOTS: "x"}, "BFTRAINER_SLOTS must be .* got 'x'"),
        (AgentOptions("http://h", folder=Path("/dev/null/x")), {variables.SECRET: "s"}, "`--folder` must be a folder"),
    ],
)
def test_wrong_settings_are_named(options: AgentOptions, environment: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(options, environment)


def test_variables_may_come_on_standard_input() -> None:
    found: dict[str, str] = {}
    read_environment(iter(["A=1\n", "B=x=y\r\n", "\n", "C=3\n"]), found)
    assert found == {"A": "1", "B": "x=y"}
    with pytest.raises(InputError, match="NAME=value"):
        read_environment(iter(["what?\n"]), found)


def test_a_wrong_call_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (variables.URL, variables.SECRET, variables.NODE):
        monkeypatch.delenv(name, raising=False)
    assert run_command(["agent"]) == 2
    assert capsys.readouterr().err.startswith("bftrainer: there is no secret to join with")


def test_what_a_controller_and_its_agents_start_sees_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variables.TOKEN, "of an admin")
    monkeypatch.setenv("PLAIN", "kept")
    environment = {
        variables.TOKEN: "x",
        variables.SECRET: "s",
        variables.URL: "http://127.0.0.1:1",
        "PLAIN": "kept",
    }
    resolve(AgentOptions(), environment)
    assert environment == {variables.URL: "http://127.0.0.1:1", "PLAIN": "kept"}
    assert variables.inherited(os.environ).keys() == os.environ.keys() - {variables.TOKEN, variables.SECRET}

    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **more: started.append(more["env"]) or SimpleNamespace(pid=1))
    head = HeadAgent(tmp_path, {variables.SECRET: "theirs"})
    head.keep(wanted=True, here=False)
    monkeypatch.undo()
    (given,) = started
    assert (variables.TOKEN in given, given["PLAIN"], given[variables.SECRET]) == (False, "kept", "theirs")


@pytest.mark.waits
def test_commands_of_pools_see_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variables.TOKEN, "of an admin")
    said = asyncio.run(discovery.run((sys.executable, "-c", "import os; print(*os.environ)"), 20.0)).decode().split()
    assert variables.TOKEN not in said
    assert "PATH" in said
    host = SimpleNamespace(agent_environment={variables.SECRET: "theirs"})
    pool = LocalPool(LocalSettings(nodes=1), tmp_path, preload=())
    monkeypatch.setattr(LocalPool, "_to", host)
    assert variables.TOKEN not in pool._environment("node-1")
    assert pool._environment("node-1")[variables.SECRET] == "theirs"
