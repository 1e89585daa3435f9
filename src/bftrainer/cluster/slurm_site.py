"""Asks a Slurm site about itself: configuration, partitions, QOS, nodes, topology, clock, the user, the file system.

`gather` runs Slurm's own commands, each with a time-out, and returns a `Site`, a value. `slurm_check` judges it,
`slurm_user` finds in it what a plain user may harvest; `bftrainer slurm` prints both. Nothing is changed.
"""

from __future__ import annotations

import calendar
import contextlib
import getpass
import grp
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import MappingProxyType

from bftrainer.core.hostlist import expand
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.suggest import unknown

TIMEOUT_S = 10.0
NETWORK = frozenset(
    "9p afs beegfs ceph cifs daos dvs gfs2 glusterfs gpfs juicefs lustre nfs nfs4 ocfs2 orangefs panfs pvfs2 quobyte "
    "sshfs smb3 virtiofs wekafs ceph-fuse".split()
)
"""File systems that other machines see as well; `fuse.` before the name is left out."""

_MOST_BYTES = 64 << 20
_SAMPLE = 16
"""Nodes that are looked at one by one."""
_QOS_COLUMNS = "Name,Preempt,PreemptMode,PreemptExemptTime,GraceTime,GrpTRES,GrpJobs,MaxTRESPU,MaxJobsPU,MaxWall"
_HEADER = re.compile(r"Configuration data as of (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_SETTING = re.compile(r"(\S+)\s*= ?(.*)")
_DURATION = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_UNITS = {"": 1, "sec": 1, "secs": 1, "min": 60, "mins": 60, "hour": 3600, "hours": 3600}

Ask = Callable[[Sequence[str]], str]
"""Runs a command and returns what it prints; `SlurmError` if it fails or does not answer."""


class SlurmError(BFTrainerError):
    """A command of Slurm is missing, failed, did not answer, or printed what nobody understands."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition as `scontrol` shows it."""

    name: str
    tier: int
    preempt_mode: frozenset[str]
    """Of this partition, which is the cluster's where it has none of its own."""
    grace_s: float
    nodes: frozenset[str]
    keys: Mapping[str, str]
    """All of it, by Slurm's names; `(null)` is an empty text."""


@dataclass(frozen=True, slots=True)
class Qos:
    """A quality of service as `sacctmgr` shows it."""

    name: str
    preempts: frozenset[str]
    preempt_mode: frozenset[str]
    """Empty: that of the cluster."""
    grace_s: float
    exempt_s: float | None
    limits: Mapping[str, str]
    """What bounds the number or the length of pilots, where it is set."""


@dataclass(frozen=True, slots=True)
class User:
    """Who asks, and what the accounting lets them use."""

    name: str
    groups: frozenset[str]
    accounts: Mapping[str, frozenset[str]]
    """For each account the QOS that may be used with it; empty where there is no accounting."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Where the state folder is."""

    path: str
    kind: str
    mount: str

    @property
    def shared(self) -> bool:
        """Whether other machines see it as well, going by its kind."""
        return self.kind.removeprefix("fuse.") in NETWORK


@dataclass(frozen=True, slots=True)
class Site:
    """A Slurm site at one instant."""

    config: Mapping[str, str]
    partitions: Mapping[str, Partition]
    user: User
    qos: Mapping[str, Qos] | None = None
    """None: nobody could be asked."""
    addresses: frozenset[str] = frozenset()
    """Of a sample of the nodes; one address alone is one machine that plays a cluster."""
    topology: str = ""
    """Lines of `scontrol show topology`, if there is a tree of switches."""
    skew_s: float | None = None
    """How far the clock of slurmctld's machine is ahead of ours."""
    file_system: FileSystem | None = None
    unanswered: tuple[str, ...] = ()
    """Questions that had no answer, a line each."""

    @property
    def version(self) -> tuple[int, ...]:
        """Such as (22, 5, 8)."""
        return tuple(int(part) for part in re.findall(r"\d+", self.config.get("SLURM_VERSION", ""))[:3])

    def partition(self, name: str) -> Partition:
        """The partition of that name; `InputError` if there is none."""
        if name not in self.partitions:
            where = self.config.get("ClusterName") or "this cluster"
            raise InputError(f"{where}: {unknown('partition', name, self.partitions)}")
        return self.partitions[name]

    def sharing(self, partition: Partition) -> list[Partition]:
        """The other partitions that have nodes in common with one."""
        others = (other for name, other in sorted(self.partitions.items()) if name != partition.name)
        return [other for other in others if other.nodes & partition.nodes]

    def options(self, key: str) -> dict[str, str]:
        """A comma-separated setting, such as SchedulerParameters, by its names in lower case."""
        words = (word.strip() for word in self.config.get(key, "").split(","))
        return {name.lower(): value for name, _, value in (word.partition("=") for word in words if word)}


def run(argv: Sequence[str], timeout_s: float = TIMEOUT_S) -> str:
    """Run a command of Slurm. It is killed with all that it has started when it does not answer in time."""
    # In UTC and in Slurm's own form, whatever the user has set.
    env = {name: text for name, text in os.environ.items() if name != "SLURM_TIME_FORMAT"}
    env |= {"TZ": "UTC", "LC_ALL": "C"}
    # Files, not pipes: nobody waits for a child of the command that keeps a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(  # noqa: S603 - no shell, words of our own
                list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True
            )
        except (OSError, ValueError) as problem:
            why = getattr(problem, "strerror", None) or problem
            raise SlurmError(
                f"cannot run {argv[0]}: {why}; run this where Slurm's commands are on the PATH, such as a login node"
            ) from None
        try:
            process.wait(timeout_s)
        except BaseException as problem:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(problem, subprocess.TimeoutExpired):
                raise SlurmError(
                    f"{' '.join(argv)}: no answer within {timeout_s:g} s; is slurmctld up and reachable from here?"
                ) from None
            raise
        output, complaint = _start(out), _start(err)
    if process.returncode != 0:
        lines = [line.strip() for line in complaint.splitlines() if line.strip()]
        raise SlurmError(
            f"{' '.join(argv[:3])}: {lines[-1][:200] if lines else f'exit status {process.returncode}, not a word'}"
        )
    return output if output.strip() else complaint  # sbatch --test-only answers on stderr


