"""Search driver: starts trials while there is room, watches their trainers and reports results to the study.

Everything that must outlive this process is written to the study before it is acted on (`ledger`), and trainers are
found by their names. So nothing is trained twice, whenever the driver or the controller is killed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from bftrainer.client.api import RefusedError
from bftrainer.client.client import Client, describe
from bftrainer.client.polling import Row, is_away
from bftrainer.cluster.spec.names import default_name
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.spec.trainer import TrainerSpec, parse_spec
from bftrainer.cluster.wire.api import StatusView
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.hpo.ledger import HELD, NAME, PRUNED, TRAINER, VALUE_OF_EPOCH, Ledger, attribute
from bftrainer.hpo.plan import SearchRules, TrialOutcome, number, outcome, tidy, trainer_name, value_of_epoch
from bftrainer.hpo.stopping import stoppable
from bftrainer.hpo.watch import TrialWatch

Space = Callable[[optuna.Trial], Sequence[object]]
Callback = Callable[[optuna.Study, FrozenTrial], object]

_TELL_AGAIN_S = 60.0
# A child of Optuna's logger: its lines are shown like Optuna's own, and silenced with them.
_log = logging.getLogger("optuna.bftrainer")


@dataclass(frozen=True, slots=True)
class SearchSummary:
    """Summary of a search, counted over all of its drivers."""

    complete: int
    pruned: int
    failed: int
    node_seconds: float
    """Node-seconds that the search's trainers held."""
    pool_node_seconds: float
    """Node-seconds that the pool offered while trials were under way."""

    @property
    def share(self) -> float:
        """The share of the pool's node-time that the trials held."""
        return self.node_seconds / self.pool_node_seconds if self.pool_node_seconds > 0 else 0.0

    def __str__(self) -> str:
        trials = f"{self.complete} trials complete, {self.pruned} pruned, {self.failed} failed"
        held = f"{self.node_seconds / 3600:.2f} of {self.pool_node_seconds / 3600:.2f} idle node-hours"
        return f"{trials}; they held {held} ({self.share:.0%})"


@dataclass(slots=True)
class _Going:
    """A trial that is under way."""

    trial: optuna.Trial
    spec: TrainerSpec
    maybe_there: bool
    """Whether the trial's trainer may have been submitted already."""
    submitted: bool = False
    """Whether the trial's trainer is known to the controller."""
    reported: int = 0
    """Position of the trial when its metric was last given to the pruner."""

    @property
    def name(self) -> str:
        assert self.spec.name is not None
        return self.spec.name


