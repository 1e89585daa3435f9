"""The launcher for programs that ask a script where they may run, as `horovodrun --host-discovery-script` does.

The user's program runs once, on the head, and starts on the nodes what it likes. Which nodes it has is in a file that
is replaced whenever that changes, and an executable beside it prints the file: a line `HOST:SLOTS` for each host, one
slot a node.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bftrainer.cluster.launchers.base import Home, Place, Traits
from bftrainer.cluster.wire import Start

if TYPE_CHECKING:
    from bftrainer.cluster.live import Live

SCRIPT = "BFTRAINER_HOSTS_SCRIPT"
"""Environment of the program: an executable that prints where it may run now."""
FILE = "BFTRAINER_HOSTS_FILE"
"""Environment of the program: the file with what that executable prints."""
RESCALE_S = 10.0


class HostsLauncher:
    """See `base.Launcher`."""

    traits = Traits(on_nodes=False, rescale_s=RESCALE_S)

    def __init__(self, home: Home) -> None:
        self._home = home

    def start(self, live: Live, place: Place) -> Start:
        """See `base.Launcher`."""
        spec, folder = live.spec, self._home.folder(live.id)
        env = {**self._home.environment(live), SCRIPT: str(folder / "hosts"), FILE: str(folder / "hosts.txt")}
        program = spec.module is None and not spec.python and _is_program(Path(spec.cwd, spec.script))
        what = (place.worker, live.id, spec.argv, env, spec.cwd, spec.python)
        return Start(*what, program=program, speaks=False, submitted_python=spec.submitted_python)

    def given(self, live: Live, hosts: Sequence[str]) -> None:
        """See `base.Launcher`."""
        self._home.prepare(live.id)
        folder = self._home.folder(live.id)
        lines = [f"{host}:{slots}\n" for host, slots in Counter(hosts).items()]
        replace_file(folder / "hosts.txt", "".join(lines), 0o600)
        text = f"#!/bin/sh\nexec cat {shlex.quote(str(folder / 'hosts.txt'))}\n"
        script = folder / "hosts"
        if not script.exists():
            replace_file(script, text, 0o700)

    def said(self, tail: str) -> str:
        """See `base.Launcher`."""
        return tail


def _is_program(path: Path) -> bool:
    return path.suffix != ".py" and os.access(path, os.X_OK)


def replace_file(path: Path, text: str, mode: int) -> None:
    """Write a file, so that whoever reads it finds the old text or the new one."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
