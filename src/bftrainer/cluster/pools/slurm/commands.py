"""`Slurm` asks and tells Slurm what the `slurm` pool needs, through a `SlurmRunner`.

None of its methods blocks the event loop. Every failure is a `SlurmCommandError`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bftrainer.cluster.pools.script.discovery import DiscoveryError, run
from bftrainer.cluster.pools.slurm.hardware import LAYOUT_FORMAT, SiteLayout, read_layout
from bftrainer.cluster.pools.slurm.naming import PREFIX
from bftrainer.cluster.pools.slurm.read import (
    Jobs,
    OwnerOf,
    Pilot,
    SlurmNode,
    job_format,
    new_separator,
    read_jobs,
    read_nodes,
)
from bftrainer.cluster.pools.slurm.reservations import ReservationWatch, read_reservations
from bftrainer.cluster.pools.slurm.runner import SlurmCommandError, SlurmRunner
from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from bftrainer.cluster.pools.slurm.submit.job import (
    cancel_words,
    command_environment,
    have_ended,
    job_number,
    submission,
)
from bftrainer.errors import InputError
from bftrainer.traces.recorder.record import SINFO

PROGRAMS = ("sinfo", "squeue", "sbatch", "scancel")
_DRAIN_STEP_S = 0.2
_AT_ONCE = 500
"""Largest number of jobs cancelled by one command."""


class Slurm:
    """Runs Slurm commands for the pilots of one controller."""

    def __init__(
        self, settings: SlurmSettings, folder: Path, state_id: str, mark: str, owner_of: OwnerOf | None = None
    ) -> None:
        """Keep the environment and the output of pilots in `folder`, which the nodes must see.

        `owner_of` says which jobs are pilots, where pilots have owners; they are submitted by others.
        """
        self.name = PREFIX + state_id
        self.mark = mark
        self._environment = command_environment(os.environ)
        self.runner = SlurmRunner(settings.command_timeout_s, self._environment)
        self.answers = self.runner.answers
        self._settings = settings
        self._folder = folder
        self._owner_of = owner_of
        self._reservations = ReservationWatch(settings.renew_s)

    async def nodes(self) -> dict[str, SlurmNode]:
        """Return the nodes of the partition, by name. Nodes that are reserved soon are marked as wanted back."""
        form = "%N %f %T" if self._settings.constraint else SINFO[-1]
        nodes = await self.runner.ask((*SINFO[:-1], form, "-p", self._settings.partition), read_nodes)
        if self._reservations.ask_now():
            with suppress(SlurmCommandError):  # without an answer, time limits and states of nodes still hold
                self._reservations.learned(
                    await self.runner.ask(("scontrol", "show", "reservation", "-o"), read_reservations)
                )
        return self._reservations.marked(nodes)

    async def layout(self) -> SiteLayout:
        """Return the partitions and the kinds of nodes of the site."""
        return await self.runner.ask(("sinfo", "-a", "-h", "--exact", "-o", LAYOUT_FORMAT), read_layout)

    def reservations(self) -> Mapping[str, frozenset[str]]:
        """Return the nodes of each reservation, as last read."""
        return self._reservations.by_name()

    async def jobs(self, *, only_ours: bool = False) -> Jobs:
        """Return our jobs, including those that ended a moment ago, and those of others that wait for nodes.

        With `only_ours` Slurm looks up one user's jobs. The format is passed in the environment, which other users
        cannot read: whoever could read the separator, could write it into a comment.
        """
        separator = new_separator()
        ours = (f"--name={self.name}", *(() if self._owner_of else (f"--user={os.getuid()}",))) if only_ours else ()
        return await self.runner.ask(
            ("squeue", "-a", *ours, "--states=all"),
            lambda text: read_jobs(text, self.name, os.getuid(), separator, self._owner_of),
            environment={**self._environment, "SQUEUE_FORMAT2": job_format(separator)},
            encoding="latin-1",
        )

    async def submit(self, node: str, *, short: bool, gpus: str = "") -> int:
        """Submit the pilot of a node and return its job id. `gpus` has the GPUs of the node, such as `gpu:a100:4`.

        Even after a `SlurmCommandError` it may have been submitted.
        """
        settings = self._settings
        argv = submission(settings, self._folder, node, self.name, self.mark, short=short, gpus=gpus)
        return await self.runner.ask(argv, job_number)

    async def cancel(self, jobs: Sequence[int], *, only_waiting: bool = False) -> None:
        """Cancel pilots; with `only_waiting`, only those that have not started. Slurm leaves other jobs alone."""
        for begin in range(0, len(jobs), _AT_ONCE):
            some = jobs[begin : begin + _AT_ONCE]
            words = cancel_words(some, str(os.getuid()), self.name, only_waiting=only_waiting)
            try:
                await self.runner.ask(words, lambda text: None)
            except SlurmCommandError as problem:
                if not have_ended(problem):
                    raise

    async def drain(
        self, patience_s: float, cancel: Callable[[Sequence[Pilot]], Awaitable[None]]
    ) -> tuple[list[int], str]:
        """Have all our jobs cancelled by `cancel`, and wait until none is left.

        Returns the jobs that are left nevertheless, and the last problem.
        """
        left, problem = list[int](), ""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while True:
                    try:
                        pilots = [pilot for pilot in (await self.jobs(only_ours=True)).pilots if pilot.state != "ended"]
                        left, problem = [pilot.job for pilot in pilots], ""
                        if not left:
                            return [], ""
                        await cancel([pilot for pilot in pilots if pilot.state != "ending"])
                    except SlurmCommandError as failure:
                        problem = str(failure)
                    await asyncio.sleep(_DRAIN_STEP_S)
        return left, problem or "they do not end"


def require_programs() -> None:
    """Raise an `InputError` if a Slurm command is not on the PATH."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise InputError(
            f"the pool slurm needs Slurm's commands, but {', '.join(missing)} is not on the PATH: "
            "start the controller where they are, such as on a login node"
        )


async def node_addresses(settings: SlurmSettings) -> dict[str, str]:
    """Return the address of each node of the partition as Slurm knows it (NodeAddr); empty if Slurm does not answer."""
    require_programs()
    argv = ("sinfo", "-N", "-h", "-p", settings.partition, "-o", "%N %o")
    try:
        output = await run(argv, settings.command_timeout_s, command_environment(os.environ))
    except (DiscoveryError, OSError):
        return {}
    rows = (line.split() for line in output.decode(errors="replace").splitlines())
    never, only = settings.never, settings.only
    return {row[0]: row[1] for row in rows if len(row) == 2 and row[0] not in never and (not only or row[0] in only)}
