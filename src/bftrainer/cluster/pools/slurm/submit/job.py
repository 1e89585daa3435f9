"""The submission of a pilot: the words of `sbatch`, the script, and the file with the secret.

`PilotJob` has what `sbatch` is told; `sbatch_words` makes the command of it, for the pool's own account (`own.py`), for
other accounts (`run_as.py`), and for a user's lender (`cluster/lend`). The script becomes the agent of its node.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bftrainer.cluster.pools.slurm import callbacks
from bftrainer.cluster.pools.slurm.naming import PREFIX, pilot_comment
from bftrainer.cluster.pools.slurm.settings import SlurmSettings, read_duration
from bftrainer.errors import BFTrainerError
from bftrainer.processes import variables
from bftrainer.slurm.gres import gres_options
from bftrainer.util.files import replace_file

ENVIRONMENT_FILE = "agent-environment"
SCRIPT_FILE = "pilot.sh"
_HAVE_ENDED = ("Invalid job id", "already completing", "it printed nothing on stderr")
"""Messages of scancel when it fails because jobs have ended in the meantime."""
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


@dataclass(frozen=True, slots=True)
class PilotJob:
    """A pilot to be submitted. An empty text stands for Slurm's default."""

    node: str
    name: str
    """The name of the job."""
    mark: str
    """See `naming.PilotComment`."""
    comment: str
    partition: str
    time_limit: str
    """In the format of sbatch."""
    time_min: str = ""
    """The least that Slurm may cut the time limit down to; empty: not at all."""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    gpus: str = ""
    """The value of `--gres`."""
    options: tuple[str, ...] = ()

    def at_most(self, minutes: int | None) -> PilotJob:
        """Return the same pilot with a time limit of at most so many minutes."""
        if minutes is None or read_duration(self.time_limit) <= 60 * minutes:
            return self
        least = self.time_min if self.time_min and read_duration(self.time_min) <= 60 * minutes else ""
        return replace(self, time_limit=str(max(1, minutes)), time_min=least)


def pilot_job(
    settings: SlurmSettings,
    node: str,
    name: str,
    mark: str,
    pilot: str = "",
    *,
    short: bool = False,
    gpus: str = "",
) -> PilotJob:
    """Return the pilot of a node.

    The time of a `short` pilot may be cut down to fit before the next planned job. `gpus` has the GPUs of the node.
    """
    asks = bool(gpus) and settings.gpus == "all" and not gres_options(settings.options)
    return PilotJob(
        node,
        name,
        mark,
        pilot_comment(name.removeprefix(PREFIX), node, mark, pilot),
        settings.partition,
        settings.time_limit,
        settings.time_min if short else "",
        settings.account,
        settings.qos,
        settings.constraint,
        gpus if asks else "",
        settings.options,
    )


def sbatch_words(job: PilotJob, folder: Path, log: Path) -> tuple[str, ...]:
    """Return the command that submits a pilot, all but the script. It runs in `folder`, and `log` gets its output.

    `--gres` works with every plugin that selects nodes, `--gpus-per-node` with one of them. `--exclusive` alone gives a
    job all GPUs since Slurm 20.11, but sites may refuse jobs on GPU nodes that do not ask for GPUs.
    """
    optional = (("account", job.account), ("qos", job.qos), ("constraint", job.constraint))
    return (
        "sbatch",
        "--parsable",
        "--nodes=1",
        f"--nodelist={job.node}",
        f"--partition={job.partition}",
        *(f"--{option}={value}" for option, value in optional if value),
        f"--time={job.time_limit}",
        *((f"--time-min={job.time_min}",) if job.time_min else ()),
        # At preemption Slurm sends the signal to the batch script, which is the agent; else only job steps would
        # receive it.
        "--signal=B:TERM@1",
        "--no-requeue",
        "--exclusive",
        "--mem=0",
        *((f"--gres={job.gpus}",) if job.gpus else ()),
        f"--job-name={job.name}",
        f"--comment={job.comment}",
        f"--chdir={folder}",
        f"--output={str(log).replace('%', '%%')}",
        "--open-mode=truncate",
        *job.options,
    )


def cancel_words(jobs: Sequence[int], user: str, name: str, *, only_waiting: bool = False) -> tuple[str, ...]:
    """Return the command that cancels jobs. Those of other users, or with another name, are left alone."""
    state = ("--state=PENDING",) if only_waiting else ()
    return ("scancel", "-Q", f"--user={user}", f"--name={name}", *state, *(str(job) for job in jobs))


def have_ended(problem: Exception) -> bool:
    """Return whether `scancel` failed because jobs have ended in the meantime."""
    return any(words in str(problem) for words in _HAVE_ENDED)


def job_number(text: str) -> int:
    """Return the id of the job in the output of `sbatch --parsable`. ValueError if there is none."""
    return int(text.strip().partition(";")[0])


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


def plain_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of commands that are run as other accounts: only what Slurm's commands need."""
    kept = {name: environment[name] for name in ("PATH", *_KEPT) if name in environment}
    return kept | {"LC_ALL": "C.UTF-8"}


def submission(
    settings: SlurmSettings, folder: Path, node: str, name: str, mark: str, *, short: bool = False, gpus: str = ""
) -> tuple[str, ...]:
    """Return the command with which the pool submits the pilot of a node as its own account."""
    job = pilot_job(settings, node, name, mark, short=short, gpus=gpus)
    return (*sbatch_words(job, folder, folder / f"{node}.log"), str(folder / SCRIPT_FILE))


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
