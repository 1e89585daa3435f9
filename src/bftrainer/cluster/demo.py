"""The demo runs the whole live system on one machine.

`bftrainer demo` starts a controller in its own process and submits three PyTorch trainers, which take two minutes. The
local pool's virtual nodes come and go as on Summit, sped up. Steps are paced, so that virtual nodes on a few cores
scale as real ones do. Every figure of the summary comes from the run's own store.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bftrainer.cluster.config.keys import Config, PolicySettings
from bftrainer.cluster.config.load import CLIENT_FILE
from bftrainer.cluster.config.policy import policy_of
from bftrainer.cluster.report.efficiency import Excerpt, LiveEfficiency, WorkDone, judge
from bftrainer.cluster.report.usage import account
from bftrainer.cluster.store.events import Decided, NodeJoined, NodeLeft, Rescaled, kinds_of
from bftrainer.cluster.store.replay import PoolReplay
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.elastic import protocol
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes.launch import dying_with
from bftrainer.util.text import last_line

HORIZON_S, SNAPSHOT_EVERY_S = 20.0, 5.0
POOL: Mapping[str, Any] = MappingProxyType(
    {"kind": "local", "churn": "summit", "abrupt": 0.5, "hours": 6, "loop": "true", "grace_s": 1.0}
)
"""The settings of the pool, but for its size, speed and seed."""


@dataclass(frozen=True, slots=True)
class DemoTrainer:
    """One trainer of the demo."""

    name: str
    script: str
    args: tuple[str, ...]
    pace: str
    """Seconds per step by world size. The first two trainers have one batch per node, the third shares one batch."""


PARTS = (
    DemoTrainer("digits", "digits.py", ("--epochs", "28"), "1:0.2,8:0.22"),
    DemoTrainer("images", "images.py", ("--epochs", "6", "--images", "1024"), "1:0.25,8:1.0"),
    DemoTrainer(
        "chars",
        "chars.py",
        ("--epochs", "2", "--width", "32", "--layers", "1", "--window", "32"),
        "1:0.64,2:0.45,4:0.35,8:0.32",
    ),
)
"""They scale as differently as models do: the first nearly linearly, the others to twice their speed on eight nodes."""


def examples() -> Path:
    """Return the folder of the training scripts: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "examples", package.parents[1] / "examples"):
        if (folder / PARTS[0].script).is_file():
            return folder
    raise BFTrainerError("the demo's training scripts (examples/) are not installed with this package")


def check_packages() -> None:
    """Raise `InputError` if a package that the demo needs is missing, before anything is started."""
    for module, extra in (("torch", "torch"), ("sklearn", "examples")):
        if importlib.util.find_spec(module) is None:
            raise InputError(f"the demo trains with {module}: pip install 'bftrainer[{extra}]'")


def specs(folder: Path) -> list[dict[str, Any]]:
    """Return the specs of the demo's trainers, which run in `folder`."""
    where = examples()
    return [
        {
            "name": part.name,
            "script": str(where / part.script),
            "args": list(part.args),
            "min_nodes": 1,
            "max_nodes": 8,
            "cwd": str(folder),
            "env": {protocol.PACE: part.pace},
        }
        for part in PARTS
    ]


@contextlib.contextmanager
def controller(folder: Path, nodes: int, speed: float, seed: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a controller, stopped at the end, whose virtual nodes come and go as on Summit, `speed` times as fast."""
    pool = {**POOL, "nodes": nodes, "speed": speed, "seed": seed}
    # The horizon is short, because the demo's nodes stay for seconds, not for hours.
    horizon = ["--set", f"policy.horizon_s={HORIZON_S}", "--set", f"trainers.snapshot_every_s={SNAPSHOT_EVERY_S}"]
    settings = [word for key, value in pool.items() for word in ("--set", f"pool.{key}={value}")]
    argv = [sys.executable, "-m", "bftrainer", "serve", "--port", "0", "--state", str(folder), *horizon, *settings]
    log = folder / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            dying_with(os.getpid(), argv), stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def page(folder: Path) -> str:
    """Return the address of the controller's page, with the token of the user who started the demo."""
    client = json.loads((folder / CLIENT_FILE).read_text())
    return f"{client['url']}/#token={client['token']}"


def await_client(folder: Path, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    """Wait until the controller has written the file by which commands find it."""
    deadline = time.monotonic() + timeout_s
    while not (folder / CLIENT_FILE).is_file():
        if process.poll() is not None or time.monotonic() > deadline:
            said = last_line((folder / "serve.log").read_text(errors="replace"))
            raise BFTrainerError(f"the controller did not start: {said or 'its log is empty'}")
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class DemoSummary:
    """The results of the demo run."""

    trainers: tuple[Mapping[str, Any], ...]
    judgement: LiveEfficiency
    """The whole run. Its U is a makespan ratio, because the work of the demo ends."""
    busy: WorkDone
    """The work done while all trainers had work, as a share of the best possible."""
    busy_s: float
    """For how long all trainers had work."""
    joins: int
    leaves: int
    decisions: int
    used_share: float
    """The share of the pool's node-time that trainers held."""


def summarise(folder: Path) -> DemoSummary:
    """Read the results from the store."""
    with Store.open(folder / FILE, read_only=True) as store:
        pauses: dict[str, list[float]] = {}
        joins = leaves = decisions = 0
        for at in PoolReplay().read(store.all_events(kinds_of(Rescaled, NodeJoined, NodeLeft, Decided))):
            event = at.event
            if isinstance(event, Rescaled) and event.why != "start" and event.pause_s is not None:
                pauses.setdefault(event.trainer, []).append(event.pause_s)
            joins += isinstance(event, NodeJoined)
            leaves += isinstance(event, NodeLeft)
            decisions += isinstance(event, Decided)
        policy = policy_of(Config(policy=PolicySettings(horizon_s=HORIZON_S)))
        judgement = judge(store, policy, snapshot_every_s=SNAPSHOT_EVERY_S)
        all_busy = account(
            store, end=min((row.ended for row in store.trainers() if row.ended is not None), default=None)
        )
        busy = judge(Excerpt(store, all_busy), policy, snapshot_every_s=SNAPSHOT_EVERY_S, endless=True)
        rows: list[dict[str, Any]] = []
        for row in store.trainers():
            times_s = pauses.get(row.id, [])
            rows.append(
                {
                    "name": row.name,
                    "state": row.state,
                    "metrics": row.metrics,
                    "samples": row.samples,
                    "total": row.total,
                    "rescales": row.rescales,
                    "preemptions": row.preemptions,
                    "median_pause_s": statistics.median(times_s) if times_s else None,
                    "samples_redone": row.samples_redone,
                    "node_seconds": row.node_seconds,
                    "seconds": row.ended - row.submitted if row.ended is not None else None,
                }
            )
    held = sum(row["node_seconds"] for row in rows)
    used = min(held / (judgement.node_hours * 3600), 1.0)
    return DemoSummary(tuple(rows), judgement, busy.work, busy.seconds, joins, leaves, decisions, used)
