"""Preemption checks tell whether Slurm takes nodes back from pilots, and how soon.

They are part of `check.py`: a `Site` and the place to harvest come in, findings on preemption, its order, its signals
and its waits come out. The seconds that findings state were measured on a real Slurm 22.05.
"""

from __future__ import annotations

from collections.abc import Iterator

from bftrainer.slurm.findings import Harvest, Level, SiteFinding, listed, preempts_by, time_of
from bftrainer.slurm.site import Partition, Qos, Site

MOST_KILL_WAIT_S = 10.0
MOST_GRACE_S = 30.0
MOST_MESSAGE_S = 30.0


def taking_back(site: Site, harvest: Harvest) -> Iterator[SiteFinding]:
    """Check whether Slurm takes a node back from a pilot, and how."""
    kind = preempts_by(site)
    never = "a main job would wait until the time limit of the pilot on its node ends: hours"
    if kind == "none":
        lines = ("PreemptType=preempt/partition_prio", "PreemptMode=CANCEL")
        yield SiteFinding("preempt-type", "error", "PreemptType is none: Slurm never takes a node back", never, lines)
    else:
        yield SiteFinding("preempt-type", "ok", f"PreemptType is preempt/{kind}")
    if harvest.partition is None:
        return
    if kind == "qos":
        yield from _qos_order(site, harvest.qos, never)
    else:
        yield from _tiers(site, harvest.partition, never)
    mode, where, line = preempt_mode(site, harvest)
    if "SUSPEND" in mode:
        why = "a suspended pilot keeps its memory and GPUs: main jobs start beside it, and may fail for want of them"
        yield SiteFinding("preempt-mode", "error", f"PreemptMode of {where} is SUSPEND", why, (line,))
    elif "REQUEUE" in mode:
        why = "Slurm holds a requeued job back for about two minutes; pilots ask not to be requeued, others may not"
        yield SiteFinding("preempt-mode", "warning", f"PreemptMode of {where} is REQUEUE", why, (line,))
    elif "CANCEL" in mode:
        yield SiteFinding("preempt-mode", "ok", f"PreemptMode of {where} is CANCEL")
    else:
        yield SiteFinding(
            "preempt-mode", "error", f"PreemptMode of {where} is OFF: no pilot is preempted", never, (line,)
        )
    exempt_s = time_of(site, "PreemptExemptTime")
    key: tuple[str, ...] = ("PreemptExemptTime=0",)
    if kind == "qos" and harvest.qos is not None and harvest.qos.exempt_s is not None:
        exempt_s = harvest.qos.exempt_s
        key = (f"sacctmgr -i modify qos {harvest.qos.name} set PreemptExemptTime=0",)
    if exempt_s > 0:
        what = f"PreemptExemptTime is {exempt_s:g} s: a younger pilot cannot be preempted"
        yield SiteFinding(
            "preempt-exempt", "error", what, f"a main job may wait {exempt_s:g} s longer for its nodes", key
        )
    else:
        yield SiteFinding(
            "preempt-exempt", "ok", "PreemptExemptTime is 0: a pilot can be preempted from its first second"
        )


def _tiers(site: Site, partition: Partition, never: str) -> Iterator[SiteFinding]:
    """Check whether jobs of every other partition come before pilots."""
    others = site.sharing(partition)
    least = min((other.tier for other in others), default=partition.tier + 1)
    if not others:
        what = f"no other partition shares the nodes of {partition.name}"
        yield SiteFinding("priority-tier", "warning", what, "there is nothing to harvest: main jobs never run there")
    elif partition.tier < least:
        names = listed(other.name for other in others)
        what = f"PriorityTier of {partition.name} is {partition.tier}, below all that share its nodes ({names})"
        yield SiteFinding("priority-tier", "ok", what)
    if least > 0:
        lines: tuple[str, ...] = (f"PartitionName={partition.name} PriorityTier={least - 1}",)
    else:
        lines = tuple(
            f"PartitionName={o.name} PriorityTier={partition.tier + 10}" for o in others if o.tier <= partition.tier
        )
    for other in others:
        if other.tier == partition.tier:
            what = f"partitions {partition.name} and {other.name} share nodes and have equal tiers ({other.tier})"
            yield SiteFinding(
                "priority-tier", "error", f"{what}: jobs of {other.name} cannot preempt pilots", never, lines
            )
        elif other.tier < partition.tier:
            what = f"PriorityTier of {partition.name} ({partition.tier}) is above that of {other.name} ({other.tier})"
            why = f"pilots would preempt jobs of {other.name}, and never give way to them"
            yield SiteFinding("priority-tier", "error", what, why, lines)


