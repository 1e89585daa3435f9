"""The housekeeper keeps the state folder within its limits while the controller runs.

`tick` trims the database in small pieces on the event loop. `keep` measures and removes files in a thread every few
minutes; it also finds out how much disk space each owner uses. Nothing that goes wrong here ends the controller.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from bftrainer.cluster.config.keys import Config
from bftrainer.cluster.launchers.base import StateLayout
from bftrainer.cluster.retention import rules
from bftrainer.cluster.retention.compiled import trim_compiled
from bftrainer.cluster.retention.rules import DAY_S, Removal, TrainerDisk
from bftrainer.cluster.retention.stored import SINCE_KEY
from bftrainer.cluster.retention.survey import DiskSurvey, Removed
from bftrainer.cluster.store.database import checkpoint
from bftrainer.cluster.store.events import TrainerPruned
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.store.trimming import DatabaseLimits
from bftrainer.errors import BFTrainerError
from bftrainer.util.ids import trainer_number

EVERY_S = 300.0
"""How often files are measured and removed."""
CHECKPOINT_EVERY_S = 1.0
"""How often the database's log is looked at."""
BY_SETTINGS = "retention"
"""Named in events as the one who removed files by the settings."""
DISK_USED_KEY = "disk_used"
"""Key in the store of the bytes that each owner uses, as measured last."""

_log = logging.getLogger(__name__)


class DiskQuotas(Protocol):
    """What owners use and may use, in bytes."""

    disk_used: Mapping[str, int]
    """By owner, as measured last."""
    default_disk: int | None
    """Quota of owners that have none of their own."""

    def disk_allowed(self, owner: str) -> int | None:
        """Return the quota of an owner; None: no limit."""
        ...


def limits_of(config: Config) -> DatabaseLimits:
    """Return the limits of the database by the settings."""
    days = config.retention.events_days
    most_bytes = config.retention.database_mb * 10**6
    return DatabaseLimits(config.trainers.keep_events, days * DAY_S if days else None, most_bytes)


class Housekeeper:
    """Keeps one controller's state folder within its limits. Use it in the thread of the event loop only."""

    def __init__(self, store: Store, config: Config, quotas: DiskQuotas, unfinished: Collection[str]) -> None:
        """`unfinished` are the ids of the trainers that the controller handles, always up to date."""
        self._store = store
        self._settings = config.retention
        self._quotas = quotas
        quotas.default_disk = round(config.retention.owner_gb * rules.GB) or None
        self._unfinished = unfinished
        self._since = float(store.kept(SINCE_KEY, 0.0))
        self._survey = DiskSurvey(config.state, store.path)
        self._compiled = StateLayout(config.state, "").compiled
        self._trimmer = store.trimmer(limits_of(config))

    def tick(self, now: float) -> bool:
        """Trim the database a little, if it needs it. Returns whether there may be more to do."""
        return self._trimmer.step(now)

    async def keep(self) -> None:
        """Measure and remove files, and write the database's changes to its file, for ever."""
        self._store.leave_checkpoints()
        await asyncio.gather(self._keep_clean(), self._keep_checkpointing())

    async def _keep_clean(self) -> None:
        while True:
            try:
                await self.clean(time.time())
            except (BFTrainerError, OSError) as problem:
                _log.warning("the files of trainers were not looked after: %s", problem)
            await asyncio.sleep(EVERY_S)

    async def _keep_checkpointing(self) -> None:
        while True:
            await asyncio.sleep(CHECKPOINT_EVERY_S)
            try:
                await asyncio.to_thread(checkpoint, self._store.path)
            except BFTrainerError as problem:  # a commit of the controller will meet it, too, and tell
                _log.warning("no checkpoint: %s", problem)

    async def clean(self, now: float, *, dry_run: bool = False) -> list[Removed]:
        """Remove what goes by the settings, and return it."""
        disks = await self._measure()
        await asyncio.to_thread(self._survey.free)
        if self._settings.compiled_gb and not dry_run:
            await asyncio.to_thread(trim_compiled, self._compiled, self._settings.compiled_gb * rules.GB, now)
        over = [owner for owner, used in self._quotas.disk_used.items() if self._is_over(owner, used)]
        chosen = rules.by_settings(disks, self._settings, over, now, self._since)
        done = await self._carry_out(chosen, BY_SETTINGS, now, dry_run=dry_run)
        start = self._trimmer.log_start()
        if start is not None and not dry_run:
            self._trimmer.remove(await asyncio.to_thread(self._without_files, start))
        return done

    async def prune(
        self, trainers: Collection[str] | None, owner: str | None, older_than_s: float, by: str, *, dry_run: bool
    ) -> list[Removed]:
        """Remove all files of finished trainers: of those named, or of all of an `owner`, or of all (None)."""
        now = time.time()
        disks = [disk for disk in await self._measure(trainers) if owner is None or disk.owner == owner]
        chosen = rules.whole(disks, older_than_s, now)
        return await self._carry_out(chosen, by, now, dry_run=dry_run)

    async def _measure(self, only: Collection[str] | None = None) -> list[TrainerDisk]:
        unfinished = frozenset(self._unfinished)
        disks = await asyncio.to_thread(self._survey.disks, unfinished, only)
        if only is None:
            self._publish(rules.use_by_owner(disks))
        return disks

    async def _carry_out(self, chosen: Sequence[Removal], by: str, now: float, *, dry_run: bool) -> list[Removed]:
        if dry_run or not chosen:
            return [Removed(removal, "") for removal in chosen]
        done = await asyncio.to_thread(self._survey.carry_out, chosen)
        used = dict(self._quotas.disk_used)
        with self._store.transaction():
            for (disk, part, size), problem in ((_parts(each.removal), each.problem) for each in done):
                if problem:
                    _log.warning("%s of %s were not removed: %s", part, disk.id, problem)
                    continue
                used[disk.owner] = max(used.get(disk.owner, 0) - size, 0)
                self._store.log(now, TrainerPruned(disk.id, part, size, by))
        self._publish(used)
        # Nobody waits for it: deleting a large folder takes minutes, and what is left is deleted later.
        threading.Thread(target=self._survey.free, name="prune", daemon=True).start()
        return done

    def _publish(self, used: Mapping[str, int]) -> None:
        """Tell the controller what owners use, and the commands that read the database."""
        if used != self._quotas.disk_used:
            self._quotas.disk_used = used
            self._store.keep(DISK_USED_KEY, used)

    def _is_over(self, owner: str, used: int) -> bool:
        allowed = self._quotas.disk_allowed(owner)
        return allowed is not None and used > allowed

    def _without_files(self, start: float) -> list[int]:
        """Return the numbers of trainers that ended before a time and have no files left. Runs in a thread."""
        with Store.open(self._store.path, read_only=True) as store:
            ended = store.totals.ended_before(start)
        with_files = {trainer_number(id_) for id_ in self._survey.folders()}
        return [number for number in ended if number not in with_files]


def _parts(removal: Removal) -> tuple[TrainerDisk, str, int]:
    return removal.trainer, removal.part, removal.bytes
