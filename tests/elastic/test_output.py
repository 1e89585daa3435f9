"""The output folder and files written whole."""

from __future__ import annotations

import os
import re
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
        path = run.save("model.pt", {"number": torch.tensor(number)})
        assert path == tmp_path / "model.pt"
        assert torch.load(path)["number"] == number
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]
    monkeypatch.setattr(elastic.Run, "is_main", False)
    assert run.save("other.pt", {}) is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]


def test_a_write_that_fails_leaves_the_former_file_and_nothing_else(
    run: elastic.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BFTRAINER_OUTPUT", str(tmp_path))
    run.save("model.pt", 1)
    with pytest.raises(BFTrainerError, match="model.pt cannot be written: .*pickle"):
        run.save("model.pt", [2, lambda: 3])
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
    run.save("model.pt", 1)
    assert {entry.name for entry in tmp_path.iterdir()} == {"model.pt", new.name, other.name}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b.pt", "/model.pt", "../model.pt", 3, None, b"model.pt"])
def test_a_name_that_is_no_file_name_is_refused_on_all_ranks(
    run: elastic.Run, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic.Run, "is_main", False)
    with pytest.raises(InputError, match="`name` must be a file name such as 'model.pt', without folders, but got"):
        run.save(name, {})


@pytest.mark.parametrize("name", ["best.pt", Path("best.pt")])
def test_swapped_arguments_are_refused_on_all_ranks_with_the_right_call(
    run: elastic.Run, name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BFTRAINER_OUTPUT", str(tmp_path))
    for is_main in (True, False):
        monkeypatch.setattr(elastic.Run, "is_main", is_main)
        with pytest.raises(InputError, match=re.escape("takes the name first: write run.save('best.pt', …)")):
            run.save({"weight": torch.zeros(1)}, name)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(elastic.Run, "is_main", True)
    run.save("note.pt", "a text")  # two texts: the first is the name
    assert torch.load(tmp_path / "note.pt") == "a text"


def test_objects_with_a_state_dict_are_written_as_torch_save_writes_them(
    run: elastic.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BFTRAINER_OUTPUT", str(tmp_path))
    model = torch.nn.Linear(2, 1)
    for name, thing, kind in (("whole.pt", model, torch.nn.Linear), ("state.pt", model.state_dict(), dict)):
        path = run.save(name, thing)
        assert path is not None
        assert isinstance(torch.load(path, weights_only=False), kind)
