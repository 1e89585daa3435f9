"""Rows of a new group's members: what each rank tells the others before a state is sent.

`TrainingState` gathers them. All ranks decide from the same rows who sends the state and who takes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bftrainer.errors import InputError


@dataclass(frozen=True, slots=True)
class StateRow:
    """One rank's message to the others when a group is formed."""

    has_state: bool
    key: tuple[int, ...]
    inside: bool
    signature: str
    size: str
    follows: bool | None = False
    """Whether it has the trained tensors from before it joined. None: its BFTrainer is older and cannot know."""

    def written(self) -> bytes:
        """Return the row as it is sent."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, text: bytes) -> StateRow:
        """Read a row that was sent."""
        said = json.loads(text)
        known = said["has_state"], tuple(said["key"]), said["inside"], said["signature"], said["size"]
        return cls(*known, said.get("follows"))


def refuse_other_models(mine: StateRow, rows: Sequence[StateRow], source: int, rank: int) -> None:
    """Refuse to train with ranks that have another model. If some ranks train already, only newcomers are refused."""
    trains = rows[source].has_state
    other = next((n for n, row in enumerate(rows) if row.signature != mine.signature), None)
    if other is None or (trains and mine.signature == rows[source].signature):
        return
    seen = source if trains else other
    raise InputError(
        f"the ranks registered different models: rank {rank} has {mine.size}; rank {seen} has {rows[seen].size}. "
        "Shapes of parameters or their order differ. Does the script build the model differently by rank or node?"
    )
