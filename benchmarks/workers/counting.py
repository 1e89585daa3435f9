"""A program without PyTorch that counts until it is told to stop, and writes down when: for clusters of many nodes."""

import json
import os
import sys
import time
from pathlib import Path

from bftrainer.elastic.membership import Leave, Membership
from bftrainer.elastic.protocol import Formed, Report
from bftrainer.processes.launch import foreground

os.nice(5)  # all virtual nodes share a few cores: agents, which must go at once when told to, come first
job = Membership.connect()
if job is None:
    sys.exit("counting.py is started by a controller: bftrainer submit counting.py FOLDER")
step, node = 0, os.environ["BFTRAINER_NODE"]
job.report = lambda: Report(job.formed, step, samples=step)
job.ready()
with Path(sys.argv[1], f"{job.worker}.jsonl").open("a", buffering=1) as log:
    try:
        while True:
            place = job.arrive(lambda rank: f"{job.address}:{rank}")
            foreground()  # newcomers start at low priority
            job.entered(place.generation)
            job.send(Formed(place.generation, place.nodes, 0.0, 0.0, 0.0))
            while not job.changed:
                step += 1
                row = {"at": time.time(), "world": place.world, "generation": place.generation, "node": node}
                log.write(json.dumps(row) + "\n")
                time.sleep(0.5)
    except Leave:
        sys.exit(job.leave(step))
