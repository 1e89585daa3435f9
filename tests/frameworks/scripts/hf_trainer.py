"""A tiny GPT-2 with a `Trainer`: sequences of different lengths, evaluation, checkpoints, early stopping.

`hf_trainer.py FOLDER OPTIONS`, where OPTIONS is a JSON object of TrainingArguments, and of the following:
`plain` trains without BFTrainer, `patience` stops early, `metrics` computes an accuracy, `kind` names a Trainer class,
`ranks` is the number of ranks that the batch size is for, `resume` is given to train().
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from bftrainer.integrations.transformers import ElasticMixin, elastic

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
plain, patience = options.pop("plain", False), options.pop("patience", None)
metrics, kind = options.pop("metrics", False), options.pop("kind", "elastic")
resume = options.pop("resume", None)
os.environ["BFTRAINER_RANKS"] = str(options.pop("ranks", 1))
VOCABULARY = 29


def sequences(count, seed):
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(3, 13, (1,), generator=draw))
        start = int(torch.randint(VOCABULARY, (1,), generator=draw))
        found.append({"input_ids": [(start + 3 * place) % VOCABULARY for place in range(length)]})
    return found


def collate(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    labels = torch.full((len(samples), longest), -100)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        ids[row, :length] = labels[row, :length] = torch.tensor(sample["input_ids"])
    return {"input_ids": ids, "attention_mask": (labels >= 0).long(), "labels": labels}


def loss_of_tokens(outputs, labels, num_items_in_batch=None):
    """The loss of causal language models, in double precision."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def accuracy(predictions):
    guesses, labels = predictions.predictions.argmax(-1)[:, :-1], predictions.label_ids[:, 1:]
    return {"accuracy": float((guesses == labels)[labels >= 0].mean())}


class MeanTrainer(Trainer):
    """Its loss is the mean over the batch, and it looks at each batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        seen = inputs["attention_mask"].double()
        means = (outputs.logits.mean(2) * seen).sum(1) / seen.sum(1)
        loss = nn.functional.mse_loss(means, (labels * seen).sum(1) / 100)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        assert set(inputs) == {"input_ids", "attention_mask", "labels"}
        return super().training_step(model, inputs, num_items_in_batch)


class MixedTrainer(ElasticMixin, MeanTrainer):
    """The same, made elastic by inheritance."""


CLASSES = {"elastic": elastic(Trainer), "mean": elastic(MeanTrainer), "mixin": MixedTrainer}
torch.manual_seed(1)
config = GPT2Config(
    vocab_size=VOCABULARY,
    n_positions=16,
    n_embd=16,
    n_layer=1,
    n_head=2,
    resid_pdrop=0,
    embd_pdrop=0,
    attn_pdrop=0,
    bos_token_id=None,
    eos_token_id=None,
)
model = GPT2LMHeadModel(config).double()
arguments = {
    "output_dir": str(folder / "output"),
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 8,
    "learning_rate": 3e-3,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 5,
    "seed": 7,
} | options
args = TrainingArguments(**arguments)
trainer_class = {"mean": MeanTrainer, "mixin": MeanTrainer}.get(kind, Trainer) if plain else CLASSES[kind]
trainer = trainer_class(
    model=model,
    args=args,
    train_dataset=sequences(90, 2),
    eval_dataset=sequences(45, 3),
    data_collator=collate,
    compute_loss_func=loss_of_tokens if kind == "elastic" else None,
    compute_metrics=accuracy if metrics else None,
    callbacks=[] if patience is None else [EarlyStoppingCallback(patience)],
)
output = trainer.train(resume_from_checkpoint=resume)
final = {
    "model": model.state_dict(),
    "lr": trainer.optimizer.param_groups[0]["lr"],
    "steps": trainer.state.global_step,
    "epoch": trainer.state.epoch,
    "loss": output.training_loss,
    "flos": trainer.state.total_flos,
    "tokens": trainer.state.num_input_tokens_seen,
    "best": trainer.state.best_metric,
    "evaluated": trainer.evaluate(),
    "history": trainer.state.log_history,
    "main": trainer.is_world_process_zero(),
}
path = folder / f"final-{os.environ.get('BFTRAINER_WORKER', 'alone')}.pt"
with path.open("wb") as file:
    torch.save(final, file)
