"""What is looked at before trainers run as their owners, or no longer: whether they can."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import pytest

from bftrainer.cluster.config.load import load_config
from bftrainer.cluster.controller.restore import check_mode
from bftrainer.cluster.owners.accounts import Account
from bftrainer.cluster.owners.modes import MODE_KEY
from bftrainer.cluster.pools.local.own_nodes import can_run
from bftrainer.cluster.retention.stored import SETTINGS_KEY
from bftrainer.cluster.serve import serve
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.errors import InputError

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
