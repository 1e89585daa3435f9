"""Two owners with Unix accounts of their own on one machine: each has what is theirs, and gets at nothing else.

All tests share one running system with the `local` pool of root: see `support/users/attacks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.users.attacks import Attacked, AttackTests, attacked_system, churn
from support.users.owned import owned_system

pytest.importorskip("torch")

pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with owned_system(tmp_path_factory.mktemp("apart"), 4) as system:
        yield attacked_system(system)


class TestOnTheLocalPool(AttackTests):
    def test_in_a_burst_of_churn_nothing_is_lost_and_no_node_is_idle_that_somebody_could_use(
        self, attacked: Attacked
    ) -> None:
        live = attacked.system.live
        churn(attacked.system, 4, lambda: [node["agent_pid"] for node in live.nodes() if node["trainer"]])
