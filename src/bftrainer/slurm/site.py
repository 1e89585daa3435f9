"""`Site` describes a Slurm site, parsed from the output of Slurm's commands.

`ask.py` runs the commands; `check.py` and `user.py` judge the `Site`. All functions are pure functions of text.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType

from bftrainer.core.hostlist import expand
from bftrainer.core.topology import Topology
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.suggest import unknown

_HEADER = re.compile(r"Configuration data as of (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_SETTING = re.compile(r"(\S+)\s*= ?(.*)")
_DURATION = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_NETWORK = re.compile(
    r"(fuse\.)?(9p|afs|beegfs|ceph(-fuse)?|cifs|daos|dvs|gfs2|glusterfs|gpfs|juicefs|lustre|nfs4?|ocfs2|orangefs|panfs"
    r"|pvfs2|quobyte|smb3|sshfs|virtiofs|wekafs)"
)
_UNITS = {"": 1, "sec": 1, "secs": 1, "min": 60, "mins": 60, "hour": 3600, "hours": 3600}


class SlurmError(BFTrainerError):
    """A Slurm command failed, or printed what cannot be parsed."""


class NoAnswerError(SlurmError):
    """A Slurm command is missing, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition as `scontrol` shows it."""

    name: str
    tier: int
    preempt_mode: frozenset[str]
    """Mode of this partition, or that of the cluster if the partition has none of its own."""
    grace_s: float
    nodes: frozenset[str]
    keys: Mapping[str, str]
    """All settings by Slurm's names; `(null)` becomes an empty text."""


@dataclass(frozen=True, slots=True)
class Qos:
    """A quality of service as `sacctmgr` shows it."""

    name: str
    preempts: frozenset[str]
    preempt_mode: frozenset[str]
    """Empty: the mode of the cluster."""
    grace_s: float
    exempt_s: float | None
    limits: Mapping[str, str]
    """Limits of the number or the length of pilots, where they are set."""
    usage_factor: float = 1.0
    """What the time of its jobs is multiplied by when it is charged."""
    minutes: str = ""
    """Limit of TRES-minutes of all its jobs together, such as `node=100000`; empty: none."""


@dataclass(frozen=True, slots=True)
class User:
    """The current user, and what the accounting lets them use."""

    name: str
    groups: frozenset[str]
    accounts: Mapping[str, frozenset[str]]
    """The QOS that may be used with each account; empty if there is no accounting."""
    default_qos: str = ""
    """The QOS of jobs that name none, where it is known."""
    budgets: Mapping[str, str] = field(default_factory=dict)
    """Limits of TRES-minutes by account, where the account or the user in it has one."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """File system of the state folder."""

    path: str
    kind: str
    mount: str

    @property
    def shared(self) -> bool:
        """Whether other machines see it as well, judged by its kind."""
        return _NETWORK.fullmatch(self.kind) is not None


@dataclass(frozen=True, slots=True)
class Site:
    """A Slurm site at one instant."""

    config: Mapping[str, str]
    partitions: Mapping[str, Partition]
    user: User
    qos: Mapping[str, Qos] | None = None
    """None: they could not be asked for."""
    addresses: frozenset[str] = frozenset()
    """Addresses of a sample of the nodes; a single one means one machine that simulates a cluster."""
    gres: Mapping[str, str] = field(default_factory=dict)
    """Generic resources of each node, such as `gpu:a100:4(S:0-1)`; empty if they could not be asked for."""
    defines_gpus: bool = False
    """Whether slurm.conf gives a node GPUs, if this user can read it. Slurm shows none if GresTypes lacks them."""
    topology: str = ""
    """Lines of `scontrol show topology`, if there is a tree of switches."""
    skew_s: float | None = None
    """Seconds by which the clock of slurmctld's machine is ahead of ours."""
    file_system: FileSystem | None = None
    unanswered: tuple[str, ...] = ()
    """Questions without an answer, one line each."""

    @property
    def version(self) -> tuple[int, ...]:
        """Version of Slurm, such as (22, 5, 8)."""
        return tuple(int(part) for part in re.findall(r"\d+", self.config.get("SLURM_VERSION", ""))[:3])

    def partition(self, name: str) -> Partition:
        """Return the partition of that name; `InputError` if there is none."""
        if name not in self.partitions:
            where = self.config.get("ClusterName") or "this cluster"
            raise InputError(f"{where}: {unknown('partition', name, self.partitions)}")
        return self.partitions[name]

    def sharing(self, partition: Partition) -> list[Partition]:
        """Return the other partitions that share nodes with a partition."""
        others = (other for name, other in sorted(self.partitions.items()) if name != partition.name)
        return [other for other in others if other.nodes & partition.nodes]

    def options(self, key: str) -> dict[str, str]:
        """Return a comma-separated setting, such as SchedulerParameters, by its names in lower case."""
        words = (word.strip() for word in self.config.get(key, "").split(","))
        return {name.lower(): value for name, _, value in (word.partition("=") for word in words if word)}


