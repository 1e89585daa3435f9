"""The hosts launcher runs programs that discover their hosts by a script.

`horovodrun --host-discovery-script` is an example. The user's program runs once, on the head, and itself starts its
processes on the nodes. A file lists the trainer's nodes and is replaced whenever they change. An executable beside the
file prints it: one line `HOST:SLOTS` per host, with one slot per rank of its nodes.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bftrainer.cluster.launchers.base import Launch, LauncherTraits, StateLayout, WorkerSlot
from bftrainer.cluster.wire.messages import Start
from bftrainer.util.files import replace_file

SCRIPT = "BFTRAINER_HOSTS_SCRIPT"
"""The environment variable with the path of an executable that prints the hosts on which the program may run now."""
FILE = "BFTRAINER_HOSTS_FILE"
"""The environment variable with the path of the file that this executable prints."""
RESCALE_S = 10.0


class HostsLauncher:
    """Starts the user's program on the head and writes its host list. See `base.Launcher`."""

    traits = LauncherTraits(on_nodes=False, rescale_s=RESCALE_S)

    def __init__(self, home: StateLayout) -> None:
        self._home = home

    def start(self, launch: Launch, place: WorkerSlot) -> Start:
        """See `base.Launcher`."""
        spec, folder = launch.spec, self._home.folder(launch.id)
        env = {**self._home.environment(launch), SCRIPT: str(folder / "hosts"), FILE: str(folder / "hosts.txt")}
        program = spec.module is None and not spec.python and _is_program(Path(spec.cwd, spec.script))
        arguments = (place.worker, launch.id, spec.argv, env, spec.cwd, spec.python)
        return Start(*arguments, program=program, speaks=False, submitted_python=spec.submitted_python, ranks=1)

    def given(self, launch: Launch, hosts: Sequence[tuple[str, int]]) -> None:
        """See `base.Launcher`."""
        self._home.prepare(launch.id)
        folder = self._home.folder(launch.id)
        slots: Counter[str] = Counter()  # virtual nodes share one address
        for host, ranks in hosts:
            slots[host] += ranks
        replace_file(folder / "hosts.txt", "".join(f"{host}:{number}\n" for host, number in slots.items()))
        text = f"#!/bin/sh\nexec cat {shlex.quote(str(folder / 'hosts.txt'))}\n"
        script = folder / "hosts"
        if not script.exists():
            replace_file(script, text, 0o700)

    def said(self, tail: str) -> str:
        """See `base.Launcher`."""
        return tail


def _is_program(path: Path) -> bool:
    return path.suffix != ".py" and os.access(path, os.X_OK)