def _start(file: Iterable[bytes]) -> str:
    file.seek(0)  # type: ignore[attr-defined]
    return str(file.read(_MOST_BYTES).decode(errors="replace"))  # type: ignore[attr-defined]


def gather(
    state: Path | None = None,
    ask: Ask = run,
    clock: Callable[[], float] = time.time,
    mounts: Path = Path("/proc/self/mounts"),
) -> Site:
    """All that `slurm check` looks at. `SlurmError` where Slurm itself cannot be asked; the rest may stay unknown."""
    before = clock()
    shown = ask(("scontrol", "show", "config"))
    now = (before + clock()) / 2
    config = read_config(shown)
    partitions = read_partitions(ask(("scontrol", "show", "partition", "-o")))
    unanswered: list[str] = []

    def maybe(*argv: str) -> str:
        try:
            return ask(argv)
        except SlurmError as problem:
            unanswered.append(" ".join(str(problem).split()))
            return ""

    accounting = config.get("AccountingStorageType", "").endswith("slurmdbd")
    qos: Mapping[str, Qos] | None = None
    accounts: Mapping[str, frozenset[str]] = {}
    name = getpass.getuser()
    if accounting:
        shown_qos = maybe("sacctmgr", "show", "qos", "-P", f"format={_QOS_COLUMNS}")
        qos = read_qos(shown_qos) if shown_qos else None
        accounts = read_accounts(
            maybe("sacctmgr", "-nP", "show", "assoc", f"user={name}", f"cluster={config.get('ClusterName', '')}",
                  "format=Account,QOS")
        )  # fmt: skip
    sample = sorted({node for partition in partitions.values() for node in sorted(partition.nodes)[:_SAMPLE]})[:_SAMPLE]
    nodes = maybe("scontrol", "show", "node", "-o", ",".join(sample)) if sample else ""
    tree = config.get("TopologyPlugin", "").endswith(("tree", "3d_torus"))
    return Site(
        config=config,
        partitions=partitions,
        user=User(name, _groups(), accounts),
        qos=qos,
        addresses=frozenset(re.findall(r"\bNodeAddr=(\S+)", nodes)),
        topology=maybe("scontrol", "show", "topology") if tree else "",
        skew_s=read_skew(shown, now),
        file_system=None if state is None else find_file_system(state, mounts),
        unanswered=tuple(unanswered),
    )


