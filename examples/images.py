"""A small ResNet on made-up images of ten kinds, for as long or short a training as one likes, with real accuracy.

Alone:                 python examples/images.py
On one to eight nodes: python -m bftrainer.elastic.run --nodes 1-8 examples/images.py
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bftrainer import elastic

parser = argparse.ArgumentParser(description="Train a small ResNet on synthetic images.")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--images", type=int, default=2048, help="how many there are")
parser.add_argument("--batch-size", type=int, default=16, help="images per node and step")
parser.add_argument("--width", type=int, default=8, help="channels of the first block")
parser.add_argument("--snapshots", metavar="DIR", help="where to keep state in case all nodes go")
args = parser.parse_args()


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.around = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolutions(x) + self.around(x))


def made_up(count: int, seed: int) -> TensorDataset:
    """Images: one of ten patterns, the same for all, under noise of their own."""
    patterns = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=own)
    return TensorDataset(patterns[labels] * 0.25 + torch.randn(count, 3, 16, 16, generator=own), labels)


run = elastic.init(snapshots=args.snapshots)
width = args.width
model = nn.Sequential(
    *(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
    *(Block(width, width), Block(width, 2 * width), Block(2 * width, 4 * width)),
    *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10)),
).to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
run.register(model=model, optimizer=optimizer, lr_scaling="sqrt", lr_warmup_steps=10)
train, (images, labels) = made_up(args.images, 1), made_up(512, 2).tensors

for epoch in run.epochs(args.epochs):
    for x, y in run.batches(train, batch_size=args.batch_size):
        loss = nn.functional.cross_entropy(model(x.to(run.device)), y.to(run.device))
        loss.backward()
        run.step(loss=loss)
    if run.is_main:
        model.eval()
        with torch.no_grad():
            right = model(images.to(run.device)).argmax(1).cpu() == labels
        model.train()
        run.report(accuracy=right.float().mean().item())
        print(f"epoch {epoch}: accuracy {run.metrics['accuracy']:.2%} on {run.nodes} nodes", flush=True)
