"""`SlurmSettings` holds the settings of the `slurm` pool, checked before any Slurm command runs.

`registry.py` creates a `SlurmSettings` from the section `[pool]`; `pool.py` and `commands.py` use it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from bftrainer.core.hostlist import expand
from bftrainer.errors import InputError
from bftrainer.slurm.gres import gres_options, names_gpus

AGENT = ("-m", "bftrainer.cluster.agent")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@:/-]*")
_FEATURES = re.compile(rf"{_WORD.pattern}([&|]{_WORD.pattern})*")
_TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,9})(?::(\d{1,2}))?(?::(\d{1,2}))?", re.ASCII)


def _key(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True)
class SlurmSettings:
    """Settings of the `slurm` pool."""

    partition: str = _key("", "the preemptible partition for pilots; required")
    account: str = _key("", "the account that pilots are charged to; empty: Slurm's default")
    qos: str = _key("", "the quality of service of pilots, if it makes them preemptible; empty: none")
    constraint: str = _key("", "only nodes with these features, such as gpu or a100|h100 or gpu&nvme")
    exclude: tuple[str, ...] = _key((), "nodes never to use, names or host lists such as n[1-4]")
    nodelist: tuple[str, ...] = _key((), "the only nodes to use, names or host lists; empty: all of the partition")
    reserve: int = _key(0, "number of idle nodes that are never used")
    warm_pilots: int = _key(1, "number of pilots that are ready although no trainer can use them yet")
    linger_s: float = _key(60.0, "how long further pilots that no trainer can use are kept")
    max_pilots: int = _key(0, "the most pilots, pending and running; 0: no limit")
    max_pending: int = _key(50, "the most pending pilots")
    submit_rate: float = _key(10.0, "the most pilots submitted per second")
    time_limit: str = _key("1:00:00", "time limit of a pilot, in the format of sbatch; then another takes its place")
    time_min: str = _key("0:05:00", "a pilot that Slurm cannot start at once may be shortened to this; empty: never")
    planned: bool = _key(False, "also request nodes that are planned for a later job, for as long as they are free")
    interval_s: float = _key(2.0, "how often Slurm is asked while something changes")
    rest_s: float = _key(15.0, "how often Slurm is asked while nothing changes")
    command_timeout_s: float = _key(5.0, "the longest a command of Slurm may take; then it is killed")
    renew_s: float = _key(60.0, "how long before its time limit a pilot makes room for the next one")
    grace_s: float = _key(20.0, "how long a worker then has to leave at a step boundary")
    join_s: float = _key(180.0, "a pilot is cancelled if its agent has not joined after this time")
    watch_partition: tuple[str, ...] = _key((), "partitions whose waiting jobs go first; empty: all of them")
    submit: str = _key("lend", "with users.mode own, who submits pilots: lend: users' lenders; run-as: the controller")
    submit_as: tuple[str, ...] = _key(
        (), 'with run-as, the words before sbatch and scancel, such as "sudo -n -u {account}"; empty: runuser'
    )
    gpus: str = _key("all", "all: a pilot asks for all GPUs of its node, unless options do; none: it uses no GPU")
    options: tuple[str, ...] = _key((), "more options for sbatch, such as --licenses=lustre")
    python: str = _key("", "the Python that runs agents, on the nodes; empty: the one that runs the controller")
    agent: tuple[str, ...] = _key(AGENT, "what that Python runs")

    def __post_init__(self) -> None:
        if not _WORD.fullmatch(self.partition):
            raise InputError(
                f"`partition` must name the preemptible partition for pilots, but got {self.partition!r}; "
                "`sinfo -s` lists the partitions"
            )
        for name in ("account", "qos"):
            if getattr(self, name) and not _WORD.fullmatch(getattr(self, name)):
                raise InputError(f"`{name}` must be a name, but got {getattr(self, name)!r}")
        if self.constraint and not _FEATURES.fullmatch(self.constraint):
            raise InputError(f"`constraint` must be features joined by & or |, but got {self.constraint!r}")
        for name in ("interval_s", "rest_s", "command_timeout_s", "submit_rate", "join_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"`{name}` must be more than 0, but got {getattr(self, name)}")
        for name in ("reserve", "warm_pilots", "linger_s", "max_pilots", "renew_s", "grace_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"`{name}` must be 0 or more, but got {getattr(self, name)}")
        if self.max_pending < 1:
            raise InputError(f"`max_pending` must be 1 or more, but got {self.max_pending}")
        if self.submit not in ("lend", "run-as"):
            raise InputError(f"`submit` must be lend or run-as, but got {self.submit!r}")
        if self.submit_as and not any("{account}" in word for word in self.submit_as):
            raise InputError(f"`submit_as` must have {{account}} in it, but got {' '.join(self.submit_as)!r}")
        if self.gpus not in ("all", "none"):
            raise InputError(f"`gpus` must be all or none, but got {self.gpus!r}")
        if self.gpus == "none" and names_gpus(self.options):
            asked = " ".join(gres_options(self.options))
            raise InputError(f"`gpus` is none, but `options` asks for GPUs ({asked}): leave one of them out")
        if not self.agent:
            raise InputError("`agent` must be what Python runs on a node, but got nothing")
        self._check_times()
        for name in ("exclude", "nodelist"):
            _names(name, getattr(self, name))
        for word in self.options:
            if not word.startswith("-") or "\0" in word or "\n" in word:
                raise InputError(f"`options` must be options of sbatch such as --licenses=lustre, but got {word!r}")

    def _check_times(self) -> None:
        longest = _seconds("time_limit", self.time_limit)
        if self.time_min and not _seconds("time_min", self.time_min) <= longest:
            raise InputError(f"`time_min` must be at most `time_limit`, {self.time_limit}, but got {self.time_min}")
        if not self.grace_s <= self.renew_s < longest:
            raise InputError(
                f"`renew_s` must be at least `grace_s`, {self.grace_s:g}, and less than `time_limit`, "
                f"but got {self.renew_s:g}"
            )

    @property
    def only(self) -> frozenset[str]:
        """The names in `nodelist`."""
        return _names("nodelist", self.nodelist)

    @property
    def never(self) -> frozenset[str]:
        """The names in `exclude`."""
        return _names("exclude", self.exclude)


def read_duration(text: str) -> float:
    """Return the seconds of a time limit as Slurm accepts and prints it. ValueError if it is invalid.

    Forms: `minutes`, `minutes:seconds`, `hours:minutes:seconds`; after `days-` the hours come first.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"not a time limit: {text[:60]!r}")
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return ((int(days) * 24.0 + hours) * 60 + minutes) * 60 + seconds
    hours, minutes, seconds = numbers if len(numbers) == 3 else [0, *numbers, 0][:3]
    return (hours * 60.0 + minutes) * 60 + seconds


def _seconds(name: str, text: str) -> float:
    try:
        return read_duration(text)
    except ValueError:
        raise InputError(f"`{name}` must be a time such as 4:00:00 or 1-12:00:00, but got {text!r}") from None


def _names(name: str, lists: tuple[str, ...]) -> frozenset[str]:
    try:
        return frozenset(node for text in lists for node in expand(text))
    except ValueError as problem:
        raise InputError(f"`{name}` must be node names or host lists such as n[1-4], but {problem}") from None
