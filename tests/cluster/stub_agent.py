"""An agent that can do nothing but be there: it joins, comes back when the controller does, and goes when told to."""

from __future__ import annotations

import os
import sys
import time

from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from bftrainer.cluster.wire import codec, messages
from bftrainer.processes import variables

GIVE_UP_S = 30.0


def main() -> None:
    if "--environment-from-stdin" in sys.argv:
        for line in sys.stdin:
            if not line.strip():
                break
            name, _, value = line.rstrip("\n").partition("=")
            os.environ[name] = value
    url = os.environ[variables.URL].replace("http", "ws", 1) + messages.PATH
    headers = {"Authorization": f"Bearer {os.environ[variables.SECRET]}"}
    heard = time.monotonic()
    while time.monotonic() < heard + GIVE_UP_S:
        try:
            with connect(url, additional_headers=headers, proxy=None, compression=None, close_timeout=0.1) as channel:
                name, slots = f"{os.getpid()}-{time.time_ns()}", int(os.environ.get(variables.SLOTS, "0"))
                join = messages.Join(
                    os.environ[variables.NODE], "127.0.0.1", name, pid=os.getpid(), slots=slots, knows_ranks=True
                )
                channel.send(codec.encode(join))
                for frame in channel:
                    heard = time.monotonic()
                    if isinstance(codec.decode(frame), messages.Bye):
                        sys.exit(0)
        except (OSError, WebSocketException):
            pass
        time.sleep(0.05)
    sys.exit(3)


main()
