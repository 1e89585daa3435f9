"""Arguments of a Trainer: refuses those that cannot work while nodes come and go."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from bftrainer.errors import InputError

_FUSED = (OptimizerNames.LOMO, OptimizerNames.ADALOMO)
"""Optimizers that change the weights within the backward pass."""


def refuse(trainer: Trainer) -> None:
    """Raise an InputError that says what to do, if this Trainer cannot be made elastic."""
    args: TrainingArguments = trainer.args
    for name, reason in _reasons(trainer, args).items():
        raise InputError(f"{name} cannot be used with an elastic Trainer: {reason}")


def _reasons(trainer: Trainer, args: TrainingArguments) -> dict[str, str]:
    """Return what is wrong, by the name of the argument."""
    config = args.accelerator_config
    strategy = str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy))
    optimizer = str(getattr(args.optim, "value", args.optim))
    found = {
        "deepspeed": (
            trainer.is_deepspeed_enabled,
            "it divides the model over the ranks, so a lost rank loses a part of it. Each rank must hold the model",
        ),
        "fsdp": (
            trainer.is_fsdp_enabled or bool(args.fsdp),
            "it divides the model over the ranks, so a lost rank loses a part of it. Each rank must hold the model",
        ),
        "parallelism_config": (
            getattr(args, "parallelism_config", None) is not None,
            "the ranks of a tensor or sequence parallel group cannot be lost one by one",
        ),
        "device_map": (
            trainer.is_model_parallel or getattr(trainer, "is_distributed_loading_by_transformers", False),
            "the model is spread over several devices. Load it without device_map: there is one rank per GPU",
        ),
        "more than one GPU per process": (
            args.n_gpu > 1,
            "Trainer would use DataParallel. Start one rank per GPU: `bftrainer submit --ranks-per-node`, or show this "
            "process one GPU by CUDA_VISIBLE_DEVICES",
        ),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "the batch must be the same on all ranks. Set per_device_train_batch_size; fewer ranks than submitted for "
            "take a batch in parts of that size",
        ),
        f"train_sampling_strategy={strategy!r}": (
            strategy not in ("random", "sequential"),
            "samples are shared out in an order that all ranks can compute. Use 'random' or 'sequential'",
        ),
        "a stream (IterableDataset) as train_dataset": (
            isinstance(trainer.train_dataset, torch.utils.data.IterableDataset),
            "it has no order that changing nodes could share. Give a dataset with `__len__` and `__getitem__`",
        ),
        "average_tokens_across_devices=False": (
            not args.average_tokens_across_devices,
            "the mean over each device would change with the number of nodes. Leave it True",
        ),
        "accelerator_config with split_batches or dispatch_batches": (
            bool(config.split_batches or config.dispatch_batches),
            "BFTrainer shares out the batches itself. Leave both out",
        ),
        f"optim={optimizer!r}": (
            args.optim in _FUSED or optimizer.endswith("_layerwise"),
            "it changes the weights within the backward pass, before the gradients are summed. Use another optimizer, "
            "such as 'adamw_torch'",
        ),
        "save_on_each_node": (
            args.save_on_each_node,
            "only the main rank saves. Use an output_dir on a file system that all nodes see",
        ),
        "enable_jit_checkpoint": (
            bool(getattr(args, "enable_jit_checkpoint", False)),
            "BFTrainer saves the training by itself when a node is taken away",
        ),
        "ignore_data_skip": (
            args.ignore_data_skip,
            "an elastic training goes on at the very batch at which it was. Leave it out",
        ),
    }
    return {name: reason for name, (applies, reason) in found.items() if applies}


def refuse_training(trainer: Trainer, trial: Any, *, again: bool) -> None:
    """Refuse to train for a hyperparameter search, or a second time in one script."""
    refuse(trainer)
    if trial is not None:
        raise InputError(
            "hyperparameter_search() trains several times in one process, which cannot be elastic: submit one trainer "
            "per trial, by `bftrainer submit --array` or the optuna sampler of bftrainer.hpo"
        )
    if again:
        raise InputError(
            "trainer.train() was called a second time in this script. An elastic script has one training: give "
            "num_train_epochs all epochs, or submit one script per training"
        )
