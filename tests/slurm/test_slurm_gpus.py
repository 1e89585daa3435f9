"""GPUs of Slurm nodes: what pilots ask for, what `slurm check` says of it, and what a real Slurm grants."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.cluster.pools.slurm.hardware import read_layout
from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from bftrainer.cluster.pools.slurm.submit.job import submission, write_files
from bftrainer.slurm.check import choose, examine, slurm_conf
from bftrainer.slurm.gpus import PilotRequest
from bftrainer.slurm.gres import gpu_count, gpu_request, gres_options, names_gpus, read_gres
from bftrainer.slurm.site import Site
from support.slurm.recorded_site import found, judged, recorded, site

# What a node has.


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("(null)", ""),
        ("gpu:4", "gpu:4"),
        ("gpu:4(S:0-1)", "gpu:4"),
        ("gpu:4(S:0,2)", "gpu:4"),
        ("gpu:a100:2", "gpu:a100:2"),
        ("gpu:a100:2(S:0),gpu:v100:2(S:1),nvme:1T", "gpu:a100:2,gpu:v100:2"),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1)", "gpu:a100:4"),
        ("gpu:3090:4", "gpu:3090:4"),
        ("gpu:1g.5gb:7", "gpu:1g.5gb:7"),
        ("gpu:1g.5gb:7,gpu:3g.20gb:2", "gpu:1g.5gb:7,gpu:3g.20gb:2"),
        ("gpu:a100:3,gpu:1", "gpu:4"),
        ("gpu:a100-sxm4-80gb:8(S:0-7),shard:a100-sxm4-80gb:64", "gpu:a100-sxm4-80gb:8"),
        ("gpu:2,mps:200", "gpu:2"),
        ("mps:400,shard:8,bandwidth:lustre:no_consume:4G", ""),
        ("gpu:0", ""),
        ("gpu:no_consume:2", "gpu:2"),
    ],
)
def test_all_whole_gpus_of_a_node_are_asked_for(text: str, request_: str) -> None:
    assert gpu_request(read_gres(text)) == request_


def test_gpus_in_use_are_read_with_their_numbers() -> None:
    assert read_gres("gpu:a100:2(IDX:0,3),mps:0") == (("gpu", "a100", 2), ("mps", "", 0))
    assert read_gres("gpu:2(IDX:0-1)") == (("gpu", "", 2),)
    assert gpu_count(read_gres("gpu:a100:2(S:0),gpu:1g.5gb:7(S:1),shard:16")) == 9


WORD = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,8}", fullmatch=True)


@given(st.dictionaries(WORD, st.integers(1, 64), min_size=1))
def test_a_request_asks_for_what_it_was_made_of(types: dict[str, int]) -> None:
    gres = tuple(("gpu", kind, count) for kind, count in types.items())
    assert read_gres(gpu_request(gres)) == gres


# What a pilot asks for.


@pytest.mark.parametrize(
    ("gres", "asked"), [("gpu:4(S:0-1)", ["--gres=gpu:4"]), ("gpu:a100:2", ["--gres=gpu:a100:2"]), ("(null)", [])]
)
def test_the_command_that_submits_a_pilot_asks_for_the_gpus_of_its_node(gres: str, asked: list[str]) -> None:
    kind = read_layout(f"scavenger|64|9000|{gres}|(null)|n01\n").kinds["n01"]
    settings = SlurmSettings(partition="scavenger")
    argv = submission(settings, Path("/state"), "n01", "bftrainer-abc", "ff", gpus=kind.gpus)
    assert list(argv) == [
        *("sbatch", "--parsable", "--nodes=1", "--nodelist=n01", "--partition=scavenger", "--time=1:00:00"),
        *("--signal=B:TERM@1", "--no-requeue", "--exclusive", "--mem=0", *asked),
        *("--job-name=bftrainer-abc", "--comment=bftrainer:abc:n01:ff", "--chdir=/state", "--output=/state/n01.log"),
        *("--open-mode=truncate", "/state/pilot.sh"),
    ]


@pytest.mark.parametrize(
    "option",
    [
        *("--gres=gpu:2", "--gres=nvme:1", "--gres=none", "-G2", "-Ga100:2", "--gpus=2", "--gpus-per-node=a100:2"),
        *("--gpus-per-task=1", "--gpus-per-socket=1", "--tres-per-task=gres/gpu:1"),
    ],
)
def test_resources_asked_for_by_hand_are_all_that_is_asked_for(option: str) -> None:
    settings = SlurmSettings(partition="p", options=("--licenses=x", option))
    argv = submission(settings, Path("/s"), "n01", "bftrainer-abc", "ff", gpus="gpu:4")
    assert gres_options(argv) == (option,)


@pytest.mark.parametrize(
    "option", ["--gres-flags=disable-binding", "--gpu-bind=none", "--gpu-freq=low", "--cpus-per-gpu=2"]
)
def test_options_that_ask_for_no_number_of_gpus_leave_that_to_the_pool(option: str) -> None:
    settings = SlurmSettings(partition="p", options=(option,))
    argv = submission(settings, Path("/s"), "n01", "bftrainer-abc", "ff", gpus="gpu:4")
    assert gres_options(argv) == ("--gres=gpu:4",)


def test_options_with_gpus_are_told_from_those_without() -> None:
    assert names_gpus(("--gres=nvme:1,gpu:a100:2",))
    assert names_gpus(("-G4",))
    assert not names_gpus(("--gres=nvme:1", "--gpu-bind=none"))


@pytest.mark.waits
@pytest.mark.parametrize("gpus", ["all", "none"])
def test_the_agent_finds_what_slurm_granted_unless_there_shall_be_no_gpus(gpus: str, tmp_path: Path) -> None:
    names = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_JOB_ID")
    show = f"import os; print(*(os.environ.get(name, '-') or 'empty' for name in {names}))"
    settings = SlurmSettings(partition="p", agent=("-c", show), gpus=gpus)
    argv = submission(settings, tmp_path, "n01", "bftrainer-abc", "ff", gpus="gpu:2")
    assert bool(gres_options(argv)) == (gpus == "all")
    write_files(settings, tmp_path, {"BFTRAINER_URL": "http://x:1"})
    given = {"SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_GPUS": "4,5", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_ID": "7"}
    env = {**{name: text for name, text in os.environ.items() if name not in names}, **given, "SLURMD_NODENAME": "n7"}
    printed = subprocess.run(["/bin/sh", tmp_path / "pilot.sh"], env=env, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == (
        ["2", "4,5", "0,1", "-", "7"] if gpus == "all" else ["-", "-", "empty", "empty", "7"]
    )


# What `slurm check` says.

MIXED = "gpu:a100:4(S:0-1)|n[01-02]\ngpu:v100:2|n03\n(null)|n04"
GOOD = {"GresTypes": "gpu", "TaskPlugin": "task/cgroup", "ConstrainDevices": "yes"}
SLURMDBD = {"AccountingStorageType": "accounting_storage/slurmdbd", "PreemptType": "preempt/partition_prio"}


def said(one: Site, *options: str, gpus: str = "all") -> Any:
    return found(examine(one, choose(one), request=PilotRequest(gpus, options)), "gpus")


def test_what_a_pilot_would_get_is_said_for_each_kind_of_node() -> None:
    findings = judged(site(GOOD, gres=MIXED))
    assert found(findings, "gpus").what == (
        "2 nodes with 4 GPUs each (gpu:a100:4): a pilot asks for --gres=gpu:a100:4 and gets all of them; "
        "1 node with 2 GPUs (gpu:v100:2): a pilot asks for --gres=gpu:v100:2 and gets all of them; "
        "1 node without GPUs"
    )
    assert {finding.check: finding.level for finding in findings if finding.check in ("gpus", "devices")} == {
        **{"gpus": "ok", "devices": "ok"}
    }
    assert "none of the 4 nodes has GPUs" in found(judged(site()), "gpus").what
    assert {"gres-types", "devices", "gpu-hours"}.isdisjoint(finding.check for finding in judged(site()))


def test_only_nodes_of_the_harvested_partition_count() -> None:
    one = site(GOOD, gres=MIXED, scavenger={"Nodes": "n[03-04]"})
    assert found(judged(one, "scavenger"), "gpus").what.startswith("1 node with 2 GPUs (gpu:v100:2)")


def test_options_by_hand_and_a_pool_without_gpus_are_named() -> None:
    one = site(GOOD, gres=MIXED)
    by_hand = said(one, "--gres=gpu:2")
    assert by_hand.level == "warning"
    assert "pool.options has --gres=gpu:2: pilots ask for this and nothing else" in by_hand.what
    assert said(site(GOOD, gres="gpu:2|n[01-04]"), "--gpus-per-node=2").level == "ok"
    other = said(one, "--gres=nvme:1")
    assert (other.level, "not for GPUs" in other.what) == ("warning", True)
    assert said(one, gpus="none").what == "pool.gpus is none: pilots use none of the GPUs of 3 nodes"


@pytest.mark.parametrize(
    ("options", "gpus", "words"),
    [
        ((), "all", ("--gres=gpu:a100:4",)),
        ((), "none", ()),
        (("--licenses=x", "--gres=gpu:1"), "all", ("--gres=gpu:1",)),
    ],
)
def test_a_trial_pilot_asks_for_what_most_pilots_ask_for(options: Any, gpus: str, words: Any) -> None:
    one = site(GOOD, gres=MIXED)
    assert PilotRequest(gpus, options).words(one, one.partitions["scavenger"]) == words


@pytest.mark.parametrize(
    ("changes", "check", "level", "line"),
    [
        ({"GresTypes": "(null)"}, "gres-types", "error", "GresTypes=gpu"),
        ({"GresTypes": "nvme"}, "gres-types", "error", "GresTypes=gpu,nvme"),
        ({"TaskPlugin": "task/affinity"}, "devices", "warning", None),
        ({"ConstrainDevices": "no"}, "devices", "warning", None),
        (SLURMDBD, "gpu-hours", "warning", "AccountingStorageTRES=gres/gpu"),
        (
            {**SLURMDBD, "AccountingStorageTRES": "cpu,mem,energy,node,billing,license/x"}, "gpu-hours", "warning",
            "AccountingStorageTRES=gres/gpu,license/x",
        ),
    ],
)  # fmt: skip
def test_settings_of_the_site_that_keep_gpus_from_pilots_are_found(
    changes: dict[str, str], check: str, level: str, line: str | None
) -> None:
    findings = judged(site({**GOOD, **changes}, gres=MIXED))
    finding = found(findings, check)
    assert (finding.level, bool(finding.why)) == (level, True)
    assert line is None or line in slurm_conf(findings)


def test_gpus_of_an_unknown_type_are_found_in_slurm_conf_as_slurm_itself_hides_them(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=lab\nNodeName=n[01-04] CPUs=64 Gres=nvme:1,gpu:a100:4 State=UNKNOWN\n")
    assert found(judged(site({"SLURM_CONF": str(conf)})), "gres-types").fix == ("GresTypes=gpu",)
    conf.write_text("# NodeName=n01 Gres=gpu:4\nNodeName=n[01-04] Gres=nvme:1  # no gpu\n")
    assert "gres-types" not in {finding.check for finding in judged(site({"SLURM_CONF": str(conf)}))}


def test_gpus_that_are_counted_cause_no_warning() -> None:
    one = site({**GOOD, **SLURMDBD, "AccountingStorageTRES": "cpu,mem,gres/gpu,gres/gpu:a100"}, gres=MIXED)
    assert "gpu-hours" not in {finding.check for finding in judged(one)}


@pytest.mark.parametrize(
    ("limit", "level"),
    [
        ("MaxTRES|gres/gpu=3", "warning"),
        ("MaxTRES|cpu=100,gres/gpu=1", "warning"),
        ("MaxTRESPU|gres/gpu:a100=2", "warning"),
        ("GrpTRES|gres/gpu=4", None),
        ("MaxTRESPU|gres/gpu:v100=2", None),
        ("MaxTRESPU|node=2", None),
    ],
)
def test_a_qos_that_allows_fewer_gpus_than_a_node_has_is_found(limit: str, level: str | None) -> None:
    key, value = limit.split("|")
    rows = f"Name|Preempt|PreemptMode|GraceTime|{key}|UsageFactor\nnormal|scavenger|cluster|00:00:00||1\n"
    rows += f"scavenger||cluster|00:00:00|{value}|1\n"
    one = site({**GOOD, "AccountingStorageTRES": "gres/gpu"}, qos=rows, assoc=recorded("assoc"), gres=MIXED)
    findings = {finding.check: finding for finding in judged(one)}
    if level is None:
        assert "gpu-limits" not in findings
    else:
        assert findings["gpu-limits"].level == level
        assert "2 nodes with 4 GPUs each (gpu:a100:4)" in findings["gpu-limits"].what
        assert findings["gpu-limits"].fix[0].startswith("sacctmgr -i modify qos scavenger set MaxTRESPer")
    everywhere = site({**GOOD, "AccountingStorageTRES": "gres/gpu"}, qos=rows, gres="gpu:a100:4|n[01-04]")
    assert level is None or found(judged(everywhere), "gpu-limits").level == "error"
