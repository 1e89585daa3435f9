"""The launcher for unmodified TorchElastic scripts: a torchrun agent on each node, and their rendezvous on the head.

The store in which the agents meet must not be on a node that can be taken. Each time it is started it gets a free port,
which is kept, so that a restarted controller can send newcomers there. The agents form groups and restart the script by
themselves; the script must save and resume.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bftrainer.cluster.launchers.base import HEAD, Home, Place, Traits
from bftrainer.cluster.wire import Start
from bftrainer.elastic.torchrun import RESTARTS, agent_command

if TYPE_CHECKING:
    from bftrainer.cluster.live import Live

RESCALE_S = 10.0
"""From a change of the nodes to the next step: as measured, with small models. Bigger ones load for longer."""
_LOGGED = re.compile(r"\[?[A-Z]\d{4} \d\d:\d\d:\d\d\S* .*torch/distributed/")
"""Lines that torchrun itself logs."""
_IN_TORCHRUN = "torch/distributed/run.py"
"""What its own traceback names, and the script's does not."""
_SCRIPT_FAILED = "ChildFailedError"
"""How it says that the script is to blame, and not torchrun."""


class TorchrunLauncher:
    """See `base.Launcher`. Nodes reach the head as `host`; `keep` and `kept` remember values over a restart."""

    traits = Traits(retries=True, rescale_s=RESCALE_S)

    def __init__(self, home: Home, host: str, keep: Callable[[str, Any], None], kept: Callable[[str], Any]) -> None:
        self._home = home
        self._host = host
        self._keep = keep
        self._kept = kept

    def start(self, live: Live, place: Place) -> Start:
        """See `base.Launcher`."""
        return self._store(live, place) if place.node == HEAD else self._agent(live, place)

    def _store(self, live: Live, place: Place) -> Start:
        port = _free_port()
        self._keep(f"torchrun.{live.id}", port)
        argv = ("-m", "bftrainer.elastic.torchrun", "--store", f"{self._host}:{port}")
        # It is ours, not the user's: it runs under our interpreter, and of the environment it needs nothing.
        return Start(place.worker, live.id, argv, cwd=str(self._home.state), speaks=False)

    def _agent(self, live: Live, place: Place) -> Start:
        spec = live.spec
        host = f"[{self._host}]" if ":" in self._host else self._host
        command = agent_command(
            spec.argv,
            nodes=(spec.min_nodes, spec.max_nodes),
            node=place.host,
            endpoint=f"{host}:{self._kept(f'torchrun.{live.id}')}",
            run_id=place.head,
            env=self._home.environment(live),
            cwd=spec.cwd,
        )
        # There a script may fail for ever. Here the agent ends after as many failures as the user allows, and whether
        # nodes that went caused them is judged by the job. A script that has never run for long fails at once, so that
        # the job sees how: torchrun's own restarts take longer, and nobody hears of them.
        restarts = spec.max_restarts if place.settled else 0
        limits = {f"--max-restarts={RESTARTS}": f"--max-restarts={restarts}"}
        # The command line names the interpreter too, so it is chosen here: nodes must have it under the same path.
        python = spec.python or (spec.submitted_python if os.access(spec.submitted_python, os.X_OK) else "")
        if python:
            limits[sys.executable] = python
        argv = tuple(limits.get(word, word) for word in command.argv)
        return Start(place.worker, live.id, argv, command.env, spec.cwd, python, speaks=False)

    def given(self, live: Live, hosts: Sequence[str]) -> None:
        """See `base.Launcher`: the agents find each other by themselves."""
        self._home.prepare(live.id)

    def said(self, tail: str) -> str:
        """See `base.Launcher`. Torchrun has a page of its own to print after the script's last line."""
        lines = tail.splitlines()
        page = next((at for at, line in enumerate(lines) if _IN_TORCHRUN in line), len(lines))
        # Its traceback begins a few lines before the first one that names it.
        begins = [at for at in range(page) if lines[at].startswith("Traceback (most recent call last)")]
        end = begins[-1] if begins and page < len(lines) else page
        script = "\n".join(line for line in lines[:end] if not _LOGGED.match(line))
        # Without a word of the script, and where it was not the script that failed, torchrun's own must do.
        return script if script.strip() or _SCRIPT_FAILED in tail else tail


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
