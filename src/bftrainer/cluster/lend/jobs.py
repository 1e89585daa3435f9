"""`LenderJobs` runs the commands of Slurm that a lender needs, as its user.

These are `sbatch`, `squeue` and `scancel`, and `sinfo` once when the lender starts.

`sbatch` gets the lender's own script. `scancel` gets numbers of jobs, and Slurm ends those only that are this user's
and have the name of pilots.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from bftrainer.cluster.lend.pilot_files import PilotFiles
from bftrainer.cluster.lend.rules import PILOT_ID, LendRules
from bftrainer.cluster.pools.slurm.naming import PREFIX, pilot_comment, read_comment
from bftrainer.cluster.pools.slurm.runner import SlurmCommandError, SlurmRunner
from bftrainer.cluster.pools.slurm.submit.job import (
    PilotJob,
    cancel_words,
    command_environment,
    have_ended,
    job_number,
    sbatch_words,
)
from bftrainer.cluster.wire.lender_messages import LendPilot
from bftrainer.errors import InputError

_FORMAT = "%A|%j|%k"
_TIMEOUT_S = 20.0

_log = logging.getLogger(__name__)


class LenderJobs:
    """The jobs of a lender in Slurm."""

    def __init__(self, files: PilotFiles, rules: LendRules, runner: SlurmRunner | None = None) -> None:
        self._files = files
        self._rules = rules
        self._runner = runner or SlurmRunner(_TIMEOUT_S, command_environment(os.environ))

    def words(self, request: LendPilot, state_id: str) -> tuple[str, ...]:
        """Return the command that submits a pilot. The request was checked by `rules.check_submission`."""
        job = PilotJob(
            request.node,
            PREFIX + state_id,
            request.mark,
            pilot_comment(state_id, request.node, request.mark, request.pilot),
            request.partition,
            str(request.minutes),
            str(request.least_minutes) if request.least_minutes else "",
            request.account,
            request.qos,
            request.constraint,
            request.gpus,
            self._rules.options,
        )
        files = self._files
        return (*sbatch_words(job, files.folder, files.log(request.node)), str(files.script), request.pilot)

    async def check_partitions(self) -> None:
        """Raise `InputError` for a partition that does not exist. A Slurm that does not answer may answer later."""
        try:
            known = await self._runner.ask(("sinfo", "-h", "-a", "-o", "%R"), lambda text: frozenset(text.split()))
        except SlurmCommandError as problem:
            _log.warning("it is not known whether the partitions exist: %s", problem)
            return
        for name in sorted(self._rules.partitions - known):
            there = f"Slurm has {', '.join(sorted(known))}" if known else "Slurm has none"
            raise InputError(f"partition {name} does not exist: {there}")

    async def submit(self, request: LendPilot, state_id: str) -> int:
        """Submit a pilot and return its job."""
        return await self._runner.ask(self.words(request, state_id), job_number)

    async def cancel(self, jobs: Sequence[int], state_id: str, *, only_waiting: bool = False) -> None:
        """Cancel pilots. Jobs that are no pilots of this user are left alone by Slurm."""
        words = cancel_words(jobs, f"{os.getuid()}", PREFIX + state_id, only_waiting=only_waiting)
        try:
            await self._runner.ask(words, lambda text: None)
        except SlurmCommandError as problem:
            if not have_ended(problem):
                raise

    async def listed(self, state_id: str) -> dict[str, tuple[int, str]]:
        """Return the job and the node of each pilot that has not ended, by its id."""
        name = PREFIX + state_id
        words = ("squeue", "-h", "-a", f"--user={os.getuid()}", f"--name={name}", "-o", _FORMAT)
        return await self._runner.ask(words, lambda text: _read(text, name, state_id))


def _read(text: str, name: str, state_id: str) -> dict[str, tuple[int, str]]:
    jobs: dict[str, tuple[int, str]] = {}
    for line in text.splitlines():
        number, _, rest = line.partition("|")
        named, _, comment = rest.partition("|")
        pilot = read_comment(comment, state_id)
        if number.isdigit() and named == name and pilot is not None and PILOT_ID.fullmatch(pilot.id):
            jobs[pilot.id] = (int(number), pilot.node)
    return jobs
