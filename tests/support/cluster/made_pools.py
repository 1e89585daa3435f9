"""Pools of all kinds for tests, with agents that can do nothing but be there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bftrainer.cluster.pools.base import Pool
from bftrainer.cluster.pools.local.pool import LocalPool, LocalSettings
from bftrainer.cluster.pools.script.pool import ScriptPool, ScriptSettings
from bftrainer.cluster.pools.slurm.pool import SlurmPool
from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from support.cluster.pool_conformance import Setting

STUB = str(Path(__file__).resolve().parents[2] / "cluster" / "stub_agent.py")
PRELOAD = ("websockets.sync.client", "bftrainer.cluster.wire.codec")


def local(folder: Path, clock: Callable[[], float] = time.monotonic, **settings: Any) -> LocalPool:
    return LocalPool(LocalSettings(**settings), folder, agent=(STUB,), preload=PRELOAD, clock=clock)


def executable(path: Path, text: str) -> str:
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.chmod(0o755)
    beside.replace(path)
    return str(path)


def script(folder: Path, **settings: Any) -> ScriptPool:
    """A pool whose discovery prints a file, and whose remote shell passes on nothing but stdin."""
    folder.mkdir(exist_ok=True)
    if not (folder / "hosts").exists():
        (folder / "hosts").write_text("first\nsecond:4  # with slots\n")
    discover = executable(folder / "discover", f"#!/bin/sh\ncat '{folder}/hosts'\n")
    shell = executable(folder / "rsh", '#!/bin/sh\nshift\nexec env -i HOME="$HOME" "$@"\n')
    start = (shell, "{node}", sys.executable, STUB, "--environment-from-stdin", str(folder))
    chosen = {"command": (discover,), "start": start, "interval_s": 0.1, **settings}
    return ScriptPool(ScriptSettings(**chosen), folder)


def slurm(folder: Path, **settings: Any) -> SlurmPool:
    chosen: dict[str, Any] = {
        "partition": "scavenger",
        "interval_s": 0.25,
        "rest_s": 0.25,
        "agent": (STUB, str(folder)),
        **settings,
    }
    return SlurmPool(SlurmSettings(**chosen), folder, retry_s=0.5)


def settings_of(kind: str, folder: Path) -> Setting:
    makers: dict[str, tuple[Callable[[], Pool], tuple[str, str]]] = {
        "local": (lambda: local(folder, nodes=2), ("node-1", "node-2")),
        "script": (lambda: script(folder), ("first", "second")),
    }
    make, nodes = makers[kind]
    return Setting(make, folder, nodes)
