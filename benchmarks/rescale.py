"""How long does training stand still when nodes come and go? In place against torchrun, one run, one machine.

    python benchmarks/rescale.py [--json] [--repetitions 5] [--torchrun-repetitions 3]
    python benchmarks/rescale.py --ranks-per-node 2 [--json] [--repetitions 7]
    python benchmarks/rescale.py --framework prepare [--json] [--repetitions 5]
    python benchmarks/rescale.py --state-mb 400 [--json] [--repetitions 5]
    python benchmarks/rescale.py --against torchrun,torchft [--state-mb 0.4,400] [--torchft-python PYTHON] [--json]

Two ranks train a CNN of 100,000 parameters; a third joins (`grow`), leaves with notice (`shrink`), joins again and is
killed with SIGKILL (`kill`). The figure is the longest time without a committed step around the change. torchrun has
the settings that made it quickest here (`bftrainer.elastic.local.torchrun`), its script saves a checkpoint at every
step. A newcomer in place is forked from a warm parent at low priority: `warm_join` has the pause and the share of their
normal rate that the others keep from its start until it is ready.

`--ranks-per-node K` is another measurement: 2 → 3 nodes with K ranks each beside as many ranks at one per node, that is
2K → 3K nodes of which K join, leave or are killed at once. Both in turns, each turn with jobs of its own. `ratio` is
the pause of nodes with K ranks over that of nodes with one.

`--framework` compares a way to write the script, such as a plain loop with `elastic.prepare` or a Hugging Face Trainer,
with `run.step`. Both in turns as well. `ratio` is its pause over that of `run.step`. `ways.py` has the ways.

`--state-mb N` trains a model whose parameters and momentum have N megabytes. Its newcomers follow the training before
they join (`follow`), or take the whole state when they join, as before (`whole`); both in turns. `gap_s` is the longest
time from one commit to the next around the change, `step_s` that of an undisturbed step after it, and `pause_s` the
difference, all medians. `parts_s` is what the workers say that they spent the pause on, until the first step with the
newcomer begins; `switches_s` is the time from the last commit without it to the first one with it, which need not be
the longest. `flow_rate_share` is the share of their normal rate that the others keep while the state flows.

`--against` measures the same three figures for torchrun, torchft or both, beside training in place, for each size of
the state, in turns. The JSON has them under `sizes`, and those of training in place at the last size at the top.
torchrun's script saves at each step, from 100 MB on every 10 s (`save_every_s`): what was done since is done again, and
is part of the gap. torchft's newcomers get the state from the others; its lighthouse waits 100 ms for late replicas.
torchft is not installed for this: `--torchft-python` is an interpreter that has it. The JSON says what is missing, and
what did not train again within three minutes of a change: it has no further turn at that size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bftrainer import __version__
from bftrainer.elastic.local.coordinator import CoordinatorSettings
from bftrainer.elastic.protocol import FOLLOW
from bftrainer.processes.warm import PRELOAD as WARM
from bftrainer.processes.warm import WarmLauncher
from changes import CHANGES, HERE, Measured, Shape, in_parts, measure_changes, rounded
from others import measure_other, measure_sized, missing, torchrun
from ways import FRAMEWORKS, PRELOAD, refuse_missing, worker_command

CALM_S = 2.0
"""Undisturbed training before each change of torchrun's nodes, as on the elastic side."""
LARGE_MB = 100.0
"""From this size on, torchrun's script does not save at each step."""
OTHERS = ("torchrun", "torchft")


def script(folder: str) -> list[str]:
    """The worker's command."""
    return [str(HERE / "rescale_worker.py"), folder]


async def in_place(repetitions: int) -> Measured:
    """The elastic side."""
    found, launcher = Measured(), WarmLauncher()
    await measure_changes(script, launcher, Shape(), CoordinatorSettings(), found, repetitions=repetitions)
    await launcher.close()
    return found


async def by_torchrun(repetitions: int) -> dict[str, list[float]]:
    """The other side: agents come and go, workers are restarted."""
    found = Measured()
    with tempfile.TemporaryDirectory() as name:
        async with torchrun(Path(name), [str(HERE / "torchrun_worker.py"), name]) as add:
            await measure_other(
                Path(name), add, found, name="torchrun", repetitions=repetitions, calm_s=CALM_S, steps=20
            )
    return found.gaps


