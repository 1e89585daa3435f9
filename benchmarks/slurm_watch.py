"""How long a round of the `slurm` pool holds up the controller's event loop on a large site with a long queue.

    python benchmarks/slurm_watch.py --json --nodes 10000 --pending 5000

The pool runs as in the controller. `sinfo` and `squeue` are programs that print output in the shape of a real site:
half of the nodes have pilots, a fifth is idle; jobs of four partitions wait, with constraints, GPUs, arrays, planned
nodes and Slurm's usual reasons. In each round some jobs arrive and some leave.

`loop_ms` is the processor time of the loop's thread per round. `stall_ms` is the longest time in a round for which the
loop did not come back to a task that wakes every millisecond; it includes what other threads and programs took.
`idle_stall_ms` is the same for a loop that does nothing for as long, in turns with it: what the machine costs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from bftrainer.cluster.pools.slurm.pool import SlurmPool
from bftrainer.cluster.pools.slurm.read import JOB_FIELDS, TEXT_WIDTHS
from bftrainer.cluster.pools.slurm.settings import SlurmSettings

STATE_ID = "benchmark"
SEPARATOR = "\x1f"
"""Between fields in the files; the programs put the one they are asked for in its place."""
REASONS = ("Priority",) * 60 + ("Resources",) + ("Dependency",) * 15 + ("QOSMaxCpuPerUserLimit",) * 12 + ("None",) * 2
PARTITIONS = ("batch", "long", "gpu", "debug")
GOAL_MS = 50.0


class BusyHost:
    """A controller whose trainers use the nodes of all pilots."""

    observing = False
    agent_environment: dict[str, str] = {"BFTRAINER_URL": "http://127.0.0.1:1"}  # noqa: RUF012 - as the protocol has it

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes = self.used = frozenset(nodes)
        self.demand = len(nodes) - 1
        self.memory: dict[str, Any] = {"slurm.id": STATE_ID}

    def recall(self, key: str) -> Any:
        """See `PoolHost`."""
        return self.memory.get(key)

    def remember(self, key: str, value: Any) -> None:
        """See `PoolHost`."""
        self.memory[key] = value

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **facts: None


class SlurmSite:
    """The programs of a site in a folder, and the files that they print."""

    def __init__(self, folder: Path, nodes: int, pending: int) -> None:
        self.folder = folder
        self.names = [f"nid{number:06}" for number in range(1, nodes + 1)]
        self.ours = self.names[: nodes // 2]
        idle = frozenset(self.names[nodes // 2 : nodes // 2 + nodes // 5])
        self.chance = random.Random(1)
        self.number = 1_000_000
        self.pilots = [self._pilot(number, node) for number, node in enumerate(self.ours, 1)]
        self.running = [self._job(state="RUNNING") for _ in range(nodes // 10)]
        self.pending = [self._job() for _ in range(pending)]
        half = len(self.names) // 2
        kinds = (("128|512000|(null)|cpu,nvme", self.names[:half]), ("64|256000|gpu:a100:4|gpu", self.names[half:]))
        lines = [f"{part}|{kind}|{','.join(names)}" for part in (*PARTITIONS, "scav") for kind, names in kinds]
        (folder / "layout").write_text("\n".join(lines) + "\n")
        self._write("nodes", (f"{name} {'idle' if name in idle else 'allocated'}" for name in self.names))
        for program, shown in (
            ("sinfo", 'case "$*" in *-N*) cat nodes;; *) cat layout;; esac'),
            ("squeue", "first=${SQUEUE_FORMAT2%%,*}; sed \"s/$(printf '\037')/${first#*:}/g\" jobs"),
        ):
            self._program(program, shown)
        for program in ("sbatch", "scancel"):
            self._program(program, "echo 7")

    def next_round(self) -> None:
        """Let a hundredth of the pending jobs leave, and as many arrive."""
        few = max(1, len(self.pending) // 100)
        self.pending = self.pending[few:] + [self._job() for _ in range(few)]
        header = self._row(**dict(zip(JOB_FIELDS, ("JOBID", *JOB_FIELDS[1:]), strict=True)))
        self._write("jobs", (header, *self.pilots, *self.running, *self.pending))

    def _pilot(self, number: int, node: str) -> str:
        return self._row(
            JobArrayID=str(number),
            JobID=str(number),
            UserID=str(os.getuid()),
            State="RUNNING",
            Partition="scav",
            ReqNodes=node,
            NodeList=node,
            TimeLeft="3:00:00",
            Name=f"bftrainer-{STATE_ID}",
        )

    def _job(self, state: str = "PENDING") -> str:
        chance = self.chance
        self.number += 1
        partition, reason = chance.choice(PARTITIONS), chance.choice(REASONS)
        planned = reason == "Resources" or (reason == "Priority" and chance.random() < 0.02)
        first = chance.randrange(len(self.names) - 64)
        return self._row(
            JobArrayID=f"{self.number}_[1-{chance.randrange(2, 99)}]" if chance.random() < 0.1 else str(self.number),
            JobID=str(self.number),
            UserID=str(10_000 + chance.randrange(300)),
            State=state,
            Partition=partition if chance.random() < 0.8 else f"{partition},long",
            NumNodes=str(1 << chance.randrange(9)),
            NumCPUs=str(64 << chance.randrange(9)),
            MinCpus=str(chance.choice((1, 8, 64, 128))),
            MinMemory=f"{chance.choice((0, 4000, 64_000, 250_000))}M",
            TimeLimit=chance.choice(("1:00:00", "12:00:00", "1-00:00:00", "7-00:00:00")),
            PriorityLong=str(chance.randrange(4_000_000)),
            StartTime=str(int(time.time()) + chance.randrange(600, 90_000)) if planned else "N/A",
            Reason=reason,
            SchedNodes=f"nid[{first + 1:06}-{first + 64:06}]" if planned else "(null)",
            Dependency="afterok:5(unfulfilled)" if reason == "Dependency" else "(null)",
            Feature=chance.choice(("(null)", "cpu", "gpu", "cpu&nvme")),
            Name=f"job-{chance.randrange(999)}",
            **{"tres-per-node": "gres:gpu:4" if partition == "gpu" else "N/A"},
        )

    def _row(self, **fields: str) -> str:
        cells = (fields.get(name, "").ljust(TEXT_WIDTHS.get(name, 0)) for name in JOB_FIELDS)
        return SEPARATOR.join(cells) + SEPARATOR

    def _write(self, name: str, lines: Any) -> None:
        (self.folder / name).write_text("\n".join(lines) + "\n")

    def _program(self, name: str, shown: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\ncd '{self.folder}'\n{shown}\n")
        path.chmod(0o755)


async def measure(site: SlurmSite, rounds: int, state: Path) -> dict[str, list[float]]:
    """The figures of each round."""
    gc.set_threshold(*gc.get_threshold()[:2], 1 << 30)  # as in the controller, which collects all objects seldom
    pool = SlurmPool(SlurmSettings(partition="scav", command_timeout_s=60.0), state)
    host: Any = BusyHost(site.ours)
    site.next_round()
    await pool.open(host)
    task = pool._task
    assert task is not None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    found: dict[str, list[float]] = {"loop_ms": [], "stall_ms": [], "idle_stall_ms": [], "round_ms": []}
    for number in range(rounds + 1):
        site.next_round()
        began, cpu = time.perf_counter(), time.thread_time()
        await pool._round()
        took_s, used_s = time.perf_counter() - began, time.thread_time() - cpu
        stall_s = await _longest_stall(pool._round())
        idle_s = await _longest_stall(asyncio.sleep(took_s))
        if number:  # in the first one all pilots are new
            for name, seconds in zip(found, (used_s, stall_s, idle_s, took_s), strict=True):
                found[name].append(seconds * 1e3)
    return found


async def _longest_stall(work: Coroutine[Any, Any, object]) -> float:
    """The longest time, in seconds, for which a task that wakes every millisecond is not woken meanwhile."""
    task = asyncio.create_task(work)
    longest_s = 0.0
    while not task.done():
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, time.perf_counter() - began - 0.001)
    await task
    return longest_s


def main() -> int:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--pending", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        programs = Path(folder) / "bin"
        programs.mkdir()
        os.environ["PATH"] = f"{programs}:{os.environ['PATH']}"
        site = SlurmSite(programs, options.nodes, options.pending)
        found = asyncio.run(measure(site, options.rounds, Path(folder) / "state"))
    result: dict[str, Any] = {"nodes": options.nodes, "pending": options.pending, "rounds": options.rounds}
    for name, values in found.items():
        ordered = sorted(values)
        result[name] = {
            "p50": round(statistics.median(ordered), 1),
            "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1),
        }
    result["goal_ms"] = GOAL_MS
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for name in found:
            print(f"{name}: p50 {result[name]['p50']}, p99 {result[name]['p99']} (goal for the loop: {GOAL_MS:g})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
