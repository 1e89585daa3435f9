"""`SiteFinding` holds one result of `bftrainer slurm check`; `slurm_conf` merges their fixes.

`slurm_conf` returns the lines of slurm.conf that all findings ask for together. `check.py` and `preemption.py` create
findings; `bftrainer slurm` shows them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bftrainer.slurm.site import Partition, Qos, Site, seconds

Level = Literal["ok", "warning", "error"]

_LISTED = 8


@dataclass(frozen=True, slots=True)
class SiteFinding:
    """Result of one check: its subject, whether it is in order, why it matters, and what fixes it."""

    check: str
    """A name for programs, the same in every release."""
    level: Level
    what: str
    why: str = ""
    fix: tuple[str, ...] = ()
    """Lines of slurm.conf, and commands of `sacctmgr`. Of a partition's line only the words to change."""


@dataclass(frozen=True, slots=True)
class Harvest:
    """The partition and the QOS in which pilots would run."""

    partition: Partition | None
    qos: Qos | None = None


def slurm_conf(findings: Iterable[SiteFinding]) -> list[str]:
    """Return the lines of all findings together: each key and each partition once, commands last."""
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
    """Return what decides which job preempts which: `partition_prio`, `qos` or `none`."""
    return site.config.get("PreemptType", "").removeprefix("preempt/") or "none"


def time_of(site: Site, key: str, default_s: float = 0.0) -> float:
    """Return a setting that is a duration, in seconds."""
    try:
        return seconds(site.config[key])
    except (KeyError, ValueError):  # not set, or -1
        return default_s


def listed(names: Iterable[str]) -> str:
    """Return some names as text, shortened if there are many."""
    words = sorted(names)
    return ", ".join(words[:_LISTED]) + (f" and {len(words) - _LISTED} more" if len(words) > _LISTED else "")
