"""Record of a Lightning training: the part of its state that is in no module, optimizer or scheduler.

It is registered with the run, so that newcomers and resumed trainings have it: the progress of Lightning's loops, what
was logged, the states of callbacks and the folders of loggers. Lightning counts a batch before it is computed. So from
the moment a batch is taken until its step is made, the record is that of before: a step that is lost has not been.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from bftrainer.elastic.torch.meetings.shared_values import packed, unpacked
from bftrainer.elastic.torch.state.transfer import FreshState, copied
from bftrainer.integrations.lightning.main_rank import MainRankLoggers
from bftrainer.integrations.lightning.metric_states import load_states, states_of
from bftrainer.integrations.lightning.results import ResultsRecord

_KNOWN_ATTRIBUTES = ("_last_global_step_saved", "_last_checkpoint_saved", "current_score")
"""Attributes of ModelCheckpoint by which it decides, and which are not in its `state_dict`."""
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
"""Attributes of Lightning's logger connector: the values that were logged last, by name."""

_Place = tuple[str, Any, str]
"""Key of a value in the state of Lightning's loops, the loop, and its attribute; an empty text for its own values."""


class FitRecord(FreshState):
    """The state of a Trainer's fit loop as a registered object."""

    def __init__(
        self, trainer: Any, results: ResultsRecord, metrics: Mapping[str, Any], loggers: MainRankLoggers
    ) -> None:
        self.begun = False
        """Whether a batch was taken, by this process or by the one from which the record comes."""
        self._trainer = trainer
        self._results = results
        self._metrics = metrics
        self._loggers = loggers
        self._held: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None  # what `state_dict` returned since the last step
        self._places: list[_Place] = []  # of the values of Lightning's loops, as of the present epoch

    def hold(self) -> None:
        """Keep the record as it is, because a batch was taken."""
        self.begun = True
        present = self._last or self._present()
        self._held = {**present, "begun": True, "versions": self._loggers.versions()}

    def release(self) -> None:
        """Follow the Trainer again, because the step was made."""
        self._held = self._last = None

    def state_dict(self) -> dict[str, Any]:
        """Return the record as plain values. It is taken before each step, so that a lost one can be undone."""
        if self._held is not None:
            return self._held
        self._last = self._present()
        return self._last

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the record of another rank, of a snapshot, or of an earlier moment."""
        self._last = None
        if self._held is not None:
            self._held = dict(state)  # Lightning is in the middle of a batch, which it goes on to compute
            return
        trainer = self._trainer
        self.begun = state["begun"]
        _load_loop(trainer.fit_loop, state["loops"], "")
        trainer.should_stop = state["should_stop"]
        trainer.fit_loop.epoch_loop.val_loop._has_run = state["validated"]
        connector = trainer._logger_connector
        connector._first_loop_iter, connector._current_fx = state["first_batch"], state["last_hook"]
        for name in _METRICS:
            setattr(connector, name, _on_device(state["logged"][name], trainer.strategy.root_device))
        load_states(self._metrics, state["metrics"])
        self._results.load(state["results"])
        self._loggers.use_versions(state["versions"])
        self._load_callbacks(state["callbacks"])

    def begin_epoch(self) -> None:
        """Look at the loops again: a script may have put others in their place."""
        self._places = []

    def begin_epoch_again(self) -> None:
        """Set Lightning's loops back to the top of the present epoch, where they begin. The first batch puts it right.

        A newcomer's code at the top of the epoch runs, and its effect on the record is undone.
        """
        fit_loop = self._trainer.fit_loop
        for progress in (fit_loop.epoch_progress.current, fit_loop.epoch_progress.total):
            progress.ready = progress.started = progress.completed = progress.processed
        for loop in _loops(fit_loop):
            loop.on_iteration_done()  # it does not restart from a checkpoint

    def _present(self) -> dict[str, Any]:
        trainer = self._trainer
        connector = trainer._logger_connector
        self._places = self._places or list(_places(trainer.fit_loop, ""))
        return {
            "begun": self.begun,
            "loops": _loop_state(self._places),
            "should_stop": bool(trainer.should_stop),
            "validated": bool(trainer.fit_loop.epoch_loop.val_loop._has_run),
            "first_batch": connector._first_loop_iter,
            "last_hook": connector._current_fx,
            "logged": {name: _plain(getattr(connector, name)) for name in _METRICS},
            "metrics": states_of(self._metrics),
            "results": self._results.state(),
            "versions": self._loggers.versions(),
            "callbacks": self._callbacks(),
        }

    def _callbacks(self) -> bytes:
        """Return the states of callbacks as bytes: they may hold times, and registered values must not differ."""
        states = {}
        for number, callback in enumerate(self._trainer.callbacks):
            known = {name: getattr(callback, name) for name in _KNOWN_ATTRIBUTES if hasattr(callback, name)}
            state = callback.state_dict()
            if state or known:
                states[f"{number} {callback.state_key}"] = {"state": state, "known": known}
        return packed(states, "the state of callbacks") if states else b""

    def _load_callbacks(self, raw: bytes) -> None:
        if raw == self._callbacks():
            return
        states = unpacked(raw) if raw else {}
        for number, callback in enumerate(self._trainer.callbacks):
            found = states.get(f"{number} {callback.state_key}")
            if found is None:
                continue
            if "dirpath" in found["state"] and hasattr(callback, "dirpath"):
                callback.dirpath = found["state"]["dirpath"]
            if found["state"]:
                callback.load_state_dict(found["state"])
            for name, value in found["known"].items():
                setattr(callback, name, value)


def _loops(loop: Any) -> list[Any]:
    """Return a loop of Lightning and the loops within it."""
    inner = [value for value in vars(loop).values() if hasattr(value, "on_iteration_done")]
    return [loop, *(found for one in inner for found in _loops(one))]


def _places(loop: Any, prefix: str) -> Iterator[_Place]:
    """Yield where the values are that `loop.state_dict()` returns: those of loops and of their progress objects."""
    yield f"{prefix}state_dict", loop, ""
    for name, value in vars(loop).items():
        if hasattr(value, "on_iteration_done"):
            yield from _places(value, f"{prefix}{name}.")
        elif dataclasses.is_dataclass(value) and hasattr(value, "from_state_dict"):
            yield f"{prefix}{name}", loop, name


def _loop_state(places: Sequence[_Place]) -> dict[str, Any]:
    """Return what `loop.state_dict()` returns. Lightning's own takes a millisecond, and this is done in each step."""
    return {
        key: _values(getattr(loop, name)) if name else copied(loop.on_save_checkpoint()) for key, loop, name in places
    }


def _values(progress: Any) -> dict[str, Any]:
    """Return the counts of a progress object, and of those within it."""
    return {
        name: value if type(value) is int or not hasattr(value, "__dict__") else _values(value)
        for name, value in vars(progress).items()
    }


def _load_loop(loop: Any, state: Mapping[str, Any], prefix: str) -> None:
    """Load the progress of a loop and the loops within it, without having them restart from a checkpoint."""
    loop._load_from_state_dict(dict(state), prefix)
    for name, value in vars(loop).items():
        if hasattr(value, "on_iteration_done"):
            _load_loop(value, state, f"{prefix}{name}.")


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in metrics.items()}


def _on_device(metrics: Mapping[str, Any], device: Any) -> dict[str, Any]:
    return {
        name: value.to(device, copy=True) if isinstance(value, Tensor) else value for name, value in metrics.items()
    }
