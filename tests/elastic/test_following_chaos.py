"""Donors and newcomers are killed, or leave, while the state flows: nothing of what is computed changes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.elastic.churn import undisturbed
from support.elastic.flow_chaos import ROUNDS, check_flows, disturb_flows

pytestmark = pytest.mark.waits

EPOCHS = 32


def test_forty_events_while_the_state_flows_change_nothing_and_leave_nothing_behind(tmp_path: Path) -> None:
    assert sum(round_.events for round_ in ROUNDS) == 40
    alone = undisturbed(tmp_path / "alone", EPOCHS)
    account = disturb_flows(tmp_path / "disturbed", EPOCHS)
    assert account.counts == {"join": 20, "kill": 12, "leave": 8}
    check_flows(tmp_path / "disturbed", alone, EPOCHS, account)
