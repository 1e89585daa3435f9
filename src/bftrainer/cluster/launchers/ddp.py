"""The ddp launcher runs unmodified torchrun scripts in place.

Its workers are those of the elastic launcher. In each of them `bftrainer.elastic.ddp` runs the script, with stand-ins
for torch.distributed. The messages to agents are the same, but the node's BFTrainer must have that module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bftrainer.cluster.launchers.base import Launch, LauncherTraits, StateLayout, WorkerSlot
from bftrainer.cluster.launchers.elastic import ElasticLauncher
from bftrainer.cluster.wire.messages import Start
from bftrainer.elastic.defaults import DDP_ENTRY


class DdpLauncher:
    """Starts one worker per node that runs a torchrun script in place. See `base.Launcher`."""

    traits = LauncherTraits(speaks=True, on_head=False, needs_new_agents=True)

    def __init__(self, home: StateLayout) -> None:
        self._elastic = ElasticLauncher(home)

    def start(self, launch: Launch, place: WorkerSlot) -> Start:
        """See `base.Launcher`."""
        started = self._elastic.start(launch, place)
        return replace(started, argv=(*DDP_ENTRY, *started.argv))

    def given(self, launch: Launch, hosts: Sequence[tuple[str, int]]) -> None:
        """See `base.Launcher`. The roster tells the workers about their peers."""
        self._elastic.given(launch, hosts)

    def said(self, tail: str) -> str:
        """See `base.Launcher`."""
        return self._elastic.said(tail)
