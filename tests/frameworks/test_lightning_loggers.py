"""Loggers of Lightning when another process becomes the main one."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from support.elastic.frameworks import needs

pytest.importorskip("torch")
needs("lightning")

ROWS = [{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.1}, {"loss": 2.0}]
"""What is logged in a step of three batches."""


def rows(folder: Path) -> list[dict[str, Any]]:
    with (folder / "logs" / "version_0" / "metrics.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize("written", range(len(ROWS) + 1))
def test_a_successor_writes_the_rows_of_a_step_that_the_lost_main_rank_has_not_written(
    written: int, tmp_path: Path
) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from bftrainer.integrations.lightning.main_rank import MainRankLoggers, set_rank

    set_rank(0)
    lost = CSVLogger(tmp_path, name="logs", version=0)
    lost.log_metrics({"loss": 3.0, "lr": 0.2}, 6)  # of the step before; a CSVLogger writes its header once
    for row in ROWS[:written]:
        lost.log_metrics(row, 7)
    lost.save()
    set_rank(1)
    successor = CSVLogger(tmp_path, name="logs", version=0)
    loggers = MainRankLoggers([successor])
    for row in ROWS:
        successor.log_metrics(row, 7)
    set_rank(0)
    loggers.became_main(goes_on=True)
    expected = [{name: str(value) for name, value in row.items()} | {"step": "7"} for row in ROWS]
    assert [row for row in rows(tmp_path) if row["step"] == "7"] == expected


def test_what_a_newcomer_logs_at_the_top_of_an_epoch_that_has_begun_before_is_not_written_again(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from bftrainer.integrations.lightning.main_rank import MainRankLoggers, set_rank

    set_rank(0)
    lost = CSVLogger(tmp_path, name="logs", version=0)
    lost.log_metrics({"lr": 0.2}, 0)  # when the epoch began
    lost.log_metrics({"loss": 3.0}, 6)
    lost.save()
    set_rank(1)
    newcomer = CSVLogger(tmp_path, name="logs", version=0)
    loggers = MainRankLoggers([newcomer])
    loggers.repeats = True
    newcomer.log_metrics({"lr": 0.2}, 7)
    loggers.repeats = False
    newcomer.log_metrics({"loss": 2.0}, 7)
    set_rank(0)
    loggers.became_main(goes_on=True)
    assert [row["step"] for row in rows(tmp_path)] == ["0", "6", "7"]


def test_a_main_rank_that_is_killed_while_columns_are_added_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from bftrainer.integrations.lightning.main_rank import MainRankLoggers, set_rank

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    set_rank(0)
    logger = CSVLogger(tmp_path, name="logs", version=0)
    MainRankLoggers([logger])
    logger.log_metrics({"loss": 3.0}, 0)
    with monkeypatch.context() as patches:
        patches.setattr(csv.DictWriter, "writerows", killed)
        with pytest.raises(Killed):
            logger.log_metrics({"loss": 2.0, "error": 1.0}, 1)
    assert rows(tmp_path) == [{"loss": "3.0", "step": "0"}]
    successor = CSVLogger(tmp_path, name="logs", version=0)
    MainRankLoggers([successor]).became_main(goes_on=True)
    successor.log_metrics({"loss": 2.0, "error": 1.0}, 1)
    assert rows(tmp_path) == [{"loss": "3.0", "step": "0"}, {"loss": "2.0", "error": "1.0", "step": "1"}]
