"""What all tests share: hypothesis profiles, the check of markers, the plugins, and real data."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.examples import register_profiles

register_profiles()
gc.disable()  # until all tests are found: the imports make a million objects that stay, and none that is garbage

os.environ.setdefault("OMP_NUM_THREADS", "1")  # many small trainings share few cores; threads would wait for each other

for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):  # `submit` would use the interpreter of the developer's environment
    os.environ.pop(name, None)

pytest.register_assert_rewrite("support.users.attacks")  # it has tests
pytest_plugins = ["support.order", "support.process_guard"]

HERE = Path(__file__).resolve().parent
SHARED_DATA = HERE.parents[1] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real logs and traces, which lies beside the repository where it exists."""
    if not SHARED_DATA.is_dir():
        pytest.skip("needs the real data in ../shared/data, which is not part of the repository")
    return SHARED_DATA


@pytest.fixture(autouse=True)
def _own_run() -> Iterator[None]:
    """A process has one run of `bftrainer.elastic`: that of a test is not there for the next one."""
    yield
    if elastic := sys.modules.get("bftrainer.elastic"):
        elastic._run = None  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
