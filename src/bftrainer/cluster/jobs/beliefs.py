"""Beliefs: what was learned of each script, shared by all trainers of it and stored for later ones.

The `Reconciler` asks for the belief of a trainer that is submitted or restored. Trainers add to it (`jobs.learning`),
and what has changed is stored with their progress.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from bftrainer.cluster.jobs.learning import add_measurements
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.scripts.beliefs import BeliefKey
from bftrainer.cluster.store.store import Store
from bftrainer.errors import BFTrainerError
from bftrainer.learning.trials import ScriptBelief

_TAKEN_UP = "beliefs.taken_up"
"""Key in the store: whether the measurements of trainers of earlier versions are part of the beliefs."""


def belief_key(owner: str, spec: TrainerSpec) -> BeliefKey:
    """Return what trainers that share a belief have in common."""
    return BeliefKey(owner, *spec.identity, spec.model)


class Beliefs:
    """The beliefs of scripts whose trainers are not finished, and their storage."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: WeakValueDictionary[BeliefKey, ScriptBelief] = WeakValueDictionary()
        """The beliefs that trainers use."""
        self._stored: dict[BeliefKey, tuple[int, int]] = {}
        """The state of each belief when it was stored last."""

    def of(self, key: BeliefKey) -> ScriptBelief:
        """Return the belief of a script. All trainers of the script get the same one."""
        known = self._known.get(key)
        if known is None:
            found = self._store.beliefs.of(key)
            known = ScriptBelief() if found is None else ScriptBelief.from_json(found)
            self._known[key], self._stored[key] = known, known.state
        return known

    def save(self, key: BeliefKey, now: float) -> None:
        """Store a belief if it has changed."""
        known = self._known.get(key)
        if known is not None and self._stored.get(key) != known.state:
            self._stored[key] = known.state
            self._store.beliefs.put(key, known.as_json(), now)

    def forget(self, key: BeliefKey) -> None:
        """Forget what is known of a script. Its trainers that run begin to measure anew."""
        self._store.beliefs.remove(key)
        known = self._known.get(key)
        if known is not None:
            known.forget()
            self._stored[key] = known.state

    def take_up(self, now: float) -> None:
        """Once after an upgrade, add what trainers measured before there were beliefs."""
        if self._store.kept(_TAKEN_UP):
            return
        for row in self._store.trainers():
            if not (row.learned or {}).get("in_use"):
                continue
            try:
                key = belief_key(row.owner, TrainerSpec.model_validate(row.spec))
            except (BFTrainerError, ValueError):
                continue  # a specification that this version refuses has no trainers that could use it
            belief = self.of(key)
            add_measurements(belief, row.id, row.learned)
            self.save(key, now)
        self._store.keep(_TAKEN_UP, True)
