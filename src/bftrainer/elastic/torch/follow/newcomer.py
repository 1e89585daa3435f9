"""Newcomer: takes the trained state before it joins, and repeats the others' steps until it has caught up.

`Following` asks the manager for donors, chooses the step at which all of them copy their share of the state, and loads
it. One thread per donor reads; another one repeats the steps. The main thread returns from `begin` when the newcomer
has caught up, says that it is ready, and joins the group while the other threads go on. Then `has_caught_up` compares
the checksums of the donors with the state here.
"""

from __future__ import annotations

import math
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bftrainer.elastic.membership import Membership
from bftrainer.elastic.torch.follow.frames import FlowError, FlowLateError, FlowLostError, Frames
from bftrainer.elastic.torch.follow.memory import drop, give_back, make_heap_ready, make_ready_room, make_room
from bftrainer.elastic.torch.follow.trained import TrainedState
from bftrainer.errors import BFTrainerError
from bftrainer.processes.launch import foreground

_ANSWER_S = 5.0
"""Seconds that the manager has to say who sends the state, and then the donors to connect."""
_PATIENCE_S = 60.0
"""Seconds without progress after which a newcomer stops following, and joins as if it had not begun."""
_AGREEING_S = 0.2
"""Seconds from the newcomer's choice of a step until all donors know of it."""
_VERIFYING_S = 5.0
"""Seconds that the others wait at most for a newcomer's last steps when it joins. Then it gets the whole state."""
_SLICE_S = 0.05
_LOOK_S = 0.2
_RING = 3
"""Steps that may have arrived and not be repeated yet."""
_HOPELESS_STEPS, _HOPELESS_S = 20, 3.0
"""A newcomer gives up when so many steps came in so many seconds, and the donors had never fewer left to send."""
_TOO_FAST = "the others train faster than it can follow"
_LAG = 1
"""A newcomer has caught up when it is at most so many steps behind."""


@dataclass(slots=True, eq=False)
class _Link:
    """The connection to one donor."""

    frames: Frames
    share: int
    step: int
    step_s: float
    headers: queue.SimpleQueue[dict[str, Any] | None] = field(default_factory=queue.SimpleQueue)
    """Headers whose bytes have arrived; None at the end."""
    read: int = 0
    """Steps that have arrived."""
    level: int = -1
    """Steps that had arrived when the donor had nothing more to send."""
    behind: int = 0
    """Steps that the donor had yet to send when it began to send the last one."""


