"""Session of a ddp script: its training, as the stand-ins see it.

Every rank's script sees itself as rank 0 of as many ranks as it was submitted for, since ranks are numbered anew when
nodes come or go. Only the main rank's output counts. The script is in one of three phases: at its *top*, before the
first training batch, where it is alone; in a *loop* over training batches; or in a *gap* between two such loops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from bftrainer import elastic
from bftrainer.elastic.torch.ddp.carries import carried_names
from bftrainer.elastic.torch.ddp.found import FoundObjects
from bftrainer.elastic.torch.ddp.order import DistributedOrder
from bftrainer.elastic.torch.ddp.record import GapRecord, TopRecord
from bftrainer.elastic.torch.ddp.refused import refuse, script_line
from bftrainer.elastic.torch.prepare.loader import PreparedLoader
from bftrainer.elastic.torch.prepare.preparation import Preparation, ranks_submitted_for


class DdpSession:
    """One rank's script. `top_speaks` says whether this rank writes files before the training."""

    def __init__(self, top_speaks: bool) -> None:
        self.ranks = ranks_submitted_for()
        """Number of ranks that the script sees."""
        self.found = FoundObjects()
        self.record = GapRecord()
        self.top = TopRecord()
        self.on_begin: Callable[[Preparation], None] = lambda _: None
        """Called when the objects of the script are prepared."""
        self.evaluated = False
        """Whether the script has looped over an evaluation set since the last training batch."""
        self.in_loop = False
        """Whether the script is in a loop over training batches."""
        self._top_speaks = top_speaks
        self._preparation: Preparation | None = None
        self._loaders: dict[int, tuple[DataLoader[Any], PreparedLoader]] = {}
        self._met = 0  # results of the present gap
        self._evaluations = 0  # loops over evaluation sets in the present gap
        self._unreduced = ""  # the line of an evaluation whose outcome only this rank knows

    # Where the script is.

    @property
    def preparation(self) -> Preparation | None:
        """The prepared objects; None at the top of the script."""
        return self._preparation

    @property
    def is_at_top(self) -> bool:
        """Whether the training has not begun, so that this rank knows no other."""
        return self._preparation is None

    @property
    def repeats(self) -> bool:
        """Whether the script runs code of a gap that was over before this worker came."""
        preparation = self._preparation
        return preparation is not None and not self.in_loop and preparation.loops_begun <= preparation.epoch

    @property
    def speaks(self) -> bool:
        """Whether what the script writes now counts."""
        if self._preparation is None:
            return self._top_speaks
        return self._preparation.is_main and not self.repeats

    # Results that all ranks know.

    def agree(self, what: str, compute: Callable[[], Any]) -> Any:
        """Return the result of a meeting in a gap; the recorded one if there is one."""
        preparation = self._preparation
        assert preparation is not None
        if self.in_loop:
            return compute()
        gap, number = preparation.loops_begun, self._met
        if not self.record.has(gap, number):
            if self.repeats:
                refuse(f"{what} was not called by the other ranks at this point: all ranks must do the same")
            self.record.add(gap, number, compute())
        self._met, self._unreduced = number + 1, ""
        return self.record.get(gap, number)

    # Loops.

    def train(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Iterate over this rank's training batches of the script's next epoch."""
        preparation = self._preparation or self._begin()
        self._leave_gap()
        gap = preparation.loops_begun
        prepared = self._prepared(loader).batches
        prepared.plan.forget_order()
        batches = iter(prepared)
        self.in_loop, self.evaluated = True, False
        try:
            for batch in batches:
                self.evaluated = False
                yield batch
        finally:
            batches.close()  # type: ignore[attr-defined] # a `break` must be noticed now
            self.in_loop = self.evaluated = False
            if preparation.loops_begun != gap:  # the script did not only look at a batch
                self._met = self._evaluations = 0

    def evaluate(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Iterate over all batches of an evaluation set; over the first one where the outcome is known already."""
        preparation, number, self._evaluations = self._preparation, self._evaluations, self._evaluations + 1
        met, given, gap = self._met, 0, preparation.loops_begun if preparation is not None else 0
        if self.repeats:
            batch = next(batches, None)
            for _ in range(self.record.batches(gap, number)):
                yield batch
            self.evaluated = True
            return
        self._unreduced = "" if self.is_at_top else script_line()
        self.evaluated = True  # from here on all ranks compute the same: see `Collectives._judged`
        try:
            for batch in batches:
                given += 1
                yield batch
        finally:
            self.evaluated = True
            if preparation is not None and not self.in_loop:
                self.record.add_loop(gap, number, given if self._met > met else 1)

    def length(self, loader: DataLoader[Any]) -> int | None:
        """Return the number of batches in a loop over a training loader; None for other loaders."""
        known = self._loaders.get(id(loader))
        if known is None:
            return None
        return len(known[1]) if self.in_loop else known[1].batches.plan.steps_in_epoch(1)

    def _begin(self) -> Preparation:
        """Prepare all objects, because the script asks for its first training batch."""
        objects = self.found.close()
        if not self.found.models:
            refuse("the script trains without DistributedDataParallel")
        elastic.prepare(*objects, self.record, self.top)
        preparation = elastic.run_of_framework().preparation
        preparation.looks_again()
        preparation.training.refuse_accumulation = _refuse_accumulation
        self._preparation = preparation
        self.on_begin(preparation)
        return preparation

    def _prepared(self, loader: DataLoader[Any]) -> PreparedLoader:
        known = self._loaders.get(id(loader))
        if known is None:
            assert self._preparation is not None
            order = DistributedOrder(loader.sampler)  # type: ignore[arg-type]
            known = self._loaders[id(loader)] = (loader, self._preparation.prepare_in_order(loader, order))
        return known[1]

    def _leave_gap(self) -> None:
        line, self._unreduced = self._unreduced, ""
        names = carried_names(tuple(sys.argv)) if line else ()
        if names:
            refuse(
                f"{line} evaluates without a reduction over the ranks, and `{names[0]}` keeps a value from epoch to "
                "epoch. A node that joins later could not know it",
                "reduce what is evaluated with torch.distributed.all_reduce, or submit it with --launcher torchrun",
            )


def _refuse_accumulation() -> NoReturn:
    refuse(
        "the script adds up the gradients of several batches, while fewer ranks train than it sees, so that their "
        "batches come in parts",
        "give --ranks at most the number of ranks on the fewest nodes, or submit it with --launcher torchrun",
    )
