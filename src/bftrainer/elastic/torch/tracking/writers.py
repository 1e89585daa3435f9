"""Writers: the interface through which a tracker writes to TensorBoard, W&B or MLflow, and which ones there are.

A writer is opened on the main rank, by the first value that is to be written there. When another rank becomes the main
one, it is closed here and opened there, for the same run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from bftrainer.elastic.torch.tracking.journal import LoggedValues, TrackerJournal
from bftrainer.errors import InputError
from bftrainer.util.suggest import unknown


class TrackerWriter(Protocol):
    """Writes values to one run."""

    def write(self, logged: LoggedValues) -> None:
        """Write the values of a step. What was written is not lost if this process is killed, or is in the journal."""

    def close(self) -> None:
        """Stop writing; the run goes on elsewhere."""

    def finish(self) -> None:
        """Stop writing and mark the run as complete."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a writer needs to know to open a run."""

    run: str
    """The run's id, the same for all processes of the training."""
    name: str
    """A name to show, if the options have none."""
    folder: Path
    """The trainer's output folder."""
    journal: TrackerJournal
    """What was logged to the run before."""
    options: Mapping[str, Any]
    """The options that the script gave."""


@dataclass(frozen=True, slots=True)
class _Kind:
    package: str
    module: str
    writer: str
    reserved: tuple[str, ...] = ()


_HERE = "bftrainer.elastic.torch.tracking"
KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "tensorboard": _Kind("tensorboard", f"{_HERE}.tensorboard_writer", "TensorBoardWriter", ("purge_step",)),
        "wandb": _Kind("wandb", f"{_HERE}.wandb_writer", "WandbWriter", ("id", "resume")),
        "mlflow": _Kind("mlflow", f"{_HERE}.mlflow_writer", "MlflowWriter", ("run_id",)),
    }
)
"""The trackers by name. Their packages are extras of BFTrainer of the same names."""


def check_kind(kind: object, options: Mapping[str, Any]) -> str:
    """Return the name of a tracker if it exists, is installed, and can take the options."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"run.tracker: {unknown('tracker', kind, KINDS)}")
    known = KINDS[kind]
    if importlib.util.find_spec(known.package) is None:
        raise InputError(
            f"run.tracker({kind!r}) needs the package {known.package}, which this environment does not have: "
            f"pip install 'bftrainer[{kind}]'"
        )
    for option in known.reserved:
        if option in options:
            raise InputError(
                f"run.tracker({kind!r}) must not be given `{option}`: it chooses the run itself, so that the run is "
                "the same after the loss of nodes"
            )
    return kind


def opener(kind: str) -> Callable[[Opening], TrackerWriter]:
    """Return the function that opens a run of a tracker. Its package is imported when that is called."""

    def open_writer(opening: Opening) -> TrackerWriter:
        writer: Callable[[Opening], TrackerWriter] = getattr(
            importlib.import_module(KINDS[kind].module), KINDS[kind].writer
        )
        return writer(opening)

    return open_writer
