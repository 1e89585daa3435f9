"""What harvesting costs its user, by the settings of a site: fair share, charging and allocations."""

from __future__ import annotations

import pytest

from bftrainer.slurm.check import slurm_conf
from bftrainer.slurm.site import Site, read_budgets, read_qos
from support.slurm.recorded_site import Changes, found, judged, recorded, site

MULTIFACTOR = {
    "PriorityType": "priority/multifactor",
    "PriorityWeightFairShare": "10000",
    "PriorityDecayHalfLife": "7-00:00:00",
}
PARTITIONS = {"PreemptType": "preempt/partition_prio"}
LIMITS = recorded("limits")


def charged(config: Changes | None = None, scavenger: Changes | None = None, factor: str = "1", **given: str) -> Site:
    """A site with slurmdbd that preempts by partition."""
    qos = recorded("qos").replace("1.000000", factor)
    changes = {**PARTITIONS, **(config or {})}
    return site(changes, scavenger=scavenger, qos=qos, assoc=recorded("assoc"), **given)


def test_without_accounting_nobody_is_charged() -> None:
    findings = judged(site())
    assert found(findings, "charging").level == "ok"
    assert "fair-share" not in {finding.check for finding in findings}


def test_pilots_that_are_charged_in_full_are_told_with_the_commands_that_end_it() -> None:
    findings = judged(charged(MULTIFACTOR))
    charging, share = found(findings, "charging"), found(findings, "fair-share")
    assert (charging.level, share.level) == ("warning", "warning")
    assert "charged to the account of their user in full" in charging.what
    assert "2,400 node-hours" in charging.why
    assert "PriorityWeightFairShare is 10000" in share.what
    assert "7-00:00:00" in share.why
    commands = slurm_conf(findings)
    assert "sacctmgr -i add qos bftrainer set UsageFactor=0" in commands
    assert any(
        line.startswith("sacctmgr -i modify user ") and line.endswith(" set qos+=bftrainer") for line in commands
    )


def test_a_qos_of_the_pilots_is_changed_rather_than_a_new_one_made() -> None:
    one = site(MULTIFACTOR, qos=recorded("qos"), assoc=recorded("assoc"))
    assert "sacctmgr -i modify qos scavenger set UsageFactor=0" in found(judged(one), "charging").fix


@pytest.mark.parametrize("check", ["charging", "fair-share", "allocation"])
def test_a_usage_factor_of_0_costs_nothing(check: str) -> None:
    assert found(judged(charged(MULTIFACTOR, factor="0.000000"), qos="scavenger"), check).level == "ok"


def test_a_factor_between_is_named() -> None:
    assert "at 0.25 times their time" in found(judged(charged(factor="0.250000"), qos="scavenger"), "charging").what


def test_weights_of_0_take_pilots_out_of_fair_share() -> None:
    weights = f"{recorded('partitions').splitlines()[1]} TRESBillingWeights=CPU=0.0,Mem=0.0G,GRES/gpu=0\n"
    findings = judged(charged(MULTIFACTOR, partition=weights), "scavenger")
    assert found(findings, "charging").level == found(findings, "fair-share").level == "ok"
    half = weights.replace("GRES/gpu=0", "GRES/gpu=1.5")
    assert found(judged(charged(MULTIFACTOR, partition=half), "scavenger"), "fair-share").level == "warning"


@pytest.mark.parametrize(
    "config",
    [{"PriorityType": "priority/basic"}, {"PriorityType": "priority/multifactor", "PriorityWeightFairShare": "0"}],
)
def test_without_fair_share_none_is_lost(config: Changes) -> None:
    assert found(judged(charged(config)), "fair-share").level == "ok"


def test_an_allocation_of_minutes_is_used_up_by_pilots() -> None:
    findings = judged(charged({"AccountingStorageEnforce": "associations,limits,safe"}))
    finding = found(findings, "allocation")
    assert finding.level == "warning"
    assert "account lab has cpu=600000" in finding.what
    assert "main jobs too" in finding.why
    unenforced = found(judged(charged({"AccountingStorageEnforce": "none"})), "allocation")
    assert "does not enforce them" in unenforced.why


def test_weights_of_0_do_not_help_against_minutes_of_other_resources() -> None:
    weights = f"{recorded('partitions').splitlines()[1]} TRESBillingWeights=CPU=0\n"
    assert found(judged(charged(partition=weights), "scavenger"), "allocation").level == "warning"
    billed = LIMITS.replace("cpu=600000", "billing=600000")
    assert found(judged(charged(partition=weights, limits=billed), "scavenger"), "allocation").level == "ok"


def test_minutes_of_others_and_limits_of_jobs_are_not_mixed_up() -> None:
    text = "lab|||node=100|\nlab|ada|scavenger||cpu=5\nlab|bob|normal|cpu=1|\n|||x|\n"
    assert read_budgets(text, "ada") == ("scavenger", {"lab": "node=100,cpu=5"})
    assert read_budgets("", "ada") == ("", {})
    header = "Name|GrpTRES|MaxWall|UsageFactor|GrpTRESMins"
    one = read_qos(f"{header}\nq|node=3|01:00:00|0.500000|node=100000\n")["q"]
    assert one.limits == {"GrpTRES": "node=3", "MaxWall": "01:00:00"}
    assert (one.usage_factor, one.minutes) == (0.5, "node=100000")


def test_accounting_that_does_not_answer_is_told() -> None:
    findings = judged(charged(limits=" "))
    assert any("sacctmgr show assoc" in finding.what for finding in findings if finding.check == "asked")
