"""One replica of torchft in `benchmarks/rescale.py --against torchft`, or the lighthouse of all of them.

`torchft_worker.py lighthouse FOLDER` writes its address to FOLDER/lighthouse. `torchft_worker.py FOLDER MEGABYTES
ADDRESS` trains until it is told to end; a newcomer gets the state from the others.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

JOIN_MS = 100
"""How long the lighthouse waits for replicas that are late. Its default is a minute."""


def lighthouse(folder: Path) -> None:
    """Serve until this process is ended."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=JOIN_MS)
    (folder / "lighthouse.new").write_text(server.address())
    (folder / "lighthouse.new").rename(folder / "lighthouse")
    while True:
        time.sleep(60.0)


def train(folder: Path, megabytes: float, address: str) -> None:
    """Train, and write down each step that counts."""
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from sized import make_sized

    model, plain, inputs = make_sized(megabytes)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: told.append(signum))

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"replica-{os.getpid()}",
        hostname="127.0.0.1",
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    with (folder / f"commits-{os.getpid()}").open("a", buffering=1) as log:
        while not told:
            before = manager.current_step()
            optimizer.zero_grad()  # asks the lighthouse who takes part in this step
            wrapped(inputs).square().mean().backward()
            optimizer.step()
            if manager.current_step() > before:
                log.write(f"{time.monotonic()} {manager.current_step()} {manager.num_participants()}\n")
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        lighthouse(Path(sys.argv[2]))
    else:
        train(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
