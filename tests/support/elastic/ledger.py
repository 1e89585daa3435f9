"""What `chaos_worker.py` wrote down, put together: which samples counted, and what was computed of them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any


class News:
    """Reads what the workers of a job write, each line once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = defaultdict(int)

    def read(self) -> list[dict[str, Any]]:
        """The lines that were completed since the last call."""
        found: list[dict[str, Any]] = []
        for log in self._folder.glob("steps-*.jsonl"):
            if log.stat().st_size == self._read[log]:
                continue
            with log.open("rb") as stream:
                stream.seek(self._read[log])
                text = stream.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[log] += len(whole)
            found += map(json.loads, whole.splitlines())
        return found


def committed(folder: Path) -> dict[int, Counter[int]]:
    """How often each sample went into the state that survived, by epoch.

    A rank writes down its samples before the gradients are summed, and the step when they were. If the only rank that
    got so far was killed then, the others have made the step again, in a later generation: that one counts.
    """
    tried: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
    generation_of: dict[tuple[int, ...], int] = {}
    for said in News(folder).read():
        if "try" in said:
            tried[tuple(said["try"]), said["generation"]] += said["samples"]
        elif "commit" in said:
            place = tuple(said["commit"])
            generation_of[place] = max(generation_of.get(place, 0), said["generation"])
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for place, generation in generation_of.items():
        counts[place[0]].update(tried[place, generation])
    return counts


def same_as_alone(alone: Path, disturbed: Path) -> None:
    """Assert that a disturbed job has computed what an undisturbed one did."""
    import torch

    (expected,) = (torch.load(path) for path in alone.glob("final-*.pt"))
    finals = [torch.load(path) for path in disturbed.glob("final-*.pt")]
    assert finals
    for final in finals:
        assert final["lr"] == expected["lr"]
        for name, weight in final["model"].items():
            assert torch.equal(weight, finals[0]["model"][name])
            assert (weight - expected["model"][name]).abs().max() < 1e-12