class Driver:
    """Driver of one search on one controller."""

    def __init__(
        self, study: optuna.Study, space: Space, client: Client, rules: SearchRules, callbacks: Sequence[Callback] = ()
    ) -> None:
        self._study, self._space, self._client, self._rules = study, space, client, rules
        self._callbacks = callbacks
        self._going: list[_Going] = []
        self._failures = 0
        self._last_reason = ""
        self._stopping = False
        self._told_at = -_TELL_AGAIN_S

    def run(self, script: str | Path, nodes: str | int, group: str | None, options: Mapping[str, Any]) -> SearchSummary:
        """Search until all trials have ended."""
        for key in ("name", "params"):
            if key in options:
                raise InputError(f"{key} is set for each trial: omit it")
        describe(script, nodes=nodes, group=group or "", **options)  # errors common to all trials, before the first
        status = self._client.status()
        self._ledger = Ledger(self._study)
        named = tidy(self._study.study_name, 56) if self._ledger.is_named else ""
        self._group = group or named or f"{default_name(str(script))[:40]}-{self._ledger.tag}"
        self._base = describe(script, nodes=nodes, group=self._group, **options)
        watch = TrialWatch(self._study, time.time)
        try:
            with stoppable(self._study) as stopped:
                self._search(status, watch, stopped)
        except KeyboardInterrupt:
            _log.warning(
                "interrupted: trainers of group %s keep running; start the search again to continue", self._group
            )
            raise
        finally:
            watch.close()
        if self._failures >= self._rules.max_failures:
            raise BFTrainerError(f"{self._failures} trials in a row failed; the last one: {self._last_reason}")
        return SearchSummary(
            **self._ledger.ends(),
            node_seconds=self._ledger.node_seconds(),
            pool_node_seconds=watch.pool_given,
        )

    def _search(self, status: StatusView, watch: TrialWatch, stopped: Callable[[], bool]) -> None:
        begun = time.monotonic()
        self._pick_up()
        watch.look(status["totals"]["node_seconds"], under_way=bool(self._going))
        while True:
            late = self._rules.timeout_s is not None and time.monotonic() - begun > self._rules.timeout_s
            if not late:
                self._begin(self._rules.parallel(status), stopped)
            if not self._going:
                return
            self._submit()
            time.sleep(self._rules.poll_s)
            status = self._client.status()
            watch.look(status["totals"]["node_seconds"], under_way=True)
            self._look({row["name"]: row for row in status["trainers"]})

    # Starting trials.

    def _pick_up(self) -> None:
        left = self._ledger.left()
        if left:
            _log.info("continuing with %d trials in progress", len(left))
        for trial in left:
            self._prepare(trial, earlier=True)

    def _begin(self, parallel: int, stopped: Callable[[], bool]) -> None:
        room = min(parallel - len(self._going), self._rules.n_trials - self._ledger.count())
        for _ in range(room):
            if self._stopping or stopped():
                return
            self._prepare(self._ledger.ask(), earlier=False)

    def _prepare(self, trial: optuna.Trial, *, earlier: bool) -> None:
        """Choose a trial's parameters and its trainer's name. A trial that already has them keeps them."""
        try:
            args = self._space(trial)
            if isinstance(args, str) or not isinstance(args, Sequence):
                raise InputError(f"space must return a list of arguments, but returned {args!r:.80}")
            name = attribute(trial, NAME) or trainer_name(self._group, self._ledger.tag, trial.number)
            spec = self._spec(name, [*self._base.args, *args], trial.params)
        except optuna.TrialPruned:
            self._end(trial, TrialOutcome("pruned"))
            return
        except Exception as problem:
            if attribute(trial, NAME) is not None:  # its trainer trains, and may end well
                raise BFTrainerError(
                    f"trial {trial.number} is in progress as {attribute(trial, NAME)}, but `space` does not give it "
                    f"the same parameters again ({type(problem).__name__}: {problem}): restore the search space, or "
                    "begin another study"
                ) from problem
            self._end(trial, TrialOutcome("failed", reason=f"{type(problem).__name__}: {problem}"))
            raise
        if attribute(trial, NAME) is None:
            trial.set_user_attr(NAME, name)
        self._going.append(_Going(trial, spec, maybe_there=earlier, reported=self._ledger.reached(trial)))

    def _spec(self, name: str, args: Sequence[object], params: Mapping[str, Any]) -> TrainerSpec:
        shown = {key: value if isinstance(value, int | float | str) else repr(value) for key, value in params.items()}
        texts = {key: str(value)[:200] for key, value in list(shown.items())[:100]}
        return parse_spec({**self._base.model_dump(), "name": name, "args": list(args), "params": texts})

    def _submit(self) -> None:
        """Submit trainers for all trials; a submission that fails now is tried again at the next poll."""
        for going in [going for going in self._going if not going.submitted]:
            # An earlier driver, or a request whose answer was lost, may have submitted it.
            row = self._find(going.name) if going.maybe_there else None
            if row is None and attribute(going.trial, TRAINER) is not None:
                self._gone(going)
                continue
            if row is None:
                going.maybe_there = True
                try:
                    row = self._client.submit_spec(going.spec)
                except BFTrainerError as problem:
                    # 409: the name is taken, by this very trainer; or no more trainers are accepted for now.
                    if not is_away(problem) and getattr(problem, "status", 0) != 409:
                        self._going.remove(going)
                        self._end(going.trial, TrialOutcome("failed", reason=str(problem)))
                        raise
                    self._say(f"no trainer can be submitted for trial {going.trial.number} now: {problem}")
                    return
            going.submitted = True
            going.trial.set_user_attr(TRAINER, row["id"])

    def _find(self, name: str) -> Row | None:
        try:
            return self._client.trainer(name)
        except RefusedError as problem:
            if problem.status != 404:
                raise
            return None

    def _say(self, what: str) -> None:
        if time.monotonic() - self._told_at >= _TELL_AGAIN_S:
            self._told_at = time.monotonic()
            _log.warning("%s", what)

    # Following trials to their end.

    def _look(self, rows: Mapping[str, Row]) -> None:
        for going in list(self._going):
            if not going.submitted:
                continue
            row = rows.get(going.name)
            if row is None or row["state"] in FINISHED:
                row = self._find(going.name)  # trainers that finished long ago are not listed
            if row is None:
                self._gone(going)
            elif row["state"] in FINISHED:
                self._settle(going, row)
            elif attribute(going.trial, PRUNED) or self._should_prune(going, row):
                going.trial.set_user_attr(PRUNED, True)  # before cancelling: without it the trial counts as failed
                row = self._client.cancel(row["id"])
                if row["state"] in FINISHED:
                    self._settle(going, row)

    def _should_prune(self, going: _Going, row: Row) -> bool:
        # A trainer that has trained to its end costs nothing any more.
        trains = (row.get("progress") or 0.0) < 1.0
        return self._report(going, row) and trains and going.trial.should_prune()

    def _report(self, going: _Going, row: Row) -> bool:
        """Give new values to the pruner. False if there are none, or the study has several objectives."""
        place = self._rules.place(row)
        value = number(row, self._rules.metrics[0])
        if len(self._rules.metrics) > 1 or value is None or place <= going.reported:
            return False
        going.trial.report(value, place)
        going.reported = place
        return True

    def _settle(self, going: _Going, row: Row) -> None:
        """Tell the study the outcome of a finished trainer."""
        going.trial.set_user_attr(HELD, row["node_seconds"])
        # A trainer that was done before it could be cancelled counts like any other.
        found = outcome(
            row, self._rules.metrics, pruned=bool(attribute(going.trial, PRUNED)) and row["state"] != "done"
        )
        if found.end == "complete":
            self._report(going, row)
            self._check_epoch(going, row)
        self._going.remove(going)
        self._end(going.trial, found)

    def _check_epoch(self, going: _Going, row: Row) -> None:
        """Warn if the value is not that of the whole training: the script may evaluate only now and then."""
        epoch = value_of_epoch(row, self._rules.metrics)
        if epoch is not None:
            going.trial.set_user_attr(VALUE_OF_EPOCH, epoch)
            what = " and ".join(self._rules.metrics)
            _log.warning(
                "Trial %d: %s was last reported after epoch %d of %d", going.trial.number, what, epoch, row["epoch"]
            )

    def _gone(self, going: _Going) -> None:
        self._going.remove(going)
        reason = f"its trainer {going.name} is not known to the controller any more: was its state folder replaced?"
        self._end(going.trial, TrialOutcome("failed", reason=reason))

    def _end(self, trial: optuna.Trial, found: TrialOutcome) -> None:
        told = self._ledger.tell(trial, found)
        if found.end == "failed":
            self._failures, self._last_reason = self._failures + 1, found.reason
            self._stopping = self._stopping or self._failures >= self._rules.max_failures
            _log.warning("Trial %d failed: %s", trial.number, found.reason)
        else:
            if self._failures < self._rules.max_failures:
                self._failures = 0
            shown = ", ".join(
                f"{name} {value:.6g}" for name, value in zip(self._rules.metrics, found.values, strict=False)
            )
            _log.info(
                "Trial %d %s%s, parameters %s", trial.number, found.end, f": {shown}" if shown else "", trial.params
            )
        for callback in self._callbacks:
            if callback(self._study, told) is True:
                self._stopping = True
