"""Elastic strategy: what a Lightning `Trainer` asks about its ranks, while nodes come and go.

Lightning believes that it trains on one device. It asks the strategy which rank this is, for values of the main rank,
and to write checkpoints. `fitting.py` connects the rest of the Trainer when it is set up.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bftrainer import elastic
from bftrainer.elastic.torch.prepare.preparation import ranks_submitted_for
from bftrainer.elastic.torch.refusals import refuse_torchrun
from bftrainer.errors import InputError
from bftrainer.integrations.lightning.fitting import FitConnection
from bftrainer.integrations.lightning.main_rank import set_rank
from bftrainer.integrations.lightning.package import lookup, package_of_script

_SETUP_BARRIERS = ("dataloader()", "run-stage")
"""Ends of the names of Lightning's barriers while a Trainer is set up, which newcomers do at another time."""
_PER_RANK = (
    "cannot be used while an elastic Trainer trains: each rank has its share of a batch, in a number of parts that "
    "changes with the nodes. Use self.log() in training_step: its values are those of the whole batch, over all ranks"
)


@functools.cache
def _on_lightning(strategy: type, package: str) -> type:
    """Return a strategy class as a subclass of the `Strategy` of a package."""
    base = lookup(package, "strategies.Strategy")
    if issubclass(strategy, base):
        return strategy
    return type(strategy.__name__, (strategy, base), {"__module__": strategy.__module__, "__doc__": strategy.__doc__})


class ElasticStrategy:
    """Strategy of an elastic Trainer: `Trainer(strategy=ElasticStrategy())`.

    `accumulate` is for modules with manual optimization that add up the gradients of several batches: the number of
    batches per step. With automatic optimization use `Trainer(accumulate_grad_batches=…)`.
    """

    strategy_name = "bftrainer"

    def __new__(cls, *args: Any, **kwargs: Any) -> ElasticStrategy:
        """Make a strategy of the package that the script has imported."""
        made: ElasticStrategy = object.__new__(_on_lightning(cls, package_of_script()))
        return made

    def __init__(self, *, accumulate: int | None = None) -> None:
        super().__init__()
        refuse_torchrun()
        self._accumulate = accumulate
        self._run: Any = None
        self._connection: FitConnection | None = None

    # Where this process is.

    @property
    def run(self) -> Any:
        """The run of the script. It is made when the Trainer has chosen the device."""
        if self._run is None:
            accelerator = getattr(self, "_accelerator", None)
            on_cpu = type(accelerator).__name__ == "CPUAccelerator"
            seed = int(os.environ.get("PL_GLOBAL_SEED") or 0)
            self._run = elastic.run_of_framework(seed=seed, **({"device": "cpu"} if on_cpu else {}))
            set_rank(self.global_rank)
        return self._run

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the main rank. Another one may become it later. There is none before a rank has joined."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        """Number of this rank. Before it has joined other ranks, it is none of them that writes or logs."""
        joined = self._connection is not None and self._connection.has_joined
        managed = self.run.preparation.framework.is_managed
        return int(self.run.rank) if joined or not managed else 1

    @property
    def local_rank(self) -> int:
        """Number of this rank among those on its node."""
        return int(self.run.local_rank)

    @property
    def node_rank(self) -> int:
        """Number of this node."""
        return int(self.run.node_rank)

    @property
    def world_size(self) -> int:
        """Number of ranks that train at present; before training, of those the script was submitted for."""
        training = self._connection is not None and self._connection.loop.is_training
        return int(self.run.world) if training else ranks_submitted_for()

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        device: torch.device = self.run.device
        return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device

    def model_to_device(self) -> None:
        """Move the module to the device."""
        self.model.to(self.root_device)  # type: ignore[attr-defined]

    # Setting up and ending.

    def setup(self, trainer: Any) -> None:
        """Set up the module and its optimizers, and connect the Trainer with the run."""
        if trainer.state.fn == "fit":
            again = self._connection is not None
            self._connection = FitConnection(trainer, self, self.run, accumulate=self._accumulate, again=again)
        super().setup(trainer)  # type: ignore[misc]

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the training loader as the Trainer sees it. Other loaders give all batches on every rank."""
        connection = self._connection
        return dataloader if connection is None else connection.process_loader(dataloader)

    # Values of other ranks.

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the main rank's value on every rank."""
        return self._on_main("strategy.broadcast()", lambda: obj, obj)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks are here. While the Trainer is set up there is nobody to wait for."""
        if not (name or "").endswith(_SETUP_BARRIERS):
            self._on_main("strategy.barrier()", lambda: None, None)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - Lightning's name
        """Return whether all ranks decide so, or any of them."""
        connection = self._connection
        if connection is None or not connection.meets:
            return decision
        connection.refuse_within_step("strategy.reduce_boolean_decision()")
        decisions = connection.loop.of_all_ranks("a decision of all ranks", bool(decision))
        connection.follow_ranks()
        return min(decisions) if all else max(decisions)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the value as it is. In an evaluation every rank has all batches; in training it is refused."""
        return self._of_evaluation("strategy.reduce()", tensor)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensor as it is. In an evaluation every rank has all batches; in training it is refused."""
        return self._of_evaluation("self.all_gather()", tensor)

    def _of_evaluation(self, call: str, value: Any) -> Any:
        connection = self._connection
        if connection is not None and connection.loop.is_training and connection.trainer.training:
            raise InputError(f"{call} {_PER_RANK}")
        return value

    def _on_main(self, call: str, function: Callable[[], Any], alone: Any) -> Any:
        connection = self._connection
        return alone if connection is None or not connection.meets else connection.on_main(call, function)

    # Checkpoints.

    def save_checkpoint(self, checkpoint: Mapping[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on the main rank. If that is lost meanwhile, its successor writes it."""
        io = self.checkpoint_io  # type: ignore[attr-defined]

        def write() -> None:
            io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

        self._write("trainer.save_checkpoint()", write)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint on the main rank. A main rank that was lost may have removed it already."""
        io = self.checkpoint_io  # type: ignore[attr-defined]

        def remove() -> None:
            try:
                io.remove_checkpoint(filepath)
            except FileNotFoundError:
                return

        self._write("the removal of a checkpoint", remove)

    def _write(self, call: str, write: Callable[[], None]) -> None:
        connection = self._connection
        if connection is not None and connection.meets:
            connection.on_main(call, write)
        elif self.is_global_zero and not (connection is not None and connection.is_leaving):
            write()
