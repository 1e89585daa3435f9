"""The matrix on the page for users of PyTorch: eight rows are run, and the page has all rows as they are expected."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from matrix.registry import ROWS
from matrix.run import PAGE, block_of, judged, table_line
from support.elastic.jobs import warm

LINES = block_of(PAGE.read_text())
RUN = (
    "unfreezing",
    "queue_buffer",
    "int16_buffer",
    "multi_step_lr",
    "left_over_step",
    "gan_five_to_one",
    "different_lengths",
    "break_on_one",
)


@pytest.mark.waits
@pytest.mark.parametrize("name", RUN)
def test_a_row_is_what_the_page_says(name: str, tmp_path: Path) -> None:
    (row,) = (row for row in ROWS if row.name == name)
    loop, launcher = warm()
    verdict = loop.run_until_complete(judged(row, tmp_path / name, launcher))
    assert verdict.word == row.expect, verdict
    assert table_line(verdict) in LINES, "run `make matrix`"


def test_the_page_has_every_row_with_its_verdict() -> None:
    found = [tuple(cell.strip() for cell in line.strip("|").split(" | ")[:2]) for line in LINES]
    assert found == [(row.title, f"*{row.expect}*") for row in ROWS], "run `make matrix`"


def test_rows_have_names_of_their_own_and_refusals_say_what_to_do() -> None:
    assert len({row.name for row in ROWS}) == len({row.title for row in ROWS}) == len(ROWS)
    assert [row.name for row in ROWS if row.expect == "refused" and not (row.says and row.remark)] == []
