"""What `bftrainer slurm check` finds: a value each, and the lines of slurm.conf that all of them ask for together.

`slurm_check` and `slurm_preemption` make findings, `bftrainer slurm` shows them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bftrainer.cluster.slurm_read import Partition, Qos, Site, seconds

Level = Literal["ok", "warning", "error"]

_LISTED = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, whether it is in order, why it matters, and what mends it."""

    check: str
    """A name for programs, the same in every release."""
    level: Level
    what: str
    why: str = ""
    fix: tuple[str, ...] = ()
    """Lines of slurm.conf, and commands of `sacctmgr`. Of a partition's line only the words to change."""


@dataclass(frozen=True, slots=True)
class Harvest:
    """Where pilots would run."""

    partition: Partition | None
    qos: Qos | None = None


def slurm_conf(findings: Iterable[Finding]) -> list[str]:
    """The lines of all findings together: each key and each partition once, commands last."""
    lines: dict[str, list[str]] = {}
    commands: list[str] = []
    for line in (line for finding in findings for line in finding.fix):
        if line.startswith("sacctmgr "):
            commands.append(line)
            continue
        first, *rest = line.split(" ")
        key = first if first.startswith("PartitionName=") else first.partition("=")[0]
        words = lines.setdefault(key, [first])
        words += [word for word in rest if word.partition("=")[0] not in {w.partition("=")[0] for w in words}]
    return [" ".join(words) for words in lines.values()] + list(dict.fromkeys(commands))


def preempts_by(site: Site) -> str:
    """What decides who preempts whom: `partition_prio`, `qos` or `none`."""
    return site.config.get("PreemptType", "").removeprefix("preempt/") or "none"


def time_of(site: Site, key: str, default_s: float = 0.0) -> float:
    """A setting that is a length of time, in seconds."""
    try:
        return seconds(site.config[key])
    except (KeyError, ValueError):  # not set, or -1
        return default_s


def listed(names: Iterable[str]) -> str:
    """Some names, however many there are."""
    words = sorted(names)
    return ", ".join(words[:_LISTED]) + (f" and {len(words) - _LISTED} more" if len(words) > _LISTED else "")
