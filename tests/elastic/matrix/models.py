"""Rows about the model: parameters that come later, buffers, types, wrappers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from matrix.recorder import begin
from matrix.rows import DATA, EPOCHS, GLOBAL_BATCH, fill, mse, net, row, sgd, train


@row("layers unfrozen in a later epoch (`if epoch >= 1:`)", remark="synchronised from then on")
def unfreezing() -> None:
    run = begin()
    model = net()
    model[0].requires_grad_(False)
    run.register(model=model, optimizer=sgd(model))
    for epoch in run.epochs(EPOCHS):
        if epoch >= 1:
            model[0].requires_grad_(True)
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            loss = mse(model(x), y)
            loss.backward()
            run.step(loss=loss)


@row(
    "layers unfrozen in one epoch only (`if epoch == 1:`)",
    remark="a node that joins later takes over which layers are trained",
)
def unfreezing_once() -> None:
    run = begin()
    model = net()
    model[0].requires_grad_(False)
    run.register(model=model, optimizer=sgd(model))
    for epoch in run.epochs(EPOCHS):
        if epoch == 1:
            model[0].requires_grad_(True)
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            loss = mse(model(x), y)
            loss.backward()
            run.step(loss=loss)


@row("`optimizer.add_param_group` in a later epoch", remark="synchronised from then on")
def add_param_group() -> None:
    run = begin()
    model = net()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.05, momentum=0.9)
    run.register(model=model, optimizer=optimizer)
    for epoch in run.epochs(EPOCHS):
        if epoch >= 1 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            loss = mse(model(x), y)
            loss.backward()
            run.step(loss=loss)


class Normalised(nn.Module):
    """Keeps a moving average of its inputs, as feature normalisers and codebooks do."""

    def __init__(self, kind: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16, dtype=kind))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.average


@row("EMA in a buffer", remark="rank 0's at every step, as under DDP", exact=False)
def ema_buffer() -> None:
    run = begin()
    model = net(Normalised())
    run.register(model=model, optimizer=sgd(model))
    train(run, model)


class Queue(nn.Module):
    """Keeps the features of the last samples, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("features", torch.zeros(50, 16, dtype=torch.float64))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            places = (self.position + torch.arange(len(x))) % len(self.features)
            self.features[places] = x.detach()
            self.position.add_(len(x)).remainder_(len(self.features))
        return x - self.features.mean(0)


@row("queue of features in a buffer", remark="rank 0's at every step, as under DDP", exact=False)
def queue_buffer() -> None:
    run = begin()
    model = net(Queue())
    run.register(model=model, optimizer=sgd(model))
    train(run, model)


@row("`nn.utils.parametrizations.spectral_norm`")
def spectral_norm() -> None:
    run = begin()
    model = net()
    torch.manual_seed(1)
    nn.utils.parametrizations.spectral_norm(model[0])
    run.register(model=model, optimizer=sgd(model))
    train(run, model)


class Counted(nn.Module):
    """Counts batches and marks what it saw, in small integers."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16, dtype=kind))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_((x.detach().mean(0) > 0).to(self.seen.dtype))
        return x


def integers(kind: torch.dtype) -> None:
    run = begin()
    model = net(Counted(kind))
    run.register(model=model, optimizer=sgd(model))
    train(run, model)


@row("int16 buffer", exact=False)
def int16_buffer() -> None:
    integers(torch.int16)


@row("uint8 buffer", exact=False)
def uint8_buffer() -> None:
    integers(torch.uint8)


@row("uint16 buffer")
def uint16_buffer() -> None:
    run = begin()
    model = net()
    model.register_buffer("table", torch.arange(8).to(torch.uint16))
    run.register(model=model, optimizer=sgd(model))
    train(run, model)


class Filtered(nn.Module):
    """Multiplies in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=16)


@row("complex64 parameters", exact=False)
def complex_parameters() -> None:
    run = begin()
    model = nn.Sequential(nn.Linear(8, 16), Filtered(), nn.Linear(16, 1))
    run.register(model=model, optimizer=sgd(model))
    train(run, lambda x: model(x.float()).double())


@row("bfloat16 parameters", exact=False)
def bfloat16_parameters() -> None:
    run = begin()
    model = net().bfloat16()
    run.register(model=model, optimizer=sgd(model))
    train(run, lambda x: model(x.bfloat16()).double())


@row("`BatchNorm`", remark="running statistics are averaged over the ranks", exact=False)
def batch_norm() -> None:
    run = begin()
    model = net(nn.BatchNorm1d(16))
    run.register(model=model, optimizer=sgd(model))
    train(run, model)


@row(
    "`SyncBatchNorm`",
    "refused",
    says="SyncBatchNorm",
    remark="`BatchNorm`: its running statistics are averaged at every step",
)
def sync_batch_norm() -> None:
    run = begin()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net(nn.BatchNorm1d(16)))
    run.register(model=model, optimizer=sgd(model))
    train(run, model)


@row(
    "`Embedding(sparse=True)`",
    "refused",
    says="sparse",
    remark="`sparse=False`",
)
def sparse_embedding() -> None:
    run = begin()
    table = nn.Embedding(4, 1, sparse=True)
    model = nn.ModuleDict({"net": net(), "table": table.double()})
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
    train(run, lambda x: model["net"](x) + table((x[:, 0] > 0).long()))


class Unused(nn.Module):
    """Has a layer that every second forward pass skips."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.extra(x) if self.calls % 2 else x


@row("layer that some ranks skip in some steps", remark="a skipped layer's gradient counts as zero", exact=False)
def skipped_layer() -> None:
    run = begin()
    model = net(Unused())
    run.register(model=model, optimizer=sgd(model))
    train(run, model)


@row("`torch.compile(model)`", remark="register the model itself or the compiled one")
def compiled() -> None:
    run = begin()
    model = net()
    run.register(model=model, optimizer=sgd(model))
    train(run, torch.compile(model))


@row(
    "`DistributedDataParallel(model)` after `elastic.init`",
    "refused",
    says="DistributedDataParallel",
    remark="leave the wrapper out: `run.step` sums the gradients",
)
def ddp_wrapper() -> None:
    run = begin()
    model = nn.parallel.DistributedDataParallel(net())
    run.register(model=model, optimizer=sgd(model))
    train(run, model)


@row(
    "`DistributedDataParallel(model)` within the loop",
    "refused",
    says="DistributedDataParallel",
    remark="leave the wrapper out: `run.step` sums the gradients",
)
def ddp_in_loop() -> None:
    run = begin()
    model = net()
    run.register(model=model, optimizer=sgd(model))
    wrapped: Any = None
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            wrapped = wrapped or nn.parallel.DistributedDataParallel(model)
            loss = mse(wrapped(x), y)
            loss.backward()
            run.step(loss=loss)


@row("moving average of the weights (`AveragedModel`)")
def averaged_model() -> None:
    run = begin()
    model = net()
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    fill(ema)
    run.register(model=model, optimizer=sgd(model), ema=ema)
    train(run, model, lambda: ema.update_parameters(model))
