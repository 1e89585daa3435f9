"""Rows about data and loops: what is given to `run.batches`, how loops begin and end, what rank 0 shares."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from bftrainer import elastic
from matrix.recorder import begin
from matrix.rows import DATA, EPOCHS, GLOBAL_BATCH, SAMPLES, dataset, mse, net, row, sgd, train, validation_loss

PER_EPOCH = SAMPLES // GLOBAL_BATCH


def learn(run: Any, model: Any, x: Any, y: Any) -> bool:
    loss = mse(model(x), y)
    loss.backward()
    return run.step(loss=loss)


def ready() -> tuple[Any, Any]:
    run = begin()
    model = net()
    run.register(model=model, optimizer=sgd(model))
    return run, model


@row("batch size per rank (`batch_size=8`)", remark="training depends on the number of ranks", exact=False)
def batch_per_node() -> None:
    run, model = ready()
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, batch_size=8):
            learn(run, model, x, y)


@row("accumulation by `max_batch`")
def accumulation() -> None:
    run, model = ready()
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH, max_batch=7):
            learn(run, model, x, y)


@row("`DataLoader` given to `run.batches`", exact=False)
def data_loader() -> None:
    run, model = ready()
    loader = DataLoader(DATA, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(loader):
            learn(run, model, x, y)


@row(
    "two datasets in turns, epoch by epoch",
    samples=(SAMPLES, SAMPLES // 2) * (EPOCHS // 2),
)
def alternating_epochs() -> None:
    run, model = ready()
    labelled, unlabelled = DATA, dataset(SAMPLES // 2)
    for epoch in run.epochs(EPOCHS):
        for x, y in run.batches(unlabelled if epoch % 2 else labelled, global_batch=GLOBAL_BATCH):
            learn(run, model, x, y)


@row(
    "two datasets in turns within an epoch",
    "refused",
    says="run.batches",
    remark="one dataset per epoch, or one that gives pairs",
)
def two_datasets() -> None:
    run, model = ready()
    unlabelled = dataset(SAMPLES // 2)
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            learn(run, model, x, y)
        for x, y in run.batches(unlabelled, global_batch=GLOBAL_BATCH):
            learn(run, model, x, y)


@row(
    "second loop over the same data in one epoch",
    "refused",
    says="run.batches",
    remark="`run.epochs(2 * n)`",
)
def second_loop() -> None:
    run, model = ready()
    for _ in run.epochs(EPOCHS):
        for _ in range(2):
            for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
                learn(run, model, x, y)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


@row(
    "`IterableDataset`",
    "refused",
    says="map-style",
    remark="a map-style dataset, or `run.steps` with data of your own",
)
def iterable_dataset() -> None:
    run, model = ready()
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(Stream(), global_batch=GLOBAL_BATCH):
            learn(run, model, x, y)


@row(
    "different data lengths on two nodes",
    "refused",
    says="samples",
    remark="the same data on all nodes",
)
def different_lengths() -> None:
    run, model = ready()
    data = dataset(SAMPLES if os.environ.get("BFTRAINER_WORKER") != "node-2" else SAMPLES - 4)
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(data, global_batch=GLOBAL_BATCH):
            learn(run, model, x, y)


@row(
    "`range()` instead of `run.epochs`",
    "refused",
    says="run.epochs",
    remark="`for epoch in run.epochs(n):`",
)
def range_epochs() -> None:
    run, model = ready()
    for _ in range(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            learn(run, model, x, y)


@row(
    "`run.step()` after every second batch only",
    "refused",
    says="run.step()",
    remark="`max_batch=`, or several backward passes per batch",
)
def every_second_batch() -> None:
    run, model = ready()
    for _ in run.epochs(EPOCHS):
        for number, (x, y) in enumerate(run.batches(DATA, global_batch=GLOBAL_BATCH)):
            mse(model(x), y).backward()
            if number % 2:
                run.step()


@row("`break` after the last batch, on all ranks")
def break_on_all() -> None:
    run, model = ready()
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            learn(run, model, x, y)
            if run.progress.cursor == SAMPLES:
                break


@row("`break` after the last batch, on one rank")
def break_on_one() -> None:
    run, model = ready()
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            learn(run, model, x, y)
            if run.is_main and run.progress.cursor == SAMPLES:
                break


@row(
    "batches counted by the script, `break` at the count",
    "refused",
    says="do not count batches",
    remark="loop to the end; refused only when a step was lost or nodes changed the count",
)
def counted_batches() -> None:
    run, model = ready()
    for _ in run.epochs(EPOCHS):
        for number, (x, y) in enumerate(run.batches(DATA, global_batch=GLOBAL_BATCH)):
            learn(run, model, x, y)
            if number == PER_EPOCH - 1:  # a newcomer's count ends later, or never
                break


@row("`elastic.Value` for a counter and a best value", remark="survive the loss of rank 0")
def values() -> None:
    run = begin()
    model = net()
    best, epochs = elastic.Value(float("inf")), elastic.Value(0)
    run.register(model=model, optimizer=sgd(model), best=best, epochs=epochs)
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            learn(run, model, x, y)
        best.value = min(best.value, run.evaluate(lambda: validation_loss(model)))
        epochs.value += 1
    assert epochs.value == EPOCHS


@row("early stopping through `run.share`", samples=(SAMPLES,) * (EPOCHS - 1))
def early_stopping() -> None:
    run, model = ready()
    for epoch in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            learn(run, model, x, y)
        enough = run.is_main and validation_loss(model) < 100 and epoch == EPOCHS - 2
        if run.share(enough):
            break
    run.finish()


@row("mean loss of an epoch (`run.mean`)", remark="over all ranks, the same on all")
def mean_of_an_epoch() -> None:
    run, model = ready()
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            learn(run, model, x, y)
        assert run.mean("loss") > 0


@row("data of the script's own in `run.steps`", exact=False, samples=())
def own_data() -> None:
    run, model = ready()
    x, y = DATA.tensors
    for number in run.steps(EPOCHS * PER_EPOCH):
        at = (number * 8 + run.rank) % (SAMPLES - 8)
        learn(run, model, x[at : at + 8], y[at : at + 8])


@row(
    "script that never calls `elastic.init`",
    "refused",
    says="elastic.init",
    remark="call it first, or submit the script with `--launcher torchrun`",
)
def no_init() -> None:
    model = net()
    optimizer = sgd(model)
    for _ in range(EPOCHS):
        for x, y in itertools.islice(DataLoader(DATA, batch_size=GLOBAL_BATCH), PER_EPOCH):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()


@row("plain loop")
def plain() -> None:
    run, model = ready()
    train(run, model)
