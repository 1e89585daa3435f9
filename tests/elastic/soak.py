"""Chaos for as long as one likes: `make soak`. Prints one line an episode and a JSON object at the end."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
import traceback
from pathlib import Path

from test_chaos import EVENTS, chaos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1000)
    args = parser.parse_args()
    began, episodes, failed = time.monotonic(), 0, []
    held = []
    while time.monotonic() - began < args.minutes * 60:
        seed = args.seed + episodes
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
        try:
            chaos(folder, seed, 50)
            shutil.rmtree(folder)
        except Exception:
            failed.append(seed)
            print(f"seed {seed} failed; its files are in {folder}\n{traceback.format_exc()}", flush=True)
        episodes += 1
        held.append([len(list(Path("/proc/self/fd").iterdir())), threading.active_count()])
        print(
            f"episode {episodes}, seed {seed}, {(time.monotonic() - began) / 60:.1f} min, held {held[-1]}", flush=True
        )
    print(
        json.dumps(
            {
                "minutes": round((time.monotonic() - began) / 60, 1),
                "episodes": episodes,
                "events": episodes * len(EVENTS),
                "failed_seeds": failed,
                "descriptors_and_threads_first_last": [held[0], held[-1]],
            }
        )
    )
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
