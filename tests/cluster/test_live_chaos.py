"""A short chaos of the whole live system; `make soak-live` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cluster.chaos import chaos

pytest.importorskip("torch")

pytestmark = pytest.mark.waits


def test_chaos_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    tally = chaos(tmp_path / "chaos", 3, controller_kills=4, epochs=25)
    assert tally.controller_kills == 4
