"""Short chaos of the whole live system; `make soak-live` and `make soak-ranks` are the long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cluster.chaos import chaos
from support.cluster.rank_chaos import rank_chaos

pytest.importorskip("torch")

pytestmark = pytest.mark.waits


def test_chaos_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    tally = chaos(tmp_path / "chaos", 3, controller_kills=2, epochs=14)
    assert tally.controller_kills == 2


def test_nodes_with_two_ranks_are_lost_as_units_and_nothing_else_is_lost(tmp_path: Path) -> None:
    tally = rank_chaos(tmp_path / "chaos", 1, events=5, epochs=8)
    assert tally.events == {"leave": 1, "join": 1, "rank kill": 1, "agent kill": 1, "rank stop": 1}
