"""Kinds of objects in a training script, by the name of the class or function that makes them."""

from __future__ import annotations

import re
from enum import StrEnum


class Kind(StrEnum):
    """What an object is for in training."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    LOADER = "loader"
    SCHEDULER = "scheduler"
    SCALER = "scaler"
    AVERAGE = "average"
    RUN = "run"


_OPTIMIZERS = frozenset(
    [
        "Adam",
        "AdamW",
        "AdamW8bit",
        "Adam8bit",
        "Adamax",
        "NAdam",
        "RAdam",
        "SparseAdam",
        "Adadelta",
        "Adagrad",
        "Adafactor",
        "ASGD",
        "SGD",
        "RMSprop",
        "Rprop",
        "LBFGS",
        "Lion",
        "LAMB",
        "Lamb",
        "LARS",
        "Lars",
        "Muon",
        "SOAP",
        "Shampoo",
        "AdaBelief",
        "FusedAdam",
        "FusedLAMB",
        "FusedSGD",
        "ZeroRedundancyOptimizer",
    ]
)
_MODEL_MAKERS = frozenset({"create_model", "from_pretrained", "from_config", "get_peft_model"})
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDP", "DDP"})
_SCHEDULE = re.compile(r"(get_\w*schedul\w*|create_scheduler|\w*Scheduler|\w*LR|ReduceLROnPlateau|ChainedScheduler)")
_BASES = {
    "Module": Kind.MODEL,
    "LightningModule": Kind.MODEL,
    "PreTrainedModel": Kind.MODEL,
    "Optimizer": Kind.OPTIMIZER,
    "LRScheduler": Kind.SCHEDULER,
    "_LRScheduler": Kind.SCHEDULER,
    "DataLoader": Kind.LOADER,
}

THROUGH = frozenset(
    [
        "to",
        "cuda",
        "cpu",
        "train",
        "eval",
        "half",
        "float",
        "double",
        "bfloat16",
        "requires_grad_",
        "apply",
        "share_memory",
        "to_empty",
        "unwatch",
    ]
)
"""Methods of a module that return the module."""
WRAPS = frozenset(
    {"tqdm", "enumerate", "iter", "islice", "cycle", "list", "auto", "track", "log_every", "progress_bar"}
)
"""Functions that iterate over their first argument."""
STREAMS = frozenset(
    ["IterableDataset", "WebDataset", "WebLoader", "StreamingDataset", "IterDataPipe", "IterableWrapper"]
)
"""Classes of data sets that have no length and no index."""
SAMPLERS = frozenset({"DistributedSampler", "RandomSampler", "SequentialSampler"})
"""Samplers whose order BFTrainer can make itself."""


def kind_of_name(name: str) -> Kind | None:
    """Return what a call of the function or class with this full name makes."""
    last = name.rpartition(".")[2]
    if name == "bftrainer.elastic.init":
        return Kind.RUN
    if last == "GradScaler":
        return Kind.SCALER
    if last in ("AveragedModel", "ModelEma", "ModelEmaV2", "ModelEmaV3", "ExponentialMovingAverage", "EMA"):
        return Kind.AVERAGE
    if last.endswith("Loss"):
        return None
    if "lr_scheduler" in name or _SCHEDULE.fullmatch(last):
        return Kind.SCHEDULER
    if last in _OPTIMIZERS or last.endswith("Optimizer") or last in ("create_optimizer", "get_optimizer"):
        return Kind.OPTIMIZER
    if name.startswith("torch.optim.") and last[:1].isupper() and "swa_utils" not in name:
        return Kind.OPTIMIZER
    if last.endswith("DataLoader"):
        return Kind.LOADER
    if last in _WRAPPERS or last in _MODEL_MAKERS or name in ("torch.compile", "torch.jit.script", "torch.hub.load"):
        return Kind.MODEL
    if name.startswith("torchvision.models."):
        return Kind.MODEL
    if name.startswith(("torch.nn.", "nn.")) and last[:1].isupper() and "Parameter" not in last:
        return Kind.MODEL
    return None


def kind_of_base(name: str) -> Kind | None:
    """Return what the objects of a class are that has a base class with this full name."""
    return _BASES.get(name.rpartition(".")[2])


def kind_by_hint(name: str) -> Kind | None:
    """Guess what a variable holds from its name, for values that come from elsewhere."""
    last = name.rpartition(".")[2].lower()
    if "sched" in last:
        return Kind.SCHEDULER
    if "scaler" in last:
        return Kind.SCALER
    if "optim" in last or re.fullmatch(r"opt(_?\w)?|\w+_opt|opt_\w+", last):
        return Kind.OPTIMIZER
    if "loader" in last or re.fullmatch(r"(\w+_)?dl", last):
        return Kind.LOADER
    return None
