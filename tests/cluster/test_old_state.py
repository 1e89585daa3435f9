"""A state folder that version 0.1.0 left is taken up, and its trainers are trained to their end.

`state-0.1.0.tar.gz` was made by that version: a controller with two virtual nodes was killed while `long` and `later`
trained; `short` was done, `ann` had a token and a limit. Paths in the specifications read `@HERE@` there.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from bftrainer.cli.main import run
from bftrainer.cluster.store.state_folder import LOCK_FILE
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.util.locks import take_lock
from support.cluster.live import Live
from support.waiting import wait_until

pytestmark = pytest.mark.waits

HERE = Path(__file__).parent
SAMPLES = 20 * 400


@pytest.fixture
def old_state(tmp_path: Path) -> Path:
    state = tmp_path / "state"
    with tarfile.open(HERE / "state-0.1.0.tar.gz") as tar:
        tar.extractall(state, filter="data")
    script = json.dumps(str(HERE / "old_state_worker.py"))[1:-1]
    with sqlite3.connect(state / FILE) as db:
        db.execute("UPDATE trainers SET spec = replace(spec, '@HERE@/train.py', ?)", (script,))
        db.execute("UPDATE trainers SET spec = replace(spec, '@HERE@', ?)", (str(tmp_path),))
    db.close()
    state.chmod(0o700)
    return state


def test_trainers_events_tokens_and_owners_of_0_1_0_are_taken_up_and_training_goes_on(old_state: Path) -> None:
    with Store.open(old_state / FILE) as store:
        before = {row.name: row.samples for row in store.trainers()}
        events = list(store.all_events())
    with Live(old_state, "--nodes", "2") as live:
        wait_until(lambda: {row["state"] for row in live.api.trainers(all=True)} == {"done"}, "the end of all", 120)
        rows = {row["name"]: row for row in live.api.trainers(all=True)}
        resumed = {name: "resumed" in text for name in ("long", "later") for text in [logged(live, rows[name]["id"])]}
    assert before["short"] == SAMPLES > before["long"] > before["later"]
    assert {name: row["samples"] for name, row in rows.items()} == dict.fromkeys(("short", "long", "later"), SAMPLES)
    assert resumed == {"long": True, "later": True}
    with Store.open(old_state / FILE) as store:
        assert list(store.all_events())[: len(events)] == events
        assert [(row.owner, row.max_nodes) for row in store.owners()] == [("ann", 2)]
        assert {token.name for token in store.tokens.all()} >= {"ann"}


def version(path: Path) -> int:
    """The schema version of a database."""
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def test_before_an_upgrade_a_back_up_is_made_and_nothing_migrates_beside_a_controller(
    old_state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, copy = old_state / FILE, tmp_path / "copy.db"
    old = version(file)
    assert run(["backup", "--state", str(old_state), str(copy)]) == 0
    assert version(copy) == old
    for words in (["token", "list"], ["owner", "list"], ["prune", "--dry-run"]):
        assert run([*words, "--state", str(old_state)]) == 1
        assert f"schema version {old} is older" in capsys.readouterr().err
    lock = take_lock(old_state / LOCK_FILE)
    assert lock is not None
    change = ["owner", "set", "bob", "--max-nodes", "3", "--state", str(old_state)]
    assert run(change) == 1
    assert "is of an older BFTrainer, and a controller" in capsys.readouterr().err
    assert version(file) == old
    os.close(lock)
    assert run(change) == 0
    assert version(file) > old


def logged(live: Live, trainer: str) -> str:
    """What the script of a trainer has printed, and what its workers said of themselves."""
    return "\n".join(str(line) for line in live.api.logs(trainer)["lines"])