def read_config(text: str) -> Mapping[str, str]:
    """The settings of `scontrol show config`; `(null)` is an empty text."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _SETTING.fullmatch(line.rstrip())
        if match is not None:
            found[match[1]] = _plain(match[2].strip())
    if "SLURM_VERSION" not in found or "PreemptMode" not in found:
        raise SlurmError("scontrol show config: must list the settings of Slurm, but printed something else")
    return MappingProxyType(found)


def read_skew(text: str, now: float) -> float | None:
    """How far slurmctld's clock, which heads `scontrol show config` in UTC, is ahead of `now`."""
    header = _HEADER.search(text)
    if header is None:
        return None
    # The header has no fractions of a second: half of one is the best guess.
    return calendar.timegm(time.strptime(header[1], "%Y-%m-%dT%H:%M:%S")) + 0.5 - now


def read_partitions(text: str) -> Mapping[str, Partition]:
    """The partitions of `scontrol show partition -o`."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        keys = {key: _plain(value) for key, _, value in (word.partition("=") for word in line.split())}
        name = keys.get("PartitionName")
        if not name:
            continue
        try:
            nodes = frozenset(expand(keys["Nodes"])) if keys.get("Nodes") else frozenset()
            tier = int(keys.get("PriorityTier", "1"))
            grace_s = seconds(keys.get("GraceTime", "0"))
        except ValueError as problem:
            raise SlurmError(f"scontrol show partition: cannot read partition {name[:80]!r}: {problem}") from None
        found[name] = Partition(name, tier, modes(keys.get("PreemptMode", "")), grace_s, nodes, MappingProxyType(keys))
    if not found:
        raise SlurmError("scontrol show partition: must list partitions, but printed none that you may see")
    return MappingProxyType(found)


def read_qos(text: str) -> Mapping[str, Qos]:
    """The rows of `sacctmgr show qos -P`."""
    header, *rows = [line.split("|") for line in text.splitlines() if "|" in line] or [[]]
    found: dict[str, Qos] = {}
    for row in rows:
        cell = dict(zip(header, row, strict=False))
        name, exempt = cell.get("Name", ""), cell.get("PreemptExemptTime", "")
        mode = modes(cell.get("PreemptMode", "")) - {"CLUSTER"}
        limits = {key: value for key, value in cell.items() if value and key.startswith(("Grp", "Max"))}
        preempts = frozenset(word for word in cell.get("Preempt", "").split(",") if word)
        try:
            grace_s, exempt_s = seconds(cell.get("GraceTime") or "0"), seconds(exempt) if exempt else None
        except ValueError as problem:
            raise SlurmError(f"sacctmgr show qos: cannot read QOS {name[:80]!r}: {problem}") from None
        found[name] = Qos(name, preempts, mode, grace_s, exempt_s, MappingProxyType(limits))
    return MappingProxyType(found)


def read_accounts(text: str) -> Mapping[str, frozenset[str]]:
    """The accounts of a user and the QOS of each, from `sacctmgr -nP show assoc format=Account,QOS`."""
    found: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        account, separator, qos = line.partition("|")
        if separator and account:
            found[account] = found.get(account, frozenset()) | {word for word in qos.split(",") if word}
    return MappingProxyType(found)


def seconds(text: str) -> float:
    """A length of time as Slurm writes it: `5 sec`, `01:00:00`, `2-00:00:00`, `UNLIMITED`. ValueError otherwise."""
    text = text.strip()
    if text.upper() in ("UNLIMITED", "INFINITE", "NONE", "N/A"):
        return inf
    number, _, unit = text.partition(" ")
    match = _DURATION.fullmatch(number)
    if match is None or unit.lower() not in _UNITS:
        raise ValueError(f"must be a length of time, but got {text[:40]!r}")
    if match[1] is None and match[3] is None:
        return float(int(match[2]) * _UNITS[unit.lower()])
    days, *parts = (int(part) if part else 0 for part in match.groups())
    if match[1] is None and match[4] is None:  # minutes:seconds
        parts = [0, parts[0], parts[1]]
    return float(days * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2])


def modes(text: str) -> frozenset[str]:
    """The words of a PreemptMode."""
    return frozenset(word for word in text.upper().split(",") if word)


def find_file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> FileSystem | None:
    """The file system that a folder is on, or will be on once it is made."""
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


def _groups() -> frozenset[str]:
    names = set()
    for number in {*os.getgroups(), os.getegid()}:
        with contextlib.suppress(KeyError, OverflowError):
            names.add(grp.getgrgid(number).gr_name)
    return frozenset(names)


def _plain(value: str) -> str:
    return "" if value in ("(null)", "N/A") else value
