"""User setup writes a configuration for what a plain user may harvest.

A `Site` comes in; partitions or QOS to harvest, best first, and the text of a configuration file come out. `bftrainer
slurm setup-user` prints it. Administrators have other means: `check.py` names the lines of slurm.conf.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from bftrainer.errors import BFTrainerError
from bftrainer.slurm.check import PILOT_S, clock_text, examine, refused
from bftrainer.slurm.findings import Harvest, SiteFinding, listed, preempts_by
from bftrainer.slurm.gpus import kinds
from bftrainer.slurm.gres import gpu_count
from bftrainer.slurm.preemption import preempt_mode
from bftrainer.slurm.site import Partition, Qos, Site, seconds

SHORT_S = 300.0
"""Seconds. The time of pilots is not cut down below this."""
LEAST_S = 120.0
"""Seconds. A pilot that may run no longer than this is of no use."""

_OF_ONE_JOB = ("MaxWall", "MaxTRES", "MaxTRESPN")
"""Limits of each single job, in the names of sacctmgr."""
_CANCELS, _REQUEUES = "CANCEL", "REQUEUE"


@dataclass(frozen=True, slots=True)
class PartitionChoice:
    """A partition (and a QOS, where QOS decide) that this user may use and main jobs can take back."""

    partition: Partition
    qos: Qos | None
    account: str
    """Empty: the user's default account is sufficient."""
    findings: tuple[SiteFinding, ...]

    @property
    def errors(self) -> list[SiteFinding]:
        """Findings that an administrator would have to fix."""
        return [finding for finding in self.findings if finding.level == "error"]


def places(site: Site, partition: str = "") -> list[PartitionChoice]:
    """Return all choices, best first.

    `BFTrainerError` says why there is none; `InputError` for a partition that does not exist.
    """
    candidates = [site.partition(partition)] if partition else list(site.partitions.values())
    found: list[PartitionChoice] = []
    reasons: list[str] = []
    for one in candidates:
        for harvest in _harvests(site, one):
            reason = _unusable(site, harvest)
            if reason:
                reasons.append(f"{one.name}: {reason}")
                continue
            account = account_for(site, one, harvest.qos)
            found.append(PartitionChoice(one, harvest.qos, account, tuple(examine(site, harvest))))
    if not found:
        shown = "; ".join(dict.fromkeys(reasons[:5])) or "there are no QOS that can be preempted"
        cluster = site.config.get("ClusterName") or "this cluster"
        raise BFTrainerError(
            f"{cluster}: there is no partition that user {site.user.name} may use and that main jobs can preempt "
            f"({shown}); ask your administrators for a preemptible partition: bftrainer slurm check prints the lines "
            "for it"
        )
    return sorted(found, key=lambda place: _worth(site, place))


def _worth(site: Site, place: PartitionChoice) -> tuple[int, bool, int, str, str]:
    """Return a sort key; the smallest is the best choice."""
    requeued = _CANCELS not in preempt_mode(site, Harvest(place.partition, place.qos))[0]
    qos = place.qos.name if place.qos else ""
    return len(place.errors), requeued, -len(place.partition.nodes), place.partition.name, qos


def _harvests(site: Site, partition: Partition) -> Iterator[Harvest]:
    if preempts_by(site) != "qos":
        yield Harvest(partition)
        return
    known = site.qos or {}
    for name in sorted({name for one in known.values() for name in one.preempts} & known.keys()):
        yield Harvest(partition, known[name])


def _unusable(site: Site, harvest: Harvest) -> str:
    """Return why pilots would not run there, or could not be taken back; empty if there is no reason."""
    partition, qos = harvest.partition, harvest.qos
    assert partition is not None
    if preempts_by(site) == "none":
        return "PreemptType is none"
    if not {_CANCELS, _REQUEUES} & preempt_mode(site, harvest)[0]:
        return "its jobs are not cancelled when they are preempted"
    if qos is None and not any(other.tier > partition.tier for other in site.sharing(partition)):
        return "no partition of a higher tier shares its nodes"
    if partition.keys.get("State", "UP") != "UP":
        return f"its state is {partition.keys['State']}"
    if min(_limits_s(partition, qos), default=PILOT_S) < LEAST_S:
        return f"its jobs end within {LEAST_S:g} s"
    if qos is not None and site.user.accounts and not any(qos.name in names for names in site.user.accounts.values()):
        return f"{site.user.name} may not use QOS {qos.name}"
    return "; ".join(refused(site, partition, qos))


