"""A ResNet-18 on synthetic images, to see how fast training goes.

Alone:                one process on the GPU, if there is one: python examples/resnet.py --amp --channels-last
On one to four nodes: python -m bftrainer.elastic.run --nodes 1-4 examples/resnet.py
"""

import argparse
import time

import torch
from torch import Tensor, nn

from bftrainer import elastic

parser = argparse.ArgumentParser(description="Time a ResNet-18 on synthetic images.")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=32, help="images per node and step")
parser.add_argument("--size", type=int, default=224, help="height and width of the images")
parser.add_argument(
    "--width", type=int, default=64, help="channels of the first stage; 64 is the ResNet-18 of the paper"
)
parser.add_argument("--device", help="cuda where there is one, else cpu")
parser.add_argument("--amp", action="store_true", help="mixed precision")
parser.add_argument("--channels-last", action="store_true", help="the memory format that tensor cores like")
parser.add_argument("--every", type=int, default=10, help="steps from one line to the next")
parser.add_argument("--snapshots", metavar="DIR", help="where to keep state in case all nodes go")
args = parser.parse_args()


def conv(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
    """A convolution and its normalisation."""
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(inputs, outputs, 3, stride), nn.ReLU(True), conv(outputs, outputs, 3, 1))
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def resnet18(width: int) -> nn.Sequential:
    """Four stages of two blocks; each but the first halves the image and doubles the channels."""
    stages = [conv(3, width, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    for number in range(4):
        outputs = width << number
        stages.append(BasicBlock(outputs // 2 if number else width, outputs, 2 if number else 1))
        stages.append(BasicBlock(outputs, outputs, 1))
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(outputs, 1000))


run = elastic.init(snapshots=args.snapshots, device=args.device)
layout = torch.channels_last if args.channels_last else torch.contiguous_format
model = resnet18(args.width).to(run.device, memory_format=layout)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler(run.device.type, enabled=args.amp)
run.register(model=model, optimizer=optimizer, scaler=scaler)

images = torch.randn(args.batch, 3, args.size, args.size, device=run.device).to(memory_format=layout)
labels = torch.randint(1000, (args.batch,), device=run.device)
since, seen = time.perf_counter(), 0
for step in run.steps(args.steps):
    with torch.autocast(run.device.type, enabled=args.amp):
        loss = nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    run.step(loss=loss, samples=args.batch)
    if (step + 1) % args.every == 0:
        now, samples = time.perf_counter(), run.progress.samples
        if run.is_main:
            rate = (samples - seen) / (now - since)
            print(f"step {step + 1}: {rate:.1f} samples/s on {run.nodes} nodes, loss {loss:.3f}", flush=True)
        since, seen = now, samples
