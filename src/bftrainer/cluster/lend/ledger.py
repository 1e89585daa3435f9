"""The ledger of a lender: which pilots it has submitted, and which of them have not ended.

It is a file without secrets that survives the lender. A pilot is entered before it is submitted, so that none is
forgotten whatever happens; ids of pilots that have ended are remembered for a while, so that no request is carried out
twice.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from bftrainer.errors import BFTrainerError
from bftrainer.util.files import replace_file

FILE = "pilots.json"
MOST_REMEMBERED = 20_000
"""Ids of ended pilots that are remembered."""
UNLISTED_S = 60.0
"""How long a pilot that Slurm does not list counts as present after its submission."""


@dataclass(frozen=True, slots=True)
class _LedgerEntry:
    node: str
    job: int
    """0: it may have been submitted, but Slurm did not say its number."""
    at: float
    """When it was submitted, in Unix seconds."""
    state_id: str
    """The id of the controller that it was submitted for: it is part of the job's name."""


class LentLedger:
    """The pilots of one lender."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._present: dict[str, _LedgerEntry] = {}
        self._ended: dict[str, None] = {}

    def load(self, state_id: str = "") -> None:
        """Read the file, if there is one. Pilots without the id of a controller are those of `state_id`."""
        try:
            data = json.loads(self._path.read_text())
            self._present = {
                str(pilot): _LedgerEntry(str(node), int(job), float(at), str(of[0]) if of else state_id)
                for pilot, (node, job, at, *of) in data["present"].items()
            }
            self._ended = dict.fromkeys(map(str, data["ended"]))
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise BFTrainerError(
                f"{self._path} cannot be read ({problem}): remove it; pilots that run are found by their names"
            ) from None

    @property
    def known(self) -> frozenset[str]:
        """The ids of all pilots that are remembered."""
        return frozenset((*self._present, *self._ended))

    @property
    def present_ids(self) -> frozenset[str]:
        """The ids of the pilots that have not ended, as far as is known."""
        return frozenset(self._present)

    @property
    def state_ids(self) -> frozenset[str]:
        """The ids of the controllers that pilots which have not ended were submitted for."""
        return frozenset(entry.state_id for entry in self._present.values())

    def jobs(self, pilots: Collection[str]) -> Mapping[str, list[int]]:
        """Return the jobs of those pilots that have not ended, by the id of their controller."""
        found: dict[str, list[int]] = {}
        for pilot, entry in self._present.items():
            if entry.job and pilot in pilots:
                found.setdefault(entry.state_id, []).append(entry.job)
        return found

    @property
    def present(self) -> int:
        """Number of pilots that have not ended, as far as is known."""
        return len(self._present)

    def job(self, pilot: str) -> int:
        """Return the job of a pilot that has not ended; 0 if it is not known."""
        entry = self._present.get(pilot)
        return 0 if entry is None else entry.job

    def submitting(self, pilot: str, node: str, now: float, state_id: str) -> None:
        """Enter a pilot that is about to be submitted."""
        self._present[pilot] = _LedgerEntry(node, 0, now, state_id)
        self._write()

    def submitted(self, pilot: str, job: int) -> None:
        """Enter the job of a pilot."""
        self._present[pilot] = replace(self._present[pilot], job=job)
        self._write()

    def ended(self, *pilots: str) -> None:
        """Enter the end of pilots, or that they were never submitted."""
        for pilot in pilots:
            if self._present.pop(pilot, None) is not None:
                self._ended[pilot] = None
        while len(self._ended) > MOST_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        if pilots:
            self._write()

    def listed(self, jobs: Mapping[str, tuple[int, str]], now: float, state_id: str) -> list[str]:
        """Compare with the pilots of one controller that Slurm lists, by id: job and node. Returns those that ended."""
        for pilot, (job, node) in jobs.items():
            if self.job(pilot) != job:  # the answer of sbatch was lost, or this file
                self._present[pilot] = _LedgerEntry(node, job, now, state_id)
        gone = [
            pilot
            for pilot, entry in self._present.items()
            if entry.state_id == state_id and pilot not in jobs and (entry.job or now - entry.at > UNLISTED_S)
        ]
        self.ended(*gone)
        return gone

    def _write(self) -> None:
        present = {pilot: astuple(entry) for pilot, entry in self._present.items()}
        replace_file(self._path, json.dumps({"present": present, "ended": list(self._ended)}) + "\n")
