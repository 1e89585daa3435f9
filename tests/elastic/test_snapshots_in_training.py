"""Snapshots while a script trains: what it registers is looked at before it begins, and nothing ends it later."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from bftrainer import elastic  # noqa: E402
from bftrainer.elastic.torch.snapshots.snapshot import Snapshots, SnapshotWarning  # noqa: E402
from bftrainer.errors import InputError  # noqa: E402

OFTEN = 1e-6


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def train(folder: Path | None, epochs: int = 2, lr: Any = 0.1, **more: Any) -> elastic.Run:
    """A script: ten steps of one sample an epoch."""
    run = elastic.init(snapshots=folder, snapshot_every_s=OFTEN, device="cpu")
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    run.register(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60]),
        scheduler_every="epoch",
        **more,
    )
    for _ in run.epochs(epochs):
        for (x,) in run.batches(TensorDataset(torch.ones(10, 3)), batch_size=1):
            loss = model(x).square().mean()
            loss.backward()
            run.step(loss=loss)
        run.report(accuracy=0.25)
    return run


class Holder:
    """An object whose state is what the test says."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.asked = 0

    def state_dict(self) -> Any:
        self.asked += 1
        return self.state(self.asked) if callable(self.state) else self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_a_scheduler_with_milestones_and_a_rate_of_numpy_train_through_snapshots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np = pytest.importorskip("numpy")
    assert train(tmp_path, lr=np.float64(0.1)).progress.step == 20
    assert "without a snapshot" not in capsys.readouterr().err
    found = elastic.load_snapshot(tmp_path)
    assert found["scheduler"]["milestones"] == {30: 1, 60: 1}
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.1


def test_a_state_that_no_snapshot_can_hold_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    holder = Holder({"fn": [print]})
    with pytest.raises(InputError, match=r"^state\['objects'\]\['counter'\]\['fn'\]\[0\] must be .* but got builtin"):
        train(tmp_path, counter=holder)
    assert list(tmp_path.iterdir()) == []
    assert train(None, counter=holder).progress.step == 20, "without snapshots nothing is asked of it"


@pytest.mark.parametrize("what", ["holds a function", "raises"])
def test_a_state_that_becomes_impossible_later_is_told_once_and_never_ends_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    def state(asked: int) -> Any:
        if asked == 1:
            return {}
        if what == "raises":
            raise ValueError("no state today")
        return {"fn": print}

    run = train(tmp_path, counter=Holder(state))
    assert run.progress.step == 20
    lines = [line for line in capsys.readouterr().err.splitlines() if "continues without a snapshot" in line]
    assert len(lines) == 1
    expected = "ValueError: no state today" if what == "raises" else "state['objects']['counter']['fn'] must be"
    assert expected in lines[0]
    assert run._member.state._snapshots is not None
    assert expected in (run._member.state._snapshots.error or "")


def test_the_end_of_a_training_leaves_no_temporary_file(tmp_path: Path) -> None:
    left = tmp_path / ".snapshot-000000000003.ab12.77-123@elsewhere.example.org.tmp"
    left.write_bytes(b"half")
    train(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".bft"] * len(list(tmp_path.iterdir()))


# Opening one


def test_a_snapshot_opens_by_file_and_by_folder(tmp_path: Path) -> None:
    run = train(tmp_path, note=Holder({"best": 3}))
    by_folder = elastic.load_snapshot(tmp_path)
    by_file = elastic.load_snapshot(str(by_folder.path))
    for found in (by_folder, by_file):
        assert (found.step, found.epoch, found.samples) == (20, 2, 20)
        assert found.path == tmp_path / "snapshot-000000000020.bft"
        assert set(found) == {"model", "optimizer", "scheduler", "note"}
        assert found["note"] == {"best": 3}
        assert found.metrics["accuracy"] == 0.25
        assert "model" in found
        assert "ema" not in found
    fresh = nn.Linear(3, 1)
    fresh.load_state_dict(by_file["model"])
    assert torch.equal(fresh.weight, run.model.weight)
    with pytest.raises(KeyError, match="holds no 'ema'; the script registered model, note, optimizer, scheduler"):
        by_file["ema"]


