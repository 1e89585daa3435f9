"""A long evaluation in real processes; `long_evaluation.py` does the same for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from long_evaluation import evaluate
from support.elastic.jobs import warm

pytest.importorskip("torch")

pytestmark = pytest.mark.waits


def test_nobody_is_killed_while_rank_0_evaluates_and_newcomers_join_afterwards(
    tmp_path: Path,
) -> None:
    loop, launcher = warm()
    figures = loop.run_until_complete(evaluate(4.0, tmp_path, launcher))
    assert figures["killed"] == []
    assert figures["members_meanwhile"] == figures["members_before"] == figures["still_alive_after"]
    assert not figures["joined_before_the_evaluation_ended"]
    assert figures["status"] == "stopped"
