"""Is this version slower than another? One benchmark of each, in turns, on one machine.

    python benchmarks/turns.py --against REVISION [--runs 5] [--json] BENCHMARK VALUE[,VALUE…] [-- OPTION…]
    python benchmarks/turns.py --against v0.1.0 step.py elastic_steps_per_s -- --repetitions 21

The other revision is checked out into a temporary folder; its own copy of the benchmark runs on its own source. VALUE
is a path into the JSON that the benchmark prints, such as `kill.in_place_s` or `0.exact_ms`. Both sides run once before
the first run that counts. The ratio is the median of this version's values over the median of the other's. Runs in
which a value was not measured (`null`) are left out of its median.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]


def value_at(result: Any, path: str) -> float | None:
    """Return a number of a benchmark's result, by its path of keys and positions; None if it was not measured."""
    for key in path.split("."):
        try:
            result = result[int(key)] if isinstance(result, list) else result[key]
        except (KeyError, IndexError, ValueError):
            raise SystemExit(f"turns: the benchmark's result has no {path}: there is no {key!r}") from None
    return None if result is None else float(result)


def median(values: list[float | None]) -> float:
    """Return the median of the values that were measured."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else math.nan


def run(tree: Path, benchmark: str, options: list[str]) -> Any:
    """Run a benchmark of one source tree and return the JSON it prints."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, str(tree / "benchmarks" / benchmark), "--json", *options]
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def compare(other: Path, benchmark: str, paths: list[str], options: list[str], runs: int) -> dict[str, Any]:
    """Run both sides in turns and return the values of each with their ratios."""
    sides = {"this": HERE, "other": other}
    values: dict[str, dict[str, list[float | None]]] = {path: {side: [] for side in sides} for path in paths}
    loads = []
    for number in range(runs + 1):
        for side, tree in sides.items():
            result = run(tree, benchmark, options)
            loads.append(os.getloadavg()[0])
            for path in paths:
                value = value_at(result, path)
                if number:  # the first run of each side warms up caches
                    values[path][side].append(value)
    rows = {}
    for path, both in values.items():
        this, there = (median(both[side]) for side in sides)
        rows[path] = {**both, "ratio": round(this / there, 4)}
    return {"benchmark": benchmark, "options": options, "runs": runs, "load_most": max(loads), "values": rows}


def main() -> None:
    """Check out the other revision, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", required=True, metavar="REVISION")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("benchmark")
    parser.add_argument("values")
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bftrainer-turns-") as folder:
        other = Path(folder) / "other"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(other), args.against], cwd=HERE, check=True)
        try:
            found = compare(other, args.benchmark, args.values.split(","), args.options, args.runs)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=HERE, check=True)
    found["against"] = args.against
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for path, row in found["values"].items():
        print(f"{path}: {row['ratio']:.3f} of {args.against} (median of {args.runs} runs each, in turns)")


if __name__ == "__main__":
    main()
