"""`prune` removes files of finished trainers, and trims the database, where no controller runs.

`bftrainer prune` calls it for a state folder whose lock it holds. Beside a running controller the command asks the
controller instead (`http/prune.py`). Both answer in the form of `as_json`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from bftrainer.cluster.config.keys import Config
from bftrainer.cluster.retention import rules
from bftrainer.cluster.retention.housekeeper import BY_SETTINGS, limits_of
from bftrainer.cluster.retention.stored import SINCE_KEY
from bftrainer.cluster.retention.survey import DiskSurvey, Removed
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.store.events import TrainerPruned
from bftrainer.cluster.store.rows import TrainerRow
from bftrainer.cluster.store.store import Store
from bftrainer.errors import InputError
from bftrainer.util.ids import trainer_number


def check_finished(row: TrainerRow, *, handled: bool = False) -> None:
    """Raise `InputError` unless a trainer is finished. `handled`: a controller still ends its workers."""
    if row.state not in FINISHED:
        raise InputError(
            f"trainer {row.id} ({row.name}) is {row.state}: only files of finished trainers can be removed; "
            f"end it first with `bftrainer cancel {row.id}`, or wait for its end"
        )
    if handled:
        raise InputError(f"trainer {row.id} ({row.name}) is still ending its workers: try again in a minute")


def prune(
    store: Store,
    config: Config,
    trainers: Collection[str] | None,
    owner: str | None,
    older_than_s: float | None,
    by: str,
    *,
    dry_run: bool,
) -> tuple[list[Removed], str]:
    """Remove files by the settings, or all files of the trainers that are chosen. Returns also a note, or ''.

    `trainers` are ids; None: those of an `owner`, or all. Without trainers, owner and age, the settings decide, and the
    database is trimmed to its limits as well. Before a controller of this version has run, nothing goes by age.
    """
    now, survey = time.time(), DiskSurvey(config.state, store.path)
    disks = [disk for disk in survey.disks(only=trainers) if owner is None or disk.owner == owner]
    by_settings = trainers is None and owner is None and older_than_s is None
    if by_settings:
        since = float(store.kept(SINCE_KEY, now))
        chosen, by = rules.by_settings(disks, config.retention, (), now, since), BY_SETTINGS
    else:
        chosen = rules.whole(disks, older_than_s or 0.0, now)
    if dry_run:
        return [Removed(removal, "") for removal in chosen], ""
    done = survey.carry_out(chosen)
    with store.transaction():
        for removal, problem in done:
            if not problem:
                store.log(now, TrainerPruned(removal.trainer.id, removal.part, removal.bytes, by))
    survey.free()
    return done, _trimmed(store, config, survey, now) if by_settings else ""


def _trimmed(store: Store, config: Config, survey: DiskSurvey, now: float) -> str:
    """Trim the database to its limits. Returns why the file could not be made smaller, or an empty text."""
    trimmer = store.trimmer(limits_of(config))
    trimmer.finish(now)
    start = trimmer.log_start()
    if start is not None:
        with_files = {trainer_number(id_) for id_ in survey.folders()}
        trimmer.remove(number for number in store.totals.ended_before(start) if number not in with_files)
        trimmer.finish(now)
    why = store.make_shrinkable()
    return f"{store.path} cannot shrink: {why}" if why else ""


def as_json(done: Sequence[Removed], *, dry_run: bool) -> dict[str, Any]:
    """Return what was removed, or would be."""
    removed = [each.removal for each in done if not each.problem]
    return {
        "dry_run": dry_run,
        "bytes": sum(each.bytes for each in removed),
        "removed": [
            {
                "trainer": each.trainer.id,
                "name": each.trainer.name,
                "owner": each.trainer.owner,
                "part": each.part,
                "bytes": each.bytes,
            }
            for each in removed
        ],
        "problems": [{"trainer": each.removal.trainer.id, "problem": each.problem} for each in done if each.problem],
    }
