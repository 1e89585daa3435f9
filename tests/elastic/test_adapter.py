"""Training alone, in this process: what a script may ask of a `Run`, and what it is told when it asks wrongly."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils.data import IterableDataset, TensorDataset  # noqa: E402

from bftrainer import elastic  # noqa: E402
from bftrainer.errors import BFTrainerError, InputError  # noqa: E402
from support.elastic.jobs import run_alone  # noqa: E402


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def make(**options: object) -> tuple[elastic.Run, nn.Module, torch.optim.Optimizer]:
    run = elastic.init(**options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return run, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(length: int = 20) -> TensorDataset:
    x = torch.randn(length, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def train(run: elastic.Run, model: nn.Module, epochs: int, **how: object) -> list[float]:
    dataset, losses = data(), []
    for _ in run.epochs(epochs):
        for x, y in run.batches(dataset, **(how or {"batch_size": 4})):  # type: ignore[arg-type]
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if run.step(loss=loss):
                losses.append(run.metrics["loss"])
    return losses


def test_alone_it_trains_as_a_plain_loop_does() -> None:
    run, model, optimizer = make()
    run.register(model=model, optimizer=optimizer)
    seen: list[int] = []
    dataset = data()
    for _ in run.epochs(2):
        for x, y in run.batches(dataset, batch_size=4):
            seen += run.indices
            nn.functional.mse_loss(run.model(x), y).backward()
            assert run.step()
    assert (run.rank, run.world, run.is_main, run.progress.step, run.progress.samples) == (0, 1, True, 10, 40)
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))

    _, plain, other = make()
    x, y = dataset.tensors
    for start in range(0, 40, 4):
        batch = seen[start : start + 4]
        other.zero_grad()
        nn.functional.mse_loss(plain(x[batch]), y[batch]).backward()
        other.step()
    assert torch.equal(plain.weight, model.weight)


def test_accumulation_adds_up_to_the_whole_batch() -> None:
    run, model, optimizer = make()
    run.register(model=model, optimizer=optimizer)
    whole = train(run, model, 2, batch_size=7)
    again, other, its = make()
    again.register(model=other, optimizer=its)
    assert train(again, other, 2, batch_size=7, max_batch=3) == pytest.approx(whole, rel=1e-5)
    assert torch.allclose(other.weight, model.weight, atol=1e-6)


def test_a_snapshot_goes_on_in_the_midst_of_an_epoch(tmp_path: Path) -> None:
    run, model, optimizer = make(snapshots=tmp_path)
    run.register(model=model, optimizer=optimizer)
    undisturbed = train(run, model, 3)

    first, model1, optimizer1 = make(snapshots=tmp_path / "b")
    first.register(model=model1, optimizer=optimizer1)
    dataset = data()
    for _ in first.epochs(3):
        for number, (x, y) in enumerate(first.batches(dataset, batch_size=4)):
            if first.progress.epoch == 1 and number == 2:
                first._member.state.save()
                break
            nn.functional.mse_loss(model1(x), y).backward()
            first.step()
        if first.progress.epoch == 1:
            break
    second, model2, optimizer2 = make(snapshots=tmp_path / "b")
    second.register(model=model2, optimizer=optimizer2)
    losses = train(second, model2, 3)
    assert len(losses) == 15 - 7
    assert losses == undisturbed[7:]
    assert torch.equal(model2.weight, model.weight)


def test_reported_values_know_their_epoch_and_survive_in_the_snapshot(tmp_path: Path) -> None:
    run, model, optimizer = make(snapshots=tmp_path)
    run.register(model=model, optimizer=optimizer)
    dataset = data()
    for epoch in run.epochs(2):
        for number, (x, y) in enumerate(run.batches(dataset, batch_size=4)):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            run.step(loss=loss, inside=number)
            if number == 1:
                run.report(midst=1.0)
        assert run._reports.report().metrics_at["loss"] == (epoch + 1, 5 * (epoch + 1), 20 * (epoch + 1))
        if epoch == 0:
            run.report(accuracy=0.5)
    told = run._reports.report()
    assert told.epoch == 2
    assert told.metrics_at == {
        **{"loss": (2, 10, 40), "inside": (2, 10, 40), "midst": (1, 7, 28), "accuracy": (1, 5, 20)}
    }
    again, model2, optimizer2 = make(snapshots=tmp_path)
    again.register(model=model2, optimizer=optimizer2)
    again.report(accuracy=0.9)  # older than what the snapshot has: of epoch 0
    assert list(again.epochs(2)) == []
    assert again.metrics == run.metrics
    assert again._reports.report().metrics_at == told.metrics_at


def test_a_snapshot_of_another_script_is_refused(tmp_path: Path) -> None:
    run, model, optimizer = make(snapshots=tmp_path)
    run.register(model=model, optimizer=optimizer)
    train(run, model, 1)
    other, model2, optimizer2 = make(snapshots=tmp_path)
    other.register(model=model2, optimizer=optimizer2, scheduler=torch.optim.lr_scheduler.StepLR(optimizer2, 1))
    with pytest.raises(BFTrainerError, match="the state lacks scheduler, which the script registers"):
        next(other.epochs(1))


def test_the_learning_rate_follows_the_rule_and_the_scheduler_never_sees_it() -> None:
    run, model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run.register(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scheduler_every="epoch",
        lr_scaling="linear",
        lr_base_batch=2,
    )
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    train(run, model, 2, batch_size=20)
    assert rates == [0.1 * 10, 0.05 * 10]
    assert optimizer.param_groups[0]["lr"] == 0.025


def test_steps_are_for_data_of_ones_own() -> None:
    run, model, optimizer = make()
    run.register(model=model, optimizer=optimizer)
    for number in run.steps(5):
        assert number == run.progress.cursor
        loss = model(torch.ones(1, 3)).square().mean()
        loss.backward()
        run.step(loss=loss, samples=3, accuracy=0.5)
    assert (run.progress.step, run.progress.samples, run.metrics["accuracy"]) == (5, 15, 0.5)


def test_steps_do_not_go_into_a_loop_over_epochs() -> None:
    run, model, optimizer = make()
    run.register(model=model, optimizer=optimizer)
    next(run.epochs(2))
    with pytest.raises(InputError, match=r"run.steps\(\) cannot be used within a loop over run.epochs\(\)"):
        next(run.steps(5))


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_wrong_use_is_explained() -> None:
    run, model, optimizer = make()
    with pytest.raises(InputError, match="must have state_dict\\(\\) and load_state_dict\\(\\), but got int"):
        run.register(thing=3)
    with pytest.raises(InputError, match="at least one optimizer"):
        next(run.epochs(1))
    with pytest.raises(InputError, match="`scheduler_every` must be 'step', 'epoch' or None, but got 'day'"):
        run.register(model=model, scheduler_every="day")
    with pytest.raises(InputError, match="`clip_norm` must be a number above 0, but got -1"):
        run.register(model=model, clip_norm=-1)
    with pytest.raises(InputError, match="`lr_scaling` must be linear, sqrt, none or a function"):
        run.register(model=model, lr_scaling="cubic")
    with pytest.raises(InputError, match="nothing is registered as `model`"):
        _ = run.model
    run.register(model=model, optimizer=optimizer)
    with pytest.raises(InputError, match="`model` is registered already"):
        run.register(model=nn.Linear(1, 1))
    with pytest.raises(InputError, match="must be map-style"):
        run.batches(Stream(), batch_size=1)
    with pytest.raises(InputError, match="one of `batch_size` and `global_batch`"):
        run.batches(data())
    with pytest.raises(InputError, match=r"run.step\(\) must be called once after each batch"):
        run.step()
    batches = iter(run.batches(data(), batch_size=4))
    next(batches)
    with pytest.raises(InputError, match=r"register\(\) must be called before the first epoch"):
        run.register(other=model)
    with pytest.raises(InputError, match=r"run.step\(\) must be called after each batch"):
        next(batches)


def test_a_rule_for_the_learning_rate_needs_batches() -> None:
    run, model, optimizer = make()
    run.register(model=model, optimizer=optimizer, lr_scaling="sqrt")
    with pytest.raises(InputError, match=r"`lr_scaling` needs run.batches\(\)"):
        next(run.steps(1))


@pytest.mark.waits
def test_a_process_that_the_script_forks_is_not_a_worker(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(
        "import multiprocessing, time\nfrom bftrainer import elastic\nrun = elastic.init()\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "child.start()\nchild.terminate()\nchild.join(20)\nprint(child.exitcode)\n"
    )
    assert run_alone(tmp_path, script) == "-15\n"


def test_a_break_leaves_nothing_to_be_undone_later() -> None:
    run, model, optimizer = make()
    run.register(model=model, optimizer=optimizer)
    undone: list[tuple[int, int]] = []
    epochs = run.epochs(2)
    next(epochs)
    for x, y in run.batches(data(), batch_size=4):
        nn.functional.mse_loss(model(x), y).backward()
        run.step()
        run._member.state.repair = lambda: undone.append(
            (run.progress.epoch, run.progress.cursor)
        )  # as after a lost peer
        break
    assert undone == [(0, 4)]
    assert next(epochs) == 1


def test_sparse_gradients_are_refused() -> None:
    from bftrainer.elastic.torch.gradients.reducer import Reducer

    layer = nn.Embedding(4, 2, sparse=True)
    reducer = Reducer(list(layer.parameters()), 1)
    reducer.alone = False
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError, match="gradients must be dense"):
        reducer.finish(torch.zeros(1))


class Sums:
    """Counts the sums of a reducer, and gives back what it is given: the other rank has nothing to add."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send(self, flat: Tensor) -> Sums:
        self.sent.append(flat.numel())
        return self

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_several_backward_passes_do_not_send_more(passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from bftrainer.elastic.torch.gradients.reducer import Reducer

    layer, sums = nn.Linear(3, 2), Sums()
    reducer = Reducer(list(layer.parameters()), 1)
    monkeypatch.setattr(reducer, "_send", sums.send)
    reducer.alone = False
    for _ in range(4):
        reducer.active = True
        for _ in range(passes):
            layer(torch.ones(1, 3)).sum().backward()
        expected = layer.weight.grad.clone()
        reducer.finish(torch.zeros(1, dtype=torch.float64))
        assert layer.weight.grad.equal(expected)
        layer.zero_grad()
    assert len(sums.sent) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_of_single_ranks_are_sent_with_the_gradients_to_the_last_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bftrainer.elastic.torch.gradients.reducer import Reducer

    layer, sums = nn.Linear(3, 2, dtype=dtype), Sums()
    reducer = Reducer(list(layer.parameters()), 1)
    monkeypatch.setattr(reducer, "_send", sums.send)
    reducer.alone = False
    numbers = [1 / 3, -0.0, 1e300, 5e-324, math.inf, math.nan, -7.0]
    for count in (7, 7, 3, 0):
        layer(torch.ones(1, 3, dtype=dtype)).sum().backward()
        expected = layer.weight.grad.clone()
        along = torch.tensor(numbers[:count], dtype=torch.float64) if count else None
        riders = reducer.finish(torch.tensor([2.5], dtype=torch.float64), along)
        assert riders.tolist() == [2.5]
        assert layer.weight.grad.equal(expected)
        if along is not None:
            assert along.numpy().tobytes() == torch.tensor(numbers[:count], dtype=torch.float64).numpy().tobytes()
        layer.zero_grad()
    assert len(sums.sent) == (8 if dtype is torch.bfloat16 else 4)


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BFTRAINER_BACKEND", "carrier-pigeon")
    with pytest.raises(InputError, match="BFTRAINER_BACKEND must be gloo or nccl, but got 'carrier-pigeon'"):
        elastic.init()


def test_a_manager_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BFTRAINER_CHANNEL", str(tmp_path / "nobody"))
    with pytest.raises(BFTrainerError, match="cannot reach the manager at BFTRAINER_CHANNEL="):
        elastic.init()
