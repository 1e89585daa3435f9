"""Ledger of a search: what the study's storage keeps about our trials, so that a killed driver can be restarted.

A trial is first marked as ours, then gets its parameters, then the name of its trainer, and only then is the trainer
submitted. A driver that finds a trial can tell from these marks which steps were done.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, cast

import optuna
from optuna.trial import FrozenTrial, TrialState

from bftrainer.hpo.plan import TrialOutcome

TAG = "bftrainer:tag"
"""Attribute of a study: its unique tag."""
OURS, NAME, TRAINER, PRUNED = "bftrainer:ours", "bftrainer:name", "bftrainer:trainer", "bftrainer:pruned"
REASON, HELD = "bftrainer:reason", "bftrainer:node_seconds"
VALUE_OF_EPOCH = "bftrainer:value_of_epoch"
"""Attributes of a trial."""

_STATES = {"complete": TrialState.COMPLETE, "failed": TrialState.FAIL, "pruned": TrialState.PRUNED}


class Ledger:
    """Reads and writes the driver's marks in a study."""

    def __init__(self, study: optuna.Study) -> None:
        self.study = study
        self.known = TAG in study.user_attrs
        """Whether a driver has worked on this study before."""
        if not self.known:
            study.set_user_attr(TAG, secrets.token_hex(4))
        self.tag = str(study.user_attrs[TAG])

    @property
    def is_named(self) -> bool:
        """Whether a user gave the study its name."""
        return not self.study.study_name.startswith("no-name-")

    def count(self) -> int:
        """Number of trials that were started."""
        return len(self._trials()) - len(self._trials(TrialState.WAITING))

    def left(self) -> list[optuna.Trial]:
        """Trials that an earlier driver started and did not see end."""
        found = []
        for trial in self._trials(TrialState.RUNNING):
            # The driver may have been killed before it could mark a trial; another program's trial has parameters soon.
            is_bare = self.known and not trial.params and not trial.user_attrs
            if is_bare or trial.user_attrs.get(OURS):
                found.append(optuna.Trial(self.study, trial._trial_id))
        return found

    def ask(self) -> optuna.Trial:
        """Ask the study for a trial and mark it as ours."""
        trial = self.study.ask()
        trial.set_user_attr(OURS, True)
        return trial

    def reached(self, trial: optuna.Trial) -> int:
        """The position of a trial's last report; 0 if it never reported."""
        return max(self._trials()[trial.number].intermediate_values, default=0)

    def tell(self, trial: optuna.Trial, outcome: TrialOutcome) -> FrozenTrial:
        """Tell the study how a trial ended."""
        if outcome.reason:
            trial.set_user_attr(REASON, outcome.reason)
        values = list(outcome.values) or None
        return self.study.tell(trial.number, values, _STATES[outcome.end], skip_if_finished=True)

    def node_seconds(self) -> float:
        """Node-seconds of the pool that the ended trials held."""
        return sum(float(trial.user_attrs.get(HELD, 0.0)) for trial in self._trials())

    def ends(self) -> Mapping[str, int]:
        """Number of trials by how they ended."""
        return {end: len(self._trials(state)) for end, state in _STATES.items()}

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)


def attribute(trial: optuna.Trial, key: str) -> Any:
    """A user attribute of a trial; None if it has none."""
    return cast(Mapping[str, Any], trial.user_attrs).get(key)
