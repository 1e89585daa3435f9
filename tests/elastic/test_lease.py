"""Two lineages of one trainer: workers that were cut off write no snapshots, and nobody resumes from theirs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bftrainer.cluster.retention.files import older_snapshots
from bftrainer.elastic.snapshot_header import Lineage
from bftrainer.elastic.torch.snapshots import snapshot_file
from bftrainer.elastic.torch.snapshots.lease import FILE, SnapshotLease, SupersededError
from bftrainer.elastic.torch.snapshots.snapshot import Snapshots
from bftrainer.elastic.torch.snapshots.snapshot_file import file_name
from bftrainer.errors import BFTrainerError

OWNER = "site/t1"


def keeper(folder: Path, generation: int, owner: str = OWNER, keep: int = 3) -> Snapshots:
    found = Snapshots(folder, owner=owner, keep=keep)
    found.lease.generation = generation
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".bft")


def test_a_worker_that_was_cut_off_is_refused_and_training_resumes_from_the_newest_lineage(tmp_path: Path) -> None:
    old = keeper(tmp_path, 3)
    old.take_now(100, {"who": "old"})
    new = keeper(tmp_path, 5)
    found = new.latest()
    assert found is not None
    assert found.step == 100
    old.take_now(200, {"who": "old"})  # the new workers have not begun yet
    new.claim()
    new.take_now(150, {"who": "new"})
    with pytest.raises(BFTrainerError, match="newer workers of this trainer write snapshots here"):
        old.take_now(300, {"who": "old"})
    assert old.error is not None
    resumed = keeper(tmp_path, 6).latest()
    assert resumed is not None
    assert (resumed.step, resumed.state["who"]) == (150, "new"), "fewer steps, and of the newest lineage"
    assert file_name(300) not in names(tmp_path)


def test_a_worker_is_refused_from_the_moment_others_begin(tmp_path: Path) -> None:
    old, new = keeper(tmp_path, 3), keeper(tmp_path, 4)
    old.take_now(1, {})
    new.claim()
    with pytest.raises(BFTrainerError, match="newer workers"):
        old.take_now(2, {})


def test_a_snapshot_that_was_begun_before_and_ends_after_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = keeper(tmp_path, 3), keeper(tmp_path, 4)
    write = snapshot_file.write

    def slow(*args: object) -> None:
        write(*args)  # type: ignore[arg-type]
        new.claim()

    monkeypatch.setattr(snapshot_file, "write", slow)
    with pytest.raises(BFTrainerError, match="newer workers"):
        old.take_now(7, {})
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_the_members_of_one_lineage_follow_each_other(tmp_path: Path) -> None:
    first = keeper(tmp_path, 1)
    first.take_now(10, {})
    second = keeper(tmp_path, 2)
    second.take_now(20, {})
    first.lease.generation = 3
    first.take_now(30, {})
    found = keeper(tmp_path, 4).latest()
    assert found is not None
    assert found.step == 30


def test_abandoned_snapshots_are_deleted_as_old_ones_are(tmp_path: Path) -> None:
    old = keeper(tmp_path, 3)
    for step in (10, 20, 30):
        old.take_now(step, {})
    new = keeper(tmp_path, 5, keep=2)
    new.take_now(15, {})
    assert names(tmp_path) == [file_name(15), file_name(30)]
    new.take_now(18, {})
    assert names(tmp_path) == [file_name(15), file_name(18)]


def test_another_trainer_takes_a_folder_over_once_and_the_first_is_told(tmp_path: Path) -> None:
    first = keeper(tmp_path, 40)
    first.take_now(100, {"who": 1})
    second = keeper(tmp_path, 1, "site/t2")
    second.take_now(50, {"who": 2})
    found = keeper(tmp_path, 2, "site/t2").latest()
    assert found is not None
    assert found.state["who"] == 2
    with pytest.raises(BFTrainerError, match="another trainer writes its snapshots to this folder"):
        first.take_now(101, {})


def test_a_script_run_by_hand_continues_the_lineage_that_it_finds(tmp_path: Path) -> None:
    keeper(tmp_path, 7).take_now(100, {})
    by_hand = Snapshots(tmp_path)
    by_hand.take_now(110, {})
    assert json.loads((tmp_path / FILE).read_text())["owner"] == OWNER
    found = Snapshots(tmp_path).latest()
    assert found is not None
    assert found.step == 110
    keeper(tmp_path, 8).take_now(120, {})


def test_a_damaged_or_deleted_lease_is_made_again_from_the_snapshots(tmp_path: Path) -> None:
    keeper(tmp_path, 7).take_now(100, {})
    for damage in (lambda: (tmp_path / FILE).write_text("{"), (tmp_path / FILE).unlink):
        damage()
        assert keeper(tmp_path, 2).lease.claim() > Lineage(1, 7)


def test_without_a_lease_a_worker_that_was_cut_off_is_refused_by_the_snapshots_of_newer_ones(tmp_path: Path) -> None:
    old, new = keeper(tmp_path, 5), keeper(tmp_path, 6)
    old.take_now(100, {})
    new.take_now(101, {})
    (tmp_path / FILE).unlink()
    with pytest.raises(BFTrainerError, match="newer workers of this trainer"):
        old.take_now(200, {})
    new.take_now(102, {})
    found = keeper(tmp_path, 7).latest()
    assert found is not None
    assert found.step == 102


def test_without_a_lease_a_member_of_the_newest_generation_goes_on(tmp_path: Path) -> None:
    first, second = keeper(tmp_path, 5), keeper(tmp_path, 6)
    first.take_now(100, {})
    second.take_now(101, {})
    (tmp_path / FILE).unlink()
    first.lease.generation = 7
    first.take_now(102, {})


def test_after_a_restored_database_a_lease_that_nobody_renews_is_taken_over(tmp_path: Path) -> None:
    later = SnapshotLease(tmp_path, OWNER)
    later.generation = 90
    later.claim()
    restored = SnapshotLease(tmp_path, OWNER)
    restored.generation = 12
    with pytest.raises(SupersededError):
        restored.claim()
    os.utime(tmp_path / FILE, (1.0, 1.0))
    assert restored.claim() > Lineage(1, 90)
    with pytest.raises(SupersededError):
        later.claim()


def lease(folder: Path, start: int, generation: int) -> SnapshotLease:
    made = SnapshotLease(folder, OWNER, start=start)
    made.generation = generation
    return made


def test_after_a_restored_database_workers_of_the_later_start_write_at_once_and_earlier_ones_are_refused(
    tmp_path: Path,
) -> None:
    earlier, silent = lease(tmp_path, 1, 50), lease(tmp_path, 1, 51)
    before = earlier.claim()
    restored = lease(tmp_path, 2, 12)
    assert restored.claim() > before
    for cut_off in (earlier, silent):
        with pytest.raises(SupersededError):
            cut_off.claim()
    restored.generation = 13
    assert restored.claim() > before
    assert lease(tmp_path, 2, 14).claim() > before
    with pytest.raises(SupersededError):
        restored.claim()
    assert lease(tmp_path, 3, 9).claim() > before, "the same back-up was restored again"


def test_workers_that_survive_a_restart_write_alone_and_in_turns_with_those_of_the_later_start(tmp_path: Path) -> None:
    survivor, other, newcomer = lease(tmp_path, 1, 5), lease(tmp_path, 1, 5), lease(tmp_path, 2, 0)
    survivor.claim()
    with pytest.raises(SupersededError):
        newcomer.claim()  # it belongs to no generation yet
    survivor.claim()
    newcomer.generation = 6
    newcomer.claim()
    with pytest.raises(SupersededError):
        survivor.claim()
    survivor.generation = other.generation = newcomer.generation = 7
    survivor.claim()
    other.claim()
    newcomer.claim()


def test_the_snapshot_that_is_kept_when_others_are_removed_is_that_of_the_newest_lineage(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    stale, newest = folder / file_name(900), folder / file_name(40)
    snapshot_file.write(stale, 900, {"a": 1}, Lineage(0, 3))
    snapshot_file.write(newest, 40, {"a": 1}, Lineage(0, 5))
    assert older_snapshots(tmp_path) == [stale], "more steps, but of workers that were cut off"
