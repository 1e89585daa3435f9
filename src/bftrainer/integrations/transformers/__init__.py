"""Hugging Face Transformers: makes a `Trainer`, or a subclass of it, elastic.

    from bftrainer.integrations.transformers import elastic

    trainer = elastic(Trainer)(model=model, args=args, train_dataset=dataset)
    trainer.train()

`elastic` returns a subclass of the class it is given. A class of one's own can also inherit from `ElasticMixin`:
`class MyTrainer(ElasticMixin, Trainer)`.
"""

from bftrainer.integrations.transformers.trainer import ElasticMixin, ElasticTrainer, elastic

__all__ = ["ElasticMixin", "ElasticTrainer", "elastic"]
