"""A small GPT that learns, character by character, to write like the authors of Python's standard library.

Alone:                python examples/chars.py
On one to four nodes: python -m bftrainer.elastic.run --nodes 1-4 examples/chars.py
"""

import argparse
import importlib
import inspect

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bftrainer import elastic

MODULES = ("csv", "dataclasses", "heapq", "statistics", "textwrap")
parser = argparse.ArgumentParser(description="Train a character-level transformer.")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--global-batch", type=int, default=64, help="windows of text per step, over all ranks")
parser.add_argument("--max-batch", type=int, default=32, help="windows per node at once; more are accumulated")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--window", type=int, default=64, help="characters the model sees")
parser.add_argument("--modules", nargs="+", default=MODULES, help="modules whose source is the text")
parser.add_argument("--snapshots", metavar="DIR", help="where to keep state in case all nodes go")
args = parser.parse_args()

text = "".join(inspect.getsource(importlib.import_module(name)) for name in args.modules)
alphabet = sorted(set(text))
number_of = {char: number for number, char in enumerate(alphabet)}
codes = torch.tensor([number_of[char] for char in text])
count = (len(codes) - 1) // args.window
inputs, targets = (codes[i : i + count * args.window].view(count, args.window) for i in (0, 1))


class GPT(nn.Module):
    """Embeddings, a stack of causal attention layers, and a guess at the next character."""

    def __init__(self, width: int, layers: int, window: int) -> None:
        super().__init__()
        self.chars, self.places = nn.Embedding(len(alphabet), width), nn.Embedding(window, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, len(alphabet))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next character at each place."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.chars(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.layers(hidden, mask, is_causal=True))


run = elastic.init(snapshots=args.snapshots)
model = GPT(args.width, args.layers, args.window).to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
steps = args.epochs * -(-count // args.global_batch)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
run.register(model=model, optimizer=optimizer, scheduler=scheduler, scheduler_every="step", clip_norm=1.0)

dataset = TensorDataset(inputs, targets)
for epoch in run.epochs(args.epochs):
    losses = []
    for x, y in run.batches(dataset, global_batch=args.global_batch, max_batch=args.max_batch):
        logits = model(x.to(run.device))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.to(run.device).flatten())
        loss.backward()
        if run.step(loss=loss):
            losses.append(run.metrics["loss"])
    if run.is_main and losses:
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f} on {run.nodes} nodes", flush=True)

if run.is_main:
    model.eval()
    line = codes[: args.window // 2].to(run.device)
    while len(line) < args.window // 2 + 160:
        with torch.no_grad():
            chances = torch.softmax(model(line[None, -args.window :])[0, -1] / 0.8, 0)
        line = torch.cat([line, torch.multinomial(chances, 1)])
    print("sample:", repr("".join(alphabet[code] for code in line[args.window // 2 :].tolist())))
