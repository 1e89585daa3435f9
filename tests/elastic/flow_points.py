"""Named points of a state flow at which workers of a test are struck, and what flows hold of a process.

`chaos_worker.py --flows` installs them. FOLDER/strike is a JSON object: the worker `at` which the strike is made when
it gets to the `point`, and the workers that get the `signal`. The point is `copy` (half of the state is sent or has
arrived), `catch-up` (the same for a step) or `switch` (the checksum with which a newcomer joins).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bftrainer.elastic.torch.follow import flow, frames
from bftrainer.elastic.torch.follow.donor import DonorFlow
from bftrainer.elastic.torch.follow.frames import Frames
from bftrainer.elastic.torch.follow.newcomer import Following

POINTS = {"state": "copy", "step": "catch-up", "mark": "switch"}
CHUNK = 64
"""Bytes that are sent at a time, so that a strike can fall between two of them."""


class Strikes:
    """Makes the strikes that this worker has to make."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._folder = folder
        self._worker = worker
        (folder / f"pid-{worker}").write_text(str(os.getpid()))

    def is_due(self, kind: str) -> bool:
        """Whether this worker has to strike while such a frame is sent or received."""
        try:
            strike = json.loads((self._folder / "strike").read_text())
        except FileNotFoundError:
            return False
        return bool(strike["at"] == self._worker and strike["point"] == POINTS.get(kind))

    def make(self) -> None:
        """Strike, once."""
        claimed = self._folder / f"struck-{self._worker}"
        try:
            (self._folder / "strike").rename(claimed)
        except FileNotFoundError:
            return  # another thread was faster
        strike = json.loads(claimed.read_text())
        for worker in sorted(strike["workers"], key=lambda name: name == self._worker):  # itself last
            os.kill(int((self._folder / f"pid-{worker}").read_text()), strike["signal"])
        while strike["signal"] == signal.SIGKILL:
            time.sleep(1.0)  # this process is dead


class _Cut:
    """A connection that strikes when half of a frame is sent."""

    def __init__(self, connection: Any, strikes: Strikes, pieces: int) -> None:
        self._connection = connection
        self._strikes = strikes
        self._left = pieces

    def sendall(self, data: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._strikes.make()
        self._connection.sendall(data)


def install(folder: Path, worker: str) -> None:
    """Let all newcomers follow, however small the model is, and watch for strikes."""
    strikes = Strikes(folder, worker)
    flow.LEAST_BYTES = 0
    frames._CHUNK = CHUNK
    sends, receives, fills = Frames.send, Frames.receive, Frames.receive_into
    arriving: dict[int, str] = {}  # the kind of frame, by thread

    def send(self: Frames, header: dict[str, Any], payload: Tensor | None = None) -> None:
        if not strikes.is_due(header["kind"]):
            sends(self, header, payload)
            return
        connection = self._connection
        pieces = 1 if payload is None else 1 + max(1, payload.numel() // CHUNK // 2)
        self._connection = _Cut(connection, strikes, pieces)  # type: ignore[assignment]
        try:
            sends(self, header, payload)
        finally:
            self._connection = connection

    def receive(self: Frames) -> tuple[dict[str, Any], int]:
        header, length = receives(self)
        arriving[threading.get_ident()] = header["kind"]
        if not length and strikes.is_due(header["kind"]):
            strikes.make()
        return header, length

    def receive_into(self: Frames, room: Tensor) -> None:
        half = room.numel() // 2
        fills(self, room[:half])
        if strikes.is_due(arriving[threading.get_ident()]):
            strikes.make()
        fills(self, room[half:])

    Frames.send, Frames.receive, Frames.receive_into = send, receive, receive_into  # type: ignore[method-assign, assignment]


def leftovers() -> dict[str, int]:
    """What flows may have left in this process: objects, threads, sockets, buffers and shared memory."""
    gc.collect()
    found = gc.get_objects()
    threads = [
        thread for thread in threading.enumerate() if thread.name.startswith(("bftrainer-flow", "bftrainer-fol"))
    ]
    kinds = [kind for kind in map(type, found) if kind in (DonorFlow, Following, Frames)]
    buffers = [thing for thing in found if type(thing) is Tensor and thing.dtype is torch.uint8 and thing.numel()]
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return {
        "threads": len(threads),
        "flows": len(kinds),
        "buffers": len(buffers),
        "sockets": sum(link.startswith("socket:") for link in links),
        "shared": sum("/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }
