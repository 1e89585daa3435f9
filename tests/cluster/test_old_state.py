"""A state folder that version 0.1.0 left is taken up, and its trainers are trained to their end.

`state-0.1.0.tar.gz` was made by that version: a controller with two virtual nodes was killed while `long` and `later`
trained; `short` was done, `ann` had a token and a limit. Paths in the specifications read `@HERE@` there.
"""

from __future__ import annotations

import json
import sqlite3
import tarfile
from pathlib import Path

import pytest

from bftrainer.cluster.store.store import FILE, Store
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
        assert {token.name for token in store.tokens()} >= {"ann"}


def logged(live: Live, trainer: str) -> str:
    """What the script of a trainer has printed, and what its workers said of themselves."""
    return "\n".join(str(line) for line in live.api.logs(trainer)["lines"])
