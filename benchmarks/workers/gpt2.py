"""GPT-2 in plain torch, for the soak test and the GPU benchmark: 124 or 355 million parameters, synthetic tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - what everybody calls it
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """The dimensions of a model."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    context: int


GPT2 = Size(layers=12, heads=12, width=768, vocabulary=50257, context=128)
GPT2_MEDIUM = Size(layers=24, heads=16, width=1024, vocabulary=50257, context=128)
TINY = Size(layers=2, heads=2, width=32, vocabulary=64, context=16)
"""For tests on a CPU."""


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each after a layer norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1 = nn.LayerNorm(size.width)
        self.attend = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.norm_2 = nn.LayerNorm(size.width)
        self.feed = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(approximate="tanh"), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """One layer, for a batch of sequences."""
        batch, length, width = x.shape
        heads = self.attend(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm_2(x))


class Gpt2(nn.Module):
    """A decoder whose output layer shares the weights of its token embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*[Block(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of predicting each next token."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        places = torch.arange(inputs.shape[1], device=tokens.device)
        hidden = self.norm(self.blocks(self.tokens(inputs) + self.positions(places)))
        logits = hidden @ self.tokens.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_tokens(size: Size, samples: int) -> Tensor:
    """Synthetic sequences, one token longer than the context, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, size.vocabulary, (samples, size.context + 1), generator=generator)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
