"""Lines that make a script elastic: every name and line of the API that an explanation tells a user to write.

This is the only place of this package that spells them. When the API changes, change it here.
"""

from __future__ import annotations

from dataclasses import dataclass

IMPORT_ELASTIC = "from bftrainer import elastic"
PREPARE = "elastic.prepare"
EPOCHS = "elastic.epochs"
"""Replaces `range` in the loop over epochs. It takes a number, and counts from 0."""
STEPS = "elastic.steps"
"""Replaces `range` in a loop that makes one step per pass and has no DataLoader. It takes a number, too."""
MICRO_STEPS = "elastic.micro_steps"
ACCUMULATE = "accumulate"
"""Argument of `prepare`: the number of batches per step."""
CARRY = "carry"
"""Argument of `prepare`: the names of variables of the module that training changes."""
VALUE = "elastic.Value"
SYNCHRONIZE = "synchronize()"
"""Method of a prepared optimizer: afterwards the gradients are those of all ranks."""
IS_MAIN = "elastic.is_main()"

IMPORT_TRANSFORMERS = "from bftrainer.integrations import transformers as bft"
ELASTIC_TRAINER = "bft.elastic({trainer})"
IMPORT_LIGHTNING = "from bftrainer.integrations.lightning import ElasticStrategy"
ELASTIC_STRATEGY = "ElasticStrategy()"
"""The argument `strategy` of a Lightning Trainer."""
REGISTER_IN_ACCELERATE = "accelerator.register_for_checkpointing"
"""Takes the values of a script with an Accelerator, as `prepare` does elsewhere."""
IMPORT_ACCELERATOR = "from bftrainer.integrations.accelerate import ElasticAccelerator as {name}"

INIT_NAMES = frozenset({"bftrainer.elastic.init"})
PREPARE_NAMES = frozenset({"bftrainer.elastic.prepare"})
INTEGRATIONS = "bftrainer.integrations"
MEMBERSHIP = "bftrainer.elastic.membership"


@dataclass(frozen=True)
class Way:
    """A way to make a script elastic: its title, what it means for the script, and the launcher it needs."""

    title: str
    meaning: str
    launcher: str = ""


WAYS = {
    "elastic": Way("already elastic", "The script uses bftrainer already."),
    "transformers": Way(
        "bftrainer.integrations.transformers",
        "The script keeps its Hugging Face Trainer and its TrainingArguments.",
    ),
    "accelerate": Way(
        "bftrainer.integrations.accelerate", "The script keeps its loop and all calls of its Accelerator."
    ),
    "lightning": Way(
        "bftrainer.integrations.lightning",
        "The script keeps its LightningModule and its Lightning Trainer, which gets another strategy.",
    ),
    "ddp": Way(
        "--launcher ddp",
        "No line changes: the script trains in place while nodes come and go.",
        "ddp",
    ),
    "torchrun": Way(
        "--launcher torchrun",
        "No line changes, but all workers restart from the script's own checkpoint whenever a node comes or goes.",
        "torchrun",
    ),
    "prepare": Way(PREPARE, "The script keeps its own loop."),
    "none": Way("none", "No training was found that BFTrainer can make elastic."),
}
"""The ways, by the value of `way` in the JSON output."""
