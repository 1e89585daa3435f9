"""Launchers start a trainer's program: `elastic`, `ddp`, `torchrun` and `hosts` share one interface (`base.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bftrainer.cluster.config.keys import DEFAULTS
from bftrainer.cluster.launchers.base import HEAD, Launcher, LauncherTraits, StateLayout, WorkerSlot
from bftrainer.cluster.launchers.ddp import DdpLauncher
from bftrainer.cluster.launchers.elastic import ElasticLauncher
from bftrainer.cluster.launchers.hosts import HostsLauncher
from bftrainer.cluster.launchers.torchrun import TorchrunLauncher

__all__ = ["HEAD", "Launcher", "LauncherTraits", "StateLayout", "WorkerSlot", "make_launchers"]


def make_launchers(
    state: Path,
    state_id: str,
    host: str,
    keep: Callable[[str, object], None],
    kept: Callable[[str], Any],
    snapshot_every_s: float = DEFAULTS.trainers.snapshot_every_s,
    start: int = 0,
) -> Mapping[str, Launcher]:
    """Return all launchers by name.

    `host` is the address under which nodes reach the controller's machine. `keep` stores a value, `kept` returns it.
    `start` is the number of the controller's start.
    """
    home = StateLayout(state, state_id, snapshot_every_s, start)
    return MappingProxyType(
        {
            "elastic": ElasticLauncher(home),
            "ddp": DdpLauncher(home),
            "torchrun": TorchrunLauncher(home, host, keep, kept),
            "hosts": HostsLauncher(home),
        }
    )
