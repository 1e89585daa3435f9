"""Donor: sends newcomers this rank's share of the trained state, and then of each step, while training goes on.

There is one `DonorFlow` with one thread per newcomer. The training thread only copies: the state in the background
until the next optimizer step, which waits for the rest of the copy, and then the gradients of each step. The thread
sends what was copied. If it cannot keep up, or anything fails, the flow ends and training is not affected: the newcomer
then takes the whole state when it joins.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bftrainer.elastic import protocol
from bftrainer.elastic.protocol import Donate
from bftrainer.elastic.torch.follow.flat import ALIGNMENT
from bftrainer.elastic.torch.follow.frames import FlowError, FlowSlowError, Frames
from bftrainer.elastic.torch.follow.memory import drop, give_back, make_ready_room, make_room
from bftrainer.elastic.torch.follow.trained import TrainedState, TrainedTree
from bftrainer.errors import BFTrainerError, InputError

_STALLED_S = 30.0
"""Seconds after which a newcomer that reads nothing is given up."""
_LEAST_QUEUE_BYTES = 64 << 20
_ROOMS = 2, 6
"""Gradients of so many steps have memory from the start, at least and at most."""
_USUAL_BYTES_PER_S = 1e9
"""How fast a flow is expected to be, to have enough memory for the steps that are made while the state is sent."""
_QUEUE_SHARES = 4
"""A flow may hold so many times its share of the state in gradients that are not sent yet."""


@dataclass(slots=True)
class _Item:
    """Something to send. `ready` is waited for first: a GPU may still be at work."""

    header: dict[str, Any]
    room: Tensor | None = None
    ready: Any = None
    whole: Tensor | None = None
    """The memory that `room` is the beginning of, for gradients: it is used again."""
    marked: TrainedTree | None = None
    """The state of which a checksum is sent afterwards."""


class DonorFlow:
    """The flow to one newcomer. All methods are for the training thread, and none of them waits for the network."""

    def __init__(self, request: Donate, trained: TrainedState, pace: Callable[[], tuple[int, float]]) -> None:
        self.worker = request.worker
        self.problem = ""
        """Why the flow has ended; empty while it lives."""
        self._request = request
        self._trained = trained
        self._pace = pace
        self._lock = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._queued = 0  # bytes of gradients
        self._most_queued = _LEAST_QUEUE_BYTES
        self._free: list[Tensor] = []
        self._pins = trained.gpu is not None
        self._room: Tensor | None = None
        self._capture_at: int | None = None
        self._tree: TrainedTree | None = None  # being copied
        self._source: Any = None  # the event on a GPU after which the state may be copied
        self._copied = threading.Event()
        self._summed = threading.Event()  # no checksum is being computed
        self._summed.set()
        self._copy_done: Any = None
        self._waits = True  # for the step at which the state is copied
        self._flows = False  # steps are recorded
        self._ending = False
        self._frames: Frames | None = None
        self._thread = threading.Thread(target=self._run, name=f"bftrainer-flow-{self.worker}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the flow has not ended, and is not about to end."""
        return not self.problem and not self._ending

    def at_step(self, step: int) -> None:
        """Begin to copy the state if this is the step that the newcomer asked for: no optimizer has stepped since."""
        wanted = self._capture_at
        if not self._waits or wanted is None or step < wanted:
            return
        self._waits = False
        if step > wanted:
            self._say(_Item({"kind": "late", "step": step}))
            return
        tree = self._trained.tree()
        device = _gpu_of(tree)
        self._source = torch.cuda.current_stream(device).record_event() if device is not None else None
        self._flows = True
        with self._lock:
            self._tree = tree
            self._lock.notify_all()

    def record(self, optimizer: Optimizer, step: int) -> None:
        """Copy what the optimizer's next step depends on. Raises a `FlowError` if the flow cannot go on."""
        if not self._flows:
            return
        self._copied.wait()
        self._summed.wait()
        if self._copy_done is not None:
            torch.cuda.current_stream().wait_event(self._copy_done)
            self._copy_done = None
        found = self._trained.record(optimizer, step)
        begin, end = found.layout.share(self._request.share, self._request.shares)
        with self._lock:
            if self._queued + end - begin > self._most_queued:
                raise FlowSlowError("the newcomer cannot keep up with the training")
            # With several optimizers, the gradients of one may need more memory than those of another.
            fitting = [at for at, each in enumerate(self._free) if each.numel() >= end - begin]
            whole = self._free.pop(fitting[-1]) if fitting else None
        if whole is None:
            whole = make_room(end - begin, pinned=False)  # the copy takes long, but less than pinning
        room = whole[: end - begin]
        found.layout.copy(found.gradients, begin, end, room)
        on_gpu = bool(found.gradients) and found.gradients[0].is_cuda
        ready = torch.cuda.current_stream().record_event() if on_gpu else None
        header = {**found.header, "size": found.layout.size, "begin": begin, "end": end}
        self._say(_Item(header, room, ready, whole))

    def mark(self, label: str, key: Sequence[int]) -> None:
        """Tell the newcomer how far this rank is. A checksum of its share of the trained state follows.

        The flow's thread computes it, while the newcomer computes its own. The state does not change before the next
        step, which waits for it.
        """
        if not self._flows:
            return
        self._copied.wait()
        tree = self._trained.tree()
        device = _gpu_of(tree)
        ready = torch.cuda.current_stream(device).record_event() if device is not None else None
        self._summed.clear()
        self._say(_Item({"kind": "mark", "label": label, "key": list(key)}, ready=ready, marked=tree))

    def end(self, problem: str, flush_s: float = 0.0) -> None:
        """End the flow, after `flush_s` seconds at most in which what is queued is sent."""
        with self._lock:
            self._ending = True
            self._lock.notify_all()
        if flush_s:
            self._thread.join(flush_s)
        self._fail(problem)
        if flush_s:
            self._thread.join(flush_s)

    def give_up(self) -> None:
        """Send no more steps: the newcomer is told that it is too slow, as soon as it has read what is being sent."""
        with self._lock:
            rooms = [item.whole for item in self._queue if item.whole is not None]
            self._queue.clear()
            self._queue.append(_Item({"kind": "slow"}))
            self._ending = True
            self._lock.notify_all()
        if self._pins:
            give_back(rooms)

    def _say(self, item: _Item) -> None:
        with self._lock:
            self._queue.append(item)
            self._queued += item.room.numel() if item.room is not None else 0
            self._lock.notify_all()
        if self.problem:
            self._summed.set()  # the thread has ended, perhaps just now

    def _fail(self, problem: str) -> None:
        with self._lock:
            self.problem = self.problem or problem
            frames, self._frames = self._frames, None
            self._lock.notify_all()
        self._copied.set()
        self._summed.set()
        if frames is not None:
            frames.close()

    # The flow's own thread.

    def _run(self) -> None:
        try:
            self._trained.choose_gpu()
            self._flow()
        except (OSError, BFTrainerError) as problem:
            self._fail(str(problem))
        except Exception as problem:  # nothing that fails here may touch the training
            self._fail(f"{type(problem).__name__}: {problem}")
        else:
            self._fail("it is complete")
        with self._lock:
            rooms = [*self._free, *(item.whole for item in self._queue if item.whole is not None)]
            rooms += [self._room] if self._room is not None else []
            self._queue, self._free, self._room, self._tree = deque(), [], None, None
        if self._pins:
            give_back(rooms)
        else:
            drop(rooms)

    def _flow(self) -> None:
        share, shares = self._request.share, self._request.shares
        frames = Frames.to_newcomer(self._request.address, self._request.secret, _bytes_per_s())
        with self._lock:
            if self.problem:
                frames.close()
                return
            self._frames = frames
        frames.set_timeout(_STALLED_S)
        size = self._trained.estimated_bytes // shares
        self._most_queued = max(_LEAST_QUEUE_BYTES, _QUEUE_SHARES * size)
        # Memory is written to now: the system gives pages at the first write, and later the training would wait for it.
        self._room = make_ready_room(size, pinned=self._pins)
        gradients = self._trained.gradient_bytes // shares + ALIGNMENT
        self._free = [make_ready_room(gradients, pinned=self._pins) for _ in range(self._rooms_for(size))]
        step, step_s = self._pace()
        frames.send({"kind": "hello", "share": share, "step": step, "step_s": step_s})
        header, _ = frames.receive()
        self._capture_at = int(header["step"])
        with self._lock:
            self._lock.wait_for(lambda: self._tree is not None or self._queue or self.problem or self._ending)
            tree, room = self._tree, self._room
        if tree is not None and room is not None:
            frames.send(*self._copy(tree, room, share, shares))
        if self._pins and room is not None:
            give_back([room])
        self._room = self._tree = None
        del tree, room
        self._keep_sending(frames)

    def _rooms_for(self, size: int) -> int:
        """Return for how many steps to have memory: those that are made while so much state is sent, and one more."""
        least, most = _ROOMS
        _, step_s = self._pace()
        sending_s = size / min(_USUAL_BYTES_PER_S, _bytes_per_s() or math.inf)
        return max(least, min(most, math.ceil(sending_s / step_s) + 1)) if step_s else least

    def _copy(self, tree: TrainedTree, room: Tensor, share: int, shares: int) -> tuple[dict[str, Any], Tensor]:
        begin, end = tree.layout.share(share, shares)
        if room.numel() < end - begin:  # the estimate was too low
            room = make_room(end - begin, pinned=self._pins)
        room = room[: end - begin]
        if self._source is not None:
            stream: Any = torch.cuda.Stream(_gpu_of(tree))  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                stream.wait_event(self._source)
                tree.layout.copy(tree.tensors, begin, end, room)
                self._copy_done = done = stream.record_event()
            self._copied.set()
            done.synchronize()
        else:
            tree.layout.copy(tree.tensors, begin, end, room)
            self._copied.set()
        header = {"kind": "state", "step": self._capture_at, "skeleton": tree.skeleton, "size": tree.layout.size}
        return {**header, "begin": begin, "end": end}, room

    def _keep_sending(self, frames: Frames) -> None:
        while True:
            with self._lock:
                if not self._queue and not self._ending:
                    self._lock.release()
                    try:
                        frames.send({"kind": "level"})
                    finally:
                        self._lock.acquire()
                self._lock.wait_for(lambda: self._queue or self._ending or self.problem)
                if self.problem:
                    return
                item = self._queue.popleft() if self._queue else None
                behind = len(self._queue)
            if item is None:
                frames.send({"kind": "end"})
                return
            if item.ready is not None:
                item.ready.synchronize()
            frames.send({**item.header, "behind": behind}, item.room)
            if item.marked is not None:
                self._send_sum(frames, item.header["label"], item.marked)
            if item.room is not None and item.whole is not None:
                with self._lock:
                    self._queued -= item.room.numel()
                    if item.whole.is_pinned() or not self._pins:
                        self._free.append(item.whole)

    def _send_sum(self, frames: Frames, label: str, tree: TrainedTree) -> None:
        begin, end = tree.layout.share(self._request.share, self._request.shares)
        digest = tree.layout.checksum(tree.tensors, begin, end)
        self._summed.set()
        frames.send({"kind": "sum", "label": label, "checksum": digest})


