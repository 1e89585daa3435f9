"""Elastic Trainer: a `Trainer` of Transformers whose training grows and shrinks while nodes come and go.

The Trainer's own loop stays in charge. It is entered in the middle of an epoch on ranks that join later, gets this
rank's parts of each batch, and never hears of a step that was lost: that one is made again within it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer

from bftrainer.errors import InputError
from bftrainer.integrations.transformers import by_part
from bftrainer.integrations.transformers.arguments import refuse, refuse_training
from bftrainer.integrations.transformers.checkpoints import checkpoint_to_start_from
from bftrainer.integrations.transformers.evaluation import SharedEvaluation, can_be_shared
from bftrainer.integrations.transformers.loaders import batch_numbers
from bftrainer.integrations.transformers.training import TrainerConnection

_HERE = "where the training is"
"""In place of a checkpoint: the Trainer's loop begins in the middle of an epoch only if it is given one."""


class ElasticMixin:
    """Makes a Trainer elastic: `class MyTrainer(ElasticMixin, Trainer)`. Methods can be overridden as usual."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        by_part.wrap(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self, Trainer):
            raise InputError("ElasticMixin is for classes of Trainer: class MyTrainer(ElasticMixin, Trainer)")
        refuse(self)
        self._elastic = TrainerConnection(self)

    # The training loop.

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train. See `Trainer.train`. A checkpoint is used only by a training that begins."""
        refuse_training(self, trial, again=self._elastic.is_used)
        self._elastic.is_used = True
        self._elastic.checkpoint = checkpoint_to_start_from(resume_from_checkpoint, self.args.output_dir)
        return super().train(None, trial, *args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: Any, *rest: Any) -> Any:
        """Count steps by the batches of all ranks together."""
        return super().set_initial_training_values(args, self._elastic.count_batches(dataloader), *rest)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of a step, over all ranks."""
        return int(super().get_total_train_batch_size(args)) * self._elastic.ranks

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume: Any, trial: Any
    ) -> tuple[int, int]:
        """Prepare all objects and join the training, which gives them their state and says where to begin."""
        connection, initialize = self._elastic, super()._init_training_state
        numbers = (max_steps, num_update_steps_per_epoch, num_train_epochs)
        initialize(*numbers, None, trial)
        connection.model, _ = super()._prepare_for_training(max_steps, connection.batches, None)
        connection.prepare_rest()

        def load(checkpoint: str) -> tuple[int, int]:
            self._load_from_checkpoint(checkpoint)
            self._load_optimizer_and_scheduler(checkpoint)
            self._load_scaler(checkpoint)
            place: tuple[int, int] = initialize(*numbers, checkpoint, trial)
            return place

        return connection.join(num_train_epochs, load)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Return what was prepared before this rank joined."""
        return self._elastic.model, self._elastic.batches

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if training:
            self._elastic.prepare_model()
        return super()._wrap_model(model, training=training, dataloader=dataloader)

    def _run_epoch(self, *, epoch: int, steps_in_epoch: int, **loop: Any) -> None:
        """Run an epoch from wherever it is. The batches that are done are skipped by their numbers."""
        done = self._elastic.begin_epoch(epoch)
        loop.update(
            train_dataloader=batch_numbers(steps_in_epoch),
            resume_from_checkpoint=_HERE if done else None,
            epochs_trained=epoch,
            steps_trained_in_current_epoch=done,
        )
        super()._run_epoch(epoch=epoch, steps_in_epoch=steps_in_epoch, **loop)
        self._elastic.end_epoch()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load nothing: random numbers are seeded for each batch, by its place in the training."""

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._elastic.finish()
        return super()._finalize_training(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log values, and report them to BFTrainer."""
        if self._elastic.loop.repeats:
            return  # another rank has logged this step, and its logs come with the state
        super().log(logs, *args, **kwargs)
        self._elastic.record.logged()
        self._elastic.report(logs)

    # Evaluation.

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        record = self._elastic.record
        if skip_scheduler and record.evaluated_at_start:  # before this rank came
            return {}
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        record.evaluated_at_start = record.evaluated_at_start or skip_scheduler
        return metrics

    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        """Evaluate. See `Trainer.evaluation_loop`. During training the ranks share the work."""
        connection, evaluate = self._elastic, super().evaluation_loop
        if not connection.loop.is_training or connection.run.world == 1 or not can_be_shared(self, dataloader):
            return evaluate(dataloader, description, *args, **kwargs)
        what = f"the {description.lower()}"
        shared = SharedEvaluation(self, connection.loop, dataloader, what)
        preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        self.gather_function = shared.gathered
        try:
            output = evaluate(shared, description, *args, **kwargs)
        finally:
            self.preprocess_logits_for_metrics = preprocess
            self.gather_function = self.accelerator.gather_for_metrics
        # All ranks decide by the numbers of one of them.
        metrics = connection.loop.on_main(f"the metrics of {what}", lambda: output.metrics)
        connection.follow_ranks()
        return output._replace(metrics=metrics)

    # Checkpoints.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        connection, save, push = self._elastic, super()._save_checkpoint, super()._push_from_checkpoint
        if not connection.loop.is_training:
            save(model, trial)
            return
        self.store_flos()
        folder = Path(super()._get_output_dir(trial))

        def write() -> str | None:
            connection.follow_ranks()  # this may be the main rank only since the last one was lost
            return connection.checkpoints.write(folder, lambda: save(model, trial), push)

        self.state.best_model_checkpoint = connection.loop.on_main("the checkpoint", write)
        connection.follow_ranks()

    def _get_output_dir(self, trial: Any) -> str:
        room = self._elastic.checkpoints.room
        return str(room) if room is not None else str(super()._get_output_dir(trial))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._elastic.checkpoints.room is not None:
            self._elastic.checkpoints.pushes = True
            return
        super()._push_from_checkpoint(checkpoint_folder)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: it trains several times in one process."""
        refuse_training(self, "a search", again=False)

    def end(self) -> None:
        """Finish the trackers. The process group belongs to BFTrainer."""
        for tracker in self.accelerator.trackers:
            tracker.finish()


class ElasticTrainer(ElasticMixin, Trainer):
    """The `Trainer` of Transformers, elastic."""


def elastic(trainer_class: type[Trainer]) -> type[Trainer]:
    """Return an elastic subclass of a Trainer class. It can be used as a decorator of a class too."""
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        got = trainer_class.__name__ if isinstance(trainer_class, type) else f"a {type(trainer_class).__name__}"
        raise InputError(f"elastic() takes a class of Trainer, such as elastic(Trainer)(model=…), but got {got}")
    if issubclass(trainer_class, ElasticMixin):
        return trainer_class
    if trainer_class is Trainer:
        return ElasticTrainer
    attributes = {"__module__": trainer_class.__module__, "__doc__": trainer_class.__doc__}
    return type(trainer_class.__name__, (trainer_class, ElasticTrainer), attributes)
