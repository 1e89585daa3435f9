"""A worker without PyTorch, and with nobody to talk to but its manager: counts until it is left out."""

import itertools
import os
import signal
import sys
import time

from bftrainer.elastic.membership import Leave, Membership
from bftrainer.elastic.protocol import Done, Formed, Report

if "ignores" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
job = Membership.connect()
assert job is not None
step = 0
job.report = lambda: Report(job.formed, step, samples=10 * step)
print("hello from", os.environ["BFTRAINER_NODE"], os.environ.get("COLOUR", ""))
job.ready()
try:
    while True:
        place = job.arrive(lambda rank: f"{job.address}:{rank}")
        job.entered(place.generation)
        job.send(Formed(place.generation, place.world, 0.1, 0.05, 0.02))
        for step in itertools.count(step):  # noqa: B020
            if job.changed:
                break
            if "prints" in sys.argv:
                print("step", step)
            if "ends" in sys.argv and step == 3:
                job.send(Done(step))
                sys.exit()
            time.sleep(0.005)
except Leave:
    job.leave(step)
