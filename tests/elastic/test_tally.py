"""What a step tells all ranks: sums over micro-batches and ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from bftrainer import elastic  # noqa: E402
from bftrainer.elastic.torch.gradients import riders  # noqa: E402
from bftrainer.elastic.torch.gradients.riders import RIDERS, LateNumber, StepRiders, StepTotals  # noqa: E402

CPU = torch.device("cpu")


def test_micro_batches_and_ranks_add_up_to_one_mean() -> None:
    first, second = StepRiders(), StepRiders()
    first.add(4, 1.0)
    sums = first.riders(2, torch.tensor(4.0), knows=True, device=CPU) + second.riders(6, 2.0, knows=False, device=CPU)
    total = StepTotals.of(torch.cat([sums, torch.ones(3)]))  # more may ride along
    assert len(sums) == RIDERS
    assert (total.samples, total.loss) == (12, (4 * 1.0 + 2 * 4.0 + 6 * 2.0) / 12)
    assert (total.all_know(1), total.all_know(2)) == (True, False)


def test_without_a_loss_there_is_none() -> None:
    total = StepTotals.of(StepRiders().riders(3, None, knows=False, device=CPU))
    assert (total.samples, total.loss) == (3, None)


def test_a_step_begins_at_nothing() -> None:
    tally = StepRiders()
    tally.add(4, 1.0)
    tally.begin()
    assert tally.samples == 0
    assert StepTotals.of(tally.riders(2, 3.0, knows=False, device=CPU)).loss == 3.0


def test_the_loss_is_the_mean_over_the_samples_that_have_one() -> None:
    tally = StepRiders()
    tally.add(4, 1.0)
    total = StepTotals.of(tally.riders(2, None, knows=False, device=CPU))
    assert (total.samples, total.loss, total.loss_samples) == (6, 1.0, 4)
    tally.begin()
    tally.add(3, None)
    total = StepTotals.of(tally.riders(1, torch.tensor([5.0]), knows=False, device=CPU))
    assert (total.samples, total.loss, total.loss_samples) == (4, 5.0, 1)


def test_the_loss_of_a_stand_in_counts_for_nothing_even_if_it_is_not_a_number() -> None:
    nothing = StepRiders().riders(0, torch.tensor(float("nan")), knows=False, device=CPU)
    total = StepTotals.of(nothing + StepRiders().riders(2, 3.0, knows=False, device=CPU))
    assert (total.samples, total.loss) == (2, 3.0)


def test_the_totals_of_a_rank_alone_are_those_of_its_riders() -> None:
    tally = StepRiders()
    tally.add(4, 1.0)
    for samples, loss in [(2, torch.tensor(4.0)), (2, 2.5), (2, None), (0, torch.tensor(float("nan")))]:
        alone = tally.totals(samples, loss, knows=True)
        assert alone == StepTotals.of(tally.riders(samples, loss, knows=True, device=CPU))


def test_a_rank_alone_does_not_wait_for_a_loss_until_somebody_asks_for_it(
    run: elastic.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    known = LateNumber.__float__

    def wait(number: LateNumber) -> float:
        waited.append(number)
        return known(number)

    monkeypatch.setattr(riders, "_is_late", lambda loss: True)  # as on a GPU
    monkeypatch.setattr(LateNumber, "__float__", wait)
    data = torch.utils.data.TensorDataset(torch.arange(8.0).view(8, 1))
    losses = []
    for _ in run.epochs(1):
        for (x,) in run.batches(data, batch_size=4, max_batch=2, shuffle=False):
            loss = run.model(x).square().mean()
            loss.backward()
            losses.append(loss.detach().clone())
            run.step(loss=loss)
            with torch.no_grad():
                loss.fill_(7.0)  # a compiled model uses the memory of its outputs again
    assert waited == []
    assert run.mean("loss") == pytest.approx(float(torch.stack(losses).mean()), abs=1e-6)
    assert len(waited) == 1
    metrics, _ = run._member.metrics.both()
    assert metrics == {"loss": pytest.approx(float(torch.stack(losses[2:]).mean()), abs=1e-6)}
