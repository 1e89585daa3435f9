"""One rank of the benchmarks with `--framework lightning`: a Lightning Trainer, elastic or with its own DDP."""

from __future__ import annotations

import lightning
import torch.nn.functional as F  # noqa: N812 - what everybody calls it
from torch import optim
from torch.utils.data import DataLoader

import noting
from cnn import make_data, make_model

if noting.IS_PLAIN:
    strategy = "ddp"
else:
    from bftrainer.integrations.lightning import ElasticStrategy

    strategy = ElasticStrategy()


class Classifier(lightning.LightningModule):
    """The CNN as Lightning wants it."""

    def __init__(self):
        super().__init__()
        self.cnn = make_model()

    def training_step(self, batch, number):
        x, y = batch
        return F.cross_entropy(self.cnn(x), y)

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class NoteSteps(lightning.Callback):
    """Notes each step."""

    def on_train_batch_end(self, trainer, *rest):
        noting.step()


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=noting.RANKS if noting.IS_PLAIN else 1,
    strategy=strategy,
    max_epochs=-1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[NoteSteps()],
)
trainer.fit(Classifier(), DataLoader(make_data(), batch_size=32, shuffle=True))