async def measure(repetitions: int, torchrun_repetitions: int) -> dict[str, Any]:
    """Both sides."""
    mine = await in_place(repetitions)
    theirs = await by_torchrun(torchrun_repetitions)
    found = heading(repetitions)
    for change in CHANGES:
        ours, other = mine.pause_s(change), statistics.median(theirs[change])
        found[change] = {
            "in_place_s": round(ours, 4),
            "torchrun_s": round(other, 3),
            "ratio": round(other / ours, 1),
            "in_place_all_s": rounded(mine.gaps[change]),
            "torchrun_all_s": rounded(theirs[change], 3),
        }
    found["warm_join"] = warm_join(mine)
    return found


async def measure_ranks(ranks: int, repetitions: int) -> dict[str, Any]:
    """Nodes of several ranks, and as many ranks at one per node, in turns. Each turn is a job of its own."""
    shapes = {"in_place": Shape(2, 1, ranks), "one_per_node": Shape(2 * ranks, ranks, 1)}
    sides = {name: Measured() for name in shapes}
    launcher = WarmLauncher()
    for number in range(repetitions):
        for name, shape in shapes.items():
            await measure_changes(script, launcher, shape, CoordinatorSettings(), sides[name])
            pauses = ", ".join(f"{change} {times[-1]:.3f} s" for change, times in sides[name].gaps.items())
            print(f"turn {number + 1}, {shape}: {pauses}", file=sys.stderr, flush=True)
    await launcher.close()
    found = heading(repetitions) | {"ranks_per_node": ranks, "shapes": {name: str(shapes[name]) for name in shapes}}
    for change in CHANGES:
        together, apart = (sides[name].pause_s(change) for name in shapes)
        found[change] = {
            "in_place_s": round(together, 4),
            "one_per_node_s": round(apart, 4),
            "ratio": round(together / apart, 3),
            "in_place_all_s": rounded(sides["in_place"].gaps[change]),
            "one_per_node_all_s": rounded(sides["one_per_node"].gaps[change]),
        }
    found["ratio"] = max(found[change]["ratio"] for change in CHANGES)
    found["warm_join"] = warm_join(sides["in_place"])
    found["load_average"] = round(os.getloadavg()[0], 2)
    return found


async def measure_framework(framework: str, repetitions: int) -> dict[str, Any]:
    """A script written another way and one with `run.step`, in turns. Each turn is a job of its own."""
    commands = {framework: lambda folder: worker_command(framework, folder, "rescale"), "run_step": script}
    sides = {name: Measured() for name in commands}
    launcher = WarmLauncher(preload=(*WARM, *PRELOAD.get(framework, ())))
    for number in range(repetitions):
        for name, command in commands.items():
            await measure_changes(command, launcher, Shape(), CoordinatorSettings(), sides[name])
            pauses = ", ".join(f"{change} {times[-1]:.3f} s" for change, times in sides[name].gaps.items())
            print(f"turn {number + 1}, {name}: {pauses}", file=sys.stderr, flush=True)
    await launcher.close()
    found = heading(repetitions) | {"framework": framework}
    for change in CHANGES:
        other, ours = (sides[name].pause_s(change) for name in commands)
        found[change] = {
            "framework_s": round(other, 4),
            "run_step_s": round(ours, 4),
            "ratio": round(other / ours, 3),
            "framework_all_s": rounded(sides[framework].gaps[change]),
            "run_step_all_s": rounded(sides["run_step"].gaps[change]),
        }
    found["ratio"] = max(found[change]["ratio"] for change in CHANGES)
    found["load_average"] = round(os.getloadavg()[0], 2)
    return found


