"""What a rescale and a step cost on a GPU, for models of torchvision and for GPT-2. Needs a GPU.

    python benchmarks/gpu.py [--json] [--models resnet18,…] [--backend nccl|gloo|both] [--batch 32] [--repetitions 5]
    python benchmarks/gpu.py --sides follow,whole [--json] [--models gpt2,gpt2-medium] [--backend nccl|gloo|both]
    python benchmarks/gpu.py --compiled [--json] [--models gpt2] [--steps 400]
    python benchmarks/gpu.py --ranks-per-node 2 [--json] [--models gpt2] [--backend nccl|gloo|both] [--repetitions 5]

Two worker processes share the GPU; a third joins, leaves with notice, joins again and is killed, `repetitions` times.
Each change: the longest time without a committed step, and of the workers' own account the time to form the group and
to hand over the state. With gloo the results are at the top of a model's row, with NCCL under `nccl`. Allow two minutes
for a model and a backend.

Throughput: elastic training against plain DistributedDataParallel in the same processes, blocks of 20 steps in turns;
two processes with gloo, and one with NCCL. Several NCCL ranks on one GPU talk over loopback sockets
(`workers/rig.py`), which says nothing about a cluster: their throughput is not measured, and their pauses include that
slow transport.

`--sides` measures only changes, of GPT-2 (124M parameters) and GPT-2 medium (355M) with AdamW in bfloat16: newcomers
that follow the training before they join, newcomers that take the whole state when they join, or both in turns. Each
turn is a job of its own; with one side all changes are those of one job. `pause_s` is the longest time from one commit
to the next around the change (`gap_s`) without that of an undisturbed step after it (`step_s`), all medians; `parts_s`
is what the workers spent it on, and `said` what they told their users, such as whether newcomers followed.

`--compiled` compares the steps per second of one rank that trains a compiled model elastically with those of a plain
loop without BFTrainer, in the same process, in turns.

`--ranks-per-node K` measures only changes, and GPT-2 unless `--models` says otherwise: 2 → 3 nodes with K ranks each,
beside the same number of ranks at one per node (2K → 3K nodes, K of them change at once) and the same number of nodes
with one rank each. The three run in turns, each turn with a job of its own. All ranks share the one GPU. Allow four
minutes for two turns of a backend. `--models gpt2-tiny --device cpu` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bftrainer import __version__
from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings
from bftrainer.elastic.protocol import FOLLOW
from bftrainer.processes.launch import ProcessLauncher
from bftrainer.processes.warm import WarmLauncher
from changes import CHANGES, HERE, Measured, Shape, in_parts, measure_changes

MODELS = ("resnet18", "shufflenet_v2_x1_0", "densenet121", "vgg16", "gpt2")
BACKENDS = {"gloo": {"BFTRAINER_BACKEND": "gloo"}, "nccl": {"BFTRAINER_BACKEND": "nccl", "BFTRAINER_RIG": "1"}}
SIDES = {"follow": "1", "whole": "0"}
"""Whether newcomers follow the training before they join, and what says so to them."""
CALM_S = 1.0
SETTLED_STEPS = 10
"""Steps on the new number of ranks after which a change is over."""


def middle(values: list[float]) -> float:
    """The median, in milliseconds' precision."""
    return round(statistics.median(values), 4)


async def changes(model: str, batch: int, repetitions: int, environment: dict[str, str]) -> dict[str, Any]:
    """Times of every kind of change."""
    found, launcher = Measured(), WarmLauncher()
    await measure_job(model, batch, Shape(), environment, launcher, found, repetitions)
    await launcher.close()
    return summary(found)


async def measure_job(
    model: str,
    batch: int,
    shape: Shape,
    environment: dict[str, str],
    launcher: ProcessLauncher,
    found: Measured,
    repetitions: int = 1,
) -> None:
    """Add the changes of one job to `found`."""
    settings = CoordinatorSettings(silence_s=120.0, threads=4, environment=environment)

    def script(folder: str) -> list[str]:
        return [str(HERE / "gpu_worker.py"), folder, model, str(batch), "train"]

    await measure_changes(
        script, launcher, shape, settings, found, repetitions=repetitions, calm_s=CALM_S, steps=SETTLED_STEPS
    )


def summary(found: Measured) -> dict[str, Any]:
    """The medians by kind of change."""
    row: dict[str, Any] = {"newcomer_start_s": middle(found.starts_s)}
    for change in CHANGES:
        row[change] = {
            "pause_s": middle(found.gaps[change]),
            "pause_all_s": [round(gap, 3) for gap in found.gaps[change]],
            "form_s": middle([message.form_s for message in found.formed[change]]),
            "sync_s": middle([message.sync_s for message in found.formed[change]]),
        }
    return row


async def changes_of_ranks(
    model: str, batch: int, ranks: int, repetitions: int, environment: dict[str, str]
) -> dict[str, Any]:
    """Times of changes with several ranks per node and with one, in turns. Each turn is a job of its own."""
    shapes = {
        "ranks_per_node": Shape(2, 1, ranks),
        "same_ranks": Shape(2 * ranks, ranks, 1),
        "same_nodes": Shape(2, 1, 1),
    }
    sides = {name: Measured() for name in shapes}
    launcher = WarmLauncher()
    for number in range(repetitions):
        for name, shape in shapes.items():
            await measure_job(model, batch, shape, environment, launcher, sides[name])
            pauses = ", ".join(f"{change} {times[-1]:.3f} s" for change, times in sides[name].gaps.items())
            print(f"{model}, turn {number + 1}, {shape}: {pauses}", file=sys.stderr, flush=True)
    await launcher.close()
    row: dict[str, Any] = {name: {"shape": str(shapes[name]), **summary(side)} for name, side in sides.items()}
    mine = sides["ranks_per_node"]
    row["ratio"] = {
        name: {change: round(mine.pause_s(change) / sides[name].pause_s(change), 3) for change in CHANGES}
        for name in ("same_ranks", "same_nodes")
    }
    return row


