"""A tiny GPT-2 in a loop with Accelerate: accumulation, clipping, a schedule, evaluation with gathered predictions.

`accelerate_loop.py FOLDER EPOCHS ACCUMULATE RANKS WAYS`. WAYS are `range`, to count epochs without BFTrainer;
`ordered`, without shuffling; and `plain`, with Accelerate's own class.
"""

import math
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

from bftrainer import elastic
from bftrainer.integrations.accelerate import ElasticAccelerator as Accelerator

folder, epochs, accumulate = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
os.environ["BFTRAINER_RANKS"] = sys.argv[4]
ways = sys.argv[5:]
if "plain" in ways:
    from accelerate import Accelerator
VOCABULARY = 29


def sequences(count, seed):
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(VOCABULARY, (count, 1), generator=draw)
    steps = torch.randint(1, 5, (count, 1), generator=draw)
    return [{"input_ids": row} for row in (starts + steps * torch.arange(8)) % VOCABULARY]


def loss_of(model, batch):
    ids = batch["input_ids"]
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits


def evaluate(accelerator, model, loader):
    model.eval()
    losses, hits = [], []
    for batch in loader:
        with torch.no_grad():
            loss, logits = loss_of(model, batch)
        losses.append(accelerator.gather_for_metrics(loss.repeat(8)))
        guesses, truth = accelerator.gather_for_metrics((logits.argmax(-1)[:, :-1], batch["input_ids"][:, 1:]))
        hits.append((guesses == truth).double().mean(1))
    assert len(torch.cat(losses)) == len(torch.cat(hits)) == len(loader.dataset)
    return torch.cat(losses).mean().item(), torch.cat(hits).mean().item()


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=8,
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
    train_loader = DataLoader(sequences(90, 2), batch_size=4, shuffle="ordered" not in ways)
    eval_loader = DataLoader(sequences(43, 3), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = math.ceil(len(train_loader) / accumulate) * epochs  # of one process, as Accelerate wants it
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=3, num_training_steps=steps)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    history, seen = elastic.Value([]), elastic.Value(0)
    accelerator.register_for_checkpointing(history, seen)
    updates = math.ceil(len(train_loader) / accumulate)
    for epoch in range(epochs) if "range" in ways else elastic.epochs(epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss, _ = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        result = evaluate(accelerator, model, eval_loader)
        history.value = [*history.value, list(result)]
        everyone = accelerator.gather(torch.tensor([accelerator.process_index]))
        seen.value = accelerator.reduce(torch.tensor(1.0), "max").item()
        assert everyone.tolist() == sorted(everyone.tolist())
        accelerator.save_state(folder / f"epoch-{epoch}")
        accelerator.wait_for_everyone()
        accelerator.print(f"epoch {epoch}: loss {result[0]:.6f}, accuracy {result[1]:.3f}, ranks {len(everyone)}")
    completed = updates * epochs if "plain" in ways else accelerator.completed_steps
    assert completed == updates * epochs, (completed, updates)
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        folder / "saved", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    final = {
        "model": model.state_dict(),
        "lr": scheduler.get_last_lr()[0],
        "steps": completed,
        "history": history.value,
        "main": accelerator.is_main_process,
    }
    with (folder / f"final-{os.environ.get('BFTRAINER_WORKER', 'alone')}.pt").open("wb") as file:
        torch.save(final, file)
    accelerator.end_training()


main()
