"""A real controller in a process of its own, with a local pool, for tests that disturb it; ends with all it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from bftrainer.client.api import ApiClient, UnreachableError, find_controller
from bftrainer.cluster.doctor.doctor import examine
from support.processes import is_alive
from support.waiting import wait_until

LOOK_S = 0.25
"""Between two looks at a trainer: each costs the controller and this process some milliseconds of a busy machine."""
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


class Live:
    """A controller and its state folder."""

    def __init__(
        self, folder: Path, *options: str, env: Mapping[str, str] | None = None, python: str = sys.executable
    ) -> None:
        self.folder = folder
        self._python = python
        self.options = options
        self.log = folder.parent / f"{folder.name}-serve.log"
        self._env = {**os.environ, "BFTRAINER_STATE": str(folder), **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._client: ApiClient | None = None
        self.pids: set[int] = set()

    def __enter__(self) -> Live:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and self.log.exists():
            print(self.log.read_text()[-5000:], file=sys.stderr)
        self.stop()

    def start(self) -> None:
        """Begin a controller's life, and wait until it answers. It predicts nothing, unless `options` say otherwise."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._python, "-m", "bftrainer", "serve", "--port", "0", "--set", "eta.cpu_share=0", *self.options],
                env=self._env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._drop()
        wait_until(self._answers, "an answer of the controller", 60)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"serve ended with {self._process.returncode}: {self.log.read_text()[-2000:]}")
        try:
            return bool(self.api.health()["ok"])
        except (UnreachableError, OSError, ValueError):
            self._drop()
            return False
        except Exception as problem:  # the file of an earlier life
            if "client.json" in str(problem) or "controller" in str(problem):
                self._drop()
                return False
            raise

    def _drop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @property
    def api(self) -> ApiClient:
        """A client of it."""
        if self._client is None:
            self._client = ApiClient(find_controller(self.folder))
        return self._client

    @property
    def pid(self) -> int:
        """Of the controller."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill the controller alone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._drop()

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 20.0) -> int:
        """End the controller in good order; its exit status."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(signum)
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._drop()
        self._process = None
        return status

    # What one asks it.

    def submit(self, script: Path | str, *args: str, nodes: str = "1-8", **more: Any) -> str:
        """Queue a trainer; its id."""
        least, _, most = nodes.partition("-")
        spec = {"script": str(script), "args": list(args), "min_nodes": int(least), "max_nodes": int(most), **more}
        return str(self.api.submit({"cwd": str(self.folder.parent), **spec})["id"])

    def trainer(self, ref: str) -> dict[str, Any]:
        """All about a trainer. Remembers the pids of its workers."""
        found: dict[str, Any] = self.api.trainer(ref)
        for worker in found["workers"]:
            self.pids |= {pid for pid in (worker["pid"], *(rank["pid"] for rank in worker["ranks"])) if pid}
        return found

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that are here. Remembers the pids of their agents."""
        found = self.api.nodes()
        self.pids |= {node["agent_pid"] for node in found if node["agent_pid"]}
        return found

    def until_state(self, ref: str, *states: str, timeout_s: float = 90.0) -> dict[str, Any]:
        """Wait until a trainer is in one of these states."""

        def there() -> dict[str, Any] | None:
            found = self.trainer(ref)
            return found if found["state"] in states else None

        found: dict[str, Any] = wait_until(there, f"{ref} in state {' or '.join(states)}", timeout_s, LOOK_S)
        return found

    def until_printed(self, ref: str, holds: Callable[[list[str]], bool]) -> None:
        """Wait until a condition holds for the last lines that a trainer's workers printed.

        A trainer may be done a moment before its last lines have arrived.
        """
        lines: list[str] = []

        def there() -> bool:
            lines[:] = [line.partition("| ")[2] for line in self.trainer(ref)["log_tail"]]
            return holds(lines)

        wait_until(there, lambda: f"the last lines of {ref} ({lines})", longest_s=LOOK_S)

    def until_steps(self, ref: str, more: int = 1, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until a trainer has made more steps than it has now."""
        before = self.trainer(ref)["step"]
        found: dict[str, Any] = wait_until(
            lambda: (row := self.trainer(ref))["step"] >= before + more and row, f"steps of {ref}", timeout_s, LOOK_S
        )
        return found

    def problems(self) -> list[str]:
        """What the doctor finds wrong."""
        return [f"{finding.what}: {finding.advice}" for finding in examine(self.folder) if finding.level == "error"]


def gone(pids: set[int], timeout_s: float = 10.0) -> None:
    """Wait until none of these processes is left (a zombie is no process)."""

    def left() -> list[int]:
        return [pid for pid in pids if is_alive(pid)]

    wait_until(lambda: not left(), "the end of all processes", timeout_s)
