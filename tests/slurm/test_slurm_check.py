"""`slurm check` judges what a real Slurm printed, with misconfigurations planted in it, and then a real cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cli import main
from bftrainer.errors import InputError
from bftrainer.slurm.check import choose, examine, refused, slurm_conf
from bftrainer.slurm.owners import PilotOwnersSetup
from bftrainer.slurm.site import Site, read_config, read_partitions
from support.slurm.lab import Lab, cluster
from support.slurm.recorded_site import Changes, found, judged, recorded, site


@pytest.mark.slurm
def test_whose_account_pilots_run_under_is_judged_by_the_number_of_owners_and_by_what_slurm_shows() -> None:
    def level(setup: PilotOwnersSetup, check: str = "users", config: dict[str, str] | None = None) -> str:
        some = site(config=config)
        return found(examine(some, choose(some), owners=setup), check).level

    assert level(PilotOwnersSetup(owners=1)) == "ok"
    assert level(PilotOwnersSetup(owners=2)) == "warning"
    assert level(PilotOwnersSetup(own=True, owners=2)) == "ok"
    user = site().user.name
    assert level(PilotOwnersSetup(own=True, run_as=True)) == ("ok" if user == "root" else "error")
    assert level(PilotOwnersSetup(own=True, run_as=True, prefix=True)) == "ok"
    some = site(config={"PrivateData": "accounts,jobs"})
    plain = replace(some, user=replace(some.user, name="bftrainer"))
    finding = found(examine(plain, choose(plain), owners=PilotOwnersSetup(own=True)), "pilots-seen")
    assert (finding.level, "adminlevel=operator" in finding.fix[0]) == ("warning", True)


def test_a_good_site_has_no_errors() -> None:
    findings = judged(site(), refusal="")
    assert [finding for finding in findings if finding.level == "error"] == []
    assert {"preempt-type", "preempt-mode", "priority-tier", "grace-signal", "kill-wait", "clock", "pilot"} <= {
        finding.check for finding in findings if finding.level == "ok"
    }


S = "PartitionName=scavenger "
PLANTED: dict[str, tuple[dict[str, Changes], str, str, str]] = {
    "preemption off": (
        {"config": {"PreemptType": "preempt/none"}}, "preempt-type", "error", "PreemptType=preempt/partition_prio",
    ),
    "preemption off, newer": ({"config": {"PreemptType": "(null)"}}, "preempt-type", "error", "PreemptMode=CANCEL"),
    "mode off": ({"scavenger": {"PreemptMode": "OFF"}}, "preempt-mode", "error", S + "PreemptMode=CANCEL"),
    "suspend": ({"scavenger": {"PreemptMode": "GANG,SUSPEND"}}, "preempt-mode", "error", S + "PreemptMode=CANCEL"),
    "requeue": ({"scavenger": {"PreemptMode": "REQUEUE"}}, "preempt-mode", "warning", S + "PreemptMode=CANCEL"),
    "equal tiers": ({"scavenger": {"PriorityTier": "10"}}, "priority-tier", "error", S + "PriorityTier=9"),
    "tier above": ({"scavenger": {"PriorityTier": "20"}}, "priority-tier", "error", S + "PriorityTier=9"),
    "both at the bottom": (
        {"main": {"PriorityTier": "0"}, "scavenger": {"PriorityTier": "0"}}, "priority-tier", "error",
        "PartitionName=main PriorityTier=10",
    ),
    "grace without signal": (
        {"config": {"SlurmctldParameters": "(null)"}}, "grace-signal", "error",
        "SlurmctldParameters=preempt_send_user_signal",
    ),
    "grace without signal, others set": (
        {"config": {"SlurmctldParameters": "cloud_dns,idle_on_node_suspend"}}, "grace-signal", "error",
        "SlurmctldParameters=cloud_dns,idle_on_node_suspend,preempt_send_user_signal",
    ),
    "grace without signal, newer": (
        {"config": {"SlurmctldParameters": "(null)", "PreemptParameters": "youngest_first"}}, "grace-signal", "error",
        "PreemptParameters=youngest_first,send_user_signal",
    ),
    "long grace": ({"scavenger": {"GraceTime": "300"}}, "grace-time", "warning", S + "GraceTime=0"),
    "exempt": ({"config": {"PreemptExemptTime": "00:10:00"}}, "preempt-exempt", "error", "PreemptExemptTime=0"),
    "stock KillWait": ({"config": {"KillWait": "30 sec"}}, "kill-wait", "warning", "KillWait=5"),
    "MessageTimeout": ({"config": {"MessageTimeout": "100 sec"}}, "message-timeout", "warning", "MessageTimeout=10"),
    "rare rounds": (
        {"config": {"SchedulerParameters": "defer,bf_interval=300"}}, "scheduler", "warning",
        "SchedulerParameters=defer,bf_interval=30",
    ),
    "no backfill": (
        {"config": {"SchedulerType": "sched/builtin"}}, "backfill", "warning", "SchedulerType=sched/backfill",
    ),
    "CompleteWait": ({"config": {"CompleteWait": "32 sec"}}, "complete-wait", "warning", "CompleteWait=0"),
    "pgid": ({"config": {"ProctrackType": "proctrack/pgid"}}, "proctrack", "warning", "ProctrackType=proctrack/cgroup"),
    "closed": ({"scavenger": {"State": "DOWN"}}, "state", "error", S + "State=UP"),
    "wide jobs only": ({"scavenger": {"MinNodes": "4"}}, "size", "error", S + "MinNodes=0"),
    "no nodes": ({"scavenger": {"MaxNodes": "0"}}, "size", "error", S + "MaxNodes=UNLIMITED"),
    "shared nodes": ({"scavenger": {"OverSubscribe": "FORCE:4"}}, "sharing", "warning", S + "OverSubscribe=EXCLUSIVE"),
    "few jobs": ({"config": {"MaxJobCount": "6"}}, "limits", "error", "MaxJobCount=16"),
    "no job log": ({"config": {"JobCompType": "jobcomp/none"}}, "job-log", "warning", "JobCompType=jobcomp/filetxt"),
}  # fmt: skip


@pytest.mark.slurm
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_misconfiguration_is_found_with_the_line_that_mends_it(name: str) -> None:
    changes, check, level, line = PLANTED[name]
    findings = judged(site(**changes), "scavenger")  # type: ignore[arg-type]
    finding = found(findings, check)
    assert finding.level == level
    assert line in finding.fix
    assert finding.why
    # What mends it is in the lines as a whole, beside whatever else is wrong.
    words = " ".join(slurm_conf(findings)).split()
    assert set(line.split()) <= set(words)


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"scavenger": {"MaxTime": "00:30:00"}}, "time-limit"),
        ({"config": {"SLURM_VERSION": "20.11.9"}}, "version"),
        ({"config": {"SuspendProgram": "/usr/sbin/off", "SuspendTime": "600 sec"}}, "power"),
        ({"config": {"Epilog[0]": "/etc/slurm/epilog"}}, "scripts"),
        ({"config": {"PrologFlags": "Alloc,Serial"}}, "scripts"),
    ],
)
def test_what_no_line_mends_is_a_warning_with_a_reason(changes: dict[str, Changes], check: str) -> None:
    finding = found(judged(site(**changes)), check)  # type: ignore[arg-type]
    assert finding.level == "warning"
    assert finding.why


def test_grace_without_the_signal_says_what_it_costs_and_no_grace_needs_no_signal() -> None:
    unsignalled = {"SlurmctldParameters": "(null)"}
    assert "10–27 s" in found(judged(site(unsignalled)), "grace-signal").why
    assert found(judged(site(unsignalled, scavenger={"GraceTime": "0"})), "grace-signal").level == "ok"


def test_a_newer_slurm_may_send_the_signal_by_its_new_name() -> None:
    newer = {"SlurmctldParameters": "(null)", "PreemptParameters": "send_user_signal,youngest_first"}
    assert found(judged(site(newer)), "grace-signal").level == "ok"


def test_partitions_that_share_no_node_may_have_equal_tiers() -> None:
    apart = site(main={"PriorityTier": "1", "Nodes": "n[01-02]"}, scavenger={"Nodes": "n[03-04]"})
    assert found(judged(apart, "scavenger"), "priority-tier").level == "warning"
    one_shared = site(main={"PriorityTier": "1", "Nodes": "n[01-03]"}, scavenger={"Nodes": "n[03-04]"})
    assert found(judged(one_shared, "scavenger"), "priority-tier").level == "error"


def test_all_changes_of_a_partition_are_one_line() -> None:
    bad = site({"KillWait": "30 sec"}, scavenger={"PriorityTier": "10", "PreemptMode": "OFF", "State": "DOWN"})
    lines = slurm_conf(judged(bad, "scavenger"))
    assert "PartitionName=scavenger PriorityTier=9 PreemptMode=CANCEL State=UP" in lines
    assert "KillWait=5" in lines
    assert len({line.partition(" ")[0] for line in lines}) == len(lines)


def test_the_partition_is_the_one_that_looks_meant_for_it() -> None:
    assert choose(site()).partition == site().partitions["scavenger"]
    # Equal tiers say nothing, the name does.
    assert (
        choose(site(scavenger={"PriorityTier": "10"})).partition
        == site(scavenger={"PriorityTier": "10"}).partitions["scavenger"]
    )


def test_without_a_partition_for_it_the_lines_of_one_are_given() -> None:
    text = recorded("partitions").splitlines()[0]
    only_main = Site(read_config(recorded("config")), read_partitions(text), site().user)
    finding = found(judged(only_main), "partition")
    assert finding.level == "error"
    assert finding.fix[0].startswith("PartitionName=bftrainer Nodes=ALL PriorityTier=9 PreemptMode=CANCEL")


def test_a_partition_that_is_none_is_named_with_the_one_that_was_meant() -> None:
    with pytest.raises(InputError, match="unknown partition 'scavanger': did you mean 'scavenger'"):
        choose(site(), "scavanger")


def test_slurms_own_refusal_is_an_error() -> None:
    finding = found(judged(site(), refusal="Invalid account"), "pilot")
    assert (finding.level, "Invalid account" in finding.what) == ("error", True)


QOS = recorded("qos")


@pytest.mark.slurm
def test_with_qos_the_order_is_that_of_the_qos() -> None:
    one = site(qos=QOS, scavenger={"PriorityTier": "10"})
    findings = judged(one)
    assert choose(one).qos == (one.qos or {})["scavenger"]
    assert "priority-tier" not in {finding.check for finding in findings}
    assert found(findings, "qos").level == "ok"
    assert found(findings, "limits").what == "QOS scavenger has limits (MaxTRESPU=node=2)"


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("rows", "check", "level", "line"),
    [
        (QOS.replace("normal|scavenger", "normal|"), "qos", "error", "sacctmgr -i add qos bftrainer"),
        (QOS + "long||cluster||00:00:00|||||\n", "qos", "error", "sacctmgr -i modify qos long set Preempt+=scavenger"),
        (
            QOS.replace("scavenger||cluster", "scavenger||off"), "preempt-mode", "error",
            "sacctmgr -i modify qos scavenger set PreemptMode=cancel",
        ),
        (
            QOS.replace("cluster||00:00:10", "cluster|00:20:00|00:00:10"), "preempt-exempt", "error",
            "sacctmgr -i modify qos scavenger set PreemptExemptTime=0",
        ),
        (
            QOS.replace("00:00:10", "00:05:00"), "grace-time", "warning",
            "sacctmgr -i modify qos scavenger set GraceTime=0",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_qos_is_mended_by_sacctmgr(rows: str, check: str, level: str, line: str) -> None:
    findings = judged(site(qos=rows))
    assert found(findings, check).level == level
    assert line in found(findings, check).fix
    assert line in slurm_conf(findings)


def test_several_qos_that_can_be_preempted_must_be_told_apart() -> None:
    rows = QOS.replace("normal|scavenger", "normal|a,b").replace("scavenger||", "a||") + "b||cluster||00:00:00|||||\n"
    finding = found(judged(site(qos=rows)), "qos")
    assert (finding.level, "--qos" in finding.what) == ("error", True)
    assert found(judged(site(qos=rows), qos="a"), "qos").level == "warning"  # b, preempted itself, cannot preempt a
    with pytest.raises(InputError, match="unknown QOS 'nosuch'"):
        choose(site(qos=rows), qos="nosuch")


def test_questions_without_an_answer_are_warnings() -> None:
    silent = site(qos="")
    assert silent.qos is None
    findings = judged(silent, "scavenger")
    assert found(findings, "qos").level == "warning"
    assert found(findings, "asked").level == "warning"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"AllowGroups": "physics"}, "AllowGroups=physics: ada is in none"),
        ({"AllowAccounts": "chem,bio"}, "AllowAccounts=bio, chem: ada has none"),
        ({"AllowQos": "high"}, "QOS scavenger is not allowed"),
        ({"RootOnly": "YES"}, "only root may submit"),
        ({"ReqResv": "YES"}, "only jobs in a reservation"),
    ],
)
def test_a_partition_that_is_closed_to_a_user_says_so(changes: Changes, said: str) -> None:
    one = _as_ada(site(qos=QOS, assoc="lab|normal,scavenger\n", scavenger=changes))
    reasons = refused(one, one.partitions["scavenger"], (one.qos or {})["scavenger"])
    assert len(reasons) == 1
    assert said in reasons[0]
    assert found(judged(one, "scavenger"), "access").level == "error"


def _as_ada(one: Site) -> Site:
    return replace(one, user=replace(one.user, name="ada", groups=frozenset({"users"})))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A real cluster that is set up well."""
    with cluster(2) as one:
        yield one


