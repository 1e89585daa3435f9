"""A job on eight fake nodes that come, leave, are killed and hang, and what it computes all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.elastic.churn import EVENTS, check, disturb, undisturbed

pytestmark = pytest.mark.waits


FEWER = EVENTS[::2]
"""Half of each kind; `make soak` goes on with all of them for as long as one likes."""
EPOCHS = 30


def test_chaos_changes_nothing_of_what_is_computed(tmp_path: Path) -> None:
    assert len(FEWER) >= 20
    assert set(FEWER) == set(EVENTS)
    alone = undisturbed(tmp_path / "alone", EPOCHS)
    account = disturb(tmp_path / "disturbed", 7, EPOCHS, FEWER)
    check(tmp_path / "disturbed", alone, EPOCHS, account)
