"""A training whose imports take long: `importing.py MODULE FOLDER`. It notes when its first step was committed.

With `transformers` it trains GPT-2, in its real size on a GPU. It ends after a few steps, or, with a third argument,
when that file appears.
"""

import importlib
import os
import sys
import time
from pathlib import Path

import torch

library = importlib.import_module(sys.argv[1])

from bftrainer import elastic  # noqa: E402 - the library first, as scripts do

run = elastic.init()
if sys.argv[1] == "transformers":
    small = {} if run.device.type == "cuda" else {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1000}
    model = library.GPT2LMHeadModel(library.GPT2Config(**small)).to(run.device)
    tokens = torch.randint(1000, (2, 64), device=run.device)
    compute = lambda: model(input_ids=tokens, labels=tokens).loss  # noqa: E731
else:
    model = torch.nn.Linear(64, 64).to(run.device)
    compute = lambda: model(torch.ones(4, 64, device=run.device)).square().mean()  # noqa: E731
optimizer = torch.optim.AdamW(model.parameters())
run.register(model=model, optimizer=optimizer)
until = Path(sys.argv[3]) if len(sys.argv) > 3 else None
first = Path(sys.argv[2], os.environ["BFTRAINER_TRAINER"])
for number in run.steps(1_000_000):
    loss = compute()
    loss.backward()
    if run.step(loss=loss) and not first.exists():
        beside = first.with_suffix(".new")
        beside.write_text(repr(time.time()))
        beside.rename(first)
    if until is None and number >= 2:
        break
    if until is not None:
        time.sleep(0.05)
        if run.share(until.exists()):
            break
