"""`gather` asks a Slurm site about itself with Slurm's own commands.

The questions are its configuration, partitions, QOS, nodes, topology, clock, the user and the file system. Each command
has a time-out. The result is a `Site`. `check.py` judges it, `user.py` finds what a plain user may harvest, and
`bftrainer slurm` prints both. Nothing is changed.
"""

from __future__ import annotations

import contextlib
import getpass
import grp
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bftrainer.processes import run as processes
from bftrainer.processes import variables
from bftrainer.processes.run import CommandError, CommandNotStartedError, CommandTimeoutError
from bftrainer.slurm.site import (
    FileSystem,
    NoAnswerError,
    Qos,
    Site,
    SlurmError,
    User,
    read_accounts,
    read_budgets,
    read_config,
    read_node_gres,
    read_partitions,
    read_qos,
    read_skew,
)
from bftrainer.util.text import one_line

TIMEOUT_S = 10.0
"""Seconds that a Slurm command may take."""

_MOST_BYTES = 64 << 20
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Variables that say which Slurm is meant."""
_GPU_NODES = re.compile(r"^\s*NodeName=.*\sGres=[^\s#]*\bgpu\b", re.IGNORECASE | re.MULTILINE)
"""A line of slurm.conf with the GPUs of nodes."""
_SAMPLE = 16
"""Number of nodes that are examined one by one."""
_QOS_COLUMNS = (
    "Name,Preempt,PreemptMode,PreemptExemptTime,GraceTime,GrpTRES,GrpJobs,MaxTRES,MaxTRESPN,MaxTRESPU,MaxTRESPA,"
    "MaxJobsPU,MaxWall,UsageFactor,GrpTRESMins"
)

Ask = Callable[[Sequence[str]], str]
"""Runs a command and returns its output; `SlurmError` if it fails or does not answer."""


def run(argv: Sequence[str], timeout_s: float = TIMEOUT_S) -> str:
    """Run a Slurm command. If it does not answer in time, it is killed with its children."""
    # In UTC and in Slurm's own format, whatever the user has set. Without the user's defaults, as for pilots.
    env = {
        name: text
        for name, text in variables.inherited(os.environ).items()
        if name in _KEPT or not name.startswith(("SLURM_", "SBATCH_"))
    }
    env |= {"TZ": "UTC", "LC_ALL": "C"}
    try:
        # Not until its output is closed: a child that the command leaves behind must not block this function.
        result = processes.run(argv, timeout_s, env=env, most=_MOST_BYTES, until_closed=False)
    except CommandNotStartedError as problem:
        raise NoAnswerError(
            f"{problem}; run this where Slurm's commands are on the PATH, such as a login node"
        ) from None
    except CommandTimeoutError:
        raise NoAnswerError(
            f"{' '.join(argv)}: no answer within {timeout_s:g} s; is slurmctld up and reachable from here?"
        ) from None
    except CommandError as problem:
        raise SlurmError(f"{' '.join(argv[:3])}: {problem}") from None
    if result.status != 0:
        lines = result.complaints
        raise SlurmError(
            f"{' '.join(argv[:3])}: {lines[-1] if lines else f'{result.failure} without an error message'}"
        )
    output = result.out.decode(errors="replace")
    return output if output.strip() else result.err.decode(errors="replace")  # sbatch --test-only answers on stderr


def gather(
    state: Path | None = None,
    ask: Ask = run,
    clock: Callable[[], float] = time.time,
    mounts: Path = Path("/proc/self/mounts"),
) -> Site:
    """Return everything that `slurm check` examines.

    `SlurmError` if Slurm itself cannot be asked; other values may stay unknown.
    """
    before = clock()
    shown = ask(("scontrol", "show", "config"))
    now = (before + clock()) / 2
    config = read_config(shown)
    # All partitions: one that is hidden from this user may still share its nodes with the pilots.
    partitions = read_partitions(ask(("scontrol", "show", "partition", "-a", "-o")))
    unanswered: list[str] = []

    def maybe(*argv: str) -> str:
        try:
            return ask(argv)
        except SlurmError as problem:
            unanswered.append(one_line(problem))
            return ""

    accounting = config.get("AccountingStorageType", "").endswith("slurmdbd")
    qos: Mapping[str, Qos] | None = None
    accounts: Mapping[str, frozenset[str]] = {}
    default_qos = ""
    budgets: Mapping[str, str] = {}
    name = _user()
    if accounting:
        shown_qos = maybe("sacctmgr", "show", "qos", "-P", f"format={_QOS_COLUMNS}")
        qos = read_qos(shown_qos) if shown_qos else None
        accounts = read_accounts(
            maybe("sacctmgr", "-nP", "show", "assoc", f"user={name}", f"cluster={config.get('ClusterName', '')}",
                  "format=Account,QOS")
        )  # fmt: skip
        if accounts:
            shown_limits = maybe(
                "sacctmgr", "show", "assoc", "-nP", f"account={','.join(sorted(accounts))}",
                f"cluster={config.get('ClusterName', '')}", "format=Account,User,DefaultQOS,GrpTRESMins,MaxTRESMins",
            )  # fmt: skip
            default_qos, budgets = read_budgets(shown_limits, name)
    sample = sorted({node for partition in partitions.values() for node in sorted(partition.nodes)[:_SAMPLE]})[:_SAMPLE]
    nodes = maybe("scontrol", "show", "node", "-o", ",".join(sample)) if sample else ""
    tree = config.get("TopologyPlugin", "").endswith(("tree", "3d_torus"))
    return Site(
        config=config,
        partitions=partitions,
        user=User(name, _groups(), accounts, default_qos, budgets),
        qos=qos,
        addresses=frozenset(re.findall(r"\bNodeAddr=(\S+)", nodes)),
        gres=read_node_gres(maybe("sinfo", "-a", "-h", "-o", "%G|%N")),
        defines_gpus=_defines_gpus(Path(config.get("SLURM_CONF", ""))),
        topology=maybe("scontrol", "show", "topology") if tree else "",
        skew_s=read_skew(shown, now),
        file_system=None if state is None else find_file_system(state, mounts),
        unanswered=tuple(unanswered),
    )


def try_pilot(
    partition: str,
    qos: str = "",
    account: str = "",
    limit: str = "0:05:00",
    gpus: Sequence[str] = (),
    ask: Ask = run,
) -> str | None:
    """Return why Slurm would refuse a pilot; empty if it would not, None if it does not say. Nothing is submitted.

    `gpus` are the options with which it asks for GPUs.
    """
    named = {"--partition": partition, "--qos": qos, "--account": account, "--time": limit}
    options = [f"{option}={value}" for option, value in named.items() if value]
    try:
        ask(("sbatch", "--test-only", "-N1", "--exclusive", *options, *gpus, "--wrap", "true"))
    except NoAnswerError:
        return None
    except SlurmError as problem:
        return str(problem).partition(": ")[2]
    return ""


def find_file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> FileSystem | None:
    """Return the file system that a folder is on, or will be on once it is created."""
    try:
        there = str(path.resolve())
        lines = mounts.read_text(errors="replace").splitlines()
    except (OSError, RuntimeError):
        return None
    best: FileSystem | None = None
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[1])
        inside = there == mount or there.startswith(mount.rstrip("/") + "/")
        if inside and (best is None or len(mount) >= len(best.mount)):
            best = FileSystem(str(path), fields[2], mount)
    return best


def _defines_gpus(conf: Path) -> bool:
    try:
        return _GPU_NODES.search(conf.read_text(errors="replace")) is not None
    except OSError:  # no such file here, or not for this user
        return False


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without an entry in the password database
        return str(os.getuid())


def _groups() -> frozenset[str]:
    names = set()
    for number in {*os.getgroups(), os.getegid()}:
        with contextlib.suppress(KeyError, OverflowError):
            names.add(grp.getgrgid(number).gr_name)
    return frozenset(names)
