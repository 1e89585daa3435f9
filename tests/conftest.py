"""What several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Examples are the same in every run; no example fails for being slow on a busy machine.
settings.register_profile("bftrainer", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bftrainer")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real logs and traces, which lies beside the repository where it exists."""
    if not SHARED_DATA.is_dir():
        pytest.skip("needs the real data in ../shared/data, which is not part of the repository")
    return SHARED_DATA


LONGEST = ("test_first_pages.py", "test_slurm_live.py", "test_live_chaos.py", "test_chaos.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: nobody shall have minutes to go when all others are done."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
