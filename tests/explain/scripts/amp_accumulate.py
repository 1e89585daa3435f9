import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

ACCUMULATE = 4
dataset = TensorDataset(torch.rand(1000, 8), torch.rand(1000, 1))
train_dl = DataLoader(dataset, batch_size=16, shuffle=True)
val_dl = DataLoader(dataset, batch_size=100)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
scaler = torch.amp.GradScaler("cuda")
loss_fn = nn.MSELoss()
best_val = float("inf")
patience = 0
history = {"train": [], "val": []}

for epoch in tqdm(range(10)):
    model.train()
    total = 0.0
    pbar = tqdm(train_dl)
    for i, (x, y) in enumerate(pbar):
        with torch.autocast("cuda"):
            loss = loss_fn(model(x.cuda()), y.cuda()) / ACCUMULATE
        scaler.scale(loss).backward()
        total += loss.item()
        if (i + 1) % ACCUMULATE == 0:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    sched.step()
    model.eval()
    with torch.no_grad():
        val = sum(loss_fn(model(x.cuda()), y.cuda()).item() for x, y in val_dl) / len(val_dl)
    history["train"].append(total)
    history["val"].append(val)
    if val < best_val:
        best_val = val
        patience = 0
        torch.save(model.state_dict(), "best.pt")
    else:
        patience += 1
        if patience == 3:
            break
    with open("log.txt", "a") as log:
        log.write(f"{epoch} {val}\n")
