"""Complete folders: a folder appears complete or not at all, and writers do not disturb each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from bftrainer.integrations.whole_folder import publish, unfinished_room


def written(room: Path, text: str) -> Path:
    folder = room / "step_1"
    folder.mkdir()
    (folder / "model").write_text(text)
    return folder


def test_a_folder_takes_the_place_of_the_former_and_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-old").mkdir()
    for text in ("first", "second"):
        with unfinished_room(tmp_path) as room:
            publish(written(room, text), tmp_path / "step_1")
        assert (tmp_path / "step_1" / "model").read_text() == text
        assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_several_writers_that_do_not_know_each_other_leave_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unfinished_room(tmp_path, alone=False) as one, unfinished_room(tmp_path, alone=False) as other:
        with unfinished_room(tmp_path):  # one that has begun to train
            pass
        publish(written(one, "same"), tmp_path / "step_1")
        late = written(other, "same")
        with monkeypatch.context() as patched:
            patched.setattr(Path, "exists", lambda _: False)  # as it was a moment before
            publish(late, tmp_path / "step_1")
    assert (tmp_path / "step_1" / "model").read_text() == "same"
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_folder_that_cannot_be_put_there_is_an_error(tmp_path: Path) -> None:
    with unfinished_room(tmp_path) as room, pytest.raises(OSError, match="No such file"):
        publish(written(room, "text"), tmp_path / "nowhere" / "step_1")


def test_a_former_folder_that_cannot_be_replaced_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(path))

    with unfinished_room(tmp_path) as room:
        publish(written(room, "first"), tmp_path / "step_1")
    with unfinished_room(tmp_path) as room:
        late = written(room, "second")
        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", refuse)
            with pytest.raises(PermissionError):
                publish(late, tmp_path / "step_1")
    assert (tmp_path / "step_1" / "model").read_text() == "first"