async def measure_state(megabytes: float, repetitions: int) -> dict[str, Any]:
    """Newcomers that follow, and newcomers that take the whole state in the pause, in turns."""

    large = partial(sized_script, megabytes)
    sides = {"follow": Measured(), "whole": Measured()}
    launcher = WarmLauncher()
    for number in range(repetitions):
        for name, side in sides.items():
            settings = CoordinatorSettings(
                silence_s=30.0, background_start=False, environment={FOLLOW: "1" if name == "follow" else "0"}
            )
            await measure_changes(large, launcher, Shape(), settings, side, calm_s=5.0, steps=6)
            pauses = ", ".join(
                f"{change} {side.gaps[change][-1] - side.steps_s[change][-1]:.3f} s" for change in CHANGES
            )
            print(f"turn {number + 1}, {name}: {pauses}", file=sys.stderr, flush=True)
    await launcher.close()
    found = heading(repetitions) | {"state_mb": megabytes}
    for name, side in sides.items():
        found[name] = {change: in_parts(side, change) for change in CHANGES}
    found |= found["follow"]
    found["ratio"] = round(sides["whole"].beyond_step_s("grow") / max(sides["follow"].beyond_step_s("grow"), 1e-3), 2)
    shares = sides["follow"].flow_shares
    found["flow_rate_share"] = round(statistics.median(shares), 3) if shares else None
    found["load_average"] = round(os.getloadavg()[0], 2)
    return found


async def measure_against(names: list[str], sizes: list[float], repetitions: int, python: str) -> dict[str, Any]:
    """In place and other ways, each with states of several sizes, in turns. Each turn is a job of its own."""
    lacking = {name: why for name in names if (why := missing(name, python))}
    found = heading(repetitions) | {"state_mb": sizes, "save_every_s": {}, "sizes": {}}
    launcher = WarmLauncher()
    for size in sizes:
        script = partial(sized_script, size)
        sides = {name: Measured() for name in ("bftrainer", *names) if name not in lacking}
        unfinished = dict[str, str]()
        calm_s, steps = (2.0, 20) if size < LARGE_MB else (5.0, 6)
        save_every_s = found["save_every_s"][f"{size:g}"] = 0.0 if size < LARGE_MB else 10.0
        for number in range(repetitions):
            for name, side in sides.items():
                if name == "bftrainer":
                    settings = CoordinatorSettings(silence_s=30.0, background_start=False)
                    await measure_changes(script, launcher, Shape(), settings, side, calm_s=calm_s, steps=steps)
                elif name not in unfinished:
                    options = {"repetitions": 1, "calm_s": calm_s, "steps": steps}
                    try:
                        await measure_sized(name, size, side, python=python, save_every_s=save_every_s, **options)
                    except SystemExit as problem:
                        unfinished[name] = f"turn {number + 1} did not end: {problem}"
                        print(f"{size:g} MB, {name}: {unfinished[name]}", file=sys.stderr, flush=True)
                if name in unfinished:
                    continue
                pauses = ", ".join(f"{change} {side.beyond_step_s(change):.3f} s" for change in CHANGES)
                print(f"{size:g} MB, turn {number + 1}, {name}: {pauses}", file=sys.stderr, flush=True)
        rows: dict[str, Any] = {name: {"missing": why} for name, why in lacking.items()}
        rows |= {name: {"missing": why, "gaps_s": sides[name].gaps} for name, why in unfinished.items()}
        whole = {name: side for name, side in sides.items() if name not in unfinished}
        rows |= {name: {change: in_parts(side, change) for change in CHANGES} for name, side in whole.items()}
        found["sizes"][f"{size:g}"] = rows
    await launcher.close()
    found |= found["sizes"][f"{sizes[-1]:g}"]["bftrainer"]
    found["load_average"] = round(os.getloadavg()[0], 2)
    return found


def sized_script(megabytes: float, folder: str) -> list[str]:
    """The worker's command for a state of this size."""
    return [str(HERE / "large_worker.py"), folder, str(megabytes)]


def print_against(found: dict[str, Any]) -> None:
    """All sides, size by size."""
    print(f"medians of {found['repetitions']} turns, load average {found['load_average']}")
    for size, sides in found["sizes"].items():
        for name, row in sides.items():
            said = ", ".join(f"{change} {row[change]['pause_s']:.3f} s" for change in CHANGES if "missing" not in row)
            print(f"{size:>6} MB {name:10} {said or 'not measured: ' + row['missing']}")


def print_state(found: dict[str, Any]) -> None:
    """Both ways, kind by kind."""
    print(f"a state of {found['state_mb']:g} MB, medians of {found['repetitions']} turns", end=", ")
    print(f"load average {found['load_average']}")
    for name in ("follow", "whole"):
        for change in CHANGES:
            row = found[name][change]
            print(
                f"{name:7} {change:7} pause {row['pause_s']:.3f} s: {row['gap_s']:.3f} s, a step {row['step_s']:.3f} s"
            )
            print("        " + ", ".join(f"{part} {seconds:.3f} s" for part, seconds in row["parts_s"].items()))
    if found["flow_rate_share"] is not None:
        print(f"while the state flows the others keep {found['flow_rate_share']:.0%} of their rate")


