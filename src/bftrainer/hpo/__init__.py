"""Hyperparameter search on nodes that come and go: an Optuna study whose trials are trainers.

`optimize` replaces `study.optimize`: it asks the study for trials, has the controller train each of them, and tells the
study the results. It may be killed at any moment and started again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bftrainer.errors import BFTrainerError, InputError

if TYPE_CHECKING:
    import optuna

    from bftrainer.client import Client
    from bftrainer.hpo.driver import Callback, SearchSummary

__all__ = ["optimize"]

PATIENCE_S = 3600.0


def optimize(
    study: optuna.Study,
    script: str | Path,
    space: Callable[[optuna.Trial], Sequence[object]],
    *,
    n_trials: int,
    metric: str | Sequence[str],
    nodes: str | int = "1-64",
    max_parallel: int | None = None,
    prune_by: str = "epoch",
    prune_every: int = 1,
    group: str | None = None,
    client: Client | None = None,
    timeout_s: float | None = None,
    callbacks: Sequence[Callback] = (),
    max_failures: int = 10,
    poll_s: float = 1.0,
    **options: Any,
) -> SearchSummary:
    """Run the trials of a study as trainers, until it has `n_trials` of them in total.

    `space` receives a trial and returns the script's arguments for it. `metric` names the metric that the script
    reports (one for each objective of the study); its last value is the trial's value. Reported values go to the
    study's pruner, which may end a trial: `prune_by` epoch, step or samples, rounded down to `prune_every` of them. At
    most `max_parallel` trainers run at once; if None, the controller's max parallel, or 10 if that is automatic.
    `options` are those of `Client.submit`.

    Started again on the same storage, it continues with the trials that are under way. A trial fails if its trainer
    fails, or if the metric was not reported; after `max_failures` in a row this raises `BFTrainerError`. `callbacks`
    are called with the study and each trial that has ended. If one returns True, no more trials are started; nor after
    `timeout_s`.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise BFTrainerError("bftrainer.hpo needs the package optuna: pip install 'bftrainer[optuna]'") from None
    if not isinstance(study, optuna.Study):
        raise InputError(f"study must be an Optuna study, but got {study!r:.80}")
    try:
        from bftrainer.client import Client
        from bftrainer.hpo.driver import Driver
        from bftrainer.hpo.plan import SearchRules
    except ModuleNotFoundError as problem:
        if (problem.name or "bftrainer").partition(".")[0] == "bftrainer":
            raise
        raise BFTrainerError(f"bftrainer.hpo needs the package {problem.name}: pip install 'bftrainer[live]'") from None
    rules = SearchRules.checked(
        n_trials=n_trials,
        metric=metric,
        objectives=len(study.directions),
        max_parallel=max_parallel,
        prune_by=prune_by,
        prune_every=prune_every,
        max_failures=max_failures,
        poll_s=poll_s,
        timeout_s=timeout_s,
    )
    own = Client(patience_s=PATIENCE_S) if client is None else None
    try:
        driver = Driver(study, space, client or own, rules, callbacks)  # type: ignore[arg-type] # one of them is
        return driver.run(script, nodes, group, options)
    finally:
        if own is not None:
            own.close()
