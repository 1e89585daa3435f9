"""What a rescale and a step cost on a GPU, for models of torchvision and for GPT-2. Needs a GPU.

    python benchmarks/gpu.py [--json] [--models resnet18,…] [--backend nccl|gloo|both] [--batch 32] [--repetitions 5]

Two worker processes share the GPU; a third joins, leaves with notice, joins again and is killed, `repetitions` times.
Each change: the longest time without a committed step, and of the workers' own account the time to form the group and
to hand over the state. With gloo the results are at the top of a model's row, with NCCL under `nccl`. Allow two minutes
for a model and a backend.

Throughput: elastic training against plain DistributedDataParallel in the same processes, blocks of 20 steps in turns;
two processes with gloo, and one with NCCL. Several NCCL ranks on one GPU talk over loopback sockets
(`workers/rig.py`), which says nothing about a cluster: their throughput is not measured, and their pauses include that
slow transport.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bftrainer import __version__
from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening
from bftrainer.elastic.protocol import Formed, Ready
from bftrainer.processes.warm import WarmLauncher
from rescale import HERE, commits, longest_gap, settled

MODELS = ("resnet18", "shufflenet_v2_x1_0", "densenet121", "vgg16", "gpt2")
BACKENDS = {"gloo": {"BFTRAINER_BACKEND": "gloo"}, "nccl": {"BFTRAINER_BACKEND": "nccl", "BFTRAINER_RIG": "1"}}
CALM_S = 1.0


def middle(values: list[float]) -> float:
    """The median, in milliseconds' precision."""
    return round(statistics.median(values), 4)


async def changes(model: str, batch: int, repetitions: int, environment: dict[str, str]) -> dict[str, Any]:
    """Times of every kind of change."""
    gaps: dict[str, list[float]] = {"grow": [], "shrink": [], "kill": []}
    formed: dict[str, list[Formed]] = {"grow": [], "shrink": [], "kill": []}
    starts: list[float] = []
    now, ready = "grow", {}

    def watch(happening: Happening) -> None:
        if isinstance(happening.message, Formed):
            formed[now].append(happening.message)
        if isinstance(happening.message, Ready):
            ready[happening.node] = time.monotonic()

    with tempfile.TemporaryDirectory() as name:
        folder, launcher = Path(name), WarmLauncher()
        settings = CoordinatorSettings(silence_s=120.0, threads=4, environment=environment)
        argv = [str(HERE / "gpu_worker.py"), name, model, str(batch), "train"]
        async with Coordinator(argv, launcher, nodes=(1, 3), settings=settings, watch=watch) as job:
            await job.add(2)
            await settled(folder, 2, 0.0, 10)
            formed["grow"].clear()
            for _ in range(repetitions):
                for change in ("shrink", "kill"):
                    await asyncio.sleep(CALM_S)
                    now, begin = "grow", time.monotonic()
                    (node,) = await job.add(1)
                    end = await settled(folder, 3, begin, 10)
                    starts.append(ready[node] - begin)
                    gaps["grow"].append(longest_gap(commits(folder), begin, end))
                    await asyncio.sleep(CALM_S)
                    now, begin = change, time.monotonic()
                    job.remove(node) if change == "shrink" else job.signal(node, signal.SIGKILL)
                    end = await settled(folder, 2, begin, 10)
                    gaps[change].append(longest_gap(commits(folder), begin, end))
        await launcher.close()
    found: dict[str, Any] = {"newcomer_start_s": middle(starts)}
    for change, times in gaps.items():
        found[change] = {
            "pause_s": middle(times),
            "pause_all_s": [round(t, 3) for t in times],
            "form_s": middle([message.form_s for message in formed[change]]),
            "sync_s": middle([message.sync_s for message in formed[change]]),
        }
    return found


async def throughput(model: str, batch: int, ranks: int, steps: int, environment: dict[str, str]) -> dict[str, Any]:
    """Samples per second of both sides."""
    with tempfile.TemporaryDirectory() as name:
        launcher = WarmLauncher()
        settings = CoordinatorSettings(silence_s=120.0, threads=4, environment=environment)
        argv = [str(HERE / "gpu_worker.py"), name, model, str(batch), "compare", str(steps)]
        async with Coordinator(argv, launcher, nodes=(ranks, ranks), settings=settings) as job:
            await job.add(ranks)
            outcome = await job.wait()
            if outcome.status != "done":
                raise SystemExit(f"{outcome.error}\n{outcome.traceback}")
        await launcher.close()
        rates = json.loads(Path(name, "rates.json").read_text())
    ratios = [mine / theirs for mine, theirs in zip(rates["elastic"], rates["ddp"], strict=True)]
    return {
        "elastic_samples_per_s": round(statistics.median(rates["elastic"]), 1),
        "ddp_samples_per_s": round(statistics.median(rates["ddp"]), 1),
        "ratio": round(statistics.median(ratios), 4),
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All models."""
    found: dict[str, Any] = {"bftrainer": __version__, "batch": args.batch, "models": {}}
    for model in args.models.split(","):
        row: dict[str, Any] = {}
        found["models"][model] = row
        if args.backend != "nccl":
            row |= await changes(model, args.batch, args.repetitions, BACKENDS["gloo"])
            print(model, "gloo", json.dumps(row), file=sys.stderr, flush=True)
            row["two_ranks_gloo"] = await throughput(model, args.batch, 2, args.steps, BACKENDS["gloo"])
        if args.backend != "gloo":
            row["nccl"] = await changes(model, args.batch, args.repetitions, BACKENDS["nccl"])
            print(model, "nccl", json.dumps(row["nccl"]), file=sys.stderr, flush=True)
        if args.device == "cuda":
            row["one_rank_nccl"] = await throughput(model, args.batch, 1, args.steps, {"BFTRAINER_BACKEND": "nccl"})
        print(model, json.dumps(row), file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--backend", choices=["nccl", "gloo", "both"], help="both with a GPU, gloo without")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    if args.backend is None:
        args.backend = "both" if args.device == "cuda" else "gloo"
    if args.backend != "gloo" and args.device == "cpu":
        parser.error(f"--backend {args.backend} needs a GPU; on a CPU use --backend gloo")
    found = asyncio.run(measure(args))
    if args.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