class Following:
    """The way of one newcomer from the others' state at one step to the step at which it joins."""

    def __init__(self, trained: TrainedState, membership: Membership) -> None:
        self.problem = ""
        """Why this newcomer does not follow any more; empty while it does."""
        self.repeated = 0
        """Steps that were repeated here."""
        self.kept: Tensor | None = None
        """A block that is to be kept as long as this process trains. See `make_heap_ready`."""
        self._trained = trained
        self._membership = membership
        self._pins = trained.gpu is not None
        self._changed = threading.Condition()
        self._links: list[_Link] = []
        self._threads: list[threading.Thread] = []
        self._stopped = False
        self._kind: type[FlowError] = FlowError  # of the first problem: whether it makes sense to begin again
        self._loaded = False
        self._state: Tensor | None = None
        self._ring: list[tuple[int, Tensor]] = [(-1, torch.empty(0, dtype=torch.uint8))] * _RING
        self._verdicts: dict[str, tuple[tuple[int, ...], bool]] = {}
        self._restore: Callable[[], None] | None = None

    def begin(self, margin: int) -> None:
        """Follow until caught up. Raises a `FlowError` if it fails, without a text if nobody trains yet.

        `margin` is how many steps ahead the copy of the state is at least.
        """
        try:
            asked = time.monotonic()
            self._links = self._meet_donors()
            self._make_memory_ready()
            step_s = max(link.step_s for link in self._links)
            # The donors have gone on since they said at which step they were.
            ahead = math.ceil((_AGREEING_S + time.monotonic() - asked) / step_s) if step_s else 1
            step = max(link.step for link in self._links) + max(margin, ahead)
            for link in self._links:
                link.frames.send({"kind": "capture", "step": step})
                link.frames.set_timeout(None)
            foreground()  # a newcomer may have started at low priority, which is too slow to catch up
            for link in self._links:
                self._start(self._read, link)
            self._start(self._repeat_steps)
            self._wait_until_level()
        except (OSError, FlowError) as problem:
            self.stop(str(problem))
            if isinstance(problem, FlowError):
                raise
            raise FlowLostError(str(problem)) from problem

    def has_caught_up(self, label: str, key: Sequence[int], check: Callable[[], None]) -> bool:
        """Wait for the donors' marks with this label. Return whether the state here is theirs at this `key`.

        `check` raises if the group is broken meanwhile.
        """
        deadline = time.monotonic() + _VERIFYING_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: label in self._verdicts or self.problem, _SLICE_S)
                if label in self._verdicts:
                    return self._verdicts[label] == (tuple(key), True)
                if self.problem or time.monotonic() > deadline:
                    return False
            check()

    def stop(self, problem: str) -> None:
        """Stop following, and wait until no thread changes the state here any more."""
        self._fail(problem)
        for link in self._links:
            link.frames.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def free(self) -> None:
        """Give all memory back, in another thread: it takes a while, and the others wait for this node's first step.

        Call it after `stop`. What was here before the state of the others was loaded is lost.
        """
        held: list[object] = [self._restore, self._links]
        rooms = [room for _, room in self._ring] + ([self._state] if self._state is not None else [])
        self._state, self._ring, self._restore = None, [], None
        if self._pins:
            give_back(rooms)
        else:
            held.append(rooms)
        threading.Thread(target=drop, args=(held,), name="bftrainer-follow-end", daemon=True).start()

    def restore(self) -> None:
        """Put back what was here before the state of the others was loaded. Call it after `stop`."""
        self._state, self._ring = None, []
        if self._restore is not None:
            self._restore()

    # Donors.

    def _meet_donors(self) -> list[_Link]:
        secret = secrets.token_hex(16)
        host = self._membership.address
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.bind(address[:2])
            listener.listen(128)
            port = listener.getsockname()[1]
            count = self._membership.follow(f"{host}:{port}", secret, _ANSWER_S)
            if not count:
                raise FlowError("the manager does not answer" if count is None else "")
            deadline, links = time.monotonic() + _ANSWER_S, list[_Link]()
            try:
                while len(links) < count:
                    if (self._membership.donors or 0) < count:
                        raise FlowLostError("a donor was lost")
                    links += self._accept(listener, secret, deadline - time.monotonic())
                for link in links:
                    link.frames.set_timeout(_PATIENCE_S)
                    header, _ = link.frames.receive()
                    link.share, link.step, link.step_s = header["share"], header["step"], header["step_s"]
                if sorted(link.share for link in links) != list(range(count)):
                    raise FlowError("the donors do not have all shares of the state")
            except BaseException:
                for link in links:
                    link.frames.close()
                raise
        return sorted(links, key=lambda link: link.share)

    @staticmethod
    def _accept(listener: socket.socket, secret: str, within_s: float) -> list[_Link]:
        if within_s <= 0:
            raise FlowError("a member did not answer; its BFTrainer may be older")
        listener.settimeout(min(within_s, _LOOK_S))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return []
        try:
            return [_Link(Frames.from_donor(connection, secret), 0, 0, 0.0)]
        except (OSError, FlowError):  # a stranger, or a donor that was lost
            connection.close()
            return []

    def _wait_until_level(self) -> None:
        before, moved = list[int](), time.monotonic()
        least, least_at, least_read = math.inf, moved, 0
        while True:
            with self._changed:
                now = [self._loaded, self.repeated, *(link.read for link in self._links)]
                if self._changed.wait_for(lambda: self.problem or self._is_level(), _LOOK_S):
                    break
            if self._membership.donors == 0:
                raise FlowError("the others wait for it")
            if now != before:
                before, moved = now, time.monotonic()
            elif time.monotonic() - moved > _PATIENCE_S:
                raise FlowError(f"nothing came for {_PATIENCE_S:g} s")
            behind, read = sum(link.behind for link in self._links), min(link.read for link in self._links)
            if not read or behind < least:
                least, least_at, least_read = behind if read else math.inf, time.monotonic(), read
            elif read - least_read >= _HOPELESS_STEPS and time.monotonic() - least_at > _HOPELESS_S:
                raise FlowError(_TOO_FAST)
        if self.problem:
            raise self._kind(self.problem)

    def _is_level(self) -> bool:
        return self._loaded and all(
            link.level >= link.read - _LAG and self.repeated >= link.read - _LAG for link in self._links
        )

    # Threads.

    def _start(self, call: Callable[..., None], *args: object) -> None:
        def guarded() -> None:
            try:
                self._trained.choose_gpu()
                call(*args)
            except OSError as problem:
                self._fail(str(problem), FlowLostError)
            except FlowLostError as problem:
                self._fail(str(problem), type(problem))
            except BFTrainerError as problem:
                self._fail(str(problem))
            except Exception as problem:  # of an optimizer, for example: this newcomer just does not follow
                self._fail(f"{type(problem).__name__}: {problem}")

        thread = threading.Thread(target=guarded, name="bftrainer-follow-state", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _fail(self, problem: str, kind: type[FlowError] = FlowError) -> None:
        with self._changed:
            if not self.problem:
                self.problem, self._kind = problem, kind
            self._stopped = True
            self._changed.notify_all()
        for link in self._links:
            link.headers.put(None)

    def _read(self, link: _Link) -> None:
        """Read what one donor sends."""
        while True:
            header, length = link.frames.receive()
            kind = header["kind"]
            if kind == "end":
                link.headers.put(header)
                return
            if kind == "late":
                raise FlowLateError("a donor heard too late at which step to copy the state")
            if kind == "slow":
                raise FlowError(_TOO_FAST)
            if kind == "level":
                with self._changed:
                    link.level = link.read
                    self._changed.notify_all()
                continue
            if kind in ("state", "step"):
                begin, end = int(header["begin"]), int(header["end"])
                room = self._room(kind, link.read, int(header["size"]))
                if end - begin != length or not 0 <= begin <= end <= room.numel():
                    raise FlowError("a donor sent another number of bytes than announced")
                link.frames.receive_into(room[begin:end])
                with self._changed:
                    link.read += kind == "step"
                    link.behind = int(header.get("behind", 0))
            link.headers.put(header)

    def _room(self, kind: str, number: int, size: int) -> Tensor:
        """Return the memory for a whole state or step, of which each donor fills its share."""
        with self._changed:
            if kind == "state":
                if self._state is None:
                    self._state = make_room(size, pinned=False)  # used once: pinning it would take longer
                return self._state
            self._changed.wait_for(lambda: self.repeated > number - _RING or self._stopped)
            if self._stopped:
                raise FlowLostError("it was stopped")
            held, room = self._ring[number % _RING]
            if held != number:
                room = room if room.numel() >= size else make_room(size, pinned=self._pins)
                self._ring[number % _RING] = number, room
            return room[:size]

    def _make_memory_ready(self) -> None:
        """Write to the memory of steps and of the first gradients: else the others would wait for its pages.

        Call it before the state arrives. From then on every step counts.
        """
        size = self._trained.gradient_bytes
        self._ring = [(-1, make_ready_room(size, pinned=self._pins)) for _ in range(_RING)]
        self.kept = make_heap_ready(self._trained.gradient_sizes)

    def _repeat_steps(self) -> None:
        """Load the state, and repeat the steps of the others."""
        while (headers := self._next_headers()) is not None:
            first, kind = headers[0], headers[0]["kind"]
            if kind == "mark":
                self._compare(headers)
                continue
            if any(header["step"] != first["step"] or header["size"] != first["size"] for header in headers):
                raise FlowLostError("the donors sent different steps")
            if kind == "state":
                assert self._state is not None
                self._restore = self._trained.load(first["skeleton"], self._state)
                self._state = None
                with self._changed:
                    self._loaded = True
                    self._changed.notify_all()
                continue
            if any(header["optimizer"] != first["optimizer"] for header in headers) or not self._loaded:
                raise FlowLostError("the donors sent different steps")
            _, room = self._ring[self.repeated % _RING]
            self._trained.repeat(first, room[: first["size"]])
            with self._changed:
                self.repeated += 1
                self._changed.notify_all()

    def _next_headers(self) -> list[dict[str, Any]] | None:
        """Return the next header of each donor; None when following is stopped."""
        headers = []
        for link in self._links:
            header = link.headers.get()
            if header is None or self._stopped:
                return None
            headers.append(header)
        if len({header["kind"] for header in headers}) != 1:
            raise FlowLostError("a donor has left")
        return headers

    def _compare(self, marks: list[dict[str, Any]]) -> None:
        """Compare the donors' checksums, which come after their marks, with the state here."""
        label, key = marks[0]["label"], tuple(marks[0]["key"])
        same = all((mark["label"], tuple(mark["key"])) == (label, key) for mark in marks)
        tree = self._trained.tree()
        shares = [tree.layout.share(link.share, len(self._links)) for link in self._links]
        mine = [tree.layout.checksum(tree.tensors, begin, end) for begin, end in shares]
        sums = self._next_headers()  # the donors compute them at the same time
        if sums is None:
            return
        same = same and mine == [found.get("checksum") for found in sums]
        with self._changed:
            self._verdicts[label] = key, same
            self._changed.notify_all()
