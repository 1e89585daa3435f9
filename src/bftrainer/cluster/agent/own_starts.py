"""Own starts: what an agent that belongs to an owner does before it starts anything.

It checks that the owner has signed the specification (`owners.signatures`) and that the order follows from it, so that
whoever controls the controller, or talks in its place, cannot have the owner's account run something else. It also
chooses the folders of the trainer, in the owner's home, and makes them: the controller may not write there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from bftrainer.cluster.owners import signatures
from bftrainer.cluster.owners.folders import OwnFolders
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.wire.messages import Prepare, Start
from bftrainer.elastic import protocol
from bftrainer.elastic.defaults import DDP_ENTRY
from bftrainer.errors import InputError
from bftrainer.processes import variables
from bftrainer.util import ids

_FREE = frozenset(
    {
        *(protocol.FOLLOW, protocol.SNAPSHOT_EVERY, protocol.SNAPSHOT_OWNER, protocol.CONTROLLER_START),
        *(protocol.RANKS, protocol.TRAINER, variables.STATE_ID),
    }
)
"""Variables that the controller sets. None of them names a file or a program."""
_FOLDERS = frozenset({protocol.SNAPSHOTS, protocol.OUTPUT, variables.COMPILED})
"""Variables for which the agent sets its own values, unless the owner has signed others."""

_Order = TypeVar("_Order", Start, Prepare)


@dataclass(frozen=True, slots=True)
class OwnStarts:
    """The rules of one owner's agent."""

    owner: str
    home: Path
    state_id: str

    def checked(self, order: _Order) -> _Order:
        """Return the order with the owner's own folders. Raises `BFTrainerError` if the owner has not signed it."""
        if order.spec is None:
            raise signatures.NotSignedError(f"the order has no specification that {self.owner} could have signed")
        signature = str(order.spec.get(signatures.FIELD, ""))
        signatures.check(order.spec, signature, signatures.read_key(self.home))
        spec = TrainerSpec.model_validate(dict(order.spec))
        self._check_follows(order, spec)
        trainer = str(getattr(order, "trainer", ""))  # a `Prepare` has none
        return replace(order, env={**order.env, **self._folders(trainer, spec)})

    def _check_follows(self, order: Start | Prepare, spec: TrainerSpec) -> None:
        """Refuse an order that does not follow from its specification."""
        if spec.launcher not in signatures.OWN_LAUNCHERS:
            raise signatures.NotSignedError(f"launcher {spec.launcher} is not for trainers that run as their owners")
        entry = DDP_ENTRY if spec.launcher == "ddp" else ()
        wanted: dict[str, tuple[object, object]] = {
            "arguments": (tuple(order.argv), (*entry, *spec.argv)),
            "folder": (order.cwd, spec.cwd),
            "interpreter": ((order.python, order.submitted_python), (spec.python, spec.submitted_python)),
            "variables": ({name: order.env.get(name) for name in spec.env}, spec.env),
        }
        others = sorted(order.env.keys() - spec.env.keys() - _FREE - _FOLDERS)
        wrong = [what for what, (given, signed) in wanted.items() if given != signed]
        wrong += [f"variable {name}" for name in others]
        if isinstance(order, Start):
            wrong += ["kind of program"] if order.program or not order.speaks else []
            wrong += [] if ids.is_trainer_id(order.trainer) else ["trainer"]
        if wrong:
            raise signatures.NotSignedError(
                f"the order to start it has another {wrong[0]} than {self.owner} has signed"
            )

    def _folders(self, trainer: str, spec: TrainerSpec) -> Mapping[str, str]:
        """Return the variables that name the trainer's folders, and make those folders."""
        own = OwnFolders(self.home)
        script = hashlib.sha256("\0".join(spec.identity).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        places = {variables.COMPILED: own.compiled / script}
        if trainer:
            places[protocol.SNAPSHOTS] = own.snapshots(self.state_id, trainer)
            places[protocol.OUTPUT] = own.output(self.state_id, trainer)
        chosen = {name: folder for name, folder in places.items() if name not in spec.env}
        try:
            for folder in chosen.values():
                own.make(folder)
        except OSError as problem:
            raise InputError(f"{problem.filename}: {problem.strerror}: trainers of {self.owner} write there") from None
        return {name: str(folder) for name, folder in chosen.items()}
