"""The torchrun launcher runs unmodified TorchElastic scripts.

It starts one torchrun agent per node and their rendezvous store on the head, because the store must not be on a node
that can be taken. Each agent is one process and itself starts the ranks of its node. The store gets a free port each
time it is started. The port is kept, so that a restarted controller can send new agents there. The agents form groups
and restart the script by themselves; the script must save and resume.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bftrainer.cluster.launchers.base import HEAD, Launch, LauncherTraits, StateLayout, WorkerSlot
from bftrainer.cluster.wire.messages import Start
from bftrainer.elastic.local.torchrun import RESTARTS, agent_command

RESCALE_S = 10.0
"""Seconds from a change of nodes to the next step, as measured with small models. Bigger models take longer to load."""
_LOGGED = re.compile(r"\[?[A-Z]\d{4} \d\d:\d\d:\d\d\S* .*torch/distributed/")
"""Lines that torchrun itself logs."""
_IN_TORCHRUN = "torch/distributed/run.py"
"""A file that torchrun's own traceback names and the script's does not."""
_SCRIPT_FAILED = "ChildFailedError"
"""The error by which torchrun says that the script failed, and not torchrun."""


class TorchrunLauncher:
    """Starts the rendezvous store on the head and one torchrun agent per node. See `base.Launcher`.

    `host` is the address under which nodes reach the head. `keep` and `kept` store values over a restart.
    """

    traits = LauncherTraits(retries=True, rescale_s=RESCALE_S)

    def __init__(
        self, home: StateLayout, host: str, keep: Callable[[str, Any], None], kept: Callable[[str], Any]
    ) -> None:
        self._home = home
        self._host = host
        self._keep = keep
        self._kept = kept

    def start(self, launch: Launch, place: WorkerSlot) -> Start:
        """See `base.Launcher`."""
        return self._store(launch, place) if place.node == HEAD else self._agent(launch, place)

    def _store(self, launch: Launch, place: WorkerSlot) -> Start:
        port = _free_port()
        self._keep(f"torchrun.{launch.id}", port)
        argv = ("-m", "bftrainer.elastic.local.torchrun", "--store", f"{self._host}:{port}")
        # The store is not the user's program: it runs under our interpreter and needs no variables.
        return Start(place.worker, launch.id, argv, cwd=str(self._home.state), speaks=False, ranks=1)

    def _agent(self, launch: Launch, place: WorkerSlot) -> Start:
        spec = launch.spec
        host = f"[{self._host}]" if ":" in self._host else self._host
        command = agent_command(
            spec.argv,
            nodes=(spec.min_nodes, spec.max_nodes),
            node=place.host,
            endpoint=f"{host}:{self._kept(f'torchrun.{launch.id}')}",
            run_id=place.head,
            ranks=place.ranks,
            env=self._home.environment(launch),
            cwd=spec.cwd,
        )
        # `agent_command` lets a script fail without limit. Here the torchrun agent ends after as many failures as the
        # user allows, and the job judges whether lost nodes caused them. A script that has never run for long is not
        # restarted by torchrun, so that the job sees the failure: torchrun's own restarts take longer and are not
        # reported.
        restarts = spec.max_restarts if place.settled else 0
        limits = {f"--max-restarts={RESTARTS}": f"--max-restarts={restarts}"}
        # The command line also contains the interpreter, so it is chosen here. Nodes must have it at the same path.
        python = spec.python or spec.submitted_python
        if python:
            limits[sys.executable] = python
        argv = tuple(limits.get(word, word) for word in command.argv)
        return Start(place.worker, launch.id, argv, command.env, spec.cwd, python, speaks=False, ranks=1)

    def given(self, launch: Launch, hosts: Sequence[tuple[str, int]]) -> None:
        """See `base.Launcher`. The torchrun agents find each other by themselves."""
        self._home.prepare(launch.id)

    def said(self, tail: str) -> str:
        """See `base.Launcher`. Torchrun prints a page of its own after the script's last line."""
        lines = tail.splitlines()
        page = next((at for at, line in enumerate(lines) if _IN_TORCHRUN in line), len(lines))
        # Torchrun's traceback begins a few lines before the first line that names its file.
        begins = [at for at in range(page) if lines[at].startswith("Traceback (most recent call last)")]
        end = begins[-1] if begins and page < len(lines) else page
        script = "\n".join(line for line in lines[:end] if not _LOGGED.match(line))
        # If the script printed nothing and did not itself fail, use torchrun's output.
        return script if script.strip() or _SCRIPT_FAILED in tail else tail


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
