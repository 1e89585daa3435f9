"""The elastic launcher starts scripts that speak `elastic.protocol`, one worker per node.

The workers learn their peers from the roster. Nothing runs on the head.
"""

from __future__ import annotations

from collections.abc import Sequence

from bftrainer.cluster.launchers.base import Launch, LauncherTraits, StateLayout, WorkerSlot
from bftrainer.cluster.wire.messages import Start
from bftrainer.elastic import protocol


class ElasticLauncher:
    """Starts one worker per node that speaks `elastic.protocol`. See `base.Launcher`."""

    traits = LauncherTraits(speaks=True, on_head=False)

    def __init__(self, home: StateLayout) -> None:
        self._home = home

    def start(self, launch: Launch, place: WorkerSlot) -> Start:
        """See `base.Launcher`."""
        spec, env = launch.spec, {protocol.FOLLOW: "1", **self._home.environment(launch)}
        arguments = (place.worker, launch.id, spec.argv, env, spec.cwd, spec.python)
        # For 0 the agent takes the node's default: it knows best what the node has.
        return Start(
            *arguments,
            background=place.background,
            submitted_python=spec.submitted_python,
            ranks=place.ranks,
            log_all_ranks=spec.log_all_ranks,
        )

    def given(self, launch: Launch, hosts: Sequence[tuple[str, int]]) -> None:
        """See `base.Launcher`. The roster tells the workers about their peers."""
        if not launch.spec.signature:  # else its folders are its owner's, and agents make them
            self._home.prepare(launch.id)

    def said(self, tail: str) -> str:
        """See `base.Launcher`."""
        return tail
