"""The check judges a Slurm site and returns findings, each with the lines that fix it.

A finding says what is fine, what delays main jobs, or what keeps pilots out. A `Site` (`site.py`) and the partition to
harvest come in; nothing is asked or changed here. `bftrainer slurm check` prints the findings. Preemption itself is
checked in `preemption.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from bftrainer.errors import InputError
from bftrainer.slurm.charging import charging
from bftrainer.slurm.findings import Harvest, Level, SiteFinding, listed, preempts_by, slurm_conf, time_of
from bftrainer.slurm.gpus import PilotRequest, gpu_findings
from bftrainer.slurm.owners import PilotOwnersSetup, owners_findings
from bftrainer.slurm.preemption import ending, taking_back
from bftrainer.slurm.site import Partition, Qos, Site, seconds
from bftrainer.util.suggest import unknown

__all__ = ["Harvest", "SiteFinding", "choose", "examine", "refused", "slurm_conf"]

PILOT_S = 3600.0
"""Time limit of pilots in seconds, unless set otherwise."""
ROUND_S = 60.0
"""Longest acceptable time until Slurm considers a preempting main job again, in seconds."""
SKEW_S = 5.0

_HARVESTING = re.compile(r"bftrainer|scav|preempt|kill|harvest|opport|spot|idle|backfill|low", re.IGNORECASE)
"""Typical names of partitions and QOS for jobs that may be preempted."""
_PLANNED = (21, 8)
"""The first release that shows which nodes the backfill plan reserves."""


def choose(site: Site, partition: str = "", qos: str = "") -> Harvest:
    """Return where pilots would run: the named partition and QOS, else those that seem meant for it.

    `InputError` for a name that does not exist.
    """
    if qos and site.qos is not None and qos not in site.qos:
        raise InputError(f"{unknown('QOS', qos, site.qos)}")
    by_qos = preempts_by(site) == "qos"
    known = site.qos or {}
    preempted = {name for one in known.values() for name in one.preempts}
    picked = qos or (_likeliest(preempted) if by_qos else "")
    if partition:
        chosen: Partition | None = site.partition(partition)
    elif by_qos:
        chosen = max(site.partitions.values(), key=lambda one: (len(one.nodes), one.name), default=None)
    else:
        low = {name for name, one in site.partitions.items() if any(one.tier < o.tier for o in site.sharing(one))}
        named = {name for name in site.partitions if _HARVESTING.search(name)}
        name = _likeliest(low & named or named or low)
        chosen = site.partitions[name] if name else None
    return Harvest(chosen, known.get(picked))


def _likeliest(names: set[str]) -> str:
    """Return the only name, or the only one that sounds like harvesting; empty if there is no such one."""
    for some in (names, {name for name in names if _HARVESTING.search(name)}):
        if len(some) == 1:
            return min(some)
    return ""


def examine(
    site: Site,
    harvest: Harvest,
    refusal: str | None = None,
    limit_s: float = PILOT_S,
    request: PilotRequest | None = None,
    owners: PilotOwnersSetup | None = None,
) -> list[SiteFinding]:
    """Return all findings. `refusal` is why Slurm refused a trial pilot, empty if it did not.

    `limit_s` is the time limit of pilots, `request` what they ask for of GPUs, `owners` whose account they run under.
    """
    findings = [*taking_back(site, harvest), *ending(site, harvest)]
    if harvest.partition is None:
        findings.append(_no_partition(site))
    else:
        findings += [
            *_admission(site, harvest.partition, harvest.qos),
            *gpu_findings(site, harvest, request or PilotRequest()),
        ]
        findings += [*_pilot(refusal), *charging(site, harvest)]
        findings.append(_reservations(limit_s))
    if owners is not None:
        findings += owners_findings(site, owners)
    findings += [*_scheduling(site), *_scripts(site), *_surroundings(site)]
    findings += [SiteFinding("asked", "warning", f"no answer: {line}", "this was not checked")
                 for line in site.unanswered]  # fmt: skip
    return findings


def _no_partition(site: Site) -> SiteFinding:
    every = frozenset(node for one in site.partitions.values() for node in one.nodes)
    least = min((one.tier for one in site.partitions.values()), default=1)
    words = f"Nodes=ALL PriorityTier={max(least - 1, 0)} PreemptMode=CANCEL OverSubscribe=EXCLUSIVE State=UP"
    raised = tuple(f"PartitionName={one.name} PriorityTier=10" for one in site.partitions.values() if one.tier == 0)
    return SiteFinding(
        "partition",
        "error",
        f"no partition is for harvesting the {len(every)} nodes here; name one with --partition, or make one",
        "pilots need a partition that all others can preempt",
        (f"PartitionName=bftrainer {words}", *raised),
    )


def refused(site: Site, partition: Partition, qos: Qos | None = None) -> list[str]:
    """Return why the current user may not submit to a partition, judged by its settings; one line per reason."""
    keys, user, reasons = partition.keys, site.user, []

    def words(key: str) -> set[str] | None:
        """Return the names in a setting; None: everybody."""
        text = keys.get(key, "ALL")
        return None if text in ("ALL", "") else set(text.split(","))

    root = user.name == "root"
    if keys.get("RootOnly") == "YES" and not root:
        reasons.append("RootOnly=YES: only root may submit")
    if keys.get("DisableRootJobs") == "YES" and root:
        reasons.append("DisableRootJobs=YES: root may not submit")
    if keys.get("ReqResv") == "YES":
        reasons.append("ReqResv=YES: only jobs in a reservation may run")
    groups, accounts, denied = words("AllowGroups"), words("AllowAccounts"), words("DenyAccounts")
    if groups is not None and not root and not groups & user.groups:
        reasons.append(f"AllowGroups={listed(groups)}: {user.name} is in none of them")
    if accounts is not None and user.accounts and not accounts & user.accounts.keys():
        reasons.append(f"AllowAccounts={listed(accounts)}: {user.name} has none of them")
    if denied is not None and user.accounts and user.accounts.keys() <= denied:
        reasons.append(f"DenyAccounts={listed(denied)}: {user.name} has no other")
    if qos is not None:
        allowed, denied_qos = words("AllowQos"), words("DenyQos") or set()
        if (allowed is not None and qos.name not in allowed) or qos.name in denied_qos:
            reasons.append(f"QOS {qos.name} is not allowed in it")
    return reasons


def _admission(site: Site, partition: Partition, qos: Qos | None) -> Iterator[SiteFinding]:
    """Check whether single-node pilots may run there, for how long, and how many."""
    name, keys = partition.name, partition.keys
    line = f"PartitionName={name}"
    state = keys.get("State", "UP")
    if state != "UP":
        yield SiteFinding("state", "error", f"State of {name} is {state}", "no pilot starts", (f"{line} State=UP",))
    else:
        yield SiteFinding("state", "ok", f"partition {name} is UP and has {len(partition.nodes)} nodes")
    for reason in refused(site, partition, qos):
        yield SiteFinding("access", "error", f"partition {name}: {reason}", "pilots would be refused")
    if _number(keys.get("MinNodes", "0")) > 1:
        what = f"MinNodes of {name} is {keys['MinNodes']}"
        yield SiteFinding("size", "error", what, "a pilot has one node and is refused", (f"{line} MinNodes=0",))
    if keys.get("MaxNodes") == "0":
        yield SiteFinding(
            "size", "error", f"MaxNodes of {name} is 0", "no pilot may run", (f"{line} MaxNodes=UNLIMITED",)
        )
    most_s = min(
        _seconds(keys.get("MaxTime", "UNLIMITED")), _seconds((qos and qos.limits.get("MaxWall")) or "UNLIMITED")
    )
    if most_s < PILOT_S:
        why = f"longer pilots wait for ever: set pool.time_limit to {clock_text(most_s)} or less"
        yield SiteFinding("time-limit", "warning", f"jobs of {name} may run for {clock_text(most_s)} at most", why)
    sharing = keys.get("OverSubscribe", "NO")
    if sharing.startswith(("FORCE", "YES")):
        what, why = (
            f"OverSubscribe of {name} is {sharing}",
            "several jobs run on a node at once, and slow each other down",
        )
        yield SiteFinding("sharing", "warning", what, why, (f"{line} OverSubscribe=EXCLUSIVE",))
    else:
        yield SiteFinding("sharing", "ok", f"OverSubscribe of {name} is {sharing}: a pilot has its node to itself")
    for other in site.sharing(partition):
        if other.keys.get("OverSubscribe", "").startswith("FORCE"):
            what = f"OverSubscribe of {other.name} is {other.keys['OverSubscribe']}"
            yield SiteFinding("sharing", "warning", what, "its jobs may share nodes; only idle nodes are harvested")
    for one in filter(None, (qos, (site.qos or {}).get(keys.get("QoS", "")))):
        bounds = ", ".join(f"{key}={value}" for key, value in sorted(one.limits.items()) if key != "MaxWall")
        if bounds:
            why = "no more pilots run than that: set pool.max_pilots accordingly"
            yield SiteFinding("limits", "warning", f"QOS {one.name} has limits ({bounds})", why)
    jobs = _number(site.config.get("MaxJobCount", "10000"))
    if jobs < 2 * len(partition.nodes):
        why = "a pilot for each node would leave too few for main jobs: submissions fail when there are too many"
        yield SiteFinding(
            "limits", "error", f"MaxJobCount is {jobs}", why, (f"MaxJobCount={4 * len(partition.nodes)}",)
        )


def _pilot(refusal: str | None) -> Iterator[SiteFinding]:
    if refusal:
        yield SiteFinding(
            "pilot", "error", f"Slurm refuses a pilot: {refusal}", "no node can be harvested with these settings"
        )
    elif refusal is not None:
        yield SiteFinding("pilot", "ok", "Slurm would accept a pilot (sbatch --test-only)")


def _reservations(limit_s: float) -> SiteFinding:
    """Say for how long pilots can be in the way of a reservation."""
    what = (
        f"pilots run for up to {clock_text(limit_s)}: until then Slurm refuses a reservation of their nodes "
        '("Requested nodes are busy") unless it has the flag IGNORE_JOBS'
    )
    why = (
        "with scontrol create reservation … Flags=IGNORE_JOBS (and MAINT) pilots leave the nodes pool.renew_s before "
        "it begins; a smaller pool.time_limit makes room sooner without the flag"
    )
    return SiteFinding("reservations", "warning" if limit_s > PILOT_S else "ok", what, why)


def _scheduling(site: Site) -> Iterator[SiteFinding]:
    """Check when the scheduler considers a main job that waits for pilots to end."""
    kind, options = site.config.get("SchedulerType", "").removeprefix("sched/"), site.options("SchedulerParameters")
    defaults = {"bf_interval": 30.0, "sched_interval": 60.0, "batch_sched_delay": 3.0}
    times = {key: _number(options.get(key, ""), default) for key, default in defaults.items()}
    slow = [
        f"{key}={value:g}" for key, value in times.items() if value > (ROUND_S if key != "batch_sched_delay" else 3)
    ]
    shown = ", ".join(f"{key}={value:g}" for key, value in times.items())
    if slow:
        merged = {**options, **{entry.partition("=")[0]: f"{defaults[entry.partition('=')[0]]:g}" for entry in slow}}
        line = "SchedulerParameters=" + ",".join(f"{key}={value}" if value else key for key, value in merged.items())
        why = "a main job that preempts pilots starts in the next round of the scheduler, so late at worst"
        yield SiteFinding("scheduler", "warning", f"SchedulerParameters has {', '.join(slow)} (seconds)", why, (line,))
    else:
        yield SiteFinding("scheduler", "ok", f"the scheduler looks often enough ({shown}, in seconds)")
    if kind != "backfill":
        why = "it plans no starts ahead, so pilots cannot be fitted into the time before them"
        yield SiteFinding(
            "backfill", "warning", f"SchedulerType is {kind or 'not set'}", why, ("SchedulerType=sched/backfill",)
        )
    complete_s = time_of(site, "CompleteWait")
    if complete_s > 0:
        why = f"while a pilot ends, no main job is started, for {complete_s:g} s at most"
        yield SiteFinding("complete-wait", "warning", f"CompleteWait is {complete_s:g} s", why, ("CompleteWait=0",))


def _scripts(site: Site) -> Iterator[SiteFinding]:
    """Check which scripts run between the end of a pilot and the start of a main job."""
    names = ("Prolog", "Epilog", "PrologSlurmctld", "EpilogSlurmctld")
    found = [key for key, value in site.config.items() if value and key.partition("[")[0] in names]
    after = [key for key in found if key.startswith("Epilog")]
    if after:
        why = "after a preemption the main job waits for it as well: `time` it; each second counts for every main job"
        yield SiteFinding("scripts", "warning", f"{', '.join(after)} runs when a pilot ends", why)
    else:
        yield SiteFinding("scripts", "ok", "no Epilog runs between a pilot's end and the main job's start")
    if "serial" in site.options("PrologFlags"):
        why = "on each node, the main job's Prolog waits for the pilot's Epilog"
        yield SiteFinding("scripts", "warning", "PrologFlags has Serial", why)
    plugins = site.config.get("JobSubmitPlugins", "")
    if plugins:
        yield SiteFinding(
            "submit-plugins", "ok", f"JobSubmitPlugins ({plugins}) may change or refuse pilots; see `pilot`"
        )


def _surroundings(site: Site) -> Iterator[SiteFinding]:
    """Check processes, power, clocks, switches, logs and disks."""
    config = site.config
    track = config.get("ProctrackType", "").removeprefix("proctrack/")
    if track in ("pgid", "linuxproc"):
        why = "a process that leaves the pilot's group or tree outlives it; workers end when their agent is gone"
        yield SiteFinding("proctrack", "warning", f"ProctrackType is {track}", why, ("ProctrackType=proctrack/cgroup",))
    else:
        yield SiteFinding("proctrack", "ok", f"ProctrackType is {track}: nothing outlives its job")
    if site.version and site.version < _PLANNED:
        why = "it does not show which nodes are planned for main jobs; pilots there are preempted, not avoided"
        yield SiteFinding("version", "warning", f"Slurm is {config['SLURM_VERSION']}", why)
    else:
        yield SiteFinding("version", "ok", f"Slurm is {config['SLURM_VERSION']}")
    if config.get("SuspendProgram") and _seconds(config.get("SuspendTime", "INFINITE")) < 1e9:
        yield SiteFinding("power", "warning", "idle nodes are powered down (SuspendProgram)",
                      "nodes with pilots stay on; sleeping nodes are not woken")  # fmt: skip
    if site.skew_s is not None:
        level: Level = "warning" if abs(site.skew_s) > SKEW_S else "ok"
        why = (
            "the ends of pilots are misjudged by as much: synchronise both clocks (chrony, ntpd)"
            if level != "ok"
            else ""
        )
        ahead = "ahead of" if site.skew_s > 0 else "behind"
        what = (
            f"slurmctld's clock is {abs(site.skew_s):.0f} s {ahead} this machine's" if level != "ok" else "clocks agree"
        )
        yield SiteFinding("clock", level, what, why)
    if site.topology:
        yield SiteFinding(
            "topology", "ok", 'there is a tree of switches: policy.placement = "compact" keeps trainers together'
        )
    else:
        yield SiteFinding("topology", "ok", "there is no tree of switches: placement does not look at the network")
    if config.get("AccountingStorageType", "").endswith("slurmdbd"):
        yield SiteFinding("job-log", "ok", "sacct knows past jobs: bftrainer trace import reads what it prints")
    elif config.get("JobCompType", "").endswith("filetxt"):
        where = config.get("JobCompLoc", "")
        yield SiteFinding(
            "job-log", "ok", f"past jobs are in {where}: bftrainer trace import --format jobcomp reads it"
        )
    else:
        lines = ("JobCompType=jobcomp/filetxt", "JobCompLoc=/var/log/slurm/jobcomp.log")
        why = "bftrainer trace import has nothing to read; bftrainer trace record --source slurm works"
        yield SiteFinding("job-log", "warning", "neither slurmdbd nor jobcomp/filetxt keeps past jobs", why, lines)
    disk = site.file_system
    if disk is not None and disk.shared:
        yield SiteFinding("file-system", "ok", f"the state folder {disk.path} is on {disk.kind}, which nodes can share")
    elif disk is not None and len(site.addresses) > 1:
        why = "nodes must see what is in it: choose a folder that they share, with --state or BFTRAINER_STATE"
        yield SiteFinding(
            "file-system", "warning", f"the state folder {disk.path} is on {disk.kind}, a local disk", why
        )
    elif disk is not None:
        yield SiteFinding(
            "file-system", "ok", f"the state folder {disk.path} is on {disk.kind}; all nodes are one machine"
        )


def clock_text(length_s: float) -> str:
    """Return a duration as Slurm reads it, such as 4:00:00."""
    whole = int(length_s)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _seconds(text: str) -> float:
    try:
        return seconds(text)
    except ValueError:
        return float("inf")


def _number(text: str, default: float = 0.0) -> float:
    try:
        return float(text)
    except ValueError:
        return default
