"""The mean of the loss over an epoch: alone, after a resume and on ranks that come in the midst of it."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bftrainer.elastic.local.coordinator import Coordinator
from support.elastic.jobs import play, script

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from bftrainer import elastic  # noqa: E402
from bftrainer.errors import InputError  # noqa: E402


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def started(folder: Path | None = None) -> elastic.Run:
    """A training whose loss is the mean of its inputs."""
    run, model = elastic.init(snapshots=folder, device="cpu"), nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    return run


DATA = TensorDataset(torch.arange(10.0).unsqueeze(1))


def test_it_is_weighted_by_samples_and_begins_anew_with_the_first_step_of_an_epoch() -> None:
    run, seen = started(), []
    assert math.isnan(run.mean("loss"))
    for _ in run.epochs(2):
        for (x,) in run.batches(DATA, batch_size=4, shuffle=False, max_batch=3):  # steps of 4, 4 and 2
            loss = run.model(x).mean()
            loss.backward()
            if run.step(loss=loss):
                seen.append(run.mean("loss"))
        assert run.mean("loss") == 4.5
    assert seen == [1.5, 3.5, 4.5] * 2
    assert run.mean("loss") == 4.5


def test_a_resumed_training_goes_on_with_the_sum(tmp_path: Path) -> None:
    run = started(tmp_path)
    next(run.epochs(1))
    batches = iter(run.batches(DATA, batch_size=4, shuffle=False))
    loss = run.model(next(batches)[0]).mean()
    loss.backward()
    run.step(loss=loss)
    run._member.state.save()

    again = started(tmp_path)
    for _ in again.epochs(1):
        assert again.mean("loss") == 1.5
        for (x,) in again.batches(DATA, batch_size=4, shuffle=False):
            loss = again.model(x).mean()
            loss.backward()
            again.step(loss=loss)
    assert again.mean("loss") == 4.5


def test_a_state_of_before_there_was_a_mean_is_taken_up() -> None:
    run, other = started(), started()
    state = run._member.state._capture()
    del state["mean"]
    other._member.state._load(state)
    assert math.isnan(other.mean("loss"))


def test_only_a_loss_that_was_given_has_a_mean() -> None:
    run = started()
    with pytest.raises(InputError, match="supports only 'loss', .* but got 'accuracy'"):
        run.mean("accuracy")
    for _ in run.epochs(1):
        for (x,) in run.batches(DATA, batch_size=4):
            run.model(x).mean().backward()
            run.step()
    with pytest.raises(InputError, match=r"needs the loss of each step: call run.step\(loss=loss\)"):
        run.mean("loss")


@pytest.mark.waits
def test_a_newcomer_has_the_mean_and_the_values_of_the_others(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(2)
        await job.until(
            lambda: any((told := job.report(node)) is not None and told.step > 5 for node in job.members),
            60,
            "a few steps",
        )
        await job.add(1)

    outcome = play(scenario, tmp_path, [script("shared_worker.py"), str(tmp_path)])
    assert outcome.status == "done", outcome
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("result-*.json"))]
    assert len(results) == 3
    assert results[2]["begun"] > 0
    for result in results:
        assert result["epochs"] == [[0, 299.5, 300], [1, 299.5, 600]]
    (saved,) = [result["saved"] for result in results if result["saved"]]
    assert torch.load(saved)["weight"].item() == 1.0
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["model.pt"]
