"""Judges what the workers of one row left behind: which samples counted, and whether all ranks ended with one state."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matrix.rows import Row

ROUNDING = 1e-9
"""How far weights in double precision may be from those of one rank; a wrong step moves them by far more."""


def lines(folder: Path) -> list[dict[str, Any]]:
    """What all workers of a row have written so far."""
    whole = (text for log in folder.glob("steps-*.jsonl") for text in log.read_text().splitlines(keepends=True))
    return [json.loads(text) for text in whole if text.endswith("\n")]


def committed(folder: Path, of: str, steps: int) -> dict[int, Counter[int]]:
    """How often each sample went into the final state, by epoch.

    The final state has `steps` steps. A step that was made again, because the only rank that had made it was killed or
    because all went back to a snapshot, was made in a later generation: that one counts.
    """
    tried: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    generation_of: dict[int, int] = {}
    for line in lines(folder):
        step, generation = line["step"], line["generation"]
        if line["of"] != of or step >= steps:
            continue
        if "samples" in line:
            tried[step, generation] += [(line["epoch"], sample) for sample in line["samples"]]
        else:
            generation_of[step] = max(generation_of.get(step, 0), generation)
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for step, generation in generation_of.items():
        for epoch, sample in tried[step, generation]:
            counts[epoch][sample] += 1
    return counts


def tensors(state: Any, name: str = "") -> dict[str, Any]:
    """The leaves of a state, by name."""
    if isinstance(state, Mapping):
        items = state.items()
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    else:
        return {name: state}
    return {key: leaf for n, part in items for key, leaf in tensors(part, f"{name}.{n}" if name else str(n)).items()}


def differing(one: Any, other: Any, within: float = 0.0) -> list[str]:
    """The names of leaves that differ."""
    ours, theirs = tensors(one), tensors(other)
    return sorted(ours.keys() ^ theirs.keys()) + [
        n for n in ours if n in theirs and not _same(ours[n], theirs[n], within)
    ]


def _same(one: Any, other: Any, within: float) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(torch.equal(one, other) or (within and (one - other).abs().max() <= within))
    if within and isinstance(one, float):
        return one == other or abs(one - other) <= within
    return bool(one == other)


def faults(row: Row, disturbed: Path, alone: Path | None) -> list[str]:
    """What is wrong with the end of a training that nobody refused."""
    finals = [torch.load(path, weights_only=False) for path in sorted(disturbed.glob("final-*.pt"))]
    if len(finals) != 2:
        return [f"{len(finals)} ranks instead of 2 came to the end"]
    found = [f"the ranks differ in {name}" for name in differing(finals[0], finals[1])[:1]]
    if row.samples:
        found += _miscounted(row, committed(disturbed, row.of, finals[0]["step"]))
    if alone is not None:
        (expected,) = (torch.load(path, weights_only=False) for path in alone.glob("final-*.pt"))
        away = differing(finals[0]["objects"], expected["objects"], ROUNDING)
        found += [f"{name} is not what one rank computes" for name in away[:1]]
    return found


def _miscounted(row: Row, counts: Mapping[int, Counter[int]]) -> list[str]:
    for epoch, length in enumerate(row.samples):
        counted = counts.get(epoch, Counter())
        if counted != Counter(range(length)):
            missed = len(set(range(length)) - set(counted))
            twice = sum(count > 1 for count in counted.values())
            return [f"epoch {epoch}: {missed} samples missed, {twice} counted more than once"]
    extra = sorted(set(counts) - set(range(len(row.samples))))
    return [f"epoch {extra[0]} was trained"] if extra else []