def test_a_file_under_another_name_opens_too(tmp_path: Path) -> None:
    train(tmp_path)
    best = tmp_path / "best.bft"
    best.write_bytes((tmp_path / "snapshot-000000000020.bft").read_bytes())
    assert elastic.load_snapshot(best).step == 20


def test_a_snapshot_of_version_0_1_0_opens() -> None:
    found = elastic.load_snapshot(Path(__file__).parent / "snapshot-0.1.0.bft")
    assert (found.step, found.epoch, found.samples) == (6, 2, 24)
    assert found["model"]["weight"].tolist() == [[pytest.approx(0.0529, abs=1e-4), pytest.approx(0.4378, abs=1e-4)]]
    assert set(found) == {"model", "optimizer"}
    assert found.metrics["accuracy"] == 0.5


def test_what_is_no_snapshot_is_refused_with_its_reason(tmp_path: Path) -> None:
    train(tmp_path / "run")
    whole = (tmp_path / "run" / "snapshot-000000000020.bft").read_bytes()
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.pt").write_bytes(b"PK not one of ours")
    (tmp_path / "short.bft").write_bytes(whole[:100])
    (tmp_path / "damaged.bft").write_bytes(whole[:-1] + b"\x00" + whole[-1:])
    Snapshots(tmp_path / "other").take_now(1, {"anything": 1})
    for name, message in [
        ("absent", "absent: there is no such file or folder"),
        ("empty", r"empty: there is no snapshot \(snapshot-….bft\) in this folder"),
        ("model.pt", "model.pt: cannot be opened as a snapshot: it does not begin with a snapshot header"),
        ("short.bft", "short.bft: cannot be opened as a snapshot: it is cut short: 100 bytes"),
        ("damaged.bft", "damaged.bft: cannot be opened as a snapshot: it has .* bytes of state where"),
        ("other", "this snapshot was not written by a training"),
    ]:
        with pytest.raises(InputError, match=message):
            elastic.load_snapshot(tmp_path / name)


def test_of_a_folder_the_newest_whole_one_opens_and_damage_is_told(tmp_path: Path) -> None:
    train(tmp_path)
    ahead = tmp_path / "snapshot-000000000099.bft"
    ahead.write_bytes(b"bftrainer-snapshot 1 half")
    with pytest.warns(SnapshotWarning, match="snapshot-000000000099.bft: this snapshot is skipped: it is cut short"):
        assert elastic.load_snapshot(tmp_path).step == 20
    for path in tmp_path.iterdir():
        path.write_bytes(b"nothing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            InputError, match="no snapshot in this folder is complete: .*99.bft: this snapshot is skipped"
        ):
            elastic.load_snapshot(tmp_path)


# The last moment


def test_a_last_save_is_tried_only_where_there_is_something_new_and_it_would_fit(tmp_path: Path) -> None:
    run = train(tmp_path, epochs=1)
    standing, keeper = run._member.state, run._member.state._snapshots
    assert keeper is not None
    assert not standing.can_save(60.0), "the last step is on disk"
    standing.progress.step += 1
    assert standing.can_save(60.0)
    keeper.interval.write_s = 61.0
    assert not standing.can_save(60.0)
    standing.save_within(60.0)
    assert elastic.load_snapshot(tmp_path).step == 10
    keeper.interval.write_s = 0.1
    standing.save_within(60.0)
    assert elastic.load_snapshot(tmp_path).step == 11
    assert not standing.can_save(60.0)


def test_what_was_resumed_and_not_trained_on_is_not_saved_again(tmp_path: Path) -> None:
    train(tmp_path, epochs=1)
    again = train(tmp_path, epochs=1)
    assert again.progress.step == 10
    assert not again._member.state.can_save(60.0)
