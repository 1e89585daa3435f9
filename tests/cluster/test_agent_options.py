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
from bftrainer.cluster import wire
from bftrainer.cluster.agent_options import Options, read_environment, resolve
from bftrainer.cluster.launchers.head import HeadAgent
from bftrainer.cluster.pools import discovery
from bftrainer.cluster.pools.local import LocalPool, LocalSettings
from bftrainer.errors import InputError


def test_settings_come_from_options_then_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from-file\n")
    environment = {wire.URL: "https://head.example:1/x/", wire.SECRET: "s", wire.NODE: "n"}
    settings = resolve(Options(), dict(environment))
    assert (settings.url, settings.node, settings.secret) == ("wss://head.example:1/x/v1/agents", "n", "s")
    assert settings.host == os.uname().nodename
    assert not settings.on_loopback
    assert "'s'" not in repr(settings)
    options = Options("http://localhost:2", "m", None, tmp_path / "secret", tmp_path / "new")
    settings = resolve(options, environment)
    assert (settings.url, settings.node, settings.secret) == ("ws://localhost:2/v1/agents", "m", "from-file")
    assert settings.host == "127.0.0.1"
    assert settings.on_loopback
    assert (tmp_path / "new").is_dir()
    assert wire.SECRET not in environment


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (Options(), {wire.SECRET: "s"}, "where is the controller"),
        (Options("http://h"), {}, "there is no secret"),
        (Options("http://h", secret_file=Path("/no/file")), {}, "cannot read the secret: /no/file"),
        (Options("http://h"), {wire.SECRET: "a b"}, "one word of ASCII"),
        (Options("h:1"), {wire.SECRET: "s"}, "`--url` must be such as"),
        (Options("http://h:port"), {wire.SECRET: "s"}, "`--url` must be such as"),
        (Options("http://"), {wire.SECRET: "s"}, "`--url` must be such as"),
        (Options("http://h", "a\nb"), {wire.SECRET: "s"}, "`--node` must be a name"),
        (Options("http://h", folder=Path("/dev/null/x")), {wire.SECRET: "s"}, "`--folder` must be a folder"),
    ],
)
def test_wrong_settings_are_named(options: Options, environment: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(options, environment)


def test_variables_may_come_on_standard_input() -> None:
    found: dict[str, str] = {}
    read_environment(iter(["A=1\n", "B=x=y\r\n", "\n", "C=3\n"]), found)
    assert found == {"A": "1", "B": "x=y"}
    with pytest.raises(InputError, match="NAME=value"):
        read_environment(iter(["what?\n"]), found)


def test_a_wrong_call_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (wire.URL, wire.SECRET, wire.NODE):
        monkeypatch.delenv(name, raising=False)
    assert run_command(["agent"]) == 2
    assert capsys.readouterr().err.startswith("bftrainer: there is no secret to join with")


def test_what_a_controller_and_its_agents_start_sees_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.TOKEN, "of an admin")
    monkeypatch.setenv("PLAIN", "kept")
    environment = {wire.TOKEN: "x", wire.SECRET: "s", wire.URL: "http://127.0.0.1:1", "PLAIN": "kept"}
    resolve(Options(), environment)
    assert environment == {wire.URL: "http://127.0.0.1:1", "PLAIN": "kept"}
    assert wire.inherited(os.environ).keys() == os.environ.keys() - {wire.TOKEN, wire.SECRET}

    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **more: started.append(more["env"]) or SimpleNamespace(pid=1))
    head = HeadAgent(tmp_path, {wire.SECRET: "theirs"})
    head.keep(wanted=True, here=False)
    monkeypatch.undo()
    (given,) = started
    assert (wire.TOKEN in given, given["PLAIN"], given[wire.SECRET]) == (False, "kept", "theirs")


def test_commands_of_pools_see_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wire.TOKEN, "of an admin")
    said = asyncio.run(discovery.run((sys.executable, "-c", "import os; print(*os.environ)"), 20.0)).decode().split()
    assert wire.TOKEN not in said
    assert "PATH" in said
    office = SimpleNamespace(agent_environment={wire.SECRET: "theirs"})
    pool = LocalPool(LocalSettings(nodes=1), tmp_path, preload=())
    monkeypatch.setattr(LocalPool, "_to", office)
    assert wire.TOKEN not in pool._environment("n1")
    assert pool._environment("n1")[wire.SECRET] == "theirs"
