"""Every framework's short tests, run in its own environment: one join and one kill for each way to write a script.

The other tests of this folder are skipped where their framework is not installed. This one builds the environments and
runs the tests with the marker `short` in them, so that `make test` covers each way. `make soak-frameworks` runs all.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.waits

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CANNOT_INSTALL = 3
"""Exit status of scripts/frameworks.sh."""


def frameworks_with_short_tests() -> list[str]:
    names = [path.stem.removeprefix("requirements-") for path in HERE.glob("requirements-*.txt")]
    return sorted(
        name for name in names if any("mark.short" in path.read_text() for path in HERE.glob(f"test_{name}*.py"))
    )


def test_each_framework_that_makes_scripts_elastic_has_a_short_test() -> None:
    integrations = ROOT / "src" / "bftrainer" / "integrations"
    assert set(frameworks_with_short_tests()) >= {path.parent.name for path in integrations.glob("*/__init__.py")}


def environments() -> list[list[str]]:
    """Frameworks with the same packages share an environment, and are tested in one process."""
    found: dict[str, list[str]] = {}
    for name in frameworks_with_short_tests():
        found.setdefault((HERE / f"requirements-{name}.txt").read_text(), []).append(name)
    return list(found.values())


@pytest.mark.parametrize("names", environments(), ids="+".join)
def test_the_short_tests_of_frameworks_pass_in_their_environment(names: list[str]) -> None:
    if not (ROOT / ".venv" / ".bftrainer-setup").exists():
        pytest.skip("needs the .venv of `make setup`")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        ["bash", "scripts/frameworks.sh", "--short", *names],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    print(done.stdout)
    if done.returncode == CANNOT_INSTALL and not os.environ.get("CI"):
        pytest.skip(f"the packages of {' and '.join(names)} cannot be installed here; where $CI is set this fails")
    assert done.returncode == 0, done.stdout[-3000:]
    # As many as there are: none was skipped.
    files = [path for name in names for path in HERE.glob(f"test_{name}*.py")]
    assert f"{sum(path.read_text().count('@pytest.mark.short') for path in files)} passed" in done.stdout
