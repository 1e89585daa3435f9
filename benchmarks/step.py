"""What does elasticity cost at every step? Elastic training against DistributedDataParallel, in the same processes.

    python benchmarks/step.py [--json] [--ranks 2] [--repetitions 121] [--batch 32] [--samples 1024]
    python benchmarks/step.py --framework prepare [--json]

Each rank trains an epoch with `bftrainer.elastic`, then the same epoch with plain DistributedDataParallel (its default
settings, SGD with momentum, torch's DataLoader and DistributedSampler), in turns, in one process and one process group.
The first of each is not counted; the ratio is the median of the ratios of neighbours. Many short epochs: a pair of them
scatters by a tenth on a machine whose cores are lent out, the median of 121 by about one per cent. With `--framework
prepare` the elastic side is the same plain loop as the other one, made elastic by `elastic.prepare`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bftrainer import __version__
from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings
from bftrainer.processes.launch import ColdLauncher

WORKER = Path(__file__).with_name("workers") / "step_worker.py"


async def measure(ranks: int, repetitions: int, batch: int, samples: int, framework: str) -> dict[str, Any]:
    """Run the job and read what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rates.json")
        launcher = ColdLauncher()
        argv = [str(WORKER), str(out), str(repetitions), str(batch), str(samples), framework]
        settings = CoordinatorSettings(silence_s=60.0, background_start=False)
        async with Coordinator(argv, launcher, nodes=(ranks, ranks), folder=Path(folder), settings=settings) as job:
            await job.add(ranks)
            outcome = await job.wait()
            if outcome.status != "done":
                raise SystemExit(f"{outcome.error}\n{outcome.traceback}")
        await launcher.close()
        rates: dict[str, Any] = json.loads(out.read_text())
    ratios = [mine / theirs for mine, theirs in zip(rates["elastic"], rates["ddp"], strict=True)]
    return {
        "bftrainer": __version__,
        "framework": framework,
        "ranks": ranks,
        "batch": batch,
        "cores": os.cpu_count(),
        "steps_per_epoch": rates["steps"],
        "repetitions": repetitions,
        "elastic_steps_per_s": round(statistics.median(rates["elastic"]), 2),
        "ddp_steps_per_s": round(statistics.median(rates["ddp"]), 2),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=121)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--framework", choices=("run.step", "prepare"), default="run.step")
    args = parser.parse_args()
    found = asyncio.run(measure(args.ranks, args.repetitions, args.batch, args.samples, args.framework))
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print(f"elastic {found['elastic_steps_per_s']} steps/s, DistributedDataParallel {found['ddp_steps_per_s']} steps/s")
    print(f"ratio {found['ratio']} (median of {args.repetitions})")


if __name__ == "__main__":
    main()
