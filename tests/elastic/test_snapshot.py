from __future__ import annotations

import collections
import enum
import errno
import io
import itertools
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.elastic import leftovers
from bftrainer.elastic.torch.snapshots import snapshot_copy, snapshot_file
from bftrainer.elastic.torch.snapshots.snapshot import HEADER, Snapshots, SnapshotWarning
from bftrainer.errors import BFTrainerError, InputError

DEADLINE_S = 30.0


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def file_of(step: int) -> str:
    return f"snapshot-{step:012d}.bft"


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type all the way down; a NaN equals itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and (a == b).all())
    if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
        return False
    if type(a) in (list, tuple, collections.deque):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or a != a


def loaded(snapshots: Snapshots) -> Any:
    found = snapshots.latest()
    assert found is not None
    return found.state


class Gate:
    """Stands in for os.fsync and holds whoever calls it until opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, handle: int) -> None:
        self.reached.set()
        assert self.opened.wait(DEADLINE_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(os, "fsync", gate)
    yield gate
    gate.opened.set()


def failing(code: int) -> Callable[[int], None]:
    def fsync(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    return fsync


class Full:
    """A file on a disk without room."""

    def write(self, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Taking and loading


def test_a_snapshot_comes_back_with_its_step_path_and_state(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "not" / "yet")
    assert snapshots.latest() is None
    assert not (tmp_path / "not").exists()
    assert snapshots.take(7, {"weights": torch.arange(5.0), "epoch": 2})
    assert snapshots.close(DEADLINE_S)
    found = Snapshots(tmp_path / "not" / "yet").latest()
    assert found is not None
    assert (found.step, found.path) == (7, tmp_path / "not" / "yet" / file_of(7))
    assert same(found.state, {"weights": torch.arange(5.0), "epoch": 2})
    assert names(found.path.parent) == [file_of(7)]


def test_a_model_and_its_optimizer_resume_where_they_were(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(torch.linspace(0, 1 + step, 32).reshape(8, 4)).square().mean().backward()
            optimizer.step()

    model, optimizer = build(1)
    train(model, optimizer, range(3))
    Snapshots(tmp_path).take_now(3, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(3, 6))

    other, other_optimizer = build(2)
    state = loaded(Snapshots(tmp_path))
    assert state["model"]._metadata == model.state_dict()._metadata
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    train(other, other_optimizer, range(3, 6))
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_changing_tensors_right_after_take_does_not_change_what_is_written(tmp_path: Path, gate: Gate) -> None:
    whole = torch.ones(4, 4)
    state = {"t": whole, "view": whole[1], "nested": [{"u": torch.ones(2)}], "parameter": torch.nn.Parameter(whole)}
    snapshots = Snapshots(tmp_path)
    snapshots.take(1, state)
    whole.fill_(9)
    state["nested"][0]["u"].zero_()
    state["nested"].append("new")
    state["late"] = 1
    gate.opened.set()
    snapshots.close()
    expected = {
        "t": torch.ones(4, 4),
        "view": torch.ones(4),
        "nested": [{"u": torch.ones(2)}],
        "parameter": torch.ones(4, 4),
    }
    assert same(loaded(snapshots), expected)


def test_a_tensor_that_appears_twice_is_written_once_and_a_small_view_does_not_bring_its_whole(tmp_path: Path) -> None:
    big = torch.zeros(100_000)
    Snapshots(tmp_path).take_now(1, {"a": big, "b": big, "tied": big.detach(), "view": big[:10]})
    assert big.nbytes < (tmp_path / file_of(1)).stat().st_size < 1.5 * big.nbytes
    state = loaded(Snapshots(tmp_path))
    assert state["a"].data_ptr() == state["b"].data_ptr() == state["tied"].data_ptr()
    assert state["view"].shape == (10,)


def test_views_of_the_same_memory_that_differ_keep_their_own_values(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    complex_base = torch.tensor([1 + 2j])
    state = {
        "base": base,
        "wide": base.view(2, 3),
        "turned": base.view(2, 3).T,
        "bits": base.view(torch.int32),
        "conj": complex_base.conj(),
        "complex": complex_base,
        "spread": base[:1].expand(3, 2),
    }
    Snapshots(tmp_path).take_now(1, state)
    assert same(loaded(Snapshots(tmp_path)), state)


@pytest.mark.parametrize("outcome", ["written", "fsync fails", "disk full"])
def test_the_next_one_is_copied_into_the_memory_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    memory: list[int] = []
    save = torch.save

    def watched(state: Any, file: Any) -> None:
        memory.append(state["t"].data_ptr())
        if outcome == "disk full":
            file.out = Full()
        save(state, file)

    snapshots = Snapshots(tmp_path, on_error=lambda message: None)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", watched)
        if outcome == "fsync fails":
            patch.setattr(os, "fsync", failing(errno.EIO))
        for step in range(3):
            assert snapshots.take(step, {"t": torch.full((1000,), float(step))})
            assert snapshots.close(DEADLINE_S)
    assert len(memory) == 3
    assert len(set(memory)) == 1
    assert (snapshots.error is None) == (outcome == "written")
    if outcome == "written":
        assert same(loaded(snapshots), {"t": torch.full((1000,), 2.0)})


# When


def test_one_is_due_every_s_after_the_last_was_begun(tmp_path: Path) -> None:
    now = 100.0
    snapshots = Snapshots(tmp_path, every_s=60, clock=lambda: now)
    assert not snapshots.due()
    now = 159.9
    assert not snapshots.due()
    now = 160.0
    assert snapshots.due()
    assert (snapshots.last_step, snapshots.last_age_s()) == (None, None)
    now = 165.0
    snapshots.take_now(5, {})
    assert not snapshots.due()
    now = 224.0
    assert not snapshots.due()
    assert (snapshots.last_step, snapshots.last_age_s()) == (5, 59.0)
    now = 225.0
    assert snapshots.due()


class Slow(dict[str, Any]):
    """A state whose copy takes some of the test's time."""

    def __init__(self, clock: list[float], takes_s: float) -> None:
        super().__init__(a=1)
        self.clock, self.takes_s = clock, takes_s

    def __getitem__(self, name: str) -> Any:
        self.clock[0] += self.takes_s
        return super().__getitem__(name)


