"""Handwritten digits with a small CNN, to 98 % or so in a few seconds, on however many nodes there are.

Alone:               python examples/digits.py
On one to six nodes: python -m bftrainer.elastic.run --nodes 1-6 examples/digits.py
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

from bftrainer import elastic

parser = argparse.ArgumentParser(description="Train a CNN on scikit-learn's digits.")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=32, help="samples per node and step")
parser.add_argument("--lr", type=float, default=2e-3, help="learning rate for the batch of one node")
parser.add_argument(
    "--pace", type=float, default=0.0, metavar="S", help="sleep after each batch, to last long enough to be disturbed"
)
parser.add_argument("--snapshots", metavar="DIR", help="where to keep state in case all nodes go")
args = parser.parse_args()

run = elastic.init(snapshots=args.snapshots)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_part, test_part = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
train = TensorDataset(images[train_part], labels[train_part])
test_images, test_labels = images[test_part].to(run.device), labels[test_part].to(run.device)

model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
).to(run.device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
# More nodes make a larger batch, and Adam then bears a rate larger by the square root.
run.register(
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    scheduler_every="epoch",
    lr_scaling="sqrt",
    lr_warmup_steps=10,
)


def accuracy() -> float:
    """The share of the test images that the model gets right."""
    model.eval()
    with torch.no_grad():
        right = model(test_images).argmax(1) == test_labels
    model.train()
    return right.float().mean().item()


for epoch in run.epochs(args.epochs):
    for inputs, targets in run.batches(train, batch_size=args.batch_size):
        loss = nn.functional.cross_entropy(model(inputs.to(run.device)), targets.to(run.device))
        loss.backward()
        run.step(loss=loss)
        time.sleep(args.pace)
    if run.is_main:
        share = accuracy()
        run.report(accuracy=share)
        loss = run.metrics.get("loss", float("nan"))  # a newcomer may not have made a step
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {share:.2%} on {run.nodes} nodes", flush=True)
