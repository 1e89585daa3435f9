"""`Slurm` runs Slurm's commands for the `slurm` pool, each with a time-out and an output limit.

None of them blocks the event loop. Every failure, and output that cannot be parsed, is a `SlurmCommandError`. This
module also submits pilots: their options, their script, and the file with the secret that only the owner can read.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from bftrainer.cluster.pools.script.discovery import DiscoveryError, run
from bftrainer.cluster.pools.slurm import callbacks
from bftrainer.cluster.pools.slurm.figures import AnswerTimes
from bftrainer.cluster.pools.slurm.hardware import LAYOUT_FORMAT, SiteLayout, read_layout
from bftrainer.cluster.pools.slurm.read import (
    PREFIX,
    Jobs,
    SlurmNode,
    job_format,
    new_separator,
    read_jobs,
    read_nodes,
)
from bftrainer.cluster.pools.slurm.reservations import ReservationWatch, read_reservations
from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes import variables
from bftrainer.slurm.gres import gres_options
from bftrainer.traces.recorder.record import SINFO
from bftrainer.util.files import replace_file

PROGRAMS = ("sinfo", "squeue", "sbatch", "scancel")
ENVIRONMENT_FILE = "agent-environment"
SCRIPT_FILE = "pilot.sh"
_HAVE_ENDED = ("Invalid job id", "already completing")
"""Messages of scancel when it fails because jobs have ended in the meantime."""
_DRAIN_STEP_S = 0.2
_AT_ONCE = 500
"""Largest number of jobs cancelled by one command."""
_OURS = ("SBATCH_", "SLURM_", "SQUEUE_", "SINFO_", "SCANCEL_", "SALLOC_", "SRUN_")
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER")
_SECRET = (variables.SECRET, variables.TOKEN)
_HIDING = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that hide all GPUs if they are empty."""
_OTHER_DEVICES = ("HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
_DEVICES = (*_HIDING, *_OTHER_DEVICES)
"""Variables that say which GPUs a process may use. Slurm sets them for a pilot; those of the controller mean others."""
_COUNTS = ("SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
"""Variables with which Slurm says how many GPUs a job has."""

_Read = TypeVar("_Read")


class SlurmCommandError(BFTrainerError):
    """A Slurm command failed, took too long, or printed what cannot be parsed."""


class Slurm:
    """Runs Slurm commands for the pilots of one controller."""

    def __init__(self, settings: SlurmSettings, folder: Path, state_id: str, mark: str) -> None:
        """Keep the environment and the output of pilots in `folder`, which the nodes must see."""
        self.name = PREFIX + state_id
        self.mark = mark
        self.answers: defaultdict[str, AnswerTimes] = defaultdict(AnswerTimes)
        """How long each command took."""
        self._settings = settings
        self._folder = folder
        self._environment = command_environment(os.environ)
        self._only_ours = (f"--user={os.getuid()}", f"--name={self.name}")
        self._reservations = ReservationWatch(settings.renew_s)

    async def nodes(self) -> dict[str, SlurmNode]:
        """Return the nodes of the partition, by name. Nodes that are reserved soon are marked as wanted back."""
        form = "%N %f %T" if self._settings.constraint else SINFO[-1]
        nodes = await self._ask((*SINFO[:-1], form, "-p", self._settings.partition), read_nodes)
        if self._reservations.ask_now():
            with suppress(SlurmCommandError):  # without an answer, time limits and states of nodes still hold
                self._reservations.learned(
                    await self._ask(("scontrol", "show", "reservation", "-o"), read_reservations)
                )
        return self._reservations.marked(nodes)

    async def layout(self) -> SiteLayout:
        """Return the partitions and the kinds of nodes of the site."""
        return await self._ask(("sinfo", "-a", "-h", "--exact", "-o", LAYOUT_FORMAT), read_layout)

    def reservations(self) -> Mapping[str, frozenset[str]]:
        """Return the nodes of each reservation, as last read."""
        return self._reservations.by_name()

    async def jobs(self, *, only_ours: bool = False) -> Jobs:
        """Return our jobs, including those that ended a moment ago, and those of others that wait for nodes.

        With `only_ours` Slurm looks up one user's jobs.
        """
        separator = new_separator()
        ours = self._only_ours if only_ours else ()
        words = ("squeue", "-a", *ours, "--states=all", "-O", job_format(separator))
        return await self._ask(words, lambda text: read_jobs(text, self.name, os.getuid(), separator))

    async def submit(self, node: str, *, short: bool, gpus: str = "") -> int:
        """Submit the pilot of a node and return its job id. `gpus` has the GPUs of the node, such as `gpu:a100:4`.

        Even after a `SlurmCommandError` it may have been submitted.
        """
        settings = self._settings
        argv = submission(settings, self._folder, node, self.name, self.mark, short=short, gpus=gpus)
        return await self._ask(argv, lambda text: int(text.strip().partition(";")[0]))

    async def cancel(self, jobs: Sequence[int], *, only_waiting: bool = False) -> None:
        """Cancel pilots; with `only_waiting`, only those that have not started. Slurm leaves other jobs alone."""
        for begin in range(0, len(jobs), _AT_ONCE):
            ids = [str(job) for job in jobs[begin : begin + _AT_ONCE]]
            state = ["--state=PENDING"] if only_waiting else []
            try:
                await self._ask(("scancel", "-Q", *self._only_ours, *state, *ids), lambda text: None)
            except SlurmCommandError as problem:
                if not any(words in str(problem) for words in _HAVE_ENDED):
                    raise

    async def drain(self, patience_s: float) -> tuple[list[int], str]:
        """Cancel all our jobs and wait until none is left.

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
                        await self.cancel([pilot.job for pilot in pilots if pilot.state != "ending"])
                    except SlurmCommandError as failure:
                        problem = str(failure)
                    await asyncio.sleep(_DRAIN_STEP_S)
        return left, problem or "they do not end"

    async def _ask(self, argv: Sequence[str], read: Callable[[str], _Read]) -> _Read:
        began, failed = time.monotonic(), True
        try:
            output = await run(argv, self._settings.command_timeout_s, self._environment)
            answer = await asyncio.to_thread(lambda: read(output.decode()))  # ten thousand nodes take a while to parse
            failed = False
            return answer
        except (DiscoveryError, InputError, OSError) as problem:
            raise SlurmCommandError(f"{argv[0]}: {problem}") from None
        except ValueError as problem:  # this includes output that is not text
            raise SlurmCommandError(f"{argv[0]}: its output cannot be read: {str(problem)[:200]}") from None
        finally:
            self.answers[argv[0]].add(time.monotonic() - began, failed=failed)


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


def command_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of Slurm commands, and so of pilots, without Slurm defaults, secrets and GPUs.

    The defaults are those of the user. A controller that runs in a job itself must not pass on that job's variables,
    nor its GPUs.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not (name.startswith(_OURS) or name in _SECRET or name in _DEVICES)
    }
    return kept | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}


def submission(
    settings: SlurmSettings, folder: Path, node: str, name: str, mark: str, *, short: bool = False, gpus: str = ""
) -> tuple[str, ...]:
    """Return the command that submits the pilot of a node.

    The time of a `short` pilot may be cut down to fit before the next planned job. `gpus` has the GPUs of the node.
    `--gres` works with every plugin that selects nodes, `--gpus-per-node` with one of them. `--exclusive` alone gives a
    job all GPUs since Slurm 20.11, but sites may refuse jobs on GPU nodes that do not ask for GPUs.
    """
    state_id = name.removeprefix(PREFIX)
    optional = (("account", settings.account), ("qos", settings.qos), ("constraint", settings.constraint))
    asks = bool(gpus) and settings.gpus == "all" and not gres_options(settings.options)
    return (
        "sbatch",
        "--parsable",
        "--nodes=1",
        f"--nodelist={node}",
        f"--partition={settings.partition}",
        *(f"--{option}={value}" for option, value in optional if value),
        f"--time={settings.time_limit}",
        *((f"--time-min={settings.time_min}",) if short and settings.time_min else ()),
        # At preemption Slurm sends the signal to the batch script, which is the agent; else only job steps would
        # receive it.
        "--signal=B:TERM@1",
        "--no-requeue",
        "--exclusive",
        "--mem=0",
        *((f"--gres={gpus}",) if asks else ()),
        f"--job-name={name}",
        f"--comment=bftrainer:{state_id}:{node}:{mark}",
        f"--chdir={folder}",
        f"--output={str(folder).replace('%', '%%')}/{node}.log",
        "--open-mode=truncate",
        *settings.options,
        str(folder / SCRIPT_FILE),
    )


def pilot_script(settings: SlurmSettings, folder: Path) -> str:
    """Return the script of a pilot. It becomes the agent: a shell in between would have to forward the signal.

    All users may read it, so it only contains the path of the secret. The agent finds its GPUs in the variables that
    Slurm sets. Without GPUs it is told that there are none: Slurm gives a job with a whole node all GPUs of the node.
    """
    lines = [
        "#!/bin/sh",
        f". {shlex.quote(str(folder / ENVIRONMENT_FILE))}",
        f'export {variables.NODE}="$SLURMD_NODENAME"',
        f'export {variables.CALL_BACK}={shlex.quote(str(folder / callbacks.FOLDER))}/"$SLURMD_NODENAME"',
    ]
    if settings.gpus == "none":
        lines += [
            f"unset {' '.join((*_COUNTS, *_OTHER_DEVICES))}",
            f"export {' '.join(f'{name}=' for name in _HIDING)}",
        ]
    lines.append(f"exec {shlex.join((settings.python or sys.executable, *settings.agent))}")
    return "".join(f"{line}\n" for line in lines)


def write_files(settings: SlurmSettings, folder: Path, agent_environment: Mapping[str, str]) -> None:
    """Write the files that pilots read, each completely or not at all."""
    lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(agent_environment.items()))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        callbacks.prepare_folder(folder)
        replace_file(folder / ENVIRONMENT_FILE, lines)
        replace_file(folder / SCRIPT_FILE, pilot_script(settings, folder))
    except OSError as problem:
        raise BFTrainerError(f"cannot write the files of pilots to {folder}: {problem.strerror}") from None
