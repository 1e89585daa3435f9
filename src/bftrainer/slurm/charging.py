"""Charging checks tell what harvesting costs its user: fair share, and allocations of node-hours.

They are part of `check.py`. Pilots are jobs of the user who runs the controller. Unless the site says otherwise, Slurm
counts their time like that of any job: it lowers the priority of the user's and the account's own main jobs, and it is
taken from their allocation.
"""

from __future__ import annotations

from collections.abc import Iterator

from bftrainer.slurm.findings import Harvest, SiteFinding, listed
from bftrainer.slurm.site import Qos, Site

_NEW_QOS = "bftrainer"
"""Name of the QOS in the commands that make one."""


def charging(site: Site, harvest: Harvest) -> Iterator[SiteFinding]:
    """Check whether pilots are charged to their account, and what that costs."""
    if not site.config.get("AccountingStorageType", "").endswith("slurmdbd"):
        yield SiteFinding("charging", "ok", "there is no slurmdbd: pilots are charged to nobody")
        return
    qos = harvest.qos or (site.qos or {}).get(site.user.default_qos or "normal")
    factor = qos.usage_factor if qos is not None else 1.0
    unweighted = _unweighted(harvest)
    fixes = _fixes(site, harvest)
    yield _charged(harvest, qos, factor, unweighted, fixes)
    yield _fair_share(site, free=factor == 0 or unweighted, fixes=fixes)
    yield _allocation(site, qos, factor, unweighted, fixes)


def _charged(harvest: Harvest, qos: Qos | None, factor: float, unweighted: bool, fixes: tuple[str, ...]) -> SiteFinding:
    where = f"QOS {qos.name}" if qos is not None else "their QOS"
    if factor == 0:
        return SiteFinding("charging", "ok", f"UsageFactor of {where} is 0: the time of pilots is charged to nobody")
    if unweighted:
        name = harvest.partition.name if harvest.partition else ""
        what = f"TRESBillingWeights of {name} are 0: pilots count for nothing in fair share and billing"
        return SiteFinding("charging", "ok", what)
    how = "in full" if factor == 1 else f"at {factor:g} times their time"
    what = f"pilots are charged to the account of their user {how}: UsageFactor of {where} is {factor:g}"
    why = (
        "a hundred nodes harvested for a day are charged as 2,400 node-hours, although nobody else could use them: "
        "give pilots a QOS with UsageFactor=0"
    )
    return SiteFinding("charging", "warning", what, why, fixes)


def _fair_share(site: Site, *, free: bool, fixes: tuple[str, ...]) -> SiteFinding:
    weight = site.config.get("PriorityWeightFairShare", "0") or "0"
    if not site.config.get("PriorityType", "").endswith("multifactor") or weight == "0":
        return SiteFinding("fair-share", "ok", "past use does not change priorities: no fair share is lost")
    if free:
        return SiteFinding("fair-share", "ok", "pilots do not count in fair share")
    half_life = site.config.get("PriorityDecayHalfLife", "")
    until = f", half of it for {half_life}" if half_life not in ("", "00:00:00") else " until it is reset"
    what = f"pilots count in fair share (PriorityWeightFairShare is {weight})"
    why = (
        f"every harvested node-hour lowers the priority of main jobs of the user and of the account{until}, as if they "
        "had used it for themselves"
    )
    return SiteFinding("fair-share", "warning", what, why, fixes)


def _allocation(site: Site, qos: Qos | None, factor: float, unweighted: bool, fixes: tuple[str, ...]) -> SiteFinding:
    budgets = {f"account {name}": text for name, text in site.user.budgets.items()}
    if qos is not None and qos.minutes:
        budgets[f"QOS {qos.name}"] = qos.minutes
    if factor == 0:
        return SiteFinding("allocation", "ok", "pilots use up no allocation: UsageFactor is 0")
    if unweighted:
        budgets = {name: text for name, text in budgets.items() if _other_than_billing(text)}
    if not budgets:
        what = "Slurm limits no TRES-minutes here; a site that bills from sacct must leave out jobs named bftrainer-*"
        return SiteFinding("allocation", "ok", what)
    enforced = {"limits", "safe", "all"} & site.options("AccountingStorageEnforce").keys()
    shown = listed(f"{name} has {text}" for name, text in budgets.items())
    why = (
        "when the minutes are used up, Slurm holds or refuses every job of the account, main jobs too"
        if enforced
        else "AccountingStorageEnforce does not enforce them, but reports of the site show them as used"
    )
    what = f"pilots use up the allocation of TRES-minutes: {shown}"
    return SiteFinding("allocation", "warning", what, why, fixes)


def _fixes(site: Site, harvest: Harvest) -> tuple[str, ...]:
    """Return the commands that give pilots a QOS of their own, or free the one that they have."""
    if harvest.qos is not None:
        return (f"sacctmgr -i modify qos {harvest.qos.name} set UsageFactor=0",)
    return (
        f"sacctmgr -i add qos {_NEW_QOS} set UsageFactor=0",
        f"sacctmgr -i modify user {site.user.name} set qos+={_NEW_QOS}",
    )


def _unweighted(harvest: Harvest) -> bool:
    """Whether the partition bills nothing: it has weights, and all of them are 0."""
    text = harvest.partition.keys.get("TRESBillingWeights", "") if harvest.partition is not None else ""
    values = [word.rpartition("=")[2].rstrip("KMGTPkmgtp") for word in text.split(",") if "=" in word]
    return bool(values) and all(_is_zero(value) for value in values)


def _is_zero(text: str) -> bool:
    try:
        return float(text) == 0
    except ValueError:
        return False


def _other_than_billing(minutes: str) -> bool:
    return any(word.partition("=")[0] != "billing" for word in minutes.split(",") if word)
