"""A job on eight fake nodes that come, leave, are killed and hang, and what it computes all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.elastic.churn import EVENTS, check, disturb, undisturbed

pytestmark = pytest.mark.waits


def test_chaos_changes_nothing_of_what_is_computed(tmp_path: Path) -> None:
    assert len(EVENTS) >= 40
    alone = undisturbed(tmp_path / "alone", 50)
    account = disturb(tmp_path / "disturbed", 7, 50, EVENTS)
    check(tmp_path / "disturbed", alone, 50, account)
