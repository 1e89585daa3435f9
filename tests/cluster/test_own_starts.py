"""What an agent that belongs to an owner starts, and what it refuses whoever orders it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cluster.agent.own_starts import OwnStarts
from bftrainer.cluster.launchers import StateLayout, WorkerSlot
from bftrainer.cluster.launchers.base import Launch
from bftrainer.cluster.launchers.ddp import DdpLauncher
from bftrainer.cluster.launchers.elastic import ElasticLauncher
from bftrainer.cluster.owners import signatures
from bftrainer.cluster.spec.trainer import TrainerSpec, parse_spec
from bftrainer.cluster.wire import codec
from bftrainer.cluster.wire.messages import Prepare, Start
from bftrainer.elastic import protocol
from bftrainer.errors import BFTrainerError
from bftrainer.processes import variables

SPEC = {"script": "/a/train.py", "args": ["--lr", "0.1"], "env": {"A": "1"}, "cwd": "/a", "submitted_python": "/p"}


def signed(home: Path, **more: Any) -> TrainerSpec:
    spec = parse_spec({**SPEC, **more})
    key = signatures.read_key(home, make=True)
    return spec.model_copy(update={"signature": signatures.sign(spec.as_json(), key)})


def order(home: Path, **more: Any) -> Start:
    """The order to start a signed trainer, as it comes over the network."""
    spec = signed(home, **more)
    launcher = {"elastic": ElasticLauncher, "ddp": DdpLauncher}[spec.launcher](StateLayout(Path("/state"), "s"))
    start = launcher.start(Launch("t1", "name", spec), WorkerSlot("t1-1", "n1", "127.0.0.1"))
    sent = codec.decode(codec.encode(replace(start, spec=spec.as_json())))
    assert isinstance(sent, Start)
    return sent


def own(home: Path) -> OwnStarts:
    return OwnStarts("ann", home, "s")


@pytest.mark.parametrize("launcher", ["elastic", "ddp"])
def test_a_signed_trainer_is_started_with_folders_in_its_owners_home(tmp_path: Path, launcher: str) -> None:
    started = own(tmp_path).checked(order(tmp_path, launcher=launcher))
    base = tmp_path / ".bftrainer"
    assert started.env[protocol.SNAPSHOTS] == str(base / "trainers" / "s-t1" / "snapshots")
    assert started.env[protocol.OUTPUT] == str(base / "trainers" / "s-t1" / "output")
    assert started.env[variables.COMPILED].startswith(str(base / "compiled"))
    assert base.stat().st_mode & 0o777 == 0o700
    assert (base / "trainers" / "s-t1" / "output").is_dir()


def test_folders_that_the_owner_has_chosen_are_kept(tmp_path: Path) -> None:
    chosen = {protocol.OUTPUT: str(tmp_path / "mine"), protocol.SNAPSHOTS: str(tmp_path / "saved")}
    started = own(tmp_path).checked(order(tmp_path, env=chosen))
    assert chosen.items() <= started.env.items()


CHANGES: dict[str, Callable[[Start], Start]] = {
    "other arguments": lambda start: replace(start, argv=("-c", "evil")),
    "another folder": lambda start: replace(start, cwd="/tmp"),
    "another interpreter": lambda start: replace(start, python="/tmp/python"),
    "another submitted interpreter": lambda start: replace(start, submitted_python="/tmp/python"),
    "a changed variable": lambda start: replace(start, env={**start.env, "A": "2"}),
    "a missing variable": lambda start: replace(start, env={k: v for k, v in start.env.items() if k != "A"}),
    "one more variable": lambda start: replace(start, env={**start.env, "LD_PRELOAD": "/tmp/evil.so"}),
    "a program": lambda start: replace(start, program=True),
    "a worker that does not speak": lambda start: replace(start, speaks=False),
    "a trainer that is a path": lambda start: replace(start, trainer="../../x"),
    "no specification": lambda start: replace(start, spec=None),
    "no signature": lambda start: replace(
        start, spec={k: v for k, v in dict(start.spec or {}).items() if k != "signature"}
    ),
    "a changed specification": lambda start: replace(start, spec={**dict(start.spec or {}), "script": "/evil.py"}),
    "a launcher on the head": lambda start: replace(start, spec={**dict(start.spec or {}), "launcher": "hosts"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_order_that_the_owner_has_not_signed_is_refused(tmp_path: Path, change: str) -> None:
    with pytest.raises(BFTrainerError, match="signed"):
        own(tmp_path).checked(CHANGES[change](order(tmp_path)))


def test_a_signature_of_another_owner_is_refused(tmp_path: Path) -> None:
    ann, bob = tmp_path / "ann", tmp_path / "bob"
    sent = order(bob)
    signatures.read_key(ann, make=True)
    with pytest.raises(BFTrainerError, match="was signed with another key"):
        own(ann).checked(sent)


def test_a_signed_launcher_that_needs_the_head_is_refused(tmp_path: Path) -> None:
    spec = signed(tmp_path, launcher="hosts")
    sent = replace(order(tmp_path), spec=spec.as_json())
    with pytest.raises(BFTrainerError, match="launcher hosts"):
        own(tmp_path).checked(sent)


def test_nothing_is_imported_ahead_for_what_is_not_signed(tmp_path: Path) -> None:
    start = order(tmp_path)
    ahead = Prepare(start.argv, ("json",), start.env, start.cwd, start.python, start.submitted_python, spec=start.spec)
    assert own(tmp_path).checked(ahead).argv == start.argv
    with pytest.raises(BFTrainerError, match="signed"):
        own(tmp_path).checked(replace(ahead, argv=("/evil.py",)))


def test_without_owners_messages_are_those_of_before(tmp_path: Path) -> None:
    start = Start("t1-1", "t1", ("a.py",))
    assert "spec" not in codec.encode(start)
    assert "signature" not in parse_spec(SPEC).as_json()