def heading(repetitions: int) -> dict[str, Any]:
    """What every result begins with."""
    return {"bftrainer": __version__, "cores": os.cpu_count(), "repetitions": repetitions}


def warm_join(side: Measured) -> dict[str, Any]:
    """What newcomers do to the others."""
    return {
        "pause_s": round(side.pause_s("grow"), 4),
        "survivor_rate_share": round(statistics.median(side.rate_shares), 3) if side.rate_shares else None,
        "start_s": round(statistics.median(side.starts_s), 3),
    }


def print_ranks(found: dict[str, Any]) -> None:
    """Both shapes, kind by kind."""
    together, apart = found["shapes"].values()
    print(f"{together} and {apart}, medians of {found['repetitions']} turns, load average {found['load_average']}")
    for change in CHANGES:
        row = found[change]
        print(f"{change:7} {row['in_place_s']:.3f} s and {row['one_per_node_s']:.3f} s: ratio {row['ratio']:.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repetitions", type=int, help="5; with --ranks-per-node 7")
    parser.add_argument("--torchrun-repetitions", type=int, default=3)
    parser.add_argument("--ranks-per-node", type=int, help="compare nodes with so many ranks with nodes with one")
    parser.add_argument("--framework", choices=FRAMEWORKS, help="compare this way to write a script with run.step")
    parser.add_argument("--state-mb", help="compare two ways to give newcomers a state of this size")
    parser.add_argument("--against", help=f"compare with {' and '.join(OTHERS)}, at several sizes of the state")
    parser.add_argument(
        "--torchft-python", default=sys.executable, help="an interpreter with torchft; default: this one"
    )
    args = parser.parse_args()
    try:
        sizes = [float(size) for size in (args.state_mb or "0.4,400").split(",")]
    except ValueError:
        parser.error(f"--state-mb must be a number, or several with --against, but got {args.state_mb!r}")
    if min(sizes) <= 0 or (len(sizes) > 1 and args.state_mb is not None and args.against is None):
        parser.error(f"--state-mb must be one number above 0, or several with --against, but got {args.state_mb}")
    if args.against is not None:
        names = args.against.split(",")
        if unknown := set(names) - set(OTHERS):
            parser.error(f"--against must be of {', '.join(OTHERS)}, but got {', '.join(sorted(unknown))}")
        found = asyncio.run(measure_against(names, sizes, args.repetitions or 5, args.torchft_python))
    elif args.state_mb is not None:
        found = asyncio.run(measure_state(sizes[0], args.repetitions or 5))
    elif args.framework is not None:
        refuse_missing(args.framework, "rescale.py")
        found = asyncio.run(measure_framework(args.framework, args.repetitions or 5))
    elif args.ranks_per_node is not None:
        if args.ranks_per_node < 2:
            parser.error(f"--ranks-per-node must be 2 or more, but got {args.ranks_per_node}")
        found = asyncio.run(measure_ranks(args.ranks_per_node, args.repetitions or 7))
    else:
        found = asyncio.run(measure(args.repetitions or 5, args.torchrun_repetitions))
    if args.json:
        print(json.dumps(found, indent=1))
        return
    if args.against is not None:
        print_against(found)
        return
    if args.state_mb is not None:
        print_state(found)
        return
    if args.framework is not None:
        for change in CHANGES:
            row = found[change]
            print(
                f"{change:7} {row['framework_s']:.3f} s, run.step {row['run_step_s']:.3f} s: ratio {row['ratio']:.2f}"
            )
        return
    if args.ranks_per_node is not None:
        print_ranks(found)
        return
    for change in CHANGES:
        row = found[change]
        print(
            f"{change:7} in place {row['in_place_s']:.3f} s, torchrun {row['torchrun_s']:.1f} s: {row['ratio']:.0f} ×"
        )
    join = found["warm_join"]
    print(f"a newcomer pauses the others for {join['pause_s']:.3f} s; while it starts they keep", end=" ")
    print(f"{join['survivor_rate_share']:.0%} of their rate")


if __name__ == "__main__":
    main()