def _qos_order(site: Site, qos: Qos | None, never: str) -> Iterator[SiteFinding]:
    """Check whether jobs of every other QOS come before pilots."""
    if qos is None:
        if site.qos is None:
            yield SiteFinding(
                "qos", "warning", "which QOS may preempt which is not known: sacctmgr did not answer", never
            )
            return
        preempted = {name for one in site.qos.values() for name in one.preempts}
        what = (
            f"several QOS can be preempted ({listed(preempted)}): name the one of the pilots with --qos"
            if preempted
            else "no QOS can be preempted by another"
        )
        made = ("sacctmgr -i add qos bftrainer", "sacctmgr -i modify qos normal set Preempt+=bftrainer")
        yield SiteFinding("qos", "error", what, never, () if preempted else made)
        return
    known = site.qos or {}
    below = {name for one in known.values() for name in one.preempts}
    cannot = sorted(name for name, one in known.items() if name != qos.name and qos.name not in one.preempts)
    for name in cannot:
        what = f"QOS {name} cannot preempt QOS {qos.name}"
        lines = (f"sacctmgr -i modify qos {name} set Preempt+={qos.name}",)
        level: Level = "warning" if name in below else "error"  # a QOS in `below` may itself be preempted
        yield SiteFinding("qos", level, what, never, lines)
    if not cannot:
        yield SiteFinding("qos", "ok", f"every other QOS can preempt QOS {qos.name}")


def preempt_mode(site: Site, harvest: Harvest) -> tuple[frozenset[str], str, str]:
    """Return how pilots are preempted, what sets it, and the line that sets it to CANCEL."""
    assert harvest.partition is not None
    whole = frozenset(site.config.get("PreemptMode", "OFF").upper().split(","))
    if preempts_by(site) != "qos":
        name = harvest.partition.name
        return harvest.partition.preempt_mode, f"partition {name}", f"PartitionName={name} PreemptMode=CANCEL"
    if harvest.qos is None or not harvest.qos.preempt_mode:
        return whole, "the cluster", "PreemptMode=CANCEL"
    name = harvest.qos.name
    return harvest.qos.preempt_mode, f"QOS {name}", f"sacctmgr -i modify qos {name} set PreemptMode=cancel"


def ending(site: Site, harvest: Harvest) -> Iterator[SiteFinding]:
    """Check how soon a preempted pilot is told, and how long one that hangs may hold its node."""
    newer = "PreemptParameters" in site.config
    told = "preempt_send_user_signal" in site.options("SlurmctldParameters") or bool(
        {"send_user_signal", "preempt_send_user_signal"} & site.options("PreemptParameters").keys()
    )
    key, word = (
        ("PreemptParameters", "send_user_signal") if newer else ("SlurmctldParameters", "preempt_send_user_signal")
    )
    signalling = f"{key}=" + ",".join(filter(None, (site.config.get(key), word)))
    grace_s, where, no_grace = _grace(site, harvest)
    if where and grace_s > 0 and not told:
        what = (
            f"GraceTime of {where} is {grace_s:g} s, but {word} is not set: the batch script of a pilot hears nothing"
        )
        yield SiteFinding("grace-signal", "error", what, "each preemption delays a main job by 10–27 s", (signalling,))
    elif where:
        how = f"GraceTime of {where} is {grace_s:g} s and {word} is set" if grace_s else f"GraceTime of {where} is 0"
        yield SiteFinding("grace-signal", "ok", f"{how}: a preempted pilot gets a signal at once")
    if where and grace_s > MOST_GRACE_S:
        what, why = (
            f"GraceTime of {where} is {grace_s:g} s",
            f"a pilot that hangs may hold its node for {grace_s:g} s more",
        )
        yield SiteFinding("grace-time", "warning", f"{what}; pilots need none", why, (no_grace,))
    kill_s, message_s = time_of(site, "KillWait", 30), time_of(site, "MessageTimeout", 10)
    held = f"{kill_s:g} to {kill_s + message_s:g} s"
    why = f"a pilot that hangs delays a main job by {held}; one that ends on its first signal, as agents do, does not"
    if kill_s > MOST_KILL_WAIT_S:
        yield SiteFinding("kill-wait", "warning", f"KillWait is {kill_s:g} s", why, ("KillWait=5",))
    else:
        yield SiteFinding("kill-wait", "ok", f"KillWait is {kill_s:g} s")
    if message_s > MOST_MESSAGE_S:
        yield SiteFinding(
            "message-timeout", "warning", f"MessageTimeout is {message_s:g} s", why, ("MessageTimeout=10",)
        )
    else:
        yield SiteFinding("message-timeout", "ok", f"MessageTimeout is {message_s:g} s")


def _grace(site: Site, harvest: Harvest) -> tuple[float, str, str]:
    """Return the grace time of pilots, what sets it (empty: nothing), and the line that makes it 0."""
    if preempts_by(site) == "qos":
        qos = harvest.qos
        return (0.0, "", "") if qos is None else (
            qos.grace_s, f"QOS {qos.name}", f"sacctmgr -i modify qos {qos.name} set GraceTime=0"
        )  # fmt: skip
    one = harvest.partition
    return (
        (0.0, "", "")
        if one is None
        else (one.grace_s, f"partition {one.name}", f"PartitionName={one.name} GraceTime=0")
    )
