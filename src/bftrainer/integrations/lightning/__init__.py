"""Lightning: makes the `Trainer` of a script elastic, by its strategy.

    from bftrainer.integrations.lightning import ElasticStrategy

    trainer = Trainer(strategy=ElasticStrategy(), max_epochs=10)
    trainer.fit(module)

It works with `lightning.pytorch` and with `pytorch_lightning`, whichever of them the script imports.
"""

from bftrainer.integrations.lightning.strategy import ElasticStrategy

__all__ = ["ElasticStrategy"]