async def changes_by_side(
    model: str, batch: int, names: list[str], repetitions: int, environment: dict[str, str]
) -> dict[str, Any]:
    """Times of changes, with newcomers that follow the training and with others, in turns."""
    sides = {name: Measured() for name in names}
    launcher = WarmLauncher()
    turns, changes = (repetitions, 1) if len(sides) > 1 else (1, repetitions)
    for number in range(turns):
        for name, side in sides.items():
            await measure_job(model, batch, Shape(), {**environment, FOLLOW: SIDES[name]}, launcher, side, changes)
            pauses = ", ".join(
                f"{change} {side.gaps[change][-1] - side.steps_s[change][-1]:.3f} s" for change in CHANGES
            )
            print(f"{model}, turn {number + 1}, {name}: {pauses}", file=sys.stderr, flush=True)
    await launcher.close()
    row: dict[str, Any] = {}
    for name, side in sides.items():
        row[name] = {change: in_parts(side, change) for change in CHANGES}
        row[name]["newcomer_start_s"] = middle(side.starts_s)
        row[name]["flow_rate_share"] = middle(side.flow_shares) if side.flow_shares else None
        row[name]["said"] = dict(side.said)
    return row


async def throughput(
    model: str, batch: int, ranks: int, steps: int, environment: dict[str, str], mode: str = "compare"
) -> dict[str, Any]:
    """Samples per second of both sides."""
    with tempfile.TemporaryDirectory() as name:
        launcher = WarmLauncher()
        settings = CoordinatorSettings(silence_s=120.0, threads=4, environment=environment)
        argv = [str(HERE / "gpu_worker.py"), name, model, str(batch), mode, str(steps)]
        async with Coordinator(argv, launcher, nodes=(ranks, ranks), settings=settings) as job:
            await job.add(ranks)
            outcome = await job.wait()
            if outcome.status != "done":
                raise SystemExit(f"{outcome.error}\n{outcome.traceback}")
        await launcher.close()
        rates = json.loads(Path(name, "rates.json").read_text())
    other = "ddp" if mode == "compare" else "plain"
    ratios = [mine / theirs for mine, theirs in zip(rates["elastic"], rates["other"], strict=True)]
    return {
        "elastic_samples_per_s": round(statistics.median(rates["elastic"]), 1),
        f"{other}_samples_per_s": round(statistics.median(rates["other"]), 1),
        "ratio": round(statistics.median(ratios), 4),
    }


async def measure_ranks(args: argparse.Namespace) -> dict[str, Any]:
    """All models, with several ranks per node."""
    found: dict[str, Any] = {"bftrainer": __version__, "batch": args.batch, "ranks_per_node": args.ranks_per_node}
    found["models"] = {}
    for model in args.models.split(","):
        row = found["models"][model] = {}
        for backend in ("gloo", "nccl") if args.backend == "both" else (args.backend,):
            environment = BACKENDS[backend]
            row[backend] = await changes_of_ranks(model, args.batch, args.ranks_per_node, args.repetitions, environment)
            print(model, backend, json.dumps(row[backend]), file=sys.stderr, flush=True)
    found["load_average"] = round(os.getloadavg()[0], 2)
    return found


async def measure_sides(args: argparse.Namespace) -> dict[str, Any]:
    """All models, with newcomers that follow and with others."""
    found: dict[str, Any] = {"bftrainer": __version__, "batch": args.batch, "repetitions": args.repetitions}
    found["models"] = {}
    for model in args.models.split(","):
        row = found["models"][model] = {}
        for backend in ("gloo", "nccl") if args.backend == "both" else (args.backend,):
            row[backend] = await changes_by_side(model, args.batch, args.sides, args.repetitions, BACKENDS[backend])
            print(model, backend, json.dumps(row[backend]), file=sys.stderr, flush=True)
    found["load_average"] = round(os.getloadavg()[0], 2)
    return found


async def measure_compiled(args: argparse.Namespace) -> dict[str, Any]:
    """All models, compiled, on one rank."""
    found: dict[str, Any] = {"bftrainer": __version__, "batch": args.batch, "models": {}}
    for model in args.models.split(","):
        row = await throughput(model, args.batch, 1, args.steps, {}, mode="compiled")
        found["models"][model] = row
        print(model, json.dumps(row), file=sys.stderr, flush=True)
    return found


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
    parser.add_argument("--models", help=f"{','.join(MODELS)}; with --ranks-per-node gpt2")
    parser.add_argument("--ranks-per-node", type=int, help="compare nodes with so many ranks with nodes with one")
    parser.add_argument("--sides", type=lambda text: text.split(","), help=" or ".join((*SIDES, ",".join(SIDES))))
    parser.add_argument("--compiled", action="store_true", help="compare compiled models with a plain loop")
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
    if args.ranks_per_node is not None and args.ranks_per_node < 2:
        parser.error(f"--ranks-per-node must be 2 or more, but got {args.ranks_per_node}")
    if unknown := set(args.sides or ()) - set(SIDES):
        parser.error(f"--sides must be of {', '.join(SIDES)}, but got {', '.join(sorted(unknown))}")
    special = args.ranks_per_node or args.sides or args.compiled
    args.models = args.models or ("gpt2" if special else ",".join(MODELS))
    if args.sides:
        found = asyncio.run(measure_sides(args))
    elif args.compiled:
        found = asyncio.run(measure_compiled(args))
    else:
        found = asyncio.run(measure_ranks(args) if args.ranks_per_node else measure(args))
    if args.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