def read_config(text: str) -> Mapping[str, str]:
    """Parse the settings of `scontrol show config`; `(null)` becomes an empty text."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _SETTING.fullmatch(line.rstrip())
        if match is not None:
            found[match[1]] = _plain(match[2].strip())
    if "SLURM_VERSION" not in found or "PreemptMode" not in found:
        raise SlurmError("scontrol show config: must list the settings of Slurm, but printed something else")
    return MappingProxyType(found)


def read_skew(text: str, now: float) -> float | None:
    """Return how far slurmctld's clock, which heads `scontrol show config` in UTC, is ahead of `now`."""
    header = _HEADER.search(text)
    if header is None:
        return None
    # The header has no fractions of a second: half a second is the best estimate.
    return calendar.timegm(time.strptime(header[1], "%Y-%m-%dT%H:%M:%S")) + 0.5 - now


def read_partitions(text: str) -> Mapping[str, Partition]:
    """Parse the partitions of `scontrol show partition -o`."""
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
        raise SlurmError("scontrol show partition: must list partitions, but printed none")
    return MappingProxyType(found)


def read_qos(text: str) -> Mapping[str, Qos]:
    """Parse the rows of `sacctmgr show qos -P`."""
    header, *rows = [line.split("|") for line in text.splitlines() if "|" in line] or [[]]
    found: dict[str, Qos] = {}
    for row in rows:
        cell = dict(zip(header, row, strict=False))
        name, exempt = cell.get("Name", ""), cell.get("PreemptExemptTime", "")
        mode = modes(cell.get("PreemptMode", "")) - {"CLUSTER"}
        counted = {key: value for key, value in cell.items() if value and not key.endswith("Mins")}
        limits = {key: value for key, value in counted.items() if key.startswith(("Grp", "Max"))}
        preempts = frozenset(word for word in cell.get("Preempt", "").split(",") if word)
        try:
            grace_s, exempt_s = seconds(cell.get("GraceTime") or "0"), seconds(exempt) if exempt else None
            factor = float(cell.get("UsageFactor") or 1)
        except ValueError as problem:
            raise SlurmError(f"sacctmgr show qos: cannot read QOS {name[:80]!r}: {problem}") from None
        minutes = cell.get("GrpTRESMins", "")
        found[name] = Qos(name, preempts, mode, grace_s, exempt_s, MappingProxyType(limits), factor, minutes)
    return MappingProxyType(found)


def read_accounts(text: str) -> Mapping[str, frozenset[str]]:
    """Parse the accounts of a user and the QOS of each, from `sacctmgr -nP show assoc format=Account,QOS`."""
    found: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        account, separator, qos = line.partition("|")
        if separator and account:
            found[account] = found.get(account, frozenset()) | {word for word in qos.split(",") if word}
    return MappingProxyType(found)


def read_budgets(text: str, user: str) -> tuple[str, Mapping[str, str]]:
    """Parse the user's default QOS, and limits of TRES-minutes by account.

    The lines are those of `sacctmgr show assoc -nP format=Account,User,DefaultQOS,GrpTRESMins,MaxTRESMins`: one for
    each account, with an empty user, and one for each user in it.
    """
    qos, found = "", dict[str, str]()
    for line in text.splitlines():
        account, who, default, *minutes = [*line.split("|"), "", "", "", ""][:5]
        if not account or who not in ("", user):
            continue
        qos = default if who else qos
        limits = ",".join(word for word in (found.get(account, ""), *minutes) if word)
        if limits:
            found[account] = limits
    return qos, MappingProxyType(found)


def seconds(text: str) -> float:
    """Parse a duration as Slurm writes it: `5 sec`, `01:00:00`, `2-00:00:00`, `UNLIMITED`. ValueError otherwise."""
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
    """Return the words of a PreemptMode."""
    return frozenset(word for word in text.upper().split(",") if word)


def read_node_gres(text: str) -> Mapping[str, str]:
    """Parse the generic resources of each node, from lines of `sinfo -o '%G|%N'`."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        gres, _, nodes = line.rpartition("|")
        try:
            found |= dict.fromkeys(expand(nodes.strip()), _plain(gres.strip()))
        except ValueError as problem:
            raise SlurmError(f"sinfo: cannot read the nodes of {line[:80]!r}: {problem}") from None
    return MappingProxyType(found)


def _plain(value: str) -> str:
    return "" if value in ("(null)", "N/A") else value


def read_switches(text: str) -> Topology:
    """Parse the tree of switches that `scontrol show topology` prints.

    The output holds more than a topology.conf: each switch has its level, and a switch above others also lists all
    nodes below it.
    """
    lines = []
    for line in text.splitlines():
        found = dict(word.split("=", 1) for word in line.split() if "=" in word)
        below = found.get("Switches") or ""
        if "SwitchName" in found and (below or found.get("Nodes")):
            lines.append(
                f"SwitchName={found['SwitchName']} {f'Switches={below}' if below else 'Nodes=' + found['Nodes']}"
            )
    if not lines:
        raise InputError("Slurm knows no tree of switches (`scontrol show topology`): set policy.placement to stable")
    return Topology.from_slurm("\n".join(lines), "scontrol show topology")
