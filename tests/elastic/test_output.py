"""The output folder and files written whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bftrainer import elastic  # noqa: E402
from bftrainer.errors import BFTrainerError, InputError  # noqa: E402


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run() -> elastic.Run:
    return elastic.init()


def test_the_folder_is_that_of_the_environment_and_made_when_asked_for(
    run: elastic.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BFTRAINER_OUTPUT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert run.folder == tmp_path
    wanted = tmp_path / "trainers" / "t1"
    monkeypatch.setenv("BFTRAINER_OUTPUT", str(wanted))
    assert not wanted.exists()
    assert run.folder == wanted
    assert wanted.is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("BFTRAINER_OUTPUT", str(tmp_path / "file" / "below"))
    with pytest.raises(BFTrainerError, match="file/below cannot be made .* environment variable BFTRAINER_OUTPUT"):
        _ = run.folder


def test_a_file_is_written_on_the_main_rank_and_replaced(
    run: elastic.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BFTRAINER_OUTPUT", str(tmp_path))
    for number in range(2):
        path = run.save({"number": torch.tensor(number)}, "model.pt")
        assert path == tmp_path / "model.pt"
        assert torch.load(path)["number"] == number
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]
    monkeypatch.setattr(elastic.Run, "is_main", False)
    assert run.save({}, "other.pt") is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]


def test_a_write_that_fails_leaves_the_former_file_and_nothing_else(
    run: elastic.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BFTRAINER_OUTPUT", str(tmp_path))
    run.save(1, "model.pt")
    with pytest.raises(BFTrainerError, match="model.pt cannot be written: .*pickle"):
        run.save([2, lambda: 3], "model.pt")
    assert torch.load(tmp_path / "model.pt") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]


def test_what_a_killed_process_left_long_ago_is_removed(
    run: elastic.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BFTRAINER_OUTPUT", str(tmp_path))
    old, new, other = (tmp_path / name for name in (".model.pt.1-a.tmp", ".model.pt.2-b.tmp", ".else.pt.1-a.tmp"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    run.save(1, "model.pt")
    assert {entry.name for entry in tmp_path.iterdir()} == {"model.pt", new.name, other.name}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b.pt", "/model.pt", "../model.pt", 3, None, b"model.pt"])
def test_a_name_that_is_no_file_name_is_refused_on_all_ranks(
    run: elastic.Run, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic.Run, "is_main", False)
    with pytest.raises(InputError, match="`name` must be a file name such as 'model.pt', without folders, but got"):
        run.save({}, name)
