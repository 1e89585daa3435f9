"""Record of a Trainer: the part of its state that is in no model, optimizer or scheduler.

It is registered with the run, so that newcomers and resumed trainings have it: the counters of `TrainerState`, the
losses that are not logged yet, the switches of `TrainerControl`, and the states of callbacks (`ExportableState`).
What the script sets itself, such as max_steps, is not part of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState, TrainerControl

_COUNTERS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Fields of `TrainerState` that change during training, besides the history of logs."""
_LOSSES = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
"""Attributes of the Trainer from which it computes what it logs. A version may lack some."""


class TrainerRecord:
    """The state of a Trainer as a registered object.

    `on_news` is called with logs that another rank has made, if this rank has missed them.
    """

    def __init__(self, trainer: Trainer, on_news: Callable[[list[dict[str, Any]]], None]) -> None:
        self.evaluated_at_start = False
        """Whether the evaluation of `eval_on_start` was made."""
        self.is_complete = False
        """Whether the training was over when this state was saved."""
        self._trainer = trainer
        self._on_news = on_news
        self._known: int | None = None  # logs that this process has made or received; None before the first
        self._written = (0, b"")  # how many logs are written in these bytes

    def state_dict(self) -> dict[str, Any]:
        """Return the record as plain values. It is taken before each step, so that a lost one can be undone."""
        trainer = self._trainer
        return {
            "state": {name: getattr(trainer.state, name) for name in _COUNTERS},
            "max_steps": trainer.state.max_steps,
            # As bytes, because logs hold times, which differ from rank to rank; registered values must not.
            "log_history": self._history(),
            "losses": {name: getattr(trainer, name) for name in _LOSSES if hasattr(trainer, name)},
            "tr_loss": trainer._tr_loss.detach().clone() if hasattr(trainer, "_tr_loss") else None,
            "control": trainer.control.state()["args"],
            "callbacks": [callback.state()["attributes"] for callback in self._callbacks()],
            "evaluated_at_start": self.evaluated_at_start,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the record of another rank, of a snapshot, or of an earlier moment."""
        trainer = self._trainer
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        for name, value in state["losses"].items():
            setattr(trainer, name, value)
        if state["tr_loss"] is not None:
            trainer._tr_loss = state["tr_loss"].to(trainer.args.device, copy=True)
        self._load_control(state)
        for callback, attributes in zip(self._callbacks(), state["callbacks"], strict=False):
            for name, value in attributes.items():
                setattr(callback, name, value)
        self.evaluated_at_start = state["evaluated_at_start"]
        self._load_history(state["log_history"])

    def logged(self) -> None:
        """Note that this process has made the newest log itself."""
        self._known = len(self._trainer.state.log_history)

    def _load_control(self, state: Mapping[str, Any]) -> None:
        trainer, step = self._trainer, trainer_step(state)
        switches = dict(state["control"])
        stopped = switches["should_training_stop"] and step < state["max_steps"]
        self.is_complete = stopped or step >= trainer.state.max_steps > 0
        # A training that reached its last step goes on if the script has raised their number since.
        switches["should_training_stop"] = switches["should_training_stop"] and self.is_complete
        for name, value in switches.items():
            setattr(trainer.control, name, value)

    def _callbacks(self) -> list[ExportableState]:
        callbacks = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, ExportableState) and not isinstance(one, TrainerControl)]

    def _history(self) -> bytes:
        """Return the logs as JSON. New ones are appended to what was written before."""
        history = self._trainer.state.log_history
        count, written = self._written
        if len(history) < count:
            count, written = 0, b""
        for entry in history[count:]:
            written += json.dumps(entry, default=_plain).encode() + b"\n"
        self._written = (len(history), written)
        return written

    def _load_history(self, written: bytes) -> None:
        if written == self._history():
            return
        history = [json.loads(line) for line in written.splitlines()]
        self._trainer.state.log_history[:] = history
        self._written = (len(history), written)
        known, self._known = self._known, len(history)
        if known is not None and len(history) > known:
            self._on_news(history[known:])


def trainer_step(state: Mapping[str, Any]) -> int:
    """Return the number of steps in a saved record."""
    return int(state["state"]["global_step"])


def _plain(value: Any) -> Any:
    """Return a value that a callback has logged in a form that JSON knows."""
    if isinstance(value, torch.Tensor) or hasattr(value, "item"):
        return value.item() if getattr(value, "ndim", 0) == 0 else value.tolist()
    return str(value)