def test_training_stands_still_for_at_most_a_hundredth_of_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    snapshots = Snapshots(tmp_path, every_s=60, clock=lambda: clock[0])
    stood_s, taken = 0.0, 0
    while clock[0] < 10_000:
        clock[0] += 1.0
        if snapshots.due():
            takes_s = 2.4 if taken < 5 else 0.1
            assert snapshots.take(taken, Slow(clock, takes_s))
            assert snapshots.close(DEADLINE_S)
            stood_s, taken = stood_s + takes_s, taken + 1
            assert snapshots.interval.stall_s == pytest.approx(takes_s)
            assert snapshots.interval.interval_s == pytest.approx(max(60, 100 * takes_s))
    assert stood_s <= 0.01 * clock[0]
    assert taken > 100, "as often as asked for again, once it costs less"
    assert capsys.readouterr().err.splitlines() == [
        "bftrainer: snapshots every 240 s instead of 60 s: a copy takes 2.4 s",
        "bftrainer: snapshots every 60 s again",
    ]


def test_writing_takes_at_most_half_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0

    def slow(handle: int) -> None:
        nonlocal now
        now += 45.0  # of the file and of its folder

    monkeypatch.setattr(os, "fsync", slow)
    snapshots = Snapshots(tmp_path, every_s=60, clock=lambda: now)
    now = 60.0
    assert snapshots.take(1, {})
    assert snapshots.close(DEADLINE_S)
    assert (snapshots.interval.write_s, snapshots.interval.interval_s) == (90.0, 180.0)
    now = 239.0
    assert not snapshots.due()
    now = 240.0
    assert snapshots.due()
    assert "every 180 s instead of 60 s: writing one takes 90 s" in capsys.readouterr().err


def test_a_state_that_is_refused_is_not_due_again_at_the_next_step(tmp_path: Path) -> None:
    now = 0.0
    snapshots = Snapshots(tmp_path, every_s=60, clock=lambda: now)
    now = 60.0
    with pytest.raises(InputError):
        snapshots.take(1, {"fn": print})
    assert not snapshots.due()
    now = 120.0
    assert snapshots.due()


