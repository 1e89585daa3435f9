"""Reads Slurm's generic resources (GRES) and writes the request for all GPUs of a node.

The texts are those of sinfo, scontrol and squeue. The `slurm` pool asks for the GPUs of each node with `gpu_request`;
`slurm check` says beforehand what that will be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

GPU = "gpu"
UNKNOWN = ("", "N/A", "(null)", "None")
"""Slurm's words for no value."""
_COUNT = re.compile(r"(\d+)([KMGTP]?)", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_PLACE = re.compile(r"\([^)]*\)")
"""The sockets of a resource, such as `(S:0-1)`, or the numbers of those in use, such as `(IDX:0,2)`."""
_SCALE = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "P": 1024**5}
_REQUESTS = ("--gres", "--gpus")
_REQUESTS_PER = ("--gpus-per-", "--tres-per-")

Gres = tuple[tuple[str, str, int], ...]
"""Generic resources: name, type (empty: any) and count."""


def read_gres(text: str) -> Gres:
    """Return the generic resources of a request such as `gres:gpu:a100:2`, or of a node such as `gpu:3090:4`.

    Unknown forms are left out.
    """
    if text in UNKNOWN:
        return ()
    parts = (_one_gres(part) for part in _parts(text))
    return tuple(part for part in parts if part is not None)


def read_whole_gres(text: str) -> Gres | None:
    """Return the generic resources of a node; None if a part of them cannot be read."""
    known = read_gres(text)
    return known if text in UNKNOWN or len(known) == len(_parts(text)) else None


def gpu_count(gres: Gres) -> int:
    """Return the number of GPUs. Shards and MPS are parts of GPUs, and do not count."""
    return sum(count for name, _, count in gres if name == GPU)


def gpu_request(gres: Gres) -> str:
    """Return the value of `--gres` that asks for all GPUs of a node; empty if the node has none.

    A request names types where all GPUs have one, such as `gpu:a100:2,gpu:v100:2`. Slurm refuses a request that names
    types for some GPUs only: those of such a node are asked for by their number.
    """
    types: dict[str, int] = {}
    for name, kind, count in gres:
        if name == GPU and count:
            types[kind] = types.get(kind, 0) + count
    if "" in types:
        types = {"": sum(types.values())}
    return ",".join(":".join(word for word in (GPU, kind, str(count)) if word) for kind, count in types.items())


def gres_options(options: Iterable[str]) -> tuple[str, ...]:
    """Return those of the options of sbatch that ask for GPUs or other generic resources."""
    return tuple(word for word in options if _asks(word))


def names_gpus(options: Iterable[str]) -> bool:
    """Return whether one of these options asks for GPUs."""
    return any(GPU in word or word.startswith("-G") for word in gres_options(options))


def _asks(word: str) -> bool:
    name = word.partition("=")[0]
    return name in _REQUESTS or name.startswith(_REQUESTS_PER) or (word.startswith("-G") and word != "-G")


def _parts(text: str) -> list[str]:
    return _PLACE.sub("", text).split(",")


def _one_gres(text: str) -> tuple[str, str, int] | None:
    """Return the name, the type and the count of one resource; None if it has another form."""
    words = [
        word for word in re.split("[:=]", text.removeprefix("gres:").removeprefix("gres/")) if word != "no_consume"
    ]
    counted = _COUNT.fullmatch(words[-1]) if len(words) > 1 else None
    count = int(counted[1]) * _SCALE[counted[2]] if counted is not None else 1
    name, *kind = words[:-1] if counted is not None else words
    return (name, kind[0] if kind else "", count) if _NAME.fullmatch(name) and len(kind) <= 1 else None
