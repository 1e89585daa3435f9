"""A trainer that is not PyTorch computes the same when its nodes come, leave and are killed."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening, Outcome
from bftrainer.elastic.protocol import Formed, Report
from bftrainer.processes.launch import ColdLauncher

pytestmark = pytest.mark.waits

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "power_iteration.py"
EXPECTED = np.linalg.eigvalsh(np.cov(np.random.default_rng(1).standard_normal((300, 300))))[-1]

# Until the file is there each step takes its time, so that all happens before the end, on a slow machine too.
UNHURRIED = """
import runpy, sys, time
from pathlib import Path
go, nap = Path(sys.argv.pop(1)), time.sleep
time.sleep = lambda seconds: None if go.exists() else nap(seconds)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def eigenvalues(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"the largest eigenvalue is ([\d.]+), found in \d+ steps", text)]


def test_alone_it_finds_the_largest_eigenvalue() -> None:
    ended = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=60, check=True)
    assert eigenvalues(ended.stdout) == [pytest.approx(EXPECTED, abs=1e-9)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_joins_a_leave_and_two_kills_do_not_change_the_eigenvalue(tmp_path: Path, ranks: int) -> None:
    go, script = tmp_path / "go", tmp_path / "unhurried.py"
    script.write_text(UNHURRIED)
    formed: dict[int, set[str]] = {}
    worlds: list[int] = []
    residuals: list[float] = []

    def watch(happening: Happening) -> None:
        match happening.message:
            case Formed(generation, world):
                formed.setdefault(generation, set()).add(happening.node)
                if len(formed[generation]) == world:
                    worlds.append(world)
            case Report(metrics={"residual": residual}):
                residuals.append(residual)

    async def main() -> tuple[Outcome, str]:
        settings = CoordinatorSettings(silence_s=2.0, grace_s=20.0, ranks_per_node=ranks)
        launcher = ColdLauncher()
        try:
            async with Coordinator(
                [str(script), str(go), str(EXAMPLE), "0.1"],
                launcher,
                nodes=(1, 4),
                folder=tmp_path / "logs",
                settings=settings,
                watch=watch,
            ) as job:

                async def world_is(size: int) -> None:
                    def there() -> bool:
                        return bool(worlds) and worlds[-1] == size

                    await job.until(lambda: there() or not job.nodes, 60, f"a world of {size}")
                    assert there(), "".join(job.log(node) for node in job.logs)

                await job.add(3)
                await world_is(3)
                await job.add(1)
                await world_is(4)
                first, *_, last = job.members
                job.signal(first, signal.SIGKILL, ranks - 1)  # the other ranks of its node end with it
                await world_is(3)
                job.remove(job.members[1])
                await world_is(2)
                assert last in job.members
                await job.until(lambda: len(job.nodes) == 2, 60, "the end of the one that left")
                await job.add(2)
                await world_is(4)
                job.signal(last, signal.SIGKILL)
                await world_is(3)
                go.touch()
                outcome = await asyncio.wait_for(job.wait(), 60)
                return outcome, "".join(job.log(node) for node in job.logs)
        finally:
            await launcher.close()

    outcome, output = asyncio.run(main())
    assert outcome.status == "done", (outcome, output)
    found = eigenvalues(output)
    assert found
    assert found == [pytest.approx(EXPECTED, abs=1e-9)] * len(found)
    assert residuals