def test_while_one_is_being_written_none_is_due_and_take_does_nothing(tmp_path: Path, gate: Gate) -> None:
    now = 0.0
    snapshots = Snapshots(tmp_path, every_s=1, clock=lambda: now)
    assert snapshots.take(1, {"a": 1})
    assert gate.reached.wait(DEADLINE_S)
    now = 50.0
    assert not snapshots.due()
    assert not snapshots.take(2, {"a": 2})
    assert not snapshots.close(timeout_s=0)
    assert snapshots.last_step is None
    gate.opened.set()
    assert snapshots.close(DEADLINE_S)
    assert (snapshots.last_step, snapshots.last_age_s()) == (1, 50.0)
    assert not snapshots.due(), "writing took 50 s, and is to take no more than half of the time"
    now = 100.0
    assert snapshots.due()
    assert names(tmp_path) == [file_of(1)]
    assert snapshots.take(3, {"a": 3})
    assert snapshots.close(DEADLINE_S)
    assert loaded(snapshots) == {"a": 3}


def test_take_now_waits_for_the_one_being_written(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    join = threading.Thread.join

    def waited_for(thread: threading.Thread, timeout: float | None = None) -> None:
        gate.opened.set()  # whoever writes without waiting stands before a closed gate
        join(thread, timeout)

    snapshots = Snapshots(tmp_path)
    snapshots.take(1, {"a": 1})
    assert gate.reached.wait(DEADLINE_S)
    monkeypatch.setattr(threading.Thread, "join", waited_for)
    snapshots.take_now(2, {"a": 2})
    assert names(tmp_path) == [file_of(1), file_of(2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_s": 0}, "`every_s` must be more than 0 seconds, but got 0"),
        ({"every_s": -1.5}, "but got -1.5"),
        ({"every_s": float("nan")}, "but got nan"),
        ({"keep": 0}, "`keep` must be at least 1 snapshot, but got 0"),
    ],
)
def test_settings_without_sense_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Snapshots(tmp_path, **arguments)


@pytest.mark.parametrize("step", [-1, 10**12, 1.0, True, "1", None])
def test_a_step_that_is_no_step_is_refused(tmp_path: Path, step: Any) -> None:
    for take in (Snapshots(tmp_path).take, Snapshots(tmp_path).take_now):
        with pytest.raises(InputError, match="`step` must be a whole number from 0 to 999999999999, but got"):
            take(step, {})
    assert names(tmp_path) == []


# What is kept


def test_only_the_last_are_kept_by_step(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    snapshots = Snapshots(tmp_path, keep=2)
    for step in (9, 10, 100, 1000):
        snapshots.take_now(step, {"step": step})
    assert names(tmp_path) == ["notes.txt", file_of(100), file_of(1000)]
    snapshots.take_now(1000, {"step": "again"})
    assert names(tmp_path) == ["notes.txt", file_of(100), file_of(1000)]
    assert loaded(snapshots) == {"step": "again"}


def test_damaged_ones_ahead_never_cost_a_whole_one(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, keep=2)
    snapshots.take_now(1, {"step": 1})
    for step in (100, 101, 102):
        (tmp_path / file_of(step)).write_bytes(b"damaged")
    for step in (2, 3):
        snapshots.take_now(step, {"step": step})
    assert names(tmp_path) == [file_of(step) for step in (2, 3, 100, 101, 102)]
    with pytest.warns(SnapshotWarning):
        assert loaded(snapshots) == {"step": 3}
    snapshots.take_now(103, {"step": 103})
    assert names(tmp_path) == [file_of(102), file_of(103)]


@pytest.mark.waits
def test_temporary_files_of_processes_that_are_gone_are_deleted(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    here, parent, old = socket.gethostname(), os.getppid(), time.time() - 2 * leftovers.STALE_S
    started = leftovers._started(parent)

    def leave(name: str, *, aged: bool = False) -> str:
        (tmp_path / name).write_bytes(b"half")
        if aged:
            os.utime(tmp_path / name, (old, old))
        return name

    leave(f".snapshot-000000000001.ab12.{ended.pid}@{here}.tmp")
    leave(f".snapshot-000000000002.ab12.{parent}@{here}.tmp", aged=True)
    leave(f".snapshot-000000000003.ab12.{ended.pid}@elsewhere.example.org.tmp", aged=True)
    leave(f".snapshot-000000000004.ab12.{parent}-1{started}@{here}.tmp")  # of one that had the same number before
    stay = [
        leave(f".snapshot-000000000004.ab12.{parent}@{here}.tmp"),
        leave(f".snapshot-000000000004.ab12.{parent}-{started}@{here}.tmp"),
        leave(f".snapshot-000000000005.ab12.{os.getpid()}@{here}.tmp"),
        leave(f".snapshot-000000000006.ab12.{ended.pid}@elsewhere.example.org.tmp"),
        leave(".notes.tmp", aged=True),
        leave("snapshot-old.bft", aged=True),
    ]
    Snapshots(tmp_path).take_now(9, {})
    assert names(tmp_path) == sorted([*stay, file_of(9)])
    leftovers.sweep_after(tmp_path)
    assert names(tmp_path) == sorted([".notes.tmp", "snapshot-old.bft", file_of(9)])
    leftovers.sweep_after(tmp_path / "absent")


def test_where_writing_takes_long_a_file_of_another_host_is_left_for_longer(tmp_path: Path) -> None:
    beside = tmp_path / ".snapshot-000000000003.ab12.77-1@elsewhere.example.org.tmp"
    beside.write_bytes(b"half")
    old = time.time() - 2 * leftovers.STALE_S
    os.utime(beside, (old, old))
    snapshots = Snapshots(tmp_path)
    snapshots.interval.write_s = leftovers.STALE_S
    snapshots.take_now(9, {})
    assert beside.exists()
    snapshots.take_now(10, {})
    assert not beside.exists(), "the last write took no time"


# Damage


@pytest.fixture
def two(tmp_path: Path) -> tuple[Snapshots, Path, bytes]:
    """Snapshots of steps 1 and 2; the file of the second and what it holds."""
    snapshots = Snapshots(tmp_path)
    for step in (1, 2):
        snapshots.take_now(step, {"step": step, "t": torch.full((3,), float(step))})
    path = tmp_path / file_of(2)
    return snapshots, path, path.read_bytes()


def step_and_warnings(snapshots: Snapshots) -> tuple[int | None, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = snapshots.latest()
    assert {warning.category for warning in caught} <= {SnapshotWarning}
    return found.step if found else None, [str(warning.message) for warning in caught]


def test_a_snapshot_cut_at_any_byte_is_skipped_for_the_one_before(two: tuple[Snapshots, Path, bytes]) -> None:
    snapshots, path, whole = two
    assert step_and_warnings(snapshots) == (2, [])
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        step, told = step_and_warnings(snapshots)
        assert (step, len(told)) == (1, 1), f"cut at {length}"
        assert str(path) in told[0]
        assert "cut short" in told[0] if length < HEADER else f"it has {length - HEADER} bytes" in told[0]
    path.write_bytes(whole + b"\0")
    assert step_and_warnings(snapshots)[0] == 1


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80])
def test_any_flipped_byte_is_noticed(two: tuple[Snapshots, Path, bytes], flip: int) -> None:
    snapshots, path, whole = two
    for place in itertools.chain(range(HEADER), range(HEADER, len(whole), 5 if flip == 1 else 37)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        step, told = step_and_warnings(snapshots)
        assert (step, len(told)) == (1, 1), f"flipped at {place}"
        assert str(path) in told[0]


def test_every_damaged_one_is_named_with_its_reason_and_none_is_left(two: tuple[Snapshots, Path, bytes]) -> None:
    snapshots, path, whole = two
    folder = path.parent
    (folder / file_of(1)).unlink()
    path.write_bytes(b"")
    (folder / file_of(3)).write_bytes(whole)
    (folder / file_of(4)).mkdir()
    (folder / file_of(5)).write_bytes(b"bftrainer-snapshot 2 " + whole[21:])
    (folder / file_of(6)).write_bytes(bytes(len(whole)))
    (folder / "snapshot-7.bft").write_bytes(b"no name of ours")
    step, told = step_and_warnings(snapshots)
    assert step is None
    expected = [
        (6, "does not begin with a snapshot header"),
        (5, "does not support its format b'2'"),
        (4, "Is a directory"),
        (3, "it holds step 2, not what its name says"),
        (2, "cut short"),
    ]
    assert len(told) == len(expected)
    for line, (at, reason) in zip(told, expected, strict=True):
        assert str(folder / file_of(at)) in line
        assert reason in line


def test_a_whole_one_that_torch_cannot_load_is_skipped(
    two: tuple[Snapshots, Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots, _, _ = two
    monkeypatch.setattr(snapshot_copy, "portable", lambda state, on_tensor: state)
    snapshots.take_now(3, {"fn": collections.defaultdict(list)})
    step, told = step_and_warnings(snapshots)
    assert step == 2
    assert len(told) == 1
    assert file_of(3) in told[0]
    assert f"torch {torch.__version__} cannot load it (UnpicklingError: WeightsUnpickler error" in told[0]
    assert "defaultdict" in told[0]
    assert "\n" not in told[0]


def test_one_that_vanishes_under_the_reader_is_no_loss_when_newer_ones_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots(tmp_path, keep=1)
    snapshots.take_now(1, {"step": 1})
    read = snapshot_file.read

    def overtaken(path: Path, step: int | None = None) -> Any:
        monkeypatch.setattr(snapshot_file, "read", read)
        snapshots.take_now(2, {"step": 2})
        return read(path, step)

    monkeypatch.setattr(snapshot_file, "read", overtaken)
    step, told = step_and_warnings(snapshots)
    assert step == 2
    assert [file_of(1) in line and "vanished" in line for line in told] == [True]


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BFTrainerError, match=r"file: the snapshots cannot be listed \(Not a directory\)"):
        Snapshots(tmp_path / "file").latest()


# Writes that fail


def test_a_failing_write_is_told_once_per_reason_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    snapshots = Snapshots(tmp_path, on_error=told.append)
    snapshots.take_now(1, {"step": 1})
    for step, code in enumerate((errno.ENOSPC, errno.ENOSPC, errno.EDQUOT, errno.ENOSPC), start=2):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing(code))
            assert snapshots.take(step, {"step": step})
            assert snapshots.close(DEADLINE_S)
        assert snapshots.error is not None
        assert os.strerror(code) in snapshots.error
        assert names(tmp_path) == [file_of(1)]
        assert snapshots.last_step == 1
    assert [os.strerror(errno.ENOSPC) in told[0], os.strerror(errno.EDQUOT) in told[1]] == [True, True]
    assert len(told) == 2
    assert all(str(tmp_path) in line and "\n" not in line for line in told)
    snapshots.take_now(9, {"step": 9})
    assert snapshots.error is None
    assert snapshots.last_step == 9


def test_a_write_that_the_system_cuts_off_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    snapshots = Snapshots(tmp_path, on_error=lambda message: None)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
        with pytest.raises(BFTrainerError, match=os.strerror(errno.EFBIG)):
            snapshots.take_now(1, {"a": torch.zeros(200_000), "b": torch.zeros(200_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_told_on_stderr_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    snapshots = Snapshots(tmp_path / "file" / "folder")
    for step in (1, 2):
        assert snapshots.take(step, {})
        assert snapshots.close(DEADLINE_S)
    error = capsys.readouterr().err
    assert error == f"bftrainer: {snapshots.error}\n"
    assert "Not a directory" in error
    with pytest.raises(BFTrainerError, match="Not a directory"):
        snapshots.take_now(3, {})


def test_old_ones_that_cannot_be_deleted_are_told_and_the_new_one_counts(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / file_of(0)).mkdir()
    snapshots = Snapshots(tmp_path, keep=1, on_error=told.append)
    snapshots.take_now(1, {})
    snapshots.take_now(2, {})
    assert snapshots.last_step == 2
    assert snapshots.error is None
    assert names(tmp_path) == [file_of(0), file_of(2)]
    assert ["cannot be deleted" in line for line in told] == [True]


def test_a_host_that_gives_no_more_threads_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told: list[str] = []
    snapshots = Snapshots(tmp_path, on_error=told.append)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert not snapshots.take(1, {})
    assert "can't start new thread" in told[0]
    assert snapshots.take(2, {})
    assert snapshots.close(DEADLINE_S)
    assert names(tmp_path) == [file_of(2)]


# What a state may hold


class Colour(enum.IntEnum):
    RED = 1


class Pair(NamedTuple):
    a: int
    b: int


class Own(torch.Tensor):
    pass


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls its compressed sparse layouts a beta
    SPARSE = [torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_csc()]
    SPARSE += [torch.eye(4).to_sparse_bsr((2, 2)), torch.eye(4).to_sparse_bsc((2, 2))]

KINDS = [0, -(2**2039) + 1, 2**2039 - 1, 1.5, float("inf"), 1 + 2j, "é\ud800\0", b"\xff\0", True, None]
KINDS += [
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda:1"),
    random.Random(1).getstate(),
    torch.get_rng_state(),
]
KINDS += [
    {},
    {1: {None: 2, (1, "a"): [3], b"k": 4}},
    OrderedDict(b=1, a=2),
    [],
    [[1], (2,)],
    (),
    (1, ()),
    {1, "a"},
    set(),
]
KINDS += [torch.tensor(3), torch.zeros(0, 2), torch.zeros(2, 3).T, torch.ones(2, requires_grad=True)]
KINDS += [
    torch.ones(3).to(dtype)
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)
]
KINDS += [torch.ones(3).to(dtype) for dtype in (torch.bool, torch.int8, torch.uint8, torch.uint16, torch.int64)]


@pytest.mark.parametrize("value", KINDS, ids=lambda value: type(value).__name__)
def test_every_kind_that_is_taken_is_one_that_torch_loads_again(tmp_path: Path, value: Any) -> None:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    torch.load(file, weights_only=True)  # the list of kinds is right, whatever the snapshot adds to it
    Snapshots(tmp_path).take_now(1, {"value": value})
    assert same(loaded(Snapshots(tmp_path)), {"value": value})


@pytest.mark.parametrize("value", SPARSE, ids=lambda value: str(value.layout))
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_come_back(tmp_path: Path, value: torch.Tensor) -> None:
    Snapshots(tmp_path).take_now(1, {"value": value, "again": value})
    state = loaded(Snapshots(tmp_path))
    assert state["value"].layout == value.layout
    assert torch.equal(state["value"].to_dense(), torch.eye(4))


def test_a_parameter_comes_back_as_a_tensor_without_gradient(tmp_path: Path) -> None:
    Snapshots(tmp_path).take_now(1, {"p": torch.nn.Parameter(torch.ones(2))})
    back = loaded(Snapshots(tmp_path))["p"]
    assert type(back) is torch.Tensor
    assert not back.requires_grad


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (lambda: 1, "function"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (collections.defaultdict(lambda: 1), "a defaultdict of <function"),
        (np.longdouble(1), "numpy.longdouble"),
        (np.datetime64(0, "s"), "numpy.datetime64"),
        (np.array(["text"]), "a numpy array of <U4"),
        (np.array([None]), "a numpy array of object"),
        (np.zeros(2, ">f4"), "a numpy array of >f4"),
        (np.ma.masked_array([1]), "numpy.ma.MaskedArray"),
        (range(3), "range"),
        (("__bftrainer__", "bytes"), "a tuple that begins with '__bftrainer__'"),
        (Colour.RED, f"{__name__}.Colour"),
        (Pair(1, 2), f"{__name__}.Pair"),
        (torch.ones(1).as_subclass(Own), f"{__name__}.Own"),
        (torch.ones(1, device="meta"), "a tensor of torch.float32, torch.strided, on meta"),
        (torch.empty(1, dtype=torch.int4), "a tensor of torch.int4"),
        (2**2040, "an int of 2041 bits"),
        (Path("x"), "pathlib"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_could_not_be_loaded_again_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, value: Any, type_name: str
) -> None:
    snapshots = Snapshots(tmp_path)
    for take in (snapshots.take, snapshots.take_now):
        with pytest.raises(InputError) as caught:
            take(1, {"scheduler": {"fn": [0, value]}})
        message = str(caught.value)
        assert message.startswith("state['scheduler']['fn'][1] must be a tensor, an array, a plain value or a")
        assert f"but got {type_name}" in message
        assert "leave it out of `state_dict()`" in message
    assert snapshots.close(0)
    assert names(tmp_path) == []


def test_keys_items_and_attributes_are_looked_at_too(tmp_path: Path) -> None:
    marked = OrderedDict(a=1)
    marked.note = print  # type: ignore[attr-defined]
    own: list[Any] = []
    own.append(own)
    for state, message in [
        ({"a": {Colour.RED: 1}}, "a key of state['a'] must be"),
        ({Colour.RED: 1}, "a key of state must be"),
        ({"a": {Colour.RED}}, "an item of state['a'] must be"),
        ({"a": marked}, "state['a'].note must be"),
        ({"a": own}, "`state` must not contain itself"),
        ([1], "`state` must be a dict, but got list"),
    ]:
        with pytest.raises(InputError) as caught:
            Snapshots(tmp_path).take(1, state)  # type: ignore[arg-type]
        assert message in str(caught.value)


def test_a_state_whose_structure_changes_is_looked_at_again(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.take_now(1, {"a": 1})
    with pytest.raises(InputError, match=r"state\['b'\]"):
        snapshots.take_now(2, {"a": 1, "b": print})
    with pytest.raises(InputError, match=r"state\['a'\]"):
        snapshots.take_now(2, {"a": print})


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(1 - 2**2039, 2**2039 - 1),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters()),
    st.binary(max_size=300),
)
TENSORS = st.builds(
    lambda values, dtype: torch.tensor(values, dtype=torch.float64).to(dtype),
    st.lists(st.integers(-100, 100), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex128, torch.bool]),
)
KEYS = st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
STATES = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        PLAIN | TENSORS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(KEYS, inner, max_size=3),
            st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
            st.lists(st.integers(), max_size=3).map(collections.Counter),
            st.lists(inner, max_size=3).map(lambda items: collections.deque(items, 3)),
            st.dictionaries(KEYS, inner, max_size=3).map(lambda items: collections.defaultdict(list, items)),
            st.sets(st.text() | st.integers() | st.binary(), max_size=3),
            st.frozensets(st.text() | st.integers() | st.binary(), max_size=3),
        ),
        max_leaves=8,
    ),
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(STATES)
def test_any_state_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    snapshots = Snapshots(tmp_path_factory.getbasetemp() / "any-state")
    snapshots.take_now(1, state)
    assert same(loaded(snapshots), state)


# More than one process

WRITER = """
import os, sys, torch
from pathlib import Path
from bftrainer.elastic.torch.snapshots.snapshot import Snapshots

folder, mode = Path(sys.argv[1]), sys.argv[2]
if mode == "stall":
    def stall(handle):
        print("stalled", flush=True)
        sys.stdin.read()
    os.fsync = stall
snapshots = Snapshots(folder, keep=2)
step = 100
while True:
    step += 1
    snapshots.take_now(step, {"step": step, "t": torch.full((50_000,), float(step))})
    if step == 101:
        print("written", flush=True)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(mode: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITER, str(tmp_path), mode]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.waits
def test_a_reader_always_sees_a_whole_one_while_another_process_writes_and_after_it_was_killed(
    tmp_path: Path, writer: Callable[[str], subprocess.Popen[str]]
) -> None:
    reader = Snapshots(tmp_path, keep=2)
    reader.take_now(1, {"step": 1, "t": torch.ones(50_000)})
    process = writer("run")

    def read() -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = reader.latest()
        assert all("vanished" in str(warning.message) for warning in caught)
        assert found is not None
        assert found.state["step"] == found.step
        assert torch.equal(found.state["t"], torch.full((50_000,), float(found.step)))
        return found.step

    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    seen = [101]
    deadline = time.monotonic() + DEADLINE_S
    until = time.monotonic() + 2
    while time.monotonic() < until or len(set(seen)) < 3:
        seen.append(read())
        assert time.monotonic() < deadline
    assert seen == sorted(seen)
    process.kill()
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    last = read()
    assert last >= seen[-1]
    reader.take_now(last + 1, {"step": last + 1})
    assert names(tmp_path) == [file_of(last), file_of(last + 1)]


@pytest.mark.waits
def test_a_process_killed_in_the_middle_of_a_write_leaves_the_one_before_and_is_cleaned_up_after(
    tmp_path: Path, writer: Callable[[str], subprocess.Popen[str]]
) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.take_now(1, {"step": 1})
    process = writer("stall")
    assert process.stdout is not None
    assert process.stdout.readline() == "stalled\n"
    half = [name for name in names(tmp_path) if name.endswith(".tmp")]
    assert len(half) == 1
    snapshots.take_now(2, {"step": 2})
    assert half[0] in names(tmp_path), "its writer is alive"
    process.kill()
    process.wait(DEADLINE_S)
    assert loaded(snapshots) == {"step": 2}
    snapshots.take_now(3, {"step": 3})
    assert names(tmp_path) == [file_of(1), file_of(2), file_of(3)]
