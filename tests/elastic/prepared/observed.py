"""Runs a user's script and writes down which samples each of its committed steps took; the tests disturb it.

`observed.py FOLDER PACE_S SCRIPT ARGUMENTS…`. The script knows nothing of it. What is written is that of
`chaos_worker.py`, and so is the way in which steps are held up until FOLDER/hurry exists. While FOLDER/slow exists, a
step takes seconds: a training with few steps does not end before a newcomer has joined it.
"""

import faulthandler
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bftrainer.elastic.torch.prepare.training import PreparedTraining
from bftrainer.elastic.torch.present_batch import PresentBatch

faulthandler.register(signal.SIGUSR1)  # prints where all threads are
folder, pace_s, script = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
name = folder / f"steps-{os.environ.get('BFTRAINER_WORKER', 'alone')}-{os.getpid()}.jsonl"
# By its descriptor: the stand-ins of the ddp launcher let only one rank open files by name.
log = os.fdopen(os.open(name, os.O_CREAT | os.O_APPEND | os.O_WRONLY), "a", buffering=1)
real_commit, real_sum = PresentBatch.commit, PreparedTraining._sum
TRIED: dict[str, Any] = {}


def hold(step: int, world: int) -> None:
    """Make a step last as long as the tests want it to."""
    if not pace_s or (folder / "hurry").exists():
        return
    if (folder / "slow").exists():
        time.sleep(2.0)
        return
    if not (folder / "limit").exists():
        time.sleep(pace_s / world)
        return
    until = time.monotonic() + 0.25
    while step >= int((folder / "limit").read_text()) and time.monotonic() < until:
        time.sleep(0.01)


def observed_sum(self: PreparedTraining, *args: Any) -> Any:
    member = self._member
    hold(member.progress.step, member.world)
    taken: list[int] = []
    for batch in self._handed:
        part = batch.step.micros[batch.micro] if batch.step.micros else None
        taken += part.indices if part is not None and part.samples else ()
    place = (member.progress.key(), member.meter.generation)
    if TRIED.get("place") != place:
        TRIED.update(place=place, taken=[])
    new = taken[len(TRIED["taken"]) :]  # a step may need several sums
    if new:
        TRIED["taken"] = taken
        log.write(json.dumps({"try": place[0], "generation": place[1], "samples": new}) + "\n")
    return real_sum(self, *args)


def observed_commit(self: PresentBatch, total: Any, samples: int, metrics: Any) -> None:
    place, generation = TRIED["place"]
    if samples:
        log.write(json.dumps({"commit": place, "generation": generation, "at": time.monotonic()}) + "\n")
    real_commit(self, total, samples, metrics)


PreparedTraining._sum = observed_sum  # type: ignore[method-assign]
PresentBatch.commit = observed_commit  # type: ignore[method-assign]
sys.argv = sys.argv[3:]
sys.path.insert(0, str(Path(script).parent))
runpy.run_path(script, run_name="__main__")
