"""Where a training stands on this rank: progress, learning rate and the registered objects, which are one state.

`Run` has it saved between two batches and, whenever a group is formed, brought to that of the most advanced rank. It
also knows what the script's own code after a failed step must not leave behind.
"""

from __future__ import annotations

import copy
import hashlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from bftrainer.elastic.group import breaking
from bftrainer.elastic.membership import Place
from bftrainer.elastic.noted import Noted
from bftrainer.elastic.snapshot import Snapshots
from bftrainer.elastic.state import Registry, broadcast
from bftrainer.elastic.stepping import Stepper
from bftrainer.errors import BFTrainerError


@dataclass(slots=True)
class Progress:
    """How far the job is. Of two ranks the one with the greater epoch, cursor and step is ahead."""

    epoch: int = 0
    cursor: int = 0
    """Samples of the epoch that are committed (steps, in a loop over `steps`)."""
    step: int = 0
    """Steps committed in all."""
    samples: int = 0
    saved_at: float = 0.0
    """When the last snapshot was taken, or training began; Unix time, as it travels between nodes."""

    def key(self) -> tuple[int, int, int]:
        """What is compared."""
        return self.epoch, self.cursor, self.step


class Standing:
    """The state of one rank's training, and where it comes from: the start, a snapshot or a peer."""

    def __init__(self, registry: Registry, stepper: Stepper, noted: Noted, snapshots: Snapshots | None) -> None:
        self.progress = Progress(saved_at=time.time())
        self.has_state = False
        """Whether this rank has begun to train or has taken a state over: before that it has none to give."""
        self.repair: Callable[[], None] | None = None
        """Undoes what the script's code did after a step that failed, or that this rank had missed."""
        self._registry = registry
        self._stepper = stepper
        self._noted = noted
        self._snapshots = snapshots
        self._saved = 0  # the step of the last snapshot

    @property
    def snapshot_step(self) -> int | None:
        """The step of the newest snapshot on disk."""
        return self._snapshots.last_step if self._snapshots is not None else None

    # Snapshots.

    def begin(self) -> None:
        """Have a state, without peers: that of the newest snapshot, if there is one."""
        if not self.has_state:
            self._resume()
        self.has_state = True

    def save_if_due(self) -> None:
        """Take a snapshot behind the training's back, now and then."""
        keeper = self._snapshots
        if keeper is not None and self.progress.step != self._saved and keeper.due():
            self.progress.saved_at = time.time()
            if keeper.take(self.progress.step, self._capture()):
                self._saved = self.progress.step

    def save(self) -> None:
        """Take a snapshot before going on. Training is not lost for a full disk."""
        if self._snapshots is not None:
            try:
                self._snapshots.take_now(self.progress.step, self._capture())
            except BFTrainerError as problem:
                print(f"bftrainer: no snapshot of step {self.progress.step}: {problem}", file=sys.stderr, flush=True)

    def close(self, patience_s: float) -> None:
        """Wait so long for a snapshot that is being written."""
        if self._snapshots is not None:
            self._snapshots.close(patience_s)

    def _resume(self) -> None:
        found = self._snapshots.latest() if self._snapshots is not None else None
        if found is not None:
            self._load(found.state)
            self._saved = found.step
            print(f"bftrainer: resumed from {found.path} at step {found.step}", file=sys.stderr, flush=True)

    # Peers.

    def sync(self, place: Place, wire: torch.device) -> None:
        """Bring every member to the state of the most advanced one. Tensors travel on `wire`."""
        if place.world == 1:
            self.begin()
            return
        mine = [int(self.has_state), *self.progress.key(), self._signature()]
        row = torch.tensor(mine, dtype=torch.int64, device=wire)
        rows = [torch.empty_like(row) for _ in range(place.world)]
        with breaking():
            dist.all_gather(rows, row)
            table = [r.tolist() for r in rows]
        if len({r[-1] for r in table}) > 1:
            raise BFTrainerError(
                "the ranks registered different models: shapes of parameters or their order differ. "
                "Does the script build the model differently by rank or world size?"
            )
        keys = [r[:-1] for r in table]
        source = keys.index(max(keys))
        if not keys[source][0] and place.rank == source:
            self._resume()
        if not keys[source][0] or any(key != keys[source] for key in keys):
            wanted = keys[place.rank] != keys[source] or not keys[source][0]
            self._take_over(source, place.rank, wire, wanted=wanted)
        self.has_state = True

    def _take_over(self, source: int, rank: int, wire: torch.device, *, wanted: bool) -> None:
        state = broadcast(self._capture() if rank == source else None, source, wire)
        if rank == source or not wanted:
            return
        if not self.has_state:
            self._load(state)
            return
        # The script's code after the step that this rank missed still runs here, but is in this state already. So it is
        # loaded again after that; a copy now, as objects may keep what they are given and change it.
        self._load(copy.deepcopy(state))
        self.repair = lambda: self._load(state)

    def _signature(self) -> int:
        """A number that is the same on ranks that train the same parameters."""
        shapes = [tuple(param.shape) for param in self._stepper.params]
        names = sorted(self._registry.objects)
        return int.from_bytes(hashlib.sha256(repr((names, shapes)).encode()).digest()[:7], "big")

    # What the script's code does after a step.

    def step_failed(self) -> None:
        """The script's code after the failed step still runs; what it changes (a scheduler) is put back afterwards."""
        if self.repair is None:
            self.repair = self._registry.keep_untrained(self._stepper.optimizers)

    def put_right(self) -> None:
        """That code has run: undo what it did, if it must be."""
        if self.repair is not None:
            repair, self.repair = self.repair, None
            repair()

    # All of it at once.

    def _capture(self) -> dict[str, Any]:
        lr = self._stepper.state_dict()
        reported = self._noted.as_state()
        return {"progress": asdict(self.progress), "lr": lr, "objects": self._registry.capture(), "reported": reported}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._registry.load(state["objects"])
        self.progress = Progress(**state["progress"])
        self._stepper.load_state_dict(state["lr"])
        self._noted.load(state.get("reported", {}))
        if self._snapshots is not None:
            self._snapshots.last_was(time.time() - self.progress.saved_at)
