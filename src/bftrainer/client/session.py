"""Session shared by `Client` and `AsyncClient`: the connection to a controller, and checks of arguments.

A lost connection is looked up again, as a restarted controller may have another port. A client that its user closed
stays closed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bftrainer.client.api import ApiClient, UnreachableError, find_controller
from bftrainer.client.polling import RetryPolicy
from bftrainer.cluster.config.load import load_config
from bftrainer.cluster.spec.states import STATES
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.suggest import closest

Ref = str | Mapping[str, Any]
"""A trainer: its id, its name, or its row."""
T = TypeVar("T")

_log = logging.getLogger("bftrainer.client")


class ClosedError(BFTrainerError):
    """Raised when the user has closed the client."""

    def __init__(self) -> None:
        super().__init__("the client is closed: make another one")


class Session:
    """Connection to a controller that is looked up again when it was lost."""

    def __init__(self, url: str | None, token: str | None, state: str | Path | None, patience_s: float) -> None:
        seconds("patience_s", patience_s, least=0.0)
        self._where = (url, token, None if state is None else Path(state))
        self._api: ApiClient | None = None
        self._met = False
        self.closed = False
        self.patience = RetryPolicy(lambda: patience_s if self._met else 0.0, time.monotonic, _log.warning)

    def answer(self, question: Callable[[ApiClient], T]) -> T:
        """Send one request to the controller, once."""
        if self.closed:
            raise ClosedError
        try:
            if self._api is None:
                url, token, state = self._where
                folder = load_config(overrides={"server.state": state}).state
                self._api = ApiClient(find_controller(folder, url, token))
            found = question(self._api)
        except UnreachableError:
            self._let_go()
            raise
        self._met = True
        return found

    def close(self) -> None:
        """Close the connection permanently."""
        self.closed = True
        self._let_go()

    def _let_go(self) -> None:
        if self._api is not None:
            self._api.close()
            self._api = None


def trainer_ref(ref: Ref) -> str:
    """The id or name of the trainer that `ref` stands for."""
    found = ref.get("id") if isinstance(ref, Mapping) else ref
    if not isinstance(found, str):
        raise InputError(f"a trainer must be its id, its name or its row, but got {ref!r:.80}")
    return found


def wait_targets(refs: Iterable[Ref] | None, group: str | None) -> list[str] | None:
    """Ids or names of the trainers to wait for; None: the members of the group."""
    if (refs is None) == (group is None):
        raise InputError("give either trainers or a group to wait for")
    if isinstance(refs, str | Mapping):
        raise InputError(f"trainers must be a list of them, but got {refs!r:.80}")
    return None if refs is None else [trainer_ref(ref) for ref in refs]


def seconds(name: str, value: object, *, least: float | None = None) -> float:
    """Check a time given by a caller: above 0, or at least `least`."""
    right = isinstance(value, int | float) and not isinstance(value, bool)
    if not right or not (value > 0 if least is None else value >= least):  # type: ignore[operator] # it is a number
        what = "above 0" if least is None else f"from {least:g} on"
        raise InputError(f"{name} must be a number of seconds {what}, but got {value!r:.80}")
    return float(value)  # type: ignore[arg-type]


def better(direction: str | None) -> str | None:
    """Check which values of a metric are better: `min`, `max`, or None, by its name."""
    if direction not in (None, "min", "max"):
        raise InputError(f"direction must be min, max or None, but got {direction!r:.80}")
    return direction


def in_state(state: str) -> str:
    """Check a state to filter by; empty: any."""
    if state and state not in STATES:
        near = closest(str(state), STATES)
        hint = f": did you mean {near!r}?" if near else ""
        raise InputError(f"state must be one of {', '.join(STATES)}, but got {state!r:.80}{hint}")
    return state