Check = Callable[..., dict[str, Any]]


@pytest.fixture
def check(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Check]:
    """Changes slurm.conf of the real cluster and runs `bftrainer slurm check --json`; undone at the end."""
    monkeypatch.setenv("SLURM_CONF", str(lab.conf))
    monkeypatch.setenv("BFTRAINER_STATE", str(tmp_path))
    monkeypatch.delenv("BFTRAINER_CONFIG", raising=False)
    monkeypatch.setitem(main.COMMANDS, "slurm", "admin.slurm")
    good = lab.conf.read_text()

    def check(*changes: tuple[str, str]) -> dict[str, Any]:
        text = good
        for pattern, line in changes:
            text, count = re.subn(pattern, line, text, flags=re.MULTILINE)
            assert count == 1, f"{pattern} must be in slurm.conf once, but is {count} times"
        if changes:
            lab.conf.write_text(text)
            lab.run("scontrol", "reconfigure")
        status = main.run(["slurm", "check", "--json"])
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert status == (1 if report["errors"] else 0)
        return report

    yield check
    if lab.conf.read_text() != good:
        lab.conf.write_text(good)
        lab.run("scontrol", "reconfigure")


@pytest.mark.slurm
def test_a_real_cluster_that_is_set_up_well_has_no_errors(check: Check) -> None:
    report = check()
    assert (report["partition"], report["errors"]) == ("scavenger", 0)
    levels = {finding["check"]: finding["level"] for finding in report["findings"]}
    wanted = ("preempt-type", "preempt-mode", "priority-tier", "grace-signal", "kill-wait", "clock", "pilot")
    assert {name: levels[name] for name in wanted} == dict.fromkeys(wanted, "ok")


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("pattern", "line", "name", "level"),
    [
        ("^SlurmctldParameters=.*$", "", "grace-signal", "error"),
        (r"^(PartitionName=scavenger.*)PriorityTier=1\b", r"\1PriorityTier=10", "priority-tier", "error"),
        (r"^(PartitionName=scavenger.*)PreemptMode=\w+", r"\1PreemptMode=OFF", "preempt-mode", "error"),
        ("^KillWait=.*$", "KillWait=30", "kill-wait", "warning"),
    ],
    ids=["grace time without the signal", "equal tiers", "preemption off", "KillWait 30"],
)
def test_what_is_planted_in_a_real_cluster_is_found_and_mended(
    pattern: str, line: str, name: str, level: str, check: Check
) -> None:
    report = check((pattern, line))
    [finding] = [finding for finding in report["findings"] if finding["check"] == name]
    assert finding["level"] == level
    assert report["errors"] == (level == "error")
    # The lines that it prints, put into slurm.conf as it says, leave nothing of it.
    mended = [(pattern, line)]
    for words in finding["fix"]:
        key, _, rest = words.partition(" ")
        for word in rest.split():
            mended.append((rf"^({re.escape(key)}\b.*){word.partition('=')[0]}=\w+", rf"\g<1>{word}"))
        if not rest:
            mended[:] = [(pattern, words)]
    assert {one["level"] for one in check(*mended)["findings"] if one["check"] == name} == {"ok"}
