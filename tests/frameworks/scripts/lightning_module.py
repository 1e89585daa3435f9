"""A small regression with a Lightning `Trainer`: validation, callbacks, loggers, and manual optimization.

`lightning_module.py FOLDER OPTIONS`, where OPTIONS is a JSON object of arguments of `Trainer`, and of the following:
`plain` trains without BFTrainer, `package` is the package of Lightning, `kind` names a LightningModule, `ranks` is the
number of ranks that the batch size is for, `patience` stops early, `best` keeps the best checkpoints, `workers` load
the data, `shuffle` is that of the DataLoader, `ckpt_path` is given to fit().
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from bftrainer.integrations.lightning import ElasticStrategy

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
plain, kind, ranks = options.pop("plain", False), options.pop("kind", "automatic"), options.pop("ranks", 1)
patience, best, logs = options.pop("patience", None), options.pop("best", 0), options.pop("logs", True)
workers, shuffle = options.pop("workers", 0), options.pop("shuffle", True)
ckpt_path, accumulate = options.pop("ckpt_path", None), options.pop("accumulate", None)
pl = importlib.import_module(options.pop("package", "lightning.pytorch"))
os.environ["BFTRAINER_RANKS"] = str(ranks)
torch.set_default_dtype(torch.float64)


def data(count, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=draw)
    return TensorDataset(x, torch.sin(x).sum(1, keepdim=True))


class Regression(pl.LightningModule):
    """Automatic optimization, with schedulers per step and per epoch."""

    def __init__(self, scheduler="step"):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.train_error, self.val_error = MeanSquaredError(), MeanSquaredError()

    def training_step(self, batch, batch_idx):
        x, y = batch
        guess = self.net(x)
        loss = nn.functional.mse_loss(guess, y)
        self.train_error(guess, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("largest", guess.abs().max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("count", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("train_error", self.train_error, on_step=True, on_epoch=True)
        return {"loss": loss, "seen": len(x)}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        guess = self.net(x)
        self.val_error(guess, y)
        self.log("val_loss", nn.functional.mse_loss(guess, y), sync_dist=True)
        self.log("val_error", self.val_error)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-2)
        schedulers = {
            "step": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"},
            "epoch": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8), "interval": "epoch"},
            "plateau": {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
                "monitor": "val_loss",
            },
        }
        return {"optimizer": optimizer, "lr_scheduler": schedulers[self.hparams.scheduler]}


class Adversaries(pl.LightningModule):
    """Manual optimization of two optimizers, as in a GAN."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(6, 2), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        critics, generators = self.optimizers()
        real = torch.cat([y, y**2], 1)
        self.toggle_optimizer(critics)
        loss = nn.functional.softplus(self.critic(self.generator(x).detach())).mean()
        loss = loss + nn.functional.softplus(-self.critic(real)).mean()
        critics.zero_grad()
        self.manual_backward(loss)
        critics.step()
        self.untoggle_optimizer(critics)
        self.log("critic_loss", loss, on_epoch=True)
        self.toggle_optimizer(generators)
        loss = nn.functional.softplus(-self.critic(self.generator(x))).mean()
        generators.zero_grad()
        self.manual_backward(loss)
        generators.step()
        self.untoggle_optimizer(generators)
        self.log("train_loss", loss, on_epoch=True)

    def configure_optimizers(self):
        critics = torch.optim.Adam(self.critic.parameters(), lr=1e-2)
        return critics, torch.optim.Adam(self.generator.parameters(), lr=1e-2)


class Accumulating(Regression):
    """Manual optimization that steps after three batches."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss, on_epoch=True)
        self.manual_backward(loss / 3)
        if (batch_idx + 1) % 3 == 0 or batch_idx + 1 == self.trainer.num_training_batches:
            optimizer.step()
            optimizer.zero_grad()


KINDS = {
    "automatic": Regression,
    "per epoch": lambda: Regression("epoch"),
    "plateau": lambda: Regression("plateau"),
    "adversaries": Adversaries,
    "accumulating": Accumulating,
}
pl.seed_everything(3, verbose=False)
module = KINDS[kind]()
callbacks = []
if patience is not None:
    callbacks.append(pl.callbacks.EarlyStopping("val_loss", patience=patience, min_delta=options.pop("min_delta", 0.0)))
if best:
    callbacks.append(
        pl.callbacks.ModelCheckpoint(
            folder / "checkpoints", "{epoch}-{step}", monitor="val_loss", save_top_k=best, save_last=True
        )
    )
if logs:
    callbacks.append(pl.callbacks.LearningRateMonitor())
logger = pl.loggers.CSVLogger(folder, "logs") if logs else False
if not plain:
    options["strategy"] = ElasticStrategy(**({} if accumulate is None else {"accumulate": accumulate}))
arguments = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
trainer = pl.Trainer(
    **arguments | {"enable_checkpointing": bool(best), "default_root_dir": str(folder)} | options,
    callbacks=callbacks,
    logger=logger,
)
loaders = [DataLoader(data(90, 2), batch_size=4, shuffle=shuffle, num_workers=workers)]
if kind not in ("adversaries", "accumulating"):
    loaders.append(DataLoader(data(45, 3), batch_size=8))
trainer.fit(module, *loaders, ckpt_path=ckpt_path)
final = {
    "model": {name: value.cpu() for name, value in module.state_dict().items()},
    "lr": trainer.optimizers[0].param_groups[0]["lr"],
    "steps": trainer.global_step,
    "epoch": trainer.current_epoch,
    "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    "best": [str(Path(callback.best_model_path).name) for callback in trainer.checkpoint_callbacks],
    "score": [float(callback.best_model_score) for callback in trainer.checkpoint_callbacks],
    "logs": logger.log_dir if logs else None,
    "main": trainer.is_global_zero,
}
path = folder / f"final-{os.environ.get('BFTRAINER_WORKER', 'alone')}.pt"
with path.open("wb") as file:
    torch.save(final, file)
