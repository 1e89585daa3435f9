"""A worker that computes nothing: it joins groups, or does not, as its first argument says."""

import os
import sys
import time
from pathlib import Path

from bftrainer.elastic.membership import Membership
from bftrainer.elastic.protocol import Broken, Formed

mode, folder = sys.argv[1], Path(sys.argv[2])
is_first = os.environ["BFTRAINER_WORKER"] == "node-1"
if mode == "silent":
    sys.exit(0)
if mode == "newcomer-exits" and not is_first:
    sys.exit("no module named data")
if mode == "newcomer-silent" and not is_first:
    sys.exit(0)
membership = Membership.connect()
assert membership is not None
membership.report_failures()
if mode == "newcomer-raises" and not is_first:
    raise OSError(116, "Stale file handle", "/data")
membership.ready()
while not (folder / "end").exists():
    if membership.changed:
        place = membership.arrive(lambda rank: f"127.0.0.1:{rank}")
        if mode == "breaks":
            membership.gave_up(place.generation)
            membership.send(Broken(place.generation, "127.0.1.1 refused the connection"))
            membership.wait_for_newer(5.0)
        elif membership.entered(place.generation):
            membership.send(Formed(place.generation, place.nodes, 0.0, 0.0, 0.0))
    time.sleep(0.01)
