"""Elastic fit of a Lightning Trainer: connects the Trainer's loops with the run.

It prepares the module, the optimizers and the data, joins the training, and has Lightning's fit loop begin where the
training is. Lightning's own loops stay in charge; some of their methods are wrapped in the objects of this Trainer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from bftrainer.elastic import Run
from bftrainer.elastic.torch.prepare.loader import PreparedLoader
from bftrainer.elastic.torch.prepare.preparation import ranks_submitted_for
from bftrainer.errors import InputError
from bftrainer.integrations.lightning.loaders import TrainBatches
from bftrainer.integrations.lightning.logged import LogCall
from bftrainer.integrations.lightning.main_rank import MainRankLoggers, set_rank
from bftrainer.integrations.lightning.metric_states import metric_objects
from bftrainer.integrations.lightning.package import lookup, package_of
from bftrainer.integrations.lightning.process_group import keep_to_itself
from bftrainer.integrations.lightning.record import FitRecord
from bftrainer.integrations.lightning.refusals import (
    refuse,
    refuse_module,
    refuse_several_loaders,
    refuse_validation_within_steps,
)
from bftrainer.integrations.lightning.results import ResultsRecord
from bftrainer.integrations.lightning.steps import FitSteps

_OWN_NAMES = ("loss", "epoch", "step")
"""Logs that are not reported: BFTrainer reports the loss of each step, and counts epochs and steps, itself."""
_EPOCH_HOOKS = ("on_train_epoch_end",)
"""Hooks in which all ranks must log the same values."""


class FitConnection:
    """Connection of one Trainer's fit loop with the run of its script."""

    def __init__(self, trainer: Any, strategy: Any, run: Run, *, accumulate: int | None, again: bool) -> None:
        refuse(trainer, again=again)
        self.trainer = trainer
        self.loop = run.preparation.framework
        self.has_joined = False
        """Whether this rank has its place among the others."""
        self._in_epochs = False
        self._strategy = strategy
        self._run = run
        self._accumulate = accumulate
        self._was_main = False
        self._loads_training = False  # the loader that Lightning sets up is the training loader
        self._batches: TrainBatches | None = None
        self._prepared: PreparedLoader | None = None
        epoch_loop = trainer.fit_loop.epoch_loop
        self._log = epoch_loop._results.log
        self._metrics: dict[str, Any] = {}
        self._loggers = MainRankLoggers(trainer.loggers)
        self.steps = FitSteps(trainer, run, self._metrics, self._log, self.follow_ranks)
        self.record = FitRecord(trainer, ResultsRecord(trainer, self._log), self._metrics, self._loggers)
        self._wrap()

    def _wrap(self) -> None:
        """Have the Trainer's loops call this object where many ranks make a difference."""
        fit_loop, connector = self.trainer.fit_loop, self.trainer._logger_connector
        epoch_loop = fit_loop.epoch_loop
        _around(fit_loop, "run", self._fit)
        _around(fit_loop, "setup_data", self._set_up_data)
        _around(fit_loop, "on_advance_start", self._begin_epoch)
        _around(fit_loop, "advance", self._run_epoch)
        _around(epoch_loop.automatic_optimization, "run", self._optimize)
        _around(epoch_loop.automatic_optimization, "_make_closure", self._make_closure)
        _around(epoch_loop.manual_optimization, "advance", self._optimize_manually)
        _around(epoch_loop._results, "log", self._log_value)
        _around(connector, "update_eval_epoch_metrics", self._share_evaluation)
        _around(connector, "log_metrics", self._report)
        keep_to_itself(self.trainer)

    # Where this rank is.

    @property
    def meets(self) -> bool:
        """Whether the other ranks run the same code now: from the top of the first epoch to the end of training."""
        return self._in_epochs and self.loop.is_training and self.trainer.state.status != "interrupted"

    @property
    def is_leaving(self) -> bool:
        """Whether this rank ends because its node was taken out of the training."""
        return self.loop.has_left

    def on_main(self, call: str, function: Callable[[], Any]) -> Any:
        """Call a function on the main rank and return its result on every rank."""
        self.refuse_within_step(call)
        result = self.loop.on_main(call, function)
        self.follow_ranks()
        return result

    def refuse_within_step(self, call: str) -> None:
        """Refuse a call for which ranks would have to wait for each other in the middle of a step."""
        if not self.steps.is_made:
            raise InputError(
                f"{call} was called between a batch and the step that it belongs to, when ranks compute different "
                "parts. Call it after a step: with accumulate_grad_batches, after the last batch of a step"
            )

    def follow_ranks(self) -> None:
        """Have Lightning know whether this is the main rank. Ranks change only within calls of the run."""
        set_rank(self._strategy.global_rank)
        is_main = self.has_joined and self._run.is_main
        if is_main and not self._was_main:
            self._loggers.became_main(goes_on=self.record.begun)
        self._was_main = is_main

    # The training loader.

    def _set_up_data(self, set_up: Callable[[], None]) -> None:
        self._loads_training = True
        try:
            set_up()
        finally:
            self._loads_training = False
        combined = self.trainer.fit_loop._combined_loader
        if combined is not None:
            refuse_several_loaders(combined)

    def process_loader(self, loader: Any) -> Any:
        """Return a loader of the script as Lightning uses it."""
        if not self._loads_training:
            return loader
        self._batches = TrainBatches(loader, ranks_submitted_for(), self._take)
        return self._batches

    def _take(self) -> Any:
        """Return this rank's data of the next batch."""
        trainer, steps = self.trainer, self.steps
        assert self._batches is not None
        fit_loop, automatic = trainer.fit_loop, trainer.lightning_module.automatic_optimization
        if steps.is_between:
            data, number = steps.next(), fit_loop._data_fetcher.fetched
        else:
            if steps.is_made:
                self._begin_where_checkpoint_was()
                self.record.release()
            number = math.ceil(self._run.progress.cursor / self._batches.samples)
            accumulate = trainer.accumulate_grad_batches
            count = min(accumulate - number % accumulate, trainer.num_training_batches - number)
            data = steps.take(count) if automatic else steps.take_one_more(self._accumulate)
            if steps.begins:
                self.record.hold()
            else:
                number = fit_loop._data_fetcher.fetched
        fit_loop._data_fetcher.fetched = number  # on a newcomer this is not its first batch
        return data

    def _begin_where_checkpoint_was(self) -> None:
        """Begin a training in mid-epoch if Lightning has loaded a checkpoint from there."""
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if self.record.begun or not done:
            return
        assert self._batches is not None
        cursor = min(done * self._batches.samples, len(self._batches.sampler))  # type: ignore[arg-type]
        self.loop.start_at(self.steps.epoch, cursor, self.trainer.global_step)

    # The fit loop.

    def _fit(self, run: Callable[[], None]) -> None:
        fit_loop = self.trainer.fit_loop
        fit_loop.setup_data()
        if self._batches is None:  # limit_train_batches=0
            run()
            return
        self._join()
        run()
        self._in_epochs = False
        self.loop.finish()
        self.follow_ranks()

    def _join(self) -> None:
        trainer, strategy = self.trainer, self._strategy
        module, batches = trainer.lightning_module, self._batches
        assert batches is not None
        refuse_module(module, strategy.optimizers)
        refuse_validation_within_steps(trainer)
        self._metrics.update(metric_objects(module))
        for metric in self._metrics.values():
            metric.distributed_available_fn = lambda: False  # all ranks have the same states
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scalers = [] if scaler is None else [scaler]
        objects = self._run.prepare(module, *strategy.optimizers, *scalers, batches.loader)
        self._prepared = objects[-1]
        if not module.automatic_optimization:
            self._prepared.batches.plan.max_batch = None  # training_step runs once per batch
        schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
        self._run.prepare(*schedulers, self.record)
        epochs = trainer.fit_loop.max_epochs
        self.loop.join(epochs if isinstance(epochs, int) and epochs >= 0 else None)
        self.has_joined = True
        if self.record.begun:
            self.record.begin_epoch_again()
        self.follow_ranks()
        if self._run.is_main and not self.record.begun and trainer.enable_autolog_hparams:
            lookup(package_of(trainer), "loggers.utilities._log_hyperparams")(trainer)

    def _begin_epoch(self, begin: Callable[[], None]) -> None:
        assert self._prepared is not None
        epoch = self.trainer.fit_loop.epoch_progress.current.processed
        if not self.record.begun and epoch:  # Lightning has loaded a checkpoint
            self.loop.start_at(epoch, 0, self.trainer.global_step)
        self.steps.epoch = epoch
        self.record.begin_epoch()
        self.loop.begin_epoch(self._prepared, epoch)
        self._in_epochs = True
        self.follow_ranks()
        self._loggers.repeats = self._run.progress.cursor > 0  # a newcomer begins an epoch that has long begun
        try:
            begin()
        finally:
            self._loggers.repeats = False

    def _run_epoch(self, run: Callable[[], None]) -> None:
        run()
        self.loop.end_epoch()
        self.steps.forget()
        self.record.release()

    # Steps.

    def _make_closure(self, make: Callable[..., Any], kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        return self.steps.closure(make, kwargs, optimizer, batch_idx)

    def _optimize(self, run: Callable[..., Any], *args: Any) -> Any:
        outputs = run(*args)
        self._settle()
        return outputs

    def _optimize_manually(self, advance: Callable[[Any], None], kwargs: Any) -> None:
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        self.steps.advance(advance, kwargs, progress)
        self._settle()

    def _settle(self) -> None:
        self.steps.settle()
        if self.steps.is_made and not self.steps.is_between:
            self.record.release()
            self._loggers.step_is_made()

    # Logged values.

    def _log_value(self, log: Callable[..., None], fx: str, name: str, value: Any, **options: Any) -> None:
        if self.steps.is_computing:
            self.steps.logged(LogCall(fx, name, value, options))
            return
        if self.meets and fx in _EPOCH_HOOKS and hasattr(value, "item"):
            value = self._same_on_all(fx, name, value)
        log(fx, name, value, **options)

    def _same_on_all(self, hook: str, name: str, value: Any) -> Any:
        """Return the main rank's value. Refuse values that ranks have computed from their own batches."""
        values = self.loop.of_all_ranks(f"self.log({name!r}) in {hook}", float(value))
        self.follow_ranks()
        if any(not math.isclose(one, values[0], rel_tol=1e-4) for one in values if one == one):
            raise InputError(
                f"self.log({name!r}) in {hook} has another value on each rank: {values}. A rank sees only its parts of "
                "the batches. Log the value in training_step, with on_epoch=True: then it is over all ranks"
            )
        return value.new_tensor(values[0])

    def _share_evaluation(self, update: Callable[[], Any]) -> Any:
        """Have all ranks decide by the results of the main rank, whose machine may round in another way."""
        trainer = self.trainer
        if self.meets and trainer.validating:
            results = trainer._results
            results.metrics(on_step=False)  # computes them
            values = {key: result._computed for key, result in results.valid_items() if result._computed is not None}
            shared = self.on_main("the results of the validation", lambda: values)
            for key, value in shared.items():
                results[key]._computed = value.to(self._strategy.root_device)
        return update()

    def _report(self, log: Callable[..., None], metrics: dict[str, Any], step: int | None = None) -> None:
        log(metrics, step)
        numbers = {name: float(value) for name, value in metrics.items() if getattr(value, "ndim", 0) == 0}
        self._run.report(**{name: value for name, value in numbers.items() if name not in _OWN_NAMES})


def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method of one object by a function that gets the method as its first argument."""
    setattr(owner, name, functools.partial(wrapper, getattr(owner, name)))
