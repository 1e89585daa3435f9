"""One rank of the benchmarks with `--framework transformers`: a Hugging Face Trainer, elastic or as it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - what everybody calls it
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import noting
from bftrainer.integrations.transformers import elastic
from cnn import make_data, make_model


class Classifier(nn.Module):
    """The CNN with its loss, as a Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = make_model()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits."""
        logits = self.cnn(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class NoteSteps(TrainerCallback):
    """Notes each step."""

    def on_step_end(self, args, state, control, **kwargs):
        noting.step()


def collate(samples):
    return {"images": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}


args = TrainingArguments(
    output_dir=str(noting.FOLDER / "output"),
    per_device_train_batch_size=32,
    max_steps=10**8,
    optim="sgd",
    learning_rate=0.01,
    lr_scheduler_type="constant",
    use_cpu=True,
    logging_strategy="no",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    remove_unused_columns=False,
)
trainer_class = Trainer if noting.IS_PLAIN else elastic(Trainer)
trainer = trainer_class(
    model=Classifier(), args=args, train_dataset=make_data(), data_collator=collate, callbacks=[NoteSteps()]
)
trainer.train()
