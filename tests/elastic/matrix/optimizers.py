"""Rows about optimizers: schedulers, losses, several optimizers, and steps made in other ways than by `run.step`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from matrix.recorder import begin
from matrix.rows import DATA, EPOCHS, GLOBAL_BATCH, mse, net, row, sgd, train, validation_loss

STEPS = EPOCHS * len(DATA) // GLOBAL_BATCH


@row("`MultiStepLR`")
def multi_step_lr() -> None:
    run = begin()
    model = net()
    optimizer = sgd(model)
    scheduler = lr_scheduler.MultiStepLR(optimizer, [10, 20, 30])
    run.register(model=model, optimizer=optimizer, scheduler=scheduler, scheduler_every="step")
    train(run, model)


@row("`SequentialLR` of a warm-up and `MultiStepLR`")
def sequential_lr() -> None:
    run = begin()
    model = net()
    optimizer = sgd(model)
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8), lr_scheduler.MultiStepLR(optimizer, [10, 20])]
    scheduler = lr_scheduler.SequentialLR(optimizer, parts, [8])
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    train(run, model, scheduler.step)


@row("`OneCycleLR`", remark="also moves the momentum")
def one_cycle_lr() -> None:
    run = begin()
    model = net()
    optimizer = sgd(model)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler, scheduler_every="step")
    train(run, model)


@row("`ReduceLROnPlateau` on a validation loss by `run.evaluate`", remark="all ranks get rank 0's number")
def reduce_lr_on_plateau() -> None:
    run = begin()
    model = net()
    optimizer = sgd(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            loss = mse(model(x), y)
            loss.backward()
            run.step(loss=loss)
        scheduler.step(run.evaluate(lambda: validation_loss(model)))


@row("learning rate that is a `numpy.float64`")
def numpy_lr() -> None:
    run = begin()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=np.logspace(-3, -1, 3)[1], weight_decay=np.float32(0.01))
    run.register(model=model, optimizer=optimizer)
    train(run, model)


@row(
    "`LBFGS`",
    "refused",
    says="LBFGS",
    remark="an optimizer without a closure, such as `Adam`",
)
def lbfgs() -> None:
    run = begin()
    model = net()
    run.register(model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    train(run, model)


@row(
    "`optimizer.step()` left in the loop",
    "refused",
    says="step() was called by the script",
    remark="remove it: `run.step()` steps the registered optimizers",
)
def left_over_step() -> None:
    run = begin()
    model = net()
    optimizer = sgd(model)
    run.register(model=model, optimizer=optimizer)
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            loss = mse(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)


@row(
    "`run.step()` without a backward pass",
    "refused",
    says="backward",
    remark="call `loss.backward()` first",
)
def no_backward() -> None:
    run = begin()
    model = net()
    run.register(model=model, optimizer=sgd(model))
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            run.step(loss=mse(model(x), y))


@row("gradient accumulation by several backward passes per step")
def several_backwards() -> None:
    run = begin()
    model = net()
    run.register(model=model, optimizer=sgd(model))
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
                (mse(model(inputs), targets) / 2).backward()
            run.step()


@row(
    "loss that is a sum (`reduction='sum'`)",
    "refused",
    says="mean",
    remark="`reduction='mean'`, with a larger learning rate",
)
def sum_loss() -> None:
    run = begin()
    model = net()
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.001))
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            loss = mse(model(x), y, reduction="sum")
            loss.backward()
            run.step(loss=loss)


@row("mixed precision with a `GradScaler`, clipping", exact=False)
def grad_scaler() -> None:
    run = begin()
    model = net().float()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    run.register(model=model, optimizer=sgd(model), scaler=scaler, clip_norm=1.0)
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(x.float())
            loss = mse(output.float(), y.float())
            scaler.scale(loss).backward()
            run.step(loss=loss)


class Gan:
    """A generator that maps each sample to another, and a discriminator."""

    def __init__(self, run: Any) -> None:
        self.g, self.d = net(), net()
        self.opt_g, self.opt_d = sgd(self.g), torch.optim.Adam(self.d.parameters(), lr=1e-3)
        run.register(g=self.g, d=self.d, opt_g=self.opt_g, opt_d=self.opt_d)

    def fake(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :7], self.g(x)], 1)

    def loss_d(self, x: Tensor) -> Tensor:
        real, fake = self.d(x), self.d(self.fake(x).detach())
        return nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()

    def loss_g(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(-self.d(self.fake(x))).mean()


@row("GAN 1:1: `run.step(optimizer=opt_d)`, then `run.step(optimizer=opt_g)`", of="opt_d")
def gan() -> None:
    run = begin()
    gan = Gan(run)
    for _ in run.epochs(EPOCHS):
        for x, _y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            gan.loss_d(x).backward()
            run.step(optimizer=gan.opt_d)
            gan.loss_g(x).backward()
            run.step(optimizer=gan.opt_g)


@row("GAN 5:1: the generator steps after every fifth batch", of="opt_d")
def gan_five_to_one() -> None:
    run = begin()
    gan = Gan(run)
    for epoch in run.epochs(EPOCHS):
        for x, _y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            batch = (epoch * len(DATA) + run.progress.cursor) // GLOBAL_BATCH
            gan.loss_d(x).backward()
            run.step(optimizer=gan.opt_d)
            if batch % 5 == 4:
                gan.loss_g(x).backward()
                run.step(optimizer=gan.opt_g)


@row(
    "GAN with both losses in one `run.step()`",
    "refused",
    says="optimizer=",
    remark="`run.step(optimizer=…)` after each loss",
)
def gan_one_step() -> None:
    run = begin()
    gan = Gan(run)
    for _ in run.epochs(EPOCHS):
        for x, _y in run.batches(DATA, global_batch=GLOBAL_BATCH):
            gan.loss_d(x).backward()
            gan.loss_g(x).backward()
            run.step()


@row("two optimizers for parts of one model, one `run.step()`")
def two_optimizers() -> None:
    run = begin()
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.05)
    second = torch.optim.Adam(model[2].parameters(), lr=1e-3)
    run.register(model=model, first=first, second=second)
    train(run, model)
