"""A Hugging Face Trainer that reports each step to the trackers it is given, and says which process is rank 0.

`tracked_trainer.py FOLDER STEPS TRACKER…`: goes slowly until FOLDER/hurry exists.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from bftrainer.integrations.transformers import elastic

folder, steps, kinds = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": (self.line(x).sum(1) - x.sum(1)).pow(2).mean()}


class Watch(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if not (folder / "hurry").exists():
            time.sleep(0.05)

    def on_log(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            (folder / f"main-{os.getpid()}").write_text(f"{os.getpid()} {state.global_step}")
            (folder / f"main-{os.getpid()}").replace(folder / "main")


args = TrainingArguments(
    output_dir=str(folder / "trainer"),
    per_device_train_batch_size=8,
    max_steps=steps,
    logging_steps=1,
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
    report_to=kinds,
    run_name="tracked",
)
dataset = [{"x": row} for row in torch.randn(256, 4, generator=torch.Generator().manual_seed(1))]
trainer = elastic(Trainer)(model=Line(), args=args, train_dataset=dataset, callbacks=[Watch()])
trainer.train()
