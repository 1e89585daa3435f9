"""Rules that say which files of which trainers go. They are functions of values.

`Housekeeper` and `bftrainer prune` measure the files, ask these rules, and carry out the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from bftrainer.cluster.config.keys import RetentionSettings
from bftrainer.cluster.retention.files import TrainerFiles

DAY_S = 86400.0
GB = 10**9

Part = Literal["older snapshots", "log", "all files"]


@dataclass(frozen=True, slots=True)
class TrainerDisk:
    """A trainer and its files."""

    id: str
    name: str
    owner: str
    ended: float | None
    """None while the trainer is not finished."""
    files: TrainerFiles


@dataclass(frozen=True, slots=True)
class Removal:
    """Files of a trainer that go."""

    trainer: TrainerDisk
    part: Part
    bytes: int


def by_settings(
    disks: Iterable[TrainerDisk],
    settings: RetentionSettings,
    over_quota: Collection[str],
    now: float,
    since: float = 0.0,
) -> list[Removal]:
    """Return what goes by the settings. Trainers that ended before `since` count as ended then.

    Of an unfinished trainer nothing goes, unless its owner is `over_quota`: then its snapshots but the last go.
    """
    chosen: list[Removal] = []
    left: list[TrainerDisk] = []
    for disk in disks:
        days = None if disk.ended is None else (now - max(disk.ended, since)) / DAY_S
        if _is_past(days, settings.results_days):
            chosen.append(Removal(disk, "all files", disk.files.total))
            continue
        older = _is_past(days, settings.snapshots_days) or disk.owner in over_quota
        if older and disk.files.older_snapshots:
            chosen.append(Removal(disk, "older snapshots", disk.files.older_snapshots))
        if _is_past(days, settings.logs_days) and disk.files.logs:
            chosen.append(Removal(disk, "log", disk.files.logs))
        if disk.ended is not None:
            left.append(disk)
    return chosen + _by_size(left, settings, chosen)


def whole(disks: Iterable[TrainerDisk], older_than_s: float, now: float) -> list[Removal]:
    """Return all files of the trainers that ended so many seconds ago or earlier."""
    return [
        Removal(disk, "all files", disk.files.total)
        for disk in disks
        if disk.ended is not None and now - disk.ended >= older_than_s
    ]


def use_by_owner(disks: Iterable[TrainerDisk]) -> dict[str, int]:
    """Return the bytes of all trainers of each owner."""
    used: dict[str, int] = {}
    for disk in disks:
        used[disk.owner] = used.get(disk.owner, 0) + disk.files.total
    return used


def _is_past(days: float | None, limit: float) -> bool:
    return days is not None and limit > 0 and days >= limit


def _by_size(finished: Iterable[TrainerDisk], settings: RetentionSettings, gone: Sequence[Removal]) -> list[Removal]:
    """Return logs and older snapshots, those of the trainers that ended first, until the rest is small enough."""
    already = {(removal.trainer.id, removal.part) for removal in gone}
    parts = [
        Removal(disk, part, size)
        for disk in sorted(finished, key=lambda disk: disk.ended or 0.0)
        for part, size in _spare_parts(disk)
        if size and (disk.id, part) not in already
    ]
    excess = sum(part.bytes for part in parts) - settings.finished_gb * GB if settings.finished_gb else 0.0
    chosen = []
    for part in parts:
        if excess <= 0:
            break
        chosen.append(part)
        excess -= part.bytes
    return chosen


def _spare_parts(disk: TrainerDisk) -> tuple[tuple[Part, int], ...]:
    return ("older snapshots", disk.files.older_snapshots), ("log", disk.files.logs)
