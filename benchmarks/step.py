"""What does elasticity cost at every step? Elastic training against DistributedDataParallel, in the same processes.

    python benchmarks/step.py [--json] [--ranks 2] [--repetitions 121] [--batch 32] [--samples 1024]
    python benchmarks/step.py --framework prepare [--json] [--repetitions 15]
    build/frameworks/transformers/bin/python benchmarks/step.py --framework transformers [--json]

Each rank trains an epoch with `bftrainer.elastic`, then the same epoch with plain DistributedDataParallel (its default
settings, SGD with momentum, torch's DataLoader and DistributedSampler), in turns, in one process and one process group.
The first of each is not counted; the ratio is the median of the ratios of neighbours. Many short epochs: a pair of them
scatters by a tenth on a machine whose cores are lent out, the median of 121 by about one per cent.

With `--framework` the same worker is compared with itself: elastic, and as torchrun starts it, on two ranks each, in
turns of some steps (`ways.py`). For `prepare` that is a plain loop with `elastic.prepare`, and with
DistributedDataParallel. `scripts/frameworks.sh --install` builds the environments of other frameworks.
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
from ways import FRAMEWORKS, RANKS, STEPS_PER_TURN, refuse_missing, step_turns

WORKER = Path(__file__).with_name("workers") / "step_worker.py"


async def measure(ranks: int, repetitions: int, batch: int, samples: int) -> dict[str, Any]:
    """Run the job and read what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rates.json")
        launcher = ColdLauncher()
        argv = [str(WORKER), str(out), str(repetitions), str(batch), str(samples)]
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
        "framework": "run.step",
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


async def measure_framework(framework: str, repetitions: int) -> dict[str, Any]:
    """Compare a framework with itself."""
    elastic, plain = await step_turns(framework, repetitions)
    ratios = [mine.rate / theirs.rate for mine, theirs in zip(elastic, plain, strict=True)]
    processor = [mine.processor_s / theirs.processor_s for mine, theirs in zip(elastic, plain, strict=True)]
    return {
        "bftrainer": __version__,
        "framework": framework,
        "ranks": RANKS,
        "cores": os.cpu_count(),
        "steps_per_turn": STEPS_PER_TURN,
        "repetitions": repetitions,
        "elastic_steps_per_s": round(statistics.median(turn.rate for turn in elastic), 2),
        "plain_steps_per_s": round(statistics.median(turn.rate for turn in plain), 2),
        "ratio": round(statistics.median(ratios), 4),
        "processor_time_ratio": round(statistics.median(processor), 4),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "load_average": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repetitions", type=int, help="121; with a framework 15")
    parser.add_argument("--ranks", type=int, default=2, help="only without a framework")
    parser.add_argument("--batch", type=int, default=32, help="the same")
    parser.add_argument("--samples", type=int, default=1024, help="the same")
    parser.add_argument("--framework", choices=("run.step", *FRAMEWORKS), default="run.step")
    args = parser.parse_args()
    if args.framework == "run.step":
        turns = args.repetitions or 121
        found = asyncio.run(measure(args.ranks, turns, args.batch, args.samples))
        other, rate = "DistributedDataParallel", found["ddp_steps_per_s"]
    else:
        refuse_missing(args.framework, "step.py")
        turns = args.repetitions or 15
        found = asyncio.run(measure_framework(args.framework, turns))
        other, rate = f"{args.framework} by itself", found["plain_steps_per_s"]
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print(f"elastic {found['elastic_steps_per_s']} steps/s, {other} {rate} steps/s")
    print(f"ratio {found['ratio']} (median of {turns})")


if __name__ == "__main__":
    main()
