"""The launcher for scripts that speak `elastic.protocol`: one worker a node, told who trains along, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bftrainer.cluster.launchers.base import Home, Place, Traits
from bftrainer.cluster.wire import Start

if TYPE_CHECKING:
    from bftrainer.cluster.live import Live


class ElasticLauncher:
    """See `base.Launcher`."""

    traits = Traits(speaks=True, on_head=False)

    def __init__(self, home: Home) -> None:
        self._home = home

    def start(self, live: Live, place: Place) -> Start:
        """See `base.Launcher`."""
        spec, env = live.spec, self._home.environment(live)
        what = (place.worker, live.id, spec.argv, env, spec.cwd, spec.python)
        return Start(*what, background=place.background, submitted_python=spec.submitted_python)

    def given(self, live: Live, hosts: Sequence[str]) -> None:
        """See `base.Launcher`: workers are told by the roster."""
        self._home.prepare(live.id)

    def said(self, tail: str) -> str:
        """See `base.Launcher`."""
        return tail
