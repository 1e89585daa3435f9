"""`Submitter` submits and cancels pilots as one account; `Submitters` knows the one of each owner.

There are two ways to run pilots as their owners: `run_as.py`, where the controller may run commands as other accounts,
and `lenders.py`, where each user runs a lender. The pool treats both alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bftrainer.cluster.pools.slurm.read import Pilot
from bftrainer.cluster.pools.slurm.submit.job import PilotJob


@dataclass(frozen=True, slots=True)
class OwnedPilot:
    """A pilot of an owner that is to be submitted."""

    job: PilotJob
    id: str
    """Its id, in the comment of the job: nobody but the controller can make one."""
    invitation: Mapping[str, str]
    """The variables with which its agent joins."""


class Submitter(Protocol):
    """Submits and cancels pilots as the account of one owner. Every failure is a `SlurmCommandError`."""

    async def submit(self, pilot: OwnedPilot) -> int:
        """Submit a pilot and return its job. See `runner.is_refusal` for failures after which there may be a job."""

    async def cancel(self, pilots: Sequence[Pilot], *, only_waiting: bool = False) -> None:
        """Cancel pilots of this owner; with `only_waiting`, only those that have not started."""


class Submitters(Protocol):
    """The submitters of all owners."""

    def of(self, owner: str) -> Submitter:
        """Return the submitter of an owner. `SlurmCommandError` if there is none now."""

    def why_not(self, owner: str) -> str:
        """Return why there is no submitter for an owner now, as a sentence for them; empty if there is one."""

    def most(self, owner: str) -> int | None:
        """Return how many pilots an owner allows at most; None if owners do not say."""

    def log_of(self, owner: str, node: str) -> str:
        """Return the file of an owner with the output of the last pilot on a node, as a person would name it."""

    def describe(self) -> Mapping[str, Any]:
        """Return facts for `status`."""
