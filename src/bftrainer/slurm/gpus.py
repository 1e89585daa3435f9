"""GPU checks tell what pilots get of the GPUs of a partition, and which settings of the site stand in the way.

They are part of `check.py`. The `slurm` pool asks for all GPUs of each node by itself; nothing has to be configured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bftrainer.slurm.findings import Harvest, Level, SiteFinding, listed
from bftrainer.slurm.gres import GPU, Gres, gpu_count, gpu_request, gres_options, names_gpus, read_gres
from bftrainer.slurm.site import Partition, Qos, Site

_ALWAYS_COUNTED = frozenset({"cpu", "mem", "energy", "node", "billing", "fs/disk", "vmem", "pages"})
"""Resources that AccountingStorageTRES has at every site."""
_LIMITS = {
    "MaxTRES": ("MaxTRESPerJob", "per job"),
    "MaxTRESPN": ("MaxTRESPerNode", "per node"),
    "MaxTRESPU": ("MaxTRESPerUser", "per user"),
    "MaxTRESPA": ("MaxTRESPerAccount", "per account"),
    "GrpTRES": ("GrpTRES", "in all"),
}
"""Limits of a QOS that may count GPUs, by the names in which sacctmgr shows them: how to set them, and their scope."""
_LIMIT = re.compile(r"gres/gpu(?::([^=,]+))?=(\d+)")


@dataclass(frozen=True, slots=True)
class PilotRequest:
    """Settings of the pool that decide which GPUs a pilot asks for."""

    gpus: str = "all"
    """See `pool.gpus`."""
    options: tuple[str, ...] = ()
    """See `pool.options`."""

    def words(self, site: Site, partition: Partition) -> tuple[str, ...]:
        """Return the options with which most pilots on nodes with GPUs ask for them."""
        by_hand = gres_options(self.options)
        if by_hand or self.gpus == "none":
            return by_hand
        asked = {gpu_request(gres): count for gres, count in kinds(site, partition).items() if gpu_count(gres)}
        return (f"--gres={max(asked, key=lambda words: (asked[words], words))}",) if asked else ()


def kinds(site: Site, partition: Partition) -> Mapping[Gres, int]:
    """Return the number of nodes of each kind, by their GPUs."""
    texts = (site.gres[node] for node in sorted(partition.nodes) if node in site.gres)
    return Counter(read_gres(gpu_request(read_gres(text))) for text in texts)


def gpu_findings(site: Site, harvest: Harvest, request: PilotRequest) -> Iterator[SiteFinding]:
    """Check what pilots get of the GPUs of a partition."""
    if harvest.partition is None or not site.gres:
        return
    there = kinds(site, harvest.partition)
    if GPU not in _words(site, "GresTypes") and (site.defines_gpus or any(there)):
        yield _types(site)
        return
    yield _granted(there, request)
    if not any(there):
        return
    if request.gpus == "all":
        yield from _devices(site)
    yield from _accounting(site)
    for qos in filter(None, (harvest.qos, (site.qos or {}).get(harvest.partition.keys.get("QoS", "")))):
        yield from _limits(qos, there)


def _granted(there: Mapping[Gres, int], request: PilotRequest) -> SiteFinding:
    without = there.get((), 0)
    with_gpus = sum(there.values()) - without
    if not with_gpus:
        return SiteFinding("gpus", "ok", f"none of the {without} nodes has GPUs: pilots ask for none")
    if request.gpus == "none":
        what = f"pool.gpus is none: pilots use none of the GPUs of {_nodes(with_gpus)}"
        why = "a pilot has its node to itself, so Slurm counts the GPUs as in use all the same"
        return SiteFinding("gpus", "ok", what, why)
    by_hand = gres_options(request.options)
    if by_hand:
        return _by_hand(there, " ".join(by_hand), names_gpus(by_hand))
    parts = [
        f"{_described(gres, count)}: a pilot asks for --gres={gpu_request(gres)} and gets all of them"
        for gres, count in sorted(there.items(), key=lambda kind: (-kind[1], kind[0]))
        if gres
    ]
    if without:
        parts.append(f"{_nodes(without)} without GPUs")
    return SiteFinding("gpus", "ok", "; ".join(parts))


def _by_hand(there: Mapping[Gres, int], words: str, for_gpus: bool) -> SiteFinding:
    have = "; ".join(_described(gres, count) for gres, count in there.items() if gres)
    if not for_gpus:
        what = f"pool.options has {words}: pilots ask for this and not for GPUs, but there are {have}"
        return SiteFinding("gpus", "warning", what, "add the GPUs to this option, or leave it out")
    what = f"pool.options has {words}: pilots ask for this and nothing else; there are {have}"
    why = "nodes that have less refuse their pilots; without this option each pilot asks for all GPUs of its node"
    return SiteFinding("gpus", "warning" if len(there) > 1 else "ok", what, why if len(there) > 1 else "")


def _types(site: Site) -> SiteFinding:
    what = "nodes have GPUs (Gres), but GresTypes lacks gpu"
    why = "Slurm does not know the resource: no pilot, and no other job, can ask for GPUs"
    types = ",".join((GPU, *_words(site, "GresTypes")))
    return SiteFinding("gres-types", "error", what, why, (f"GresTypes={types}",))


def _devices(site: Site) -> Iterator[SiteFinding]:
    plugins = site.config.get("TaskPlugin", "")
    constrained = site.config.get("ConstrainDevices", "").lower()
    if "cgroup" in plugins and constrained in ("", "yes"):
        if constrained:
            yield SiteFinding("devices", "ok", "ConstrainDevices is yes: a job sees only the GPUs that it was given")
        return
    what = "ConstrainDevices is not yes in cgroup.conf" if "cgroup" in plugins else f"TaskPlugin is {plugins or 'none'}"
    why = (
        "a job can open all GPUs of its node; the ranks of a trainer still get one each (CUDA_VISIBLE_DEVICES): use "
        "task/cgroup, and ConstrainDevices=yes in cgroup.conf"
    )
    yield SiteFinding("devices", "warning", what, why)


def _accounting(site: Site) -> Iterator[SiteFinding]:
    counted = _words(site, "AccountingStorageTRES")
    if site.config.get("AccountingStorageType", "").endswith("slurmdbd") and f"gres/{GPU}" not in counted:
        what = "AccountingStorageTRES lacks gres/gpu"
        why = "GPU-hours, of pilots and of main jobs, are neither recorded nor charged, and limits of GPUs do not work"
        others = [word for word in counted if word not in _ALWAYS_COUNTED]
        yield SiteFinding(
            "gpu-hours", "warning", what, why, (f"AccountingStorageTRES={','.join((f'gres/{GPU}', *others))}",)
        )


def _limits(qos: Qos, there: Mapping[Gres, int]) -> Iterator[SiteFinding]:
    """Check whether a QOS lets a job have all GPUs of a node."""
    for key, (setting, scope) in _LIMITS.items():
        for kind, most in _LIMIT.findall(qos.limits.get(key, "")):
            above = {gres: count for gres, count in there.items() if _count(gres, kind) > int(most)}
            if not above:
                continue
            level: Level = "warning" if any(gres not in above for gres in there) else "error"
            there_are = listed(_described(gres, count) for gres, count in above.items())
            what = f"QOS {qos.name} allows {most} {kind or 'GPUs'} {scope} ({setting}), but there are {there_are}"
            limit = f"gres/{GPU}{f':{kind}' if kind else ''}"
            fix = f"sacctmgr -i modify qos {qos.name} set {setting}={limit}=-1"
            yield SiteFinding("gpu-limits", level, what, "pilots of these nodes never start", (fix,))


def _count(gres: Gres, kind: str) -> int:
    return sum(count for _, has, count in gres if kind in ("", has))


def _described(gres: Gres, nodes: int) -> str:
    """Return such as `12 nodes with 4 GPUs each (gpu:a100:4)`."""
    count = gpu_count(gres)
    gpus = f"{count} GPU{'s' if count != 1 else ''}{' each' if nodes != 1 else ''}"
    return f"{_nodes(nodes)} with {gpus} ({gpu_request(gres)})"


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count != 1 else ''}"


def _words(site: Site, key: str) -> list[str]:
    return [word for word in site.config.get(key, "").lower().split(",") if word]
