"""What is looked at before trainers run as their owners, or no longer: whether they can."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bftrainer.cluster.config.load import load_config
from bftrainer.cluster.controller.restore import check_mode
from bftrainer.cluster.owners.accounts import Account, Accounts
from bftrainer.cluster.owners.modes import MODE_KEY
from bftrainer.cluster.pools.local import own_nodes
from bftrainer.cluster.pools.local.own_nodes import OwnNodes, can_run
from bftrainer.cluster.retention.stored import SETTINGS_KEY
from bftrainer.cluster.serve import serve
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.errors import InputError
from support.users.accounts import processes_of, unix_users
from support.waiting import until

SPEC = {"script": "/train.py", "nodes": "1-2"}


def test_a_controller_does_not_begin_with_trainers_that_nobody_signed_and_changes_nothing(tmp_path: Path) -> None:
    with Store.open(tmp_path / "state.db") as store:
        store.add_trainer(name="signed", owner="ann", spec={**SPEC, "signature": "v1:x"}, time=1.0)
        check_mode(store, own=True)
        before = store.add_trainer(name="before", owner="ann", spec=SPEC, time=2.0)
        with pytest.raises(InputError, match=f"the owners of {before.id} have not signed them.*in mode shared"):
            check_mode(store, own=True)
        assert [row.state for row in store.trainers(unfinished=True)] == ["queued", "queued"]
        store.update_trainer(before.id, state="cancelled", ended=3.0)
        check_mode(store, own=True)


def test_a_controller_in_mode_shared_does_not_begin_with_trainers_of_mode_own_and_changes_nothing(
    tmp_path: Path,
) -> None:
    """It would run them as its own account, and from the beginning: their snapshots are with their owners."""
    with Store.open(tmp_path / FILE) as store:
        store.add_trainer(name="before", owner="ann", spec=SPEC, time=1.0)
        check_mode(store, own=False)
        signed = store.add_trainer(name="signed", owner="ann", spec={**SPEC, "signature": "v1:x"}, time=2.0)
    config = load_config(None, {}, {"server.state": tmp_path, "server.port": 0})
    with pytest.raises(
        InputError, match=rf"users.mode is shared, .* of mode own \({signed.id}\), .*: serve them in mode own"
    ):
        asyncio.run(asyncio.wait_for(serve(config), 20))
    with Store.open(tmp_path / FILE) as store:
        assert [row.state for row in store.trainers(unfinished=True)] == ["queued", "queued"]
        assert (store.kept(SETTINGS_KEY), store.kept(MODE_KEY)) == (None, None)
        store.update_trainer(signed.id, state="cancelled", ended=3.0)
        check_mode(store, own=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program as another account")
@pytest.mark.waits
def test_a_python_that_an_account_cannot_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = Account("nobody", 65534, 65534, (65534,), Path("/"))
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        folder = Path(name)
        python = folder / "python"
        python.write_text("#!/bin/sh\nexit 0\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        folder.chmod(0o700)
        assert not can_run(nobody)
        folder.chmod(0o755)
        assert can_run(nobody)
        python.write_text("#!/bin/sh\nexit 1\n")
        assert not can_run(nobody), "it has no BFTrainer"


@pytest.mark.waits
def test_the_trial_of_an_account_shares_neither_session_nor_terminal_with_the_controller_and_runs_no_code_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with unix_users("bft-eve") as (eve,):
        python, told = eve.home.parent / "python", eve.home / "told"
        python.write_text(
            "#!/bin/sh\n"
            f"exec > {told}\n"
            "cut -d' ' -f6,7 /proc/$$/stat\n"  # session and terminal; names of processes here have no spaces
            "readlink /proc/$$/fd/0 /proc/$$/fd/2\n"
            'echo "$1"\n'
        )
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        assert can_run(eve)
        session, terminal, *rest = told.read_text().split()
        assert int(session) != os.getsid(0)
        assert terminal == "0"
        assert rest == ["/dev/null", "/dev/null", "-I"]


@pytest.mark.waits
def test_a_trial_that_its_user_stops_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with unix_users("bft-eve") as (eve,):
        python = eve.home.parent / "python"
        python.write_text("#!/bin/sh\nkill -STOP $$\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setattr(own_nodes, "TRY_S", 0.2)
        assert not can_run(eve)
        assert processes_of(eve.uid) == []


class Host:
    """The part of `PoolHost` that `OwnNodes` needs: all nodes go to one owner."""

    def __init__(self) -> None:
        self.accounts = Accounts({"ann": "nobody"})
        self.notes: list[str] = []

    def owners_for(self, nodes: Sequence[str]) -> Mapping[str, str]:
        return dict.fromkeys(nodes, "ann")

    def note(self, what: str, **facts: Any) -> None:
        self.notes.append(what)


def test_the_event_loop_does_not_wait_for_the_trial_of_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    going, threads = threading.Event(), list[int]()

    def slow(account: Account) -> bool:
        threads.append(threading.get_ident())
        return going.wait(30.0 if threads[-1] != threading.main_thread().ident else 0.0)

    monkeypatch.setattr(own_nodes, "can_run", slow)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    async def play() -> None:
        host, known = Host(), asyncio.Event()
        own = OwnNodes(cast("Any", host), known.set)
        own.look(["n1"])
        assert not own.may_start("n1")
        assert own.why_not("ann") == "", "it is not known yet"
        await until(lambda: threads)
        assert threading.main_thread().ident not in threads
        going.set()
        await known.wait()
        assert own.may_start("n1")
        assert host.notes == []
        own.close()

    asyncio.run(play())


def test_an_account_that_cannot_run_python_is_tried_again_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now, tried = [0.0], list[float]()

    def fails(account: Account) -> bool:
        tried.append(now[0])
        return False

    monkeypatch.setattr(own_nodes, "can_run", fails)
    monkeypatch.setattr(own_nodes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    async def play() -> None:
        host, known = Host(), asyncio.Event()
        own = OwnNodes(cast("Any", host), known.set)
        own.look(["n1"])
        for _ in range(4):
            known.clear()
            assert not own.may_start("n1")
            await known.wait()
            for _ in range(3):
                assert "nobody cannot run" in own.why_not("ann")
            now[0] += 30.0 * 2 ** (len(tried) - 1)
        assert host.notes == ["no_account"]
        own.close()

    asyncio.run(play())
    assert tried == [0.0, 30.0, 90.0, 210.0]
