"""Refusals: names what a Trainer or a script does that cannot work while nodes come and go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from bftrainer.errors import InputError

_STATEFUL_CALLBACKS = {
    "StochasticWeightAveraging": "keep an average of the weights as a module in your LightningModule, and update it in "
    "on_train_batch_end",
    "WeightAveraging": "keep an average of the weights as a module in your LightningModule, and update it in "
    "on_train_batch_end",
    "BaseFinetuning": "put all parameters into the optimizer, and set requires_grad in on_train_epoch_start",
    "BatchSizeFinder": "set the batch size in the DataLoader",
    "LearningRateFinder": "set the learning rate; submit one trainer per learning rate by `bftrainer submit --array`",
    "ModelPruning": "prune the module before the training or after it",
}
"""Callbacks of Lightning that keep what newcomers need outside of their `state_dict`, and what to do instead."""


def refuse(trainer: Any, *, again: bool) -> None:
    """Raise an InputError that says what to do, if the training of this Trainer cannot be made elastic."""
    if again:
        raise InputError(
            "trainer.fit() was called a second time in this script. An elastic script has one training: give "
            "max_epochs all epochs, or submit one script per training"
        )
    for name, reason in _reasons(trainer):
        raise InputError(f"{name} cannot be used with ElasticStrategy: {reason}")


def _reasons(trainer: Any) -> Iterator[tuple[str, str]]:
    """Yield what is wrong, by the name of the option, and what to do."""
    connector = trainer._accelerator_connector
    devices, nodes = connector._devices_flag, connector._num_nodes_flag
    if isinstance(devices, int | str | list) and str(devices) not in ("auto", "1", "[0]"):
        yield (
            f"Trainer(devices={devices!r})",
            "each process trains on one device. Leave it out; BFTrainer starts one process per GPU, or as many as "
            "`bftrainer submit --ranks-per-node` says",
        )
    if nodes != 1:
        yield f"Trainer(num_nodes={nodes})", "say how many nodes by `bftrainer submit --nodes 1-4`, and leave it out"
    if trainer.reload_dataloaders_every_n_epochs:
        yield "reload_dataloaders_every_n_epochs", "the ranks share out one dataset. Leave it out"
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        yield "a val_check_interval in time", "ranks measure different times. Give it in batches"
    if trainer.fast_dev_run:
        yield "fast_dev_run", "try the script without BFTrainer first, with another strategy"
    if trainer.barebones:
        yield "barebones", "the elastic training uses what it leaves out"
    for callback in trainer.callbacks:
        names = [kind.__name__ for kind in type(callback).__mro__]
        for name, remedy in _STATEFUL_CALLBACKS.items():
            if name in names:
                yield f"the callback {type(callback).__name__}", f"a node that joins later would not know it; {remedy}"


def refuse_validation_within_steps(trainer: Any) -> None:
    """Refuse to validate between two batches of one step."""
    interval, accumulate = trainer.val_check_batch, trainer.accumulate_grad_batches
    if trainer.enable_validation and interval % accumulate and interval < trainer.num_training_batches:
        raise InputError(
            f"val_check_interval={trainer.val_check_interval} cannot be used with ElasticStrategy: it means every "
            f"{interval} batches, but validation comes after a step, and a step takes accumulate_grad_batches="
            f"{accumulate} batches. Give a multiple of that"
        )


def refuse_module(module: Any, optimizers: list[Any]) -> None:
    """Refuse modules whose optimizers cannot be stepped on summed gradients, or that fetch batches themselves."""
    real = [optimizer for optimizer in optimizers if isinstance(optimizer, torch.optim.Optimizer)]
    if not real or type(real[0]).__name__ == "_MockOptimizer":
        raise InputError("configure_optimizers() must return an optimizer: an elastic training has steps")
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in real):
        raise InputError(
            "LBFGS cannot be used with ElasticStrategy: it computes the loss several times in a step. Use an optimizer "
            "that steps on given gradients, such as AdamW"
        )
    names = module.training_step.__code__.co_varnames if hasattr(module.training_step, "__code__") else ()
    if "dataloader_iter" in names:
        raise InputError(
            "training_step(self, dataloader_iter) cannot be used with ElasticStrategy: batches are shared out when "
            "they are computed. Write training_step(self, batch, batch_idx)"
        )


def refuse_loader(loader: Any) -> None:
    """Refuse training data that changing ranks cannot share."""
    if not isinstance(loader, DataLoader):
        raise InputError(
            f"train_dataloader() must return a torch DataLoader, but got {type(loader).__name__}: samples are shared "
            "out over changing nodes"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise InputError(
            "the training data is a stream (IterableDataset): it has no order that changing nodes could share. Give a "
            "dataset with `__len__` and `__getitem__`"
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise InputError(
            f"the training loader has a batch sampler of its own, {type(loader.batch_sampler).__name__}: samples are "
            "shared out over changing nodes, so batches cannot be given. Use batch_size and a sampler"
        )


def refuse_several_loaders(combined: Any) -> None:
    """Refuse to train on several loaders at once."""
    if len(combined.flattened) != 1:
        raise InputError(
            f"the Trainer got {len(combined.flattened)} training loaders, but an elastic training has one. Join the "
            "datasets, for example by torch.utils.data.ConcatDataset or StackDataset"
        )
