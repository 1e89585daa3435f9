"""Trainers whose files the controller's account may not read are refused before they are queued."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from bftrainer.cluster.spec import access
from bftrainer.cluster.spec.access import AccessCheck, check_access
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.errors import BFTrainerError, InputError
from support.cluster.api import by, play
from support.cluster.bench import Bench

NOBODY = 65534


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home that only its owner may enter, with a script in it."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    home = tmp_path / "ann"
    (home / "work").mkdir(parents=True)
    (home / "work" / "train.py").write_text("print(1)\n")
    (home / "work" / "train.py").chmod(0o644)
    return home


def spec(home: Path, **more: object) -> TrainerSpec:
    folder = home / "work"
    return TrainerSpec.model_validate({"script": str(folder / "train.py"), "cwd": str(folder), **more})


def said_to_another_account(check: Callable[[], None]) -> str:
    """Return what a check raises in a process of another account; root's own may read everything."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            check()
        except InputError as problem:
            os.write(writer, str(problem).encode())
        except BaseException as problem:
            os.write(writer, f"unexpected: {problem!r}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:  # noqa: PTH123 - a descriptor
        said = answer.read().decode()
    os.waitpid(child, 0)
    return said


@pytest.mark.waits
def test_a_home_of_mode_0700_is_named_with_what_to_do(home: Path) -> None:
    home.chmod(0o700 if os.getuid() == 0 else 0o600)
    said = said_to_another_account(lambda: check_access(spec(home)))
    assert said.startswith(f"{home}: the account that runs trainers (")
    assert f"may not enter this folder, so it cannot work in the folder {home / 'work'}" in said
    assert f"chmod o+x {home}" in said
    assert f":x {home}`" in said


@pytest.mark.waits
def test_a_script_and_an_interpreter_that_may_not_be_read_are_named(home: Path) -> None:
    script = home / "work" / "train.py"
    home.chmod(0o711)
    assert said_to_another_account(lambda: check_access(spec(home))) == ""
    assert "may not run this interpreter" in said_to_another_account(
        lambda: check_access(spec(home, python=str(script)))
    )
    script.chmod(0o000)
    said = said_to_another_account(lambda: check_access(spec(home)))
    assert said.startswith(f"{script}: ")
    assert "may not read this script." in said
    assert f"chmod o+r {script}" in said


def test_paths_that_do_not_exist_here_and_modules_are_left_to_the_nodes(tmp_path: Path) -> None:
    check_access(TrainerSpec.model_validate({"script": "/scratch-of-nodes/train.py", "cwd": "/scratch-of-nodes"}))
    check_access(TrainerSpec.model_validate({"script": "-m train", "cwd": str(tmp_path)}))
    check_access(TrainerSpec.model_validate({"script": "train.py"}))


def test_the_api_refuses_such_a_trainer_and_queues_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may = os.access

    def closed(path: Path, mode: int) -> bool:
        return may(path, mode) and home not in path.parents and (path != home or mode == os.F_OK)

    monkeypatch.setattr(access.os, "access", closed)

    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        given = {**spec(home).as_json(), "env": {"KEY": "secret"}}
        answer = await client.post("/v1/trainers", json=given, headers=by(tokens, "ann"))
        assert answer.status_code == 422
        assert bench.store.trainers() == []
        assert not bench.store.environments.folder.exists()

    play(home.parent, scene)


def test_a_file_system_that_hangs_holds_up_the_one_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, ends = threading.Event(), threading.Event()

    def hanging(spec: TrainerSpec) -> None:
        hangs.set()
        ends.wait(60)

    monkeypatch.setattr(access, "check_access", hanging)

    async def request() -> None:
        try:
            with pytest.raises(BFTrainerError, match="did not answer the controller within 0.05 s"):
                await AccessCheck(timeout_s=0.05).check(TrainerSpec.model_validate({"script": "/train.py"}))
            assert hangs.is_set()
        finally:
            ends.set()

    asyncio.run(request())
