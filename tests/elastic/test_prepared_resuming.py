"""A prepared script that is started again goes on where its last snapshot was, whichever way it counts its epochs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from bftrainer import elastic  # noqa: E402
from bftrainer.errors import InputError  # noqa: E402


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class _KilledError(Exception):
    pass


def train(folder: Path | None, *, counts: bool, dies_at: int | None = None) -> tuple[list[float], list[int], list[int]]:
    """Train for five epochs; the weights, the steps made here, and the epochs whose end the script came to."""
    run = elastic.init(snapshots=folder, snapshot_every_s=1e-6, device="cpu")
    torch.manual_seed(0)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = run.prepare(model, optimizer, loader, scheduler)
    made, ended = [], []
    for epoch in run.epochs(5) if counts else range(5):
        for inputs, targets in loader:
            if run.progress.step == dies_at:
                run._member.state.save()
                raise _KilledError
            before = run.progress.step
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.progress.step > before:  # in epochs that are over one batch comes for nothing
                made.append(run.progress.step)
        scheduler.step()
        ended.append(epoch)
    run.finish()
    return [*model.weight.flatten().tolist(), optimizer.param_groups[0]["lr"]], made, ended


@pytest.mark.parametrize("counts", [True, False], ids=["elastic.epochs", "range"])
def test_a_script_that_is_killed_goes_on_from_its_snapshot(counts: bool, tmp_path: Path) -> None:
    expected, steps, _ = train(None, counts=counts)
    assert steps == list(range(1, 26))
    with pytest.raises(_KilledError):
        train(tmp_path, counts=counts, dies_at=13)
    found, again, ended = train(tmp_path, counts=counts)
    assert again == list(range(14, 26))
    assert found == expected
    assert ended == ([2, 3, 4] if counts else [0, 1, 2, 3, 4])


def test_a_second_loop_over_the_same_epochs_is_refused_and_one_over_more_goes_on() -> None:
    elastic.init(device="cpu")
    model = nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=4)
    model, optimizer, loader = elastic.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    seen = []

    def train_until(*epochs: int) -> None:
        for epoch in elastic.epochs(*epochs):
            seen.append(epoch)
            for (x,) in loader:
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    train_until(0)
    train_until(2)
    for again in ((2,), (1,)):
        with pytest.raises(InputError, match=r"looped over already: .* Write elastic.epochs\(2, \d\) for . more"):
            train_until(*again)
    train_until(2, 4)
    assert seen == [0, 1, 2, 3]


def stop_early(folder: Path, *, counts: bool, dies_at: int | None = None, carry: str = "") -> int:
    """Train until the loss has not become less for four epochs, which never happens; the epochs that were begun."""
    run = elastic.init(snapshots=folder, snapshot_every_s=1e-6, device="cpu")
    torch.manual_seed(0)
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    best, bad, begun = elastic.Value(float("inf")), elastic.Value(0), 0
    model, optimizer, loader, best, bad = run.prepare(model, optimizer, loader, best, bad, carry=carry or ())
    for epoch in run.epochs(20) if counts else range(20):
        begun = epoch + 1
        for inputs, targets in loader:
            if run.progress.step == dies_at:
                run._member.state.save()
                raise _KilledError
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(x), y).item()
        best.value, bad.value = min(loss, best.value), 0 if loss < best.value else bad.value + 1
        if bad.value >= 4:
            break
    run.finish()
    return begun


def test_early_stopping_in_an_epoch_that_is_over_is_refused(tmp_path: Path) -> None:
    assert stop_early(tmp_path / "whole", counts=False) == 20
    for counts in (True, False):
        with pytest.raises(_KilledError):
            stop_early(tmp_path / str(counts), counts=counts, dies_at=50)
    assert stop_early(tmp_path / "True", counts=True) == 20
    with pytest.raises(
        InputError, match=r"the script ended in epoch \d, but epoch 12 is in progress: .*elastic.epochs"
    ):
        stop_early(tmp_path / "False", counts=False)


carried_number = 0


def test_carried_variables_need_epochs_that_are_counted(tmp_path: Path) -> None:
    assert stop_early(tmp_path / "counts", counts=True, carry="carried_number") == 20
    with pytest.raises(InputError, match=r"`carry` needs a loop over elastic.epochs\(n\), but this script counts its"):
        stop_early(tmp_path / "range", counts=False, carry="carried_number")
