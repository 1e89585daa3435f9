"""A job on eight fake nodes that come, leave, are killed and hang, and what it computes all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.elastic.churn import EVENTS, check, disturb, undisturbed
from support.elastic.jobs import SETTINGS

pytestmark = pytest.mark.waits

FEW_EVENTS = ["join"] * 3 + ["leave"] * 2 + ["kill"] * 4 + ["stop"]


def test_chaos_changes_nothing_of_what_is_computed(tmp_path: Path) -> None:
    assert len(EVENTS) >= 40
    alone = undisturbed(tmp_path / "alone", 50)
    account = disturb(tmp_path / "disturbed", 7, 50, EVENTS)
    check(tmp_path / "disturbed", alone, 50, account)


def test_nodes_with_two_ranks_come_and_go_as_units_and_nothing_of_what_is_computed_changes(tmp_path: Path) -> None:
    alone = undisturbed(tmp_path / "alone", 12)
    settings = replace(SETTINGS, ranks_per_node=2)
    account = disturb(tmp_path / "disturbed", 5, 12, FEW_EVENTS, settings=settings)
    assert 2 <= account.single["kill"] < account.counts["kill"]
    assert account.single["stop"] == 1
    check(tmp_path / "disturbed", alone, 12, account)
