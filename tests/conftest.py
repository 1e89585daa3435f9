"""What all tests share: hypothesis profiles, the check of markers, the order of tests, and real data."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

from support.examples import register_profiles

register_profiles()

os.environ.setdefault("OMP_NUM_THREADS", "1")  # many small trainings share few cores; threads would wait for each other

for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):  # `submit` would use the interpreter of the developer's environment
    os.environ.pop(name, None)

pytest_plugins = ["support.process_guard"]

HERE = Path(__file__).resolve().parent
SHARED_DATA = HERE.parents[1] / "shared" / "data"
SECONDS: dict[str, float] = json.loads((HERE / "durations.json").read_text())
"""How long tests took that took long. `make durations` writes it."""
TOGETHER = {
    *("test_browser.py", "test_page.py", "test_paper.py", "test_site.py"),
    *("test_slurm_hosts.py", "test_slurm_pool.py", "test_synth.py", "test_tls.py", "test_warm.py"),
}
"""Modules whose fixtures take long to make: one process of a run makes them, not each."""


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real logs and traces, which lies beside the repository where it exists."""
    if not SHARED_DATA.is_dir():
        pytest.skip("needs the real data in ../shared/data, which is not part of the repository")
    return SHARED_DATA


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: when all others are done no test has minutes to go."""
    seconds: dict[str, float] = defaultdict(float)
    units = {}
    for item in items:
        units[item] = item.nodeid
        if item.path.name in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
            units[item] = item.path.stem
        seconds[units[item]] += SECONDS.get(item.nodeid, 0.0)
    items.sort(key=lambda item: -seconds[units[item]])
