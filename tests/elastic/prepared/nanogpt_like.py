"""A language model in the shape of a well-known small one: own `get_batch`, accumulation, a cosine schedule by hand."""

import math
import sys
from pathlib import Path

import torch
from torch import nn

from bftrainer import elastic

folder, max_iters, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
gradient_accumulation_steps, batch_size, block_size = 6, 4, 8
learning_rate, min_lr, warmup_iters, grad_clip = 1e-2, 1e-3, 5, 1.0
torch.manual_seed(1337 + seed)
text = torch.randint(0, 11, (4000,), generator=torch.Generator().manual_seed(1))
text = (text + torch.arange(4000)) % 11


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 24)
        self.mix = nn.GRU(24, 24, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(24, 11)

    def forward(self, idx, targets):
        logits = self.head(self.drop(self.mix(self.embed(idx))[0]))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(split):
    ix = torch.randint(len(text) - block_size - 1, (batch_size,))
    x = torch.stack([text[i : i + block_size] for i in ix])
    y = torch.stack([text[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(20)
    for k in range(20):
        x, y = get_batch("val")
        losses[k] = model(x, y)[1].item()
    model.train()
    return losses.mean().item()


model = Model().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)
model, optimizer = elastic.prepare(model, optimizer, seed=seed)
for iter_num in elastic.steps(max_iters):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % 20 == 0:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}")
    for _micro_step in elastic.micro_steps(gradient_accumulation_steps):
        x, y = get_batch("train")
        logits, loss = model(x, y)
        loss = loss / gradient_accumulation_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
torch.save({"model": model.state_dict(), "lr": lr}, folder / "model.pt")
