import math
import os
import time

import numpy as np
import torch
from split.model import GPT

out_dir = "out"
eval_interval = 200
gradient_accumulation_steps = 8
batch_size = 12
block_size = 64
learning_rate = 6e-4
max_iters = 2000
device = "cpu"

torch.manual_seed(1337)


def get_batch(split):
    data = np.memmap(os.path.join("data", f"{split}.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.to(device), y.to(device)


iter_num = 0
best_val_loss = 1e9
model = GPT(block_size)
model.to(device)
scaler = torch.cuda.amp.GradScaler(enabled=False)
optimizer = model.configure_optimizers(0.1, learning_rate, (0.9, 0.95))
model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(20)
    for k in range(20):
        _, loss = model(*get_batch("val"))
        losses[k] = loss.item()
    model.train()
    return losses.mean()


def get_lr(it):
    return learning_rate * 0.5 * (1.0 + math.cos(math.pi * it / max_iters))


X, Y = get_batch("train")
t0 = time.time()
running_mfu = -1.0
while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        val_loss = estimate_loss()
        if val_loss < best_val_loss:
            best_val_loss = val_loss
            torch.save({"model": model.state_dict(), "iter_num": iter_num}, os.path.join(out_dir, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    dt = t1 - t0
    t0 = t1
    running_mfu = 0.9 * running_mfu + 0.1 / dt
    iter_num += 1

    # termination
    if iter_num > max_iters:
        break
