"""The order of the tests, and which of them stay together: a plugin for pytest and pytest-xdist.

The longest tests are started first, by `tests/durations.json`. All tests of a module in `TOGETHER` run in one process.
pytest-xdist's own way, groups in the ids of tests, does nothing since pytest 9.2, so a scheduler here does it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

SECONDS: dict[str, float] = json.loads((Path(__file__).resolve().parents[1] / "durations.json").read_text())
"""How long tests took that took long. `make durations` writes it."""
TOGETHER = {
    *("test_browser.py", "test_hand_over.py", "test_owners_apart.py", "test_page.py", "test_paper.py"),
    *("test_site.py", "test_slurm_hosts.py", "test_slurm_pool.py", "test_synth.py", "test_tls.py", "test_warm.py"),
}
"""Modules whose fixtures take long to make: one process of a run makes them, not each."""


def unit_of(nodeid: str) -> str:
    """The unit that a test is started with: its module if that stays together, else only the test itself."""
    module = nodeid.partition("::")[0]
    return module if module.rpartition("/")[2] in TOGETHER else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process one unit after the other (with `--dist loadgroup`)."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class UnitScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return UnitScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: when all others are done no test has minutes to go."""
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        seconds[unit_of(item.nodeid)] += SECONDS.get(item.nodeid, 0.0)
    items.sort(key=lambda item: -seconds[unit_of(item.nodeid)])
