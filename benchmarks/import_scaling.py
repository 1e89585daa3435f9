"""Does importing scale linearly in rows? The same kind of sacct log, once and ten times as long, in one run.

python benchmarks/import_scaling.py [--rows 50000] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from bftrainer import __version__
from bftrainer.traces.readers.importing import import_trace

NODES = 1000
FACTOR = 10


def write_log(path: Path, rows: int) -> None:
    """A machine under steady load: jobs of 1 to 32 nodes, two seconds apart."""
    rng = random.Random(rows)
    with path.open("w") as log:
        log.write("JobID|Submit|Start|End|Elapsed|State|NodeList\n")
        for job in range(rows):
            start = 1_600_000_000 + 2 * job
            end = start + rng.randint(60, 7200)
            first, count = rng.randrange(NODES), rng.choice((1, 1, 2, 4, 8, 32))
            nodes = f"n[{first:04}-{min(first + count - 1, NODES - 1):04}]"
            begin, finish = (datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%dT%H:%M:%S") for t in (start, end))
            log.write(f"{job}|{begin}|{begin}|{finish}|00:00:00|COMPLETED|{nodes}\n")


def measure(rows: int, folder: Path) -> dict[str, float]:
    """Seconds to import a log of `rows` rows, the best of two."""
    path = folder / f"{rows}.log"
    write_log(path, rows)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        imported = import_trace(path)
        seconds.append(time.perf_counter() - began)
        assert imported.report.used == rows
    path.unlink()
    best = min(seconds)
    return {"rows": rows, "seconds": round(best, 3), "rows_per_second": round(rows / best)}


def main() -> None:
    """Measure both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small, large = (measure(rows, Path(folder)) for rows in (args.rows, FACTOR * args.rows))
    result = {
        "version": __version__,
        "small": small,
        "large": large,
        "rows_ratio": FACTOR,
        "time_ratio": round(large["seconds"] / small["seconds"], 2),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"{FACTOR}x the rows: {result['time_ratio']}x the time: {small['rows']:,} rows in {small['seconds']} s, "
            f"{large['rows']:,} in {large['seconds']} s; peak memory {result['peak_mb']} MB"
        )


if __name__ == "__main__":
    main()
