"""A paced training without PyTorch: its speed does not depend on how busy the machine is.

Started as `paced_steps.py FOLDER SAMPLES BATCH` by a controller. Rank 0 makes the steps: each takes as long as
BFTRAINER_PACE says. It writes the progress to a file in FOLDER, which all nodes see, so every step is a snapshot. The
other ranks wait for a change of the members, as those of a real training wait for each other's gradients.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from bftrainer.elastic.membership import Leave, Membership
from bftrainer.elastic.pacing import Pacer
from bftrainer.elastic.protocol import Done, Formed, Report
from bftrainer.elastic.torch.rates import Meter

LOOK_S = 0.1
"""How often ranks other than 0 read the progress."""


class Progress(NamedTuple):
    """How far the training is, and when its last step was committed."""

    step: int = 0
    samples: int = 0
    at: float = 0.0


file = Path(sys.argv[1], f"{os.environ.get('BFTRAINER_TRAINER', 'progress')}.json")
total, batch = int(sys.argv[2]), int(sys.argv[3])
meter, done, leads = Meter(), Progress(), False


def load() -> Progress:
    """Read the progress."""
    return Progress(*json.loads(file.read_text())) if file.exists() else Progress()


def commit(step: Progress) -> Progress:
    """Write the progress."""
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(step))
    fresh.replace(file)
    return step


def report() -> Report:
    """Return the progress that rank 0 reports. The others only say that they are alive: generation 0 counts not."""
    if not leads:
        return Report(0)
    meter.look()
    windows, rate, scatter = meter.stay()
    return Report(
        meter.generation,
        done.step,
        samples=done.samples,
        world=meter.nodes,
        rates={str(nodes): rate for nodes, rate in meter.rates().items()},
        total=total,
        windows=meter.windows(),
        stay_windows=windows,
        stay_rate=rate,
        stay_scatter=scatter,
    )


job = Membership.connect()
if job is None:
    sys.exit("paced_steps.py is started by a controller: bftrainer submit paced_steps.py FOLDER SAMPLES BATCH")
pacer = Pacer.from_environment(job.wait_for_cut)
if pacer is None:
    sys.exit("paced_steps.py needs the seconds of a step in BFTRAINER_PACE")
job.report = report
job.ready()
try:
    while done.samples < total:
        since = time.time()
        place = job.arrive(lambda rank: f"{job.address}:{rank}")
        is_new = job.formed == 0
        if not job.entered(place.generation):
            continue
        done = load()
        pause_s = max(time.time() - (since if is_new else done.at), 0.0)
        meter.formed(place.generation, place.nodes)
        leads = place.rank == 0
        job.send(Formed(place.generation, place.nodes, pause_s, 0.0, 0.0))
        pacer.begin()
        while not job.changed and done.samples < total:
            if leads:
                pacer.hold(place.nodes)
                if job.cut:
                    break  # a peer is lost, and with it the step
                count = min(batch, total - done.samples)
                done = commit(Progress(done.step + 1, done.samples + count, time.time()))
                meter.stepped(count)
            else:
                job.wait_for_newer(LOOK_S)
                done = load()
        if leads and done.samples >= total:
            job.send(report())
        leads = False
except Leave:
    sys.exit(job.leave(done.step))
job.send(Done(done.step))
