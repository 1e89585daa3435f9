"""Ids of trainers and workers are taken apart as they were built."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.cluster.launchers.base import StateLayout
from bftrainer.util import ids

NUMBER = st.integers(1, 10**18 - 1)


@given(NUMBER, NUMBER)
def test_an_id_tells_what_it_was_built_from(trainer: int, worker: int) -> None:
    name = ids.trainer_id(trainer)
    assert ids.trainer_number(name) == trainer
    assert ids.trainer_of(ids.worker_id(name, worker)) == name


@pytest.mark.parametrize("text", ["", "t", "t0", "t01", "7", "T7", "t7-1", "t7\n", "../t7", "t\u0667", "t" + 19 * "9"])
def test_other_texts_are_no_ids(text: str) -> None:
    assert not ids.is_trainer_id(text)


def test_the_highest_number_is_found_among_other_files(tmp_path: Path) -> None:
    layout = StateLayout(tmp_path, "id")
    assert layout.last_number() == 0
    for name in ("t2", "t10", "t9", "tmp", "t", "t99x", "other"):
        (tmp_path / "trainers" / name).mkdir(parents=True)
    assert layout.last_number() == 10
