"""Ways to start a trainer's program: `elastic`, `torchrun` and `hosts`, behind one interface (`base.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from bftrainer.cluster.launchers.base import HEAD, Home, Launcher, Place, Traits
from bftrainer.cluster.launchers.elastic import ElasticLauncher
from bftrainer.cluster.launchers.hosts import HostsLauncher
from bftrainer.cluster.launchers.torchrun import TorchrunLauncher
from bftrainer.cluster.store import Store

__all__ = ["HEAD", "Home", "Launcher", "Place", "Traits", "make_launchers"]


def make_launchers(
    state: Path, state_id: str, host: str, store: Store, snapshot_every_s: float = 30.0
) -> Mapping[str, Launcher]:
    """All of them by name. `host` is the address under which nodes reach the controller's machine."""
    home = Home(state, state_id, snapshot_every_s)
    return MappingProxyType(
        {
            "elastic": ElasticLauncher(home),
            "torchrun": TorchrunLauncher(home, host, store.keep, store.kept),
            "hosts": HostsLauncher(home),
        }
    )