def account_for(site: Site, partition: Partition, qos: Qos | None) -> str:
    """Return the account to name, if the user has several or the partition requires certain ones."""
    allowed = partition.keys.get("AllowAccounts", "ALL")
    denied = partition.keys.get("DenyAccounts", "").split(",")
    fitting = [
        name
        for name, names in sorted(site.user.accounts.items())
        if (allowed in ("ALL", "") or name in allowed.split(","))
        and name not in denied
        and (qos is None or qos.name in names)
    ]
    return fitting[0] if fitting and len(site.user.accounts) > 1 else ""


def render(site: Site, place: PartitionChoice) -> str:
    """Return a configuration file for `bftrainer serve`, which finds the address that nodes can reach by itself."""
    partition, qos = place.partition, place.qos
    above = [other.name for other in site.sharing(partition) if other.tier > partition.tier]
    who = f"jobs of {listed(above)}" if qos is None else "jobs of other QOS"
    most_s = min([PILOT_S, *_limits_s(partition, qos)])
    cluster = f"{site.config.get('ClusterName', '')} (Slurm {site.config['SLURM_VERSION']})"
    lines = [
        f"# For {site.user.name} on cluster {cluster}.",
        f"# Pilots run on idle nodes of partition {partition.name}; {who} take them back.",
        *(f"# {one.level}: {one.what}: {one.why}" for one in place.findings if one.level != "ok"),
        "",
    ]
    disk = site.file_system
    if len(site.addresses) > 1:
        lines += [
            "[server]",
            "# The controller listens on the address from which a route leads to the nodes. To choose another one:",
            '# host = "…"',
        ]
        if disk is not None and not disk.shared:
            lines += ["# A folder that the nodes see as well, such as one in your project's space:", '# state = "…"']
        lines.append("")
    lines += ["[pool]", 'kind = "slurm"', f"partition = {_toml(partition.name)}"]
    if qos is not None:
        lines.append(f"qos = {_toml(qos.name)}")
    if place.account:
        lines.append(f"account = {_toml(place.account)}")
    lines.append(f'time_limit = "{clock_text(most_s)}"')
    if most_s < SHORT_S:
        lines.append('time_min = ""')
    pilots = _most_pilots(site, place)
    if pilots is not None:
        lines.append(f"max_pilots = {pilots}  # the most that may run at once")
    return "".join(" ".join(line.split()) + "\n" for line in lines)


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _limits_s(partition: Partition, qos: Qos | None) -> Iterator[float]:
    for text in (partition.keys.get("MaxTime", ""), qos.limits.get("MaxWall", "") if qos else ""):
        try:
            yield seconds(text)
        except ValueError:
            continue


def _most_pilots(site: Site, place: PartitionChoice) -> int | None:
    """Return how many single-node jobs the limits of the QOS let run at once."""
    gpus = min((gpu_count(gres) for gres in kinds(site, place.partition)), default=0)
    counts: list[int] = []
    for one in (place.qos, (site.qos or {}).get(place.partition.keys.get("QoS", ""))):
        for key, value in one.limits.items() if one else ():
            if key in _OF_ONE_JOB:
                continue
            match = re.search(r"(?:^|,)node=(\d+)", value) if "TRES" in key else re.fullmatch(r"(\d+)", value)
            if match:
                counts.append(int(match[1]))
            match = re.search(r"(?:^|,)gres/gpu=(\d+)", value)
            if match and gpus and int(match[1]) >= gpus:
                counts.append(int(match[1]) // gpus)
    return min(counts, default=None)
