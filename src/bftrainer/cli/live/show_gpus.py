"""GPUs and ranks in a few words, for the tables of nodes and trainers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from bftrainer.cli.common.connection import printable
from bftrainer.cluster.wire.api import GpuView, RankView

_MAKERS = re.compile(r"^(NVIDIA|AMD|Tesla|GeForce|Instinct)\s+", re.IGNORECASE)
_MOST_DEVICE = 12
_MOST_DEVICES = 16


def gpus_text(gpus: Sequence[GpuView]) -> str:
    """GPUs in a few words, such as `4 × A100 80 GB` or `4 GPUs`."""
    kinds = Counter(_kind(gpu) for gpu in gpus)
    return ", ".join(
        f"{count} × {kind}" if kind else f"{count} GPU{'s' * (count != 1)}" for kind, count in kinds.items()
    )


def _kind(gpu: GpuView) -> str:
    name = _MAKERS.sub("", printable(gpu.get("name") or ""))[:40]
    memory = gpu.get("memory_mb")
    if not name or not memory or re.search(r"\d\s*GB", name):
        return name
    return f"{name} {memory / 1024:.0f} GB"


def ranks_text(ranks: Sequence[RankView]) -> str:
    """Ranks and their devices, such as `4 on 0 1 2 3`; `2 on cpu` for ranks without a GPU."""
    if not any(rank.get("device") for rank in ranks):
        return f"{len(ranks)} on cpu" if ranks else ""
    devices = [device_text(rank) for rank in ranks[:_MOST_DEVICES]]
    return f"{len(ranks)} on {' '.join(devices)}{' …' * (len(ranks) > _MOST_DEVICES)}"


def device_text(rank: RankView) -> str:
    """The device of a rank. The ids of GPUs may be long, such as `GPU-1f2a…`."""
    device = printable(rank.get("device") or "cpu")
    return device if len(device) <= _MOST_DEVICE else f"{device[: _MOST_DEVICE - 1]}…"


def use_text(gpus: Sequence[GpuView]) -> str:
    """How busy GPUs are and how much of their memory is used, such as `62%, 40 of 320 GB`; empty if not known."""
    shares = [gpu["percent"] for gpu in gpus if gpu.get("percent") is not None]
    used = [gpu["used_mb"] for gpu in gpus if gpu.get("used_mb") is not None]
    parts = [f"{sum(filter(None, shares)) / len(shares):.0f}%"] if shares else []
    if used:
        memory = sum(gpu.get("memory_mb") or 0 for gpu in gpus)
        of = f" of {memory / 1024:.0f}" if memory else ""
        parts.append(f"{sum(filter(None, used)) / 1024:.0f}{of} GB")
    return ", ".join(parts)
