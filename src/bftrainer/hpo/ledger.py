"""What a study's storage keeps of our trials, so that a driver that is killed at any instant can be started again.

A trial is marked as ours, then it gets its parameters, then the name of its trainer, and only then is the trainer
submitted: whoever finds a trial knows by these what was done already.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, cast

import optuna
from optuna.trial import FrozenTrial, TrialState

from bftrainer.hpo.plan import Outcome

TAG = "bftrainer:tag"
"""Of a study: a text of its own."""
OURS, NAME, TRAINER, PRUNED = "bftrainer:ours", "bftrainer:name", "bftrainer:trainer", "bftrainer:pruned"
REASON, HELD = "bftrainer:reason", "bftrainer:node_seconds"
VALUE_OF_EPOCH = "bftrainer:value_of_epoch"
"""Of a trial."""

_STATES = {"complete": TrialState.COMPLETE, "failed": TrialState.FAIL, "pruned": TrialState.PRUNED}


class Ledger:
    """A study, as far as its driver writes to it."""

    def __init__(self, study: optuna.Study) -> None:
        self.study = study
        self.known = TAG in study.user_attrs
        """A driver has been here before."""
        if not self.known:
            study.set_user_attr(TAG, secrets.token_hex(4))
        self.tag = str(study.user_attrs[TAG])

    @property
    def is_named(self) -> bool:
        """Whether somebody gave the study its name."""
        return not self.study.study_name.startswith("no-name-")

    def count(self) -> int:
        """Trials that were begun."""
        return len(self._trials()) - len(self._trials(TrialState.WAITING))

    def left(self) -> list[optuna.Trial]:
        """Trials that an earlier driver began and did not see end."""
        found = []
        for trial in self._trials(TrialState.RUNNING):
            # It may have been killed before it could mark a trial; another program's trial has parameters soon.
            is_bare = self.known and not trial.params and not trial.user_attrs
            if is_bare or trial.user_attrs.get(OURS):
                found.append(optuna.Trial(self.study, trial._trial_id))
        return found

    def ask(self) -> optuna.Trial:
        """A trial, marked as ours."""
        trial = self.study.ask()
        trial.set_user_attr(OURS, True)
        return trial

    def reached(self, trial: optuna.Trial) -> int:
        """How far a trial was when it last reported; 0 if it never did."""
        return max(self._trials()[trial.number].intermediate_values, default=0)

    def tell(self, trial: optuna.Trial, outcome: Outcome) -> FrozenTrial:
        """How a trial ended."""
        if outcome.reason:
            trial.set_user_attr(REASON, outcome.reason)
        values = list(outcome.values) or None
        return self.study.tell(trial.number, values, _STATES[outcome.end], skip_if_finished=True)

    def node_seconds(self) -> float:
        """What the trials that have ended held of the pool."""
        return sum(float(trial.user_attrs.get(HELD, 0.0)) for trial in self._trials())

    def ends(self) -> Mapping[str, int]:
        """How many trials ended how."""
        return {end: len(self._trials(state)) for end, state in _STATES.items()}

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)


def attribute(trial: optuna.Trial, key: str) -> Any:
    """What is known of a trial; None if that is nothing."""
    return cast(Mapping[str, Any], trial.user_attrs).get(key)
