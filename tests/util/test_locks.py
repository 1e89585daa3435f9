import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bftrainer.util.locks import is_locked, read_pid, take_lock, try_lock, write_pid

pytestmark = pytest.mark.waits


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def becomes_free(path: Path) -> bool:
    deadline = time.monotonic() + 60
    while is_locked(path) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_locked(path)


def test_only_one_holds_a_lock_and_closing_its_descriptor_releases_it(path: Path) -> None:
    assert not is_locked(path)
    lock = take_lock(path)
    assert lock is not None
    assert is_locked(path)
    assert take_lock(path) is None
    os.close(lock)
    assert not is_locked(path)
    again = take_lock(path)
    assert again is not None
    os.close(again)


def test_looking_neither_makes_the_file_nor_keeps_the_lock(path: Path) -> None:
    assert not is_locked(path)
    assert not path.exists()
    path.touch()
    assert not is_locked(path)
    assert not is_locked(path)


def test_a_lock_that_is_released_in_time_is_taken(path: Path) -> None:
    lock = take_lock(path)
    assert lock is not None
    looked = threading.Event()

    def release() -> None:
        looked.wait()
        os.close(lock)

    thread = threading.Thread(target=release)
    thread.start()
    looked.set()
    later = take_lock(path, wait_s=60.0)
    thread.join()
    assert later is not None
    os.close(later)


def test_a_child_that_is_handed_the_descriptor_keeps_the_lock(path: Path) -> None:
    lock = take_lock(path)
    assert lock is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    write_pid(lock, child.pid)
    os.close(lock)
    assert is_locked(path)
    assert read_pid(path) == child.pid
    child.communicate(b"\n")
    assert becomes_free(path)


def test_a_child_that_is_not_handed_the_descriptor_does_not_keep_the_lock(path: Path) -> None:
    lock = take_lock(path)
    assert lock is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    os.close(lock)
    free = becomes_free(path)  # the kernel may close the child's copy a moment after the child has begun
    child.communicate(b"\n")
    assert free


def test_a_new_pid_replaces_a_longer_one(path: Path) -> None:
    lock = take_lock(path)
    assert lock is not None
    assert read_pid(path) is None
    write_pid(lock, 123456789)
    write_pid(lock, 7)
    assert path.read_text() == "7\n"
    assert read_pid(path) == 7
    os.close(lock)
    assert read_pid(path.with_name("none")) is None


def test_an_open_file_can_be_locked(path: Path) -> None:
    with path.open("ab") as file, path.open("ab") as other:
        assert try_lock(file.fileno())
        assert not try_lock(other.fileno())
