import os
import stat
from pathlib import Path

import pytest

from bftrainer.util.files import replace_file, replacing, sync


@pytest.fixture
def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_takes_its_place_when_it_is_complete(tmp_path: Path, durable: bool, umask: int) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with replacing(path, durable=durable) as out:
        out.write("naïve")
        out.flush()
        assert path.read_text() == "old"
    assert path.read_bytes() == "naïve".encode()
    assert mode(path) == 0o666 & ~umask
    assert names(tmp_path) == ["file.txt"]


def test_after_an_error_the_former_file_is_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def interrupt() -> None:
        with replacing(path, "wb") as out:
            out.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_file_beside_which_nothing_can_be_written_raises_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "none" / "file") as out:
        out.write("text")


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as first, replacing(path) as second:
        first.write("first")
        second.write("second")
    assert path.read_text() == "first"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("permissions", [0o600, 0o700])
def test_a_private_file_was_never_readable_by_others(
    tmp_path: Path, permissions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    replace_file(path, "a name that is no text: \udcff\n", permissions)
    assert seen == [permissions]
    assert mode(path) == permissions
    assert path.read_bytes() == b"a name that is no text: \xff\n"


def test_files_and_folders_can_be_synced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    sync(tmp_path / "file")
    sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "none")


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path()):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"), replacing(path):
            pytest.fail("it was opened")
    assert (tmp_path / "pipe").is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