class DonorFlows:
    """All flows from this rank. `add` is for any thread, all other methods for the training thread."""

    def __init__(self, trained: TrainedState) -> None:
        self._trained = trained
        self._flows: list[DonorFlow] = []
        self._adding = threading.Lock()
        self._step = 0  # steps done at the last boundary, or before the last optimizer step
        self._at = 0.0
        self._step_s = 0.0
        self._closed = False

    def add(self, request: Donate) -> None:
        """Begin a flow to a newcomer."""
        with self._adding:
            if not self._closed:
                self._flows = [*self._flows, DonorFlow(request, self._trained, lambda: (self._step, self._step_s))]

    def at_step(self, step: int) -> None:
        """Note that `step` steps are committed and no optimizer has stepped since. Copies of the state may begin."""
        if step != self._step:
            now = time.monotonic()
            self._step_s = (now - self._at) / max(1, step - self._step) if self._at else 0.0
            self._step, self._at = step, now
        if self._flows:
            self._each(lambda flow: flow.at_step(step))

    def before_step(
        self, step: int, optimizer: Optimizer, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Record a step that an optimizer is about to make."""
        if step != self._step:
            self.at_step(step)  # the script makes several steps between two boundaries
        if self._flows:
            has_arguments = any(value is not None for value in (*args, *kwargs.values()))

            def record(flow: DonorFlow) -> None:
                if has_arguments:
                    raise FlowError("optimizer.step() is called with arguments")
                flow.record(optimizer, step)

            self._each(record)

    def mark(self, label: str, key: Sequence[int]) -> None:
        """Tell all newcomers how far this rank is."""
        self._each(lambda flow: flow.mark(label, key))

    def end(self, problem: str, workers: Sequence[str] | None = None, flush_s: float = 0.0) -> None:
        """End the flows to some newcomers, or all."""
        for flow in self._flows:
            if workers is None or flow.worker in workers:
                flow.end(problem, flush_s)
        self._drop()

    def close(self) -> None:
        """End all flows permanently."""
        with self._adding:
            self._closed = True
        self.end("this node has left the training", flush_s=2.0)

    def _each(self, call: Callable[[DonorFlow], None]) -> None:
        for flow in self._flows:
            try:
                if flow.alive:
                    call(flow)
            except (BFTrainerError, RuntimeError) as problem:  # RuntimeError: no memory for a copy
                print(f"bftrainer: {flow.worker} takes the state when it joins: {problem}", file=sys.stderr, flush=True)
                if isinstance(problem, FlowSlowError):
                    flow.give_up()
                else:
                    flow.end(str(problem))
        self._drop()

    def _drop(self) -> None:
        with self._adding:
            self._flows = [flow for flow in self._flows if flow.alive]


def _gpu_of(tree: TrainedTree) -> torch.device | None:
    return next((tensor.device for tensor in tree.tensors if tensor.is_cuda), None)


def _bytes_per_s() -> float | None:
    """Return the limit that the environment sets."""
    text = os.environ.get(protocol.FOLLOW_RATE)
    try:
        rate = float(text) if text else 0.0
    except ValueError:
        rate = math.nan
    if text and not 0 < rate < math.inf:
        raise InputError(f"{protocol.FOLLOW_RATE} must be a number of megabytes above 0, but got {text!r}")
    return rate * 1e6 or None
