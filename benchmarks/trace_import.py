"""How long do large logs take, and how much memory? Imports and measures generated logs of two large machines.

python benchmarks/trace_import.py [--runs 3] [--logs wide,long] [--share 1.0] [--json]

`wide` has 68,936 jobs on 40,960 nodes, `long` 301,914 jobs on 5,544 nodes. Every command runs in a process of its own,
whose peak memory is reported. `--share 0.1` takes a tenth of the jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bftrainer import __version__

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.traces.large import LONG, WIDE, write_swf  # type: ignore[import-not-found]

SHAPES = {"wide": WIDE, "long": LONG}


@dataclass(frozen=True)
class Done:
    """What a command took and printed."""

    seconds: float
    cpu_s: float
    peak_mb: float
    printed: dict[str, Any]


def command(*words: str) -> Done:
    """Run one `bftrainer` command."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen([sys.executable, "-m", "bftrainer", *words, "--json"], stdout=out)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        if child.returncode:
            raise SystemExit(f"bftrainer {' '.join(words)} ended with {child.returncode}")
        out.seek(0)
        return Done(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, json.load(out))


def measure(name: str, share: float, runs: int, folder: Path) -> dict[str, Any]:
    """Import the log and measure the trace, `runs` times: the medians of the seconds, the peaks of memory."""
    shape = SHAPES[name]
    shape = shape.shorter(round(shape.jobs * share))
    log, trace = folder / f"{name}.swf", folder / f"{name}.parquet"
    write_swf(log, shape)
    imports = [command("trace", "import", str(log), "-o", str(trace)) for _ in range(runs)]
    stats = [command("trace", "stats", str(trace)) for _ in range(runs)]
    report = imports[0].printed
    assert report["used"] == shape.jobs
    assert stats[0].printed["fragments"] == report["fragments"]
    result = {
        "jobs": shape.jobs,
        "nodes": shape.nodes,
        "processors": shape.processors,
        "busy_share": round(report["busy_share"], 4),
        "fragments": report["fragments"],
        "log_mb": round(log.stat().st_size / 1e6, 1),
        "trace_mb": round(trace.stat().st_size / 1e6, 1),
    }
    for step, done in (("import", imports), ("stats", stats)):
        result[f"{step}_s"] = round(statistics.median(d.seconds for d in done), 1)
        result[f"{step}_cpu_s"] = round(statistics.median(d.cpu_s for d in done), 1)
        result[f"{step}_peak_mb"] = round(max(d.peak_mb for d in done))
    log.unlink()
    trace.unlink()
    return result


def main() -> None:
    """Measure each log and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--logs", default="wide,long", help="which logs, separated by commas")
    parser.add_argument("--share", type=float, default=1.0, help="share of each log's jobs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {name: measure(name, args.share, args.runs, Path(folder)) for name in args.logs.split(",")}
    if args.json:
        print(json.dumps({"version": __version__, "runs": args.runs, "logs": results}, indent=2))
        return
    for name, r in results.items():
        print(
            f"{name}: {r['jobs']:,} jobs on {r['nodes']:,} nodes, {r['fragments']:,} fragments: "
            f"import {r['import_s']} s ({r['import_cpu_s']} s of CPU) and {r['import_peak_mb']:,} MB, "
            f"stats {r['stats_s']} s ({r['stats_cpu_s']} s of CPU) and {r['stats_peak_mb']:,} MB"
        )


if __name__ == "__main__":
    main()
