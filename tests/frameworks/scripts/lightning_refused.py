"""Prints, as JSON, what a Lightning Trainer with the elastic strategy says to things that it refuses.

`lightning_refused.py NAME…`, for the names of some cases. A process trains once, so of the cases in which the training
begins only the last can be one.
"""

import json
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset
from torchmetrics import AUROC

from bftrainer.errors import InputError
from bftrainer.integrations.lightning import ElasticStrategy

DATA = TensorDataset(torch.randn(40, 2, generator=torch.Generator().manual_seed(0)))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


class Module(pl.LightningModule):
    def __init__(self, **methods):
        super().__init__()
        self.net = self.backbone = torch.nn.Linear(2, 1)
        for name, method in methods.items():
            setattr(self, name, method.__get__(self))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Own(BatchSampler):
    pass


def loader(**options):
    return DataLoader(DATA, batch_size=4, **options)


def lbfgs(self):
    return torch.optim.LBFGS(self.parameters())


def gathers(self, batch, batch_idx):
    return self.all_gather(self.net(batch[0]).square().mean())


def validates(self, batch, batch_idx):
    return None


def returns_nothing(self, batch, batch_idx):
    return None


class Ranking(Module):
    def __init__(self):
        super().__init__()
        self.ranking = AUROC("binary")

    def training_step(self, batch, batch_idx):
        guess = self.net(batch[0])
        self.ranking.update(torch.sigmoid(guess[:, 0]), (batch[0][:, 0] > 0).long())
        return guess.square().mean()


CASES = {
    "devices": ({"devices": 4}, Module(), loader()),
    "num_nodes": ({"num_nodes": 2}, Module(), loader()),
    "reload": ({"reload_dataloaders_every_n_epochs": 1}, Module(), loader()),
    "val_check_interval": (
        {"accumulate_grad_batches": 2, "val_check_interval": 3},
        Module(validation_step=validates),
        loader(),
    ),
    "time": ({"val_check_interval": "00:00:10:00"}, Module(), loader()),
    "averaging": ({"callbacks": [StochasticWeightAveraging(0.1)]}, Module(), loader()),
    "finetuning": ({"callbacks": [BackboneFinetuning()]}, Module(), loader()),
    "stream": ({}, Module(), DataLoader(Stream(), batch_size=4)),
    "batch sampler": ({}, Module(), DataLoader(DATA, batch_sampler=Own(SequentialSampler(DATA), 4, False))),
    "several loaders": ({}, Module(), CombinedLoader([loader(), loader()])),
    "no loader": ({}, Module(), [[torch.randn(4, 2)]]),
    "lbfgs": ({}, Module(configure_optimizers=lbfgs), loader()),
    "gather": ({}, Module(training_step=gathers), loader()),
    "metric": ({}, Ranking(), loader()),
    "none": ({}, Module(training_step=returns_nothing), loader()),
}
said = {}
for name in sys.argv[1:]:
    options, module, data = CASES[name]
    shown = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, strategy=ElasticStrategy(), **shown | options)
    try:
        trainer.fit(module, data, loader())
    except InputError as problem:
        said[name] = str(problem)
    else:
        said[name] = "nothing"
print(json.dumps(said))
