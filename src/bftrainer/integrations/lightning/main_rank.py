"""Loggers on a main rank that changes: another process becomes the main one when its node is lost.

Lightning's loggers write on rank 0 only. All ranks log the same values, so each one remembers what it logged since the
last step. If the main rank is lost meanwhile, its successor writes that too, and goes on in the same files.
"""

from __future__ import annotations

import csv
import io
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from bftrainer.util.files import replacing

Writes = Callable[..., None]
"""Writes values for a step, as `Logger.log_metrics` does."""


def set_rank(rank: int) -> None:
    """Have functions that Lightning runs on rank 0 only know the present rank."""
    rank_zero_only.rank = rank


class MainRankLoggers:
    """The loggers of one rank's Trainer."""

    def __init__(self, loggers: list[Any]) -> None:
        self.repeats = False
        """Whether the script repeats code that the training has run before, and so what was logged then."""
        self._loggers = loggers
        self._unsure: list[tuple[Any, Writes, dict[str, Any], int | None]] = []
        for logger in loggers:
            self._remember(logger)

    def versions(self) -> list[Any]:
        """Return the version of each logger, which is part of the name of its folder; None where there is none."""
        return [logger.version if hasattr(logger, "_version") else None for logger in self._loggers]

    def use_versions(self, versions: list[Any]) -> None:
        """Write into the folders of the other ranks, or of an earlier start of the training."""
        for logger, version in zip(self._loggers, versions, strict=False):
            if version is not None and hasattr(logger, "_version") and logger._version != version:
                logger._version = version
                logger._experiment = None  # it was opened for a folder of its own, if at all

    def step_is_made(self) -> None:
        """Forget what was logged before this step: the main rank has written it."""
        self._unsure.clear()

    def became_main(self, *, goes_on: bool) -> None:
        """Write from now on. `goes_on`: another process has written the logs of this training so far."""
        if not goes_on:
            return
        for logger in self._loggers:
            if type(logger).__name__ == "CSVLogger":
                _go_on_with_file(logger)
        unsure, self._unsure = self._unsure, []
        seen: Counter[tuple[int, int | None, frozenset[str]]] = Counter()
        for logger, write, metrics, step in unsure:
            same = id(logger), step, frozenset(metrics)
            if seen[same] >= _times_written(logger, metrics, step):
                write(metrics, step)
                logger.save()
            seen[same] += 1

    def _remember(self, logger: Any) -> None:
        write = logger.log_metrics

        def log_metrics(metrics: Mapping[str, Any], step: int | None = None, *args: Any, **kwargs: Any) -> None:
            if self.repeats:
                return
            self._unsure.append((logger, write, dict(metrics), step))
            write(metrics, step, *args, **kwargs)
            _rewrite_whole_files(logger)
            logger.save()  # what is not on disk is lost with the process

        logger.log_metrics = log_metrics


def _go_on_with_file(logger: Any) -> None:
    """Have a CSVLogger append to the file of the former main rank, which it would replace otherwise."""
    path = Path(logger.log_dir, "metrics.csv")
    aside = path.with_name(f".{path.name}")
    if aside.exists() and not path.exists():  # a process was killed in the middle of this
        aside.rename(path)
    if logger._experiment is not None or not path.exists():
        return
    header, _ = _rows(path)
    path.rename(aside)  # so that the writer finds nothing to delete
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that files in the folder will be deleted
            writer = logger.experiment
    finally:
        aside.rename(path)
    writer.metrics_keys = header
    _rewrite_whole_files(logger)


def _rewrite_whole_files(logger: Any) -> None:
    """Have a CSVLogger replace its file when there are new columns.

    Lightning empties the file and writes it again: a process that is killed meanwhile would leave nothing of it.
    """
    writer = getattr(logger, "_experiment", None) if type(logger).__name__ == "CSVLogger" else None
    if writer is None:
        return

    def rewrite(fieldnames: list[str]) -> None:
        path = Path(writer.metrics_file_path)
        _, rows = _rows(path)
        with io.StringIO(newline="") as text:
            table = csv.DictWriter(text, fieldnames)
            table.writeheader()
            table.writerows(rows)
            with replacing(path, "wb", permissions=path.stat().st_mode & 0o777) as out:
                out.write(text.getvalue().encode())

    writer._rewrite_with_new_header = rewrite


def _times_written(logger: Any, metrics: Mapping[str, Any], step: int | None) -> int:
    """Return how many rows of a CSV file have these values: a step of several batches may log them for each batch.

    Other loggers keep one value per name and step, so theirs are written again.
    """
    if type(logger).__name__ != "CSVLogger" or not Path(logger.log_dir, "metrics.csv").exists():
        return 0
    _, rows = _rows(Path(logger.log_dir, "metrics.csv"))
    names = {*metrics, "step"}
    return sum(row["step"] == str(step) and {name for name in row if row[name]} == names for row in rows)


def _rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        return list(reader.fieldnames or ()), list(reader)
