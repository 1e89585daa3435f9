"""Rank 0 evaluates for minutes while two nodes join: nobody is killed, and the newcomers join afterwards.

`python tests/elastic/long_evaluation.py --minutes 6` runs it in real time and prints a line of JSON; the suite runs
`evaluate` for a few seconds. As a worker of its own job this file is the training script.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bftrainer.elastic import protocol
from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening
from bftrainer.processes.launch import ProcessLauncher
from bftrainer.processes.warm import WarmLauncher


async def evaluate(seconds: float, folder: Path, launcher: ProcessLauncher) -> dict[str, Any]:
    """Run the job; what happened, in figures."""
    happened: list[Happening] = []
    argv = (__file__, str(folder), str(seconds))
    async with Coordinator(
        argv, launcher, folder=folder / "logs", settings=CoordinatorSettings(), watch=happened.append
    ) as job:
        await job.add(2)
        await job.until(lambda: (folder / "begins").exists(), 120, "the evaluation")
        first = job.members
        for _ in range(2):
            (newcomer,) = await job.add(1)
            await job.until(lambda name=newcomer: job.roster.is_ready(name), 120, "a newcomer that is ready")
        members_meanwhile = job.members
        (folder / "may-end").touch()
        await job.until(lambda: len(job.members) == 4, seconds + 120, "the newcomers' joining")
        ended_before = not (folder / "ends").exists()
        alive = sorted(set(first) & set(job.nodes))
        killed = [h.node for h in happened if h.what.startswith("ended") or h.what == "silent"]
        await job.stop()
        outcome = await job.wait()
    return {
        "seconds": seconds,
        "evaluated_s": round(float((folder / "ends").read_text()), 1),
        "status": outcome.status,
        "error": outcome.error,
        "members_before": sorted(first),
        "members_meanwhile": sorted(members_meanwhile),
        "still_alive_after": alive,
        "joined_before_the_evaluation_ended": ended_before,
        "killed": killed,
    }


def train(folder: Path, seconds: float) -> None:
    """The training script: rank 0 evaluates once, in the second epoch."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from bftrainer import elastic

    run = elastic.init()
    model = nn.Linear(4, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in run.epochs(1_000_000):
        for (x,) in run.batches(TensorDataset(torch.ones(16, 4)), global_batch=4):
            model(x).pow(2).mean().backward()
            run.step()
        if run.is_main and run.world == 2 and not (folder / "begins").exists():
            (folder / "begins").touch()
            began = time.monotonic()
            time.sleep(seconds)
            while not (folder / "may-end").exists():  # on a busy machine it takes the newcomers longer to start
                time.sleep(0.05)
            (folder / "ends").write_text(str(time.monotonic() - began))


async def _alone(seconds: float) -> dict[str, Any]:
    launcher = WarmLauncher()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return await evaluate(seconds, Path(folder), launcher)
    finally:
        await launcher.close()


if __name__ == "__main__":
    if protocol.WORKER in os.environ:
        train(Path(sys.argv[1]), float(sys.argv[2]))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--minutes", type=float, default=6.0)
        figures = asyncio.run(_alone(60.0 * parser.parse_args().minutes))
        print(json.dumps(figures))
        sys.exit(bool(figures["killed"]) or figures["status"] != "stopped")
