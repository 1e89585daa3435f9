"""A loss that is a sum over the batch is noticed where that is certain, and no other loss is suspected."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.utils.data import TensorDataset  # noqa: E402

from bftrainer import elastic  # noqa: E402
from bftrainer.elastic.torch.gradients.loss_reduction import is_sum  # noqa: E402

BATCH = 8
MODEL = nn.Linear(3, 4)
WIDE = nn.Linear(3, BATCH)
X, Y, T = torch.randn(BATCH, 3), torch.randint(0, 4, (BATCH,)), torch.rand(BATCH, 4)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


SUMS: list[Callable[[], Tensor]] = [
    lambda: F.cross_entropy(MODEL(X), Y, reduction="sum"),
    lambda: F.cross_entropy(MODEL(X), Y, reduction="none").sum(),
    lambda: F.mse_loss(MODEL(X), T, reduction="sum"),
    lambda: F.l1_loss(MODEL(X), T, reduction="sum"),
    lambda: (MODEL(X) - T).pow(2).sum(),
    lambda: F.binary_cross_entropy(MODEL(X).sigmoid(), T, reduction="sum") - 0.5 * MODEL(X).exp().sum(),
    lambda: F.cross_entropy(MODEL(X.repeat(5, 1)), Y.repeat(5), reduction="sum"),  # five tokens per sample
    lambda: F.huber_loss(MODEL(X), T, reduction="sum").float().clone(),
]

DIVIDED_SUMS: list[Callable[[], Tensor]] = [
    lambda: F.cross_entropy(MODEL(X), Y, reduction="sum") / 2,
    lambda: F.mse_loss(MODEL(X), T, reduction="sum") / 4.0,
    lambda: 0.5 * (MODEL(X) - T).pow(2).sum(),
    lambda: (F.cross_entropy(MODEL(X), Y) + F.mse_loss(MODEL(X), T, reduction="sum")) / 4,
]

OTHERS: list[Callable[[], Tensor]] = [
    lambda: F.cross_entropy(MODEL(X), Y),
    lambda: F.cross_entropy(MODEL(X), Y, reduction="sum") / len(X),
    lambda: F.cross_entropy(MODEL(X), Y, reduction="sum") * (1 / len(X)),
    lambda: F.cross_entropy(MODEL(X), Y, reduction="sum") / len(X) / 4,
    lambda: F.cross_entropy(MODEL(X), Y, reduction="sum") / (4 * len(X)),
    lambda: F.cross_entropy(MODEL(X), Y, reduction="sum") / 2 / len(X),
    lambda: F.cross_entropy(MODEL(X), Y, reduction="sum") / (T[:, 0] > 2).sum().clamp(min=1),  # few that count
    lambda: 3.0 * F.cross_entropy(MODEL(X), Y) / 4,
    lambda: F.cross_entropy(MODEL(X), Y, reduction="none").mean(),
    lambda: (F.cross_entropy(MODEL(X), Y, reduction="none") * (torch.ones(BATCH) / BATCH)).sum(),
    lambda: F.kl_div(F.log_softmax(MODEL(X), 1), T.softmax(1), reduction="batchmean"),
    lambda: (MODEL(X) - T).pow(2).sum(1).mean(),
    lambda: F.cross_entropy(MODEL(X), Y, label_smoothing=0.1),
    # Penalties on weights, as large as they are, are no sums over samples.
    lambda: F.cross_entropy(MODEL(X), Y) + 0.01 * WIDE.weight.pow(2).sum(),
    lambda: F.cross_entropy(MODEL(X), Y) + F.mse_loss(WIDE.weight, torch.zeros(BATCH, 3), reduction="sum"),
    lambda: F.cross_entropy(MODEL(X), Y) + (WIDE.weight @ WIDE.weight.T - torch.eye(BATCH)).pow(2).sum(),
]


@pytest.mark.parametrize("number", range(len(DIVIDED_SUMS)))
def test_a_sum_that_is_divided_by_less_than_the_batch_is_noticed_before_the_backward_pass(number: int) -> None:
    assert is_sum(DIVIDED_SUMS[number](), BATCH)


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_nothing_else_is_suspected_before_the_backward_pass(number: int) -> None:
    assert not is_sum(OTHERS[number](), BATCH)


@pytest.mark.parametrize("number", range(len(SUMS)))
def test_a_sum_is_noticed_after_the_backward_pass(number: int) -> None:
    loss = SUMS[number]()
    loss.backward()
    assert is_sum(loss, BATCH)


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_anything_else_is_not_suspected(number: int) -> None:
    loss = OTHERS[number]()
    loss.backward()
    assert not is_sum(loss, BATCH)


def test_a_loss_without_a_graph_is_not_suspected() -> None:
    assert not is_sum(torch.tensor(3.0), BATCH)


@pytest.mark.parametrize(("reduction", "said"), [("sum", 1), ("mean", 0)])
def test_a_training_says_so_once(reduction: str, said: int, capfd: pytest.CaptureFixture[str]) -> None:
    run, model = elastic.init(device="cpu"), nn.Linear(3, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-4))
    for _ in run.epochs(2):
        for (x,) in run.batches(TensorDataset(X), batch_size=4):
            loss = F.mse_loss(model(x), torch.zeros(len(x), 1), reduction=reduction)
            loss.backward()
            run.step(loss=loss)
    assert capfd.readouterr().err.count("bftrainer: the loss is a sum over the batch. It must be a mean") == said
