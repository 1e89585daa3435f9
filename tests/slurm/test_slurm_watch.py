"""What the `slurm` pool reads from Slurm's output and decides, without any Slurm."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.cluster.pools.base import PoolHost
from bftrainer.cluster.pools.registry import make_pool
from bftrainer.cluster.pools.slurm.commands import Slurm
from bftrainer.cluster.pools.slurm.decide import (
    LONGEST_PAUSE_S,
    SHORT_AFTER_S,
    SHORT_FOR_S,
    Refusals,
    ShortPilots,
    choose,
    fate,
    sort_pilots,
    usable,
)
from bftrainer.cluster.pools.slurm.hardware import (
    JobRequest,
    NodeKind,
    SiteLayout,
    has_features,
    read_layout,
)
from bftrainer.cluster.pools.slurm.naming import PilotComment
from bftrainer.cluster.pools.slurm.owned import PilotOwners
from bftrainer.cluster.pools.slurm.read import TEXT_WIDTHS, Jobs, Pilot, WaitingJob, new_separator, read_nodes
from bftrainer.cluster.pools.slurm.runner import SlurmCommandError
from bftrainer.cluster.pools.slurm.settings import SlurmSettings, read_duration
from bftrainer.cluster.pools.slurm.submit.base import Submitters
from bftrainer.cluster.pools.slurm.submit.job import command_environment, pilot_script, submission, write_files
from bftrainer.cluster.pools.slurm.submit.limits import LimitsReader
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.slurm.gres import read_gres
from bftrainer.traces.recorder.states import read_sinfo
from support.cluster.made_pools import executable
from support.slurm.squeue import HEADER, SEPARATOR, read, row, table

# What there is.


@pytest.mark.parametrize(
    ("word", "free", "planned", "stays"),
    [
        ("idle", True, True, True),
        ("IDLE", True, True, True),
        ("planned", False, True, True),
        ("plnd", False, True, True),
        ("idle-", False, True, True),
        ("IDLE+PLANNED", False, True, True),
        ("idle*", False, False, True),
        ("idle~", False, False, True),
        ("idle$", False, False, False),
        ("idle@", False, False, False),
        ("allocated", False, False, True),
        ("alloc*", False, False, True),
        ("mixed", False, False, True),
        ("completing", False, False, True),
        ("draining", False, False, False),
        ("drng*", False, False, False),
        ("drained", False, False, False),
        ("ALLOCATED+DRAIN", False, False, False),
        ("maint", False, False, False),
        ("reserved", False, False, True),
        ("down*", False, False, True),
        ("powering_down", False, False, True),
        ("unknown*", False, False, True),
        ("unheard_of", False, False, True),
    ],
)
def test_a_node_is_free_if_it_is_idle_and_nothing_else(word: str, free: bool, planned: bool, stays: bool) -> None:
    node = read_nodes(f"n1 {word}\nn2 idle\n")["n1"]
    assert (node.free(), node.free(planned=True), node.may_stay) == (free, planned, stays)


def test_a_node_of_two_partitions_is_free_if_both_rows_say_so_and_nodes_are_in_natural_order() -> None:
    nodes = read_nodes("n10 idle\nn2 idle\nn2 planned\nn10 idle\nn1 mixed\n")
    assert list(nodes) == ["n1", "n2", "n10"]
    assert [name for name, node in nodes.items() if node.free()] == ["n10"]


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(["idle", "mixed", "idle*", "plnd"]))))
def test_the_pool_and_the_recorder_agree_on_what_is_idle(rows: list[tuple[str, str]]) -> None:
    text = "".join(f"{node} {state}\n" for node, state in [("z", "idle"), *rows])
    assert {name for name, node in read_nodes(text).items() if node.free()} == read_sinfo(text).idle


def test_features_are_joined_by_and_before_or() -> None:
    node = read_nodes("n1 gpu,a100,nvme idle\n")["n1"].features
    fitting = ["", "gpu", "gpu&a100", "h100|a100", "h100&gpu|nvme", "gpu&nvme|x"]
    assert all(has_features(node, text) for text in fitting)
    assert not any(has_features(node, text) for text in ["h100", "gpu&h100", "h100|x&gpu"])
    assert not has_features(read_nodes("n1 (null) idle\n")["n1"].features, "gpu")


def pilot_row(job: int, state: str, **fields: str) -> dict[str, str]:
    return {"JobArrayID": str(job), "JobID": str(job), "State": state, "Name": "bftrainer-abc", "UserID": "7", **fields}


def test_pilots_are_read_with_their_nodes_times_and_fates() -> None:
    comment = "bftrainer:abc:n01:ff"
    away = "ReqNodeNotAvail, Reserved for maintenance"
    text = table(
        pilot_row(7, "RUNNING", ReqNodes="n01", NodeList="n01", TimeLeft="3:59:57", Comment=comment),
        pilot_row(8, "PENDING", ReqNodes="n02", TimeLeft="4:00:00", Reason=away, Comment=comment),
        pilot_row(
            9, "FAILED", ReqNodes="n03", NodeList="n03", TimeLeft="4:59", PreemptTime="1794757961", Reason="NonZeroExit"
        ),
        pilot_row(10, "RUNNING", NodeList="n04", TimeLeft="UNLIMITED", Comment="rewritten by | the site"),
        pilot_row(11, "COMPLETING", ReqNodes="n05", NodeList="n05", TimeLeft="1-00:00:01", Comment=comment),
        pilot_row(12, "CANCELLED", TimeLeft="INVALID"),
        {**pilot_row(13, "RUNNING", ReqNodes="n06"), "UserID": "8"},
        {**pilot_row(14, "RUNNING", ReqNodes="n07"), "Name": "bftrainer-other"},
    )
    assert read(text).pilots == (
        Pilot(7, "n01", "running", 4 * 3600.0 - 3, "", "ff", False, "RUNNING"),
        Pilot(8, "n02", "waiting", 4 * 3600.0, away, "ff", False, "PENDING"),
        Pilot(9, "n03", "ended", 299.0, "NonZeroExit", "", True, "FAILED"),
        Pilot(10, "n04", "running", None, "", "", False, "RUNNING"),
        Pilot(11, "n05", "ending", 86401.0, "", "ff", False, "COMPLETING"),
    )
    assert read(HEADER) == Jobs((), ())


def waiting(*rows: dict[str, str]) -> tuple[WaitingJob, ...]:
    return read(table(*rows)).waiting


def test_the_queue_holds_jobs_that_wait_for_nodes_and_no_pilots() -> None:
    found = waiting(
        {
            "JobArrayID": "4",
            "NumNodes": "4",
            "Reason": "Resources",
            "SchedNodes": "n[01-02]",
            "StartTime": "1794761561",
        },
        {"JobArrayID": "5", "Partition": "main,long", "NumNodes": "2", "Reason": "Priority", "PriorityLong": "77"},
        {"JobArrayID": "6", "Reason": "None", "ReqNodes": "n07", "Name": "a\x1fb"},
        {"JobArrayID": "7", "State": "RUNNING", "Reason": "None"},
        {"JobArrayID": "11", "Name": "bftrainer-0123", "Reason": "None"},
    )
    main = JobRequest(frozenset({"main"}))
    assert found == (
        WaitingJob("4", main, 4, planned_on=frozenset({"n01", "n02"}), start=1794761561.0),
        WaitingJob("5", JobRequest(frozenset({"main", "long"})), 2, priority=77),
        WaitingJob("6", main, 1, required=frozenset({"n07"})),
    )
    assert found[1].rank > found[0].rank > found[2].rank, "priority first, then age"


FORGED = ("37", "RUNNING", "n01", "bftrainer-abc", "bftrainer:abc:n01:ff")
"""What a forger wants to be read: the job, state, node, name and comment of a pilot of user 7."""


def forged_row() -> str:
    """A whole row with the true separator, without the padding that would not fit into a comment."""
    job, state, node, name, comment = FORGED
    fields = pilot_row(int(job), state, ReqNodes=node, NodeList=node, Comment=comment) | {"Name": name}
    return SEPARATOR.join(cell.strip() for cell in row(**fields).split(SEPARATOR))


@pytest.mark.parametrize("column", sorted(TEXT_WIDTHS))
@pytest.mark.parametrize("before", ["", "x", "x\n", f"x{SEPARATOR}\n", f"{SEPARATOR}{SEPARATOR}\n", "\n\n"])
@pytest.mark.parametrize("after", ["", "\n", f"\n5{SEPARATOR}5{SEPARATOR}", "x" * 300])
def test_no_text_of_a_job_looks_like_another_job_even_if_the_separator_is_known(
    column: str, before: str, after: str
) -> None:
    jobs = read(
        table(
            {"JobArrayID": "4", "Reason": "None", **{column: f"{before}{forged_row()}{after}"}},
            {"JobArrayID": "5", "Reason": "None", "Name": "two\nlines", "Comment": "h\u00e9llo\nworld" * 99},
        )
    )
    assert [job.job for job in jobs.waiting] == (["5"] if column == "Reason" else ["4", "5"])
    assert jobs.pilots == ()
    assert new_separator() != new_separator()


@given(st.lists(st.sampled_from((SEPARATOR, "\n", "\x1f", "7", "RUNNING", "n01", "bftrainer-abc", " "))).map("".join))
def test_whatever_a_comment_is_made_of_the_other_rows_stay_the_same(comment: str) -> None:
    pilot = pilot_row(7, "RUNNING", ReqNodes="n01", NodeList="n01", Comment="bftrainer:abc:n01:ff")
    other = {"JobArrayID": "4", "Reason": "None", "Comment": comment, "Name": f"x{comment}"}
    jobs = read(table(other, pilot, other))
    assert [(each.job, each.state) for each in jobs.pilots] == [(7, "running")]
    assert len(jobs.waiting) == 2


def test_a_pilot_that_is_listed_twice_is_no_answer() -> None:
    running = pilot_row(7, "RUNNING", ReqNodes="n01", NodeList="n01")
    with pytest.raises(ValueError, match="job 7 is listed twice"):
        read(table(running, running | {"State": "COMPLETED"}))


def test_the_id_of_a_pilot_that_has_not_ended_is_not_retired() -> None:
    account = SimpleNamespace(uid=7)
    host = SimpleNamespace(
        recall=lambda key: None, remember=lambda key, value: None, accounts=SimpleNamespace(of=lambda owner: account)
    )
    owners = PilotOwners(cast(PoolHost, host), cast(Submitters, None), cast(LimitsReader, None))
    comment = PilotComment("n01", "ff", owners.new_id("ann", "n01"))
    owners.look_up(0.0)
    running = Pilot(7, "n01", "running", owner="ann", id=comment.id)
    ended = Pilot(8, "n01", "ended", owner="ann", id=comment.id)
    owners.retire((running, ended))
    assert owners.owner_of("7", comment) == "ann"
    assert owners.owner_of("8", comment) is None, "the comment of another account's job does not count"
    owners.retire((ended,))
    assert owners.owner_of("7", comment) is None


@pytest.mark.parametrize(
    ("fields", "waits"),
    [
        ({"Reason": "None"}, True),
        ({"Reason": "Priority"}, True),
        ({"Reason": "Resources"}, True),
        ({"Reason": "Priority", "Dependency": "afterok:5(unfulfilled)"}, False),
        ({"Reason": "ReqNodeNotAvail, UnavailableNodes:n01", "ReqNodes": "n01"}, True),
        ({"Reason": "ReqNodeNotAvail, Reserved for maintenance"}, False),
        *(
            ({"Reason": reason}, False)
            for reason in (
                *("Dependency", "BeginTime", "JobHeldUser", "JobHeldAdmin", "Reservation", "Licenses", "Prolog"),
                *("QOSMaxJobsPerUserLimit", "QOSGrpNodeLimit", "AssocGrpCpuLimit", "AssocMaxJobsLimit"),
                *("PartitionTimeLimit", "PartitionNodeLimit", "JobArrayTaskLimit", "BadConstraints"),
                "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            )
        ),
    ],
)
def test_only_jobs_that_would_start_if_they_had_nodes_count(fields: dict[str, str], waits: bool) -> None:
    assert bool(waiting({"JobArrayID": "4", **fields})) == waits


@pytest.mark.parametrize(
    ("job", "tasks"),
    [("12", 1), ("12_7", 1), ("12_[2-9]", 8), ("12_[2-9%3]", 3), ("12_[1,3,5-7]", 5), ("12_[0-20:5]", 5)],
)
def test_the_jobs_of_an_array_are_counted(job: str, tasks: int) -> None:
    assert waiting({"JobArrayID": job, "Reason": "None"})[0].tasks == tasks


def test_what_a_job_asks_for_is_read() -> None:
    (job,) = waiting(
        {
            **{"JobArrayID": "4", "Reason": "None", "NumCPUs": "64", "MinCpus": "16", "MinMemory": "4G"},
            **{"TimeLimit": "1-00:00:00", "MinTime": "10:00", "tres-per-node": "gres:gpu:a100:2", "Feature": "a|b"},
            **{"Reservation": "course", "tres-per-job": "gres:nvme:8"},
        }
    )
    assert job.request == JobRequest(
        frozenset({"main"}), "a|b", (("gpu", "a100", 2), ("nvme", "", 1)), 4096, 16, "course"
    )
    assert (job.cpus, job.limit_s) == (64, 600.0)
    assert waiting({"JobArrayID": "5", "Reason": "None", "TimeLimit": "UNLIMITED"})[0].limit_s == float("inf")


@pytest.mark.parametrize(
    "text", ["", "\n", "garbage", "JOBID\x1fSTATE\n1\x1fx\n", HEADER + "4|x|y\n", HEADER + SEPARATOR]
)
def test_what_is_no_table_of_jobs_is_no_answer(text: str) -> None:
    with pytest.raises(ValueError, match="must begin with its header|no job"):
        read(text)


@given(st.text())
def test_no_text_is_too_strange(text: str) -> None:
    readers: tuple[Callable[[str], object], ...] = (
        read,
        *(read_layout, read_nodes, read_gres),
    )
    for head in ("", HEADER):
        for reader in readers:
            try:
                answer: object = reader(head + text)
            except (ValueError, InputError) as problem:
                answer = str(problem).strip() or None  # an error says something
            assert answer is not None


# What nodes have.


def test_kinds_of_nodes_are_read_with_all_their_partitions() -> None:
    text = (
        "main|8|1000|(null)|(null)|n[01-02]\nmain|64|9000|gpu:a100:4(S:0-1)|gpu,nvme|n07\n"
        "scavenger|8|1000|(null)|(null)|n01\nempty|0|0|(null)|(null)|\n"
    )
    layout = read_layout(text)
    assert layout.partitions == {"main", "scavenger", "empty"}
    assert layout.kinds == {
        "n01": NodeKind(frozenset({"main", "scavenger"}), 8, 1000),
        "n02": NodeKind(frozenset({"main"}), 8, 1000),
        "n07": NodeKind(frozenset({"main"}), 64, 9000, (("gpu", "a100", 4),), frozenset({"gpu", "nvme"})),
    }


@pytest.mark.parametrize(
    ("text", "gres"),
    [
        ("gpu:3090:4", (("gpu", "3090", 4),)),
        ("gpu:2080ti:4(S:0-1)", (("gpu", "2080ti", 4),)),
        ("gpu:1g.5gb:7", (("gpu", "1g.5gb", 7),)),
        ("gpu:a100:4,nvme:1T", (("gpu", "a100", 4), ("nvme", "", 1024**4))),
        ("bandwidth:lustre:no_consume:4G", (("bandwidth", "lustre", 4 * 1024**3),)),
        ("gres:gpu:2", (("gpu", "", 2),)),
        ("gres/gpu:h100=1", (("gpu", "h100", 1),)),
        ("gpu", (("gpu", "", 1),)),
    ],
)
def test_generic_resources_are_read(text: str, gres: object) -> None:
    assert read_gres(text) == gres


def test_a_node_whose_resources_cannot_be_read_may_have_all() -> None:
    layout = read_layout("main|8|1000|gpu:a:b:c:4|(null)|n01\nmain|8|1000|(null)|(null)|n02\n")
    wants_gpu = JobRequest(frozenset({"main"}), gres=(("gpu", "", 1),))
    assert layout.kinds["n01"].fits(wants_gpu)
    assert not layout.kinds["n02"].fits(wants_gpu)


GPU = NodeKind(frozenset({"main"}), 64, 9000, (("gpu", "a100", 4),), frozenset({"gpu", "nvme"}))


@pytest.mark.parametrize(
    ("request_", "fits"),
    [
        (JobRequest(frozenset({"main"})), True),
        (JobRequest(frozenset({"long", "main"})), True),
        (JobRequest(frozenset({"long"})), False),
        (JobRequest(frozenset({"main"}), constraint="gpu&nvme"), True),
        (JobRequest(frozenset({"main"}), constraint="intel"), False),
        (JobRequest(frozenset({"main"}), constraint="[rack1*2&rack2*4]"), True),
        (JobRequest(frozenset({"main"}), gres=(("gpu", "", 4),)), True),
        (JobRequest(frozenset({"main"}), gres=(("gpu", "", 5),)), False),
        (JobRequest(frozenset({"main"}), gres=(("gpu", "h100", 1),)), False),
        (JobRequest(frozenset({"main"}), memory_mb=9000), True),
        (JobRequest(frozenset({"main"}), memory_mb=9001), False),
        (JobRequest(frozenset({"main"}), cpus=65), False),
    ],
)
def test_a_request_fits_a_kind_of_nodes_unless_something_is_certainly_missing(request_: JobRequest, fits: bool) -> None:
    assert GPU.fits(request_) == fits


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("4:00:00", 14400), ("1-0", 86400), ("1-2:30", 95400), ("1-00:00:01", 86401)],
)
def test_time_limits_are_read_as_slurm_means_them(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds


# What follows.


def test_one_pilot_a_node_is_kept_the_one_that_runs() -> None:
    pilots = [
        Pilot(3, "a", "waiting", mark="m"),
        Pilot(5, "a", "running", mark="m"),
        Pilot(6, "a", "running", mark="m"),
        Pilot(7, "b", "waiting", mark="m"),
        Pilot(8, "c", "running", mark="other"),
        Pilot(9, "d", "frozen", mark="m"),
        Pilot(10, "e", "ending", mark="m"),
        Pilot(11, "e", "running"),
    ]
    found = sort_pilots(pilots, "m")
    assert {node: pilot.job for node, pilot in found.kept.items()} == {"a": 5, "b": 7, "e": 11}
    assert {each.pilot.job for each in found.cancel} == {3, 6, 8, 9}
    assert set(found.ended) == {10}


def test_a_pilot_that_was_preempted_did_nothing_wrong_however_it_ended() -> None:
    assert fate(Pilot(1, "a", "ended", preempted=True, how="FAILED")) == ("its pilot was preempted", "preempted")
    assert fate(Pilot(1, "a", "ended", how="PREEMPTED")) == ("its pilot was preempted", "preempted")
    assert fate(Pilot(1, "a", "ended", how="TIMEOUT")) == ("its pilot has ended: timeout", "time limit")
    assert fate(Pilot(1, "a", "ended", how="CANCELLED")) == ("its pilot has ended: cancelled", "failed")
    assert fate(None) == ("its pilot has vanished", "failed")


def test_only_nodes_that_the_settings_allow_are_usable() -> None:
    nodes = read_nodes("n1 gpu idle\nn2 gpu idle\nn3 cpu idle\nn4 gpu mixed\nn5 gpu idle\n")
    settings = SlurmSettings(partition="p", constraint="gpu", exclude=("n[2-3]",), nodelist=("n[1-4]", "n9"))
    assert list(usable(nodes, settings)) == ["n1", "n4"]


FREE = ("n1", "n2", "n3", "n4")


def test_enough_nodes_stay_free() -> None:
    assert choose(FREE, (), 0) == FREE
    assert choose(FREE, (), 3) == ("n1",)
    assert choose(FREE, {"n1", "n2"}, 3) == ("n3",), "those that are left count as free"
    assert choose((), (), 2) == ()


@given(st.integers(0, 6), st.sets(st.sampled_from(FREE)))
def test_what_is_chosen_is_never_left_nor_reserved(reserve: int, leave: set[str]) -> None:
    chosen = choose(FREE, leave, reserve)
    assert not set(chosen) & leave
    assert not chosen or len(FREE) - len(chosen) >= max(len(leave), reserve)


# Refusals.

CPU = NodeKind(frozenset({"main"}), 8)
MIXED = SiteLayout(frozenset({"main"}), {**{f"c{i}": CPU for i in range(9)}, **{f"g{i}": GPU for i in range(9)}})
NO = "sbatch: it failed with exit status 1: sbatch: error: Requested node configuration is not available"


def test_a_node_that_refuses_is_tried_after_nodes_of_other_kinds_and_stops_nobody() -> None:
    refusals, nodes = Refusals(), ("c1", "c2", "c3", "g1", "g2")
    assert refusals.order(nodes, MIXED, 0.0) == nodes
    for node in ("c1", "c2", "c3"):
        refusals.refused(node, NO, 0.0, nodes, MIXED)
    assert not refusals.problem, "nodes of another kind have not been tried"
    assert refusals.order((*nodes, "c4"), MIXED, 0.0) == ("g1", "g2", "c4", "c1", "c2", "c3")
    refusals.accepted("g1", MIXED)
    assert refusals.nodes == {"c1", "c2", "c3"}


def test_if_different_nodes_of_all_kinds_refuse_their_kinds_wait_ever_longer_and_then_one_is_tried() -> None:
    refusals = Refusals()
    assert refusals.refused("c1", NO, 0.0, (), MIXED)
    assert not refusals.refused("c1", NO, 0.0, (), MIXED), "it is known"
    refusals.refused("c2", NO, 0.0, (), MIXED)
    assert not refusals.problem, "two nodes are no site"
    waits = []
    for node in ("c3", *["c4"] * 5):
        refusals.refused(node, NO, 100.0, ("c5",), MIXED)
        waits.append(refusals.until - 100.0)
    assert waits == [5, 10, 20, 40, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert refusals.problem == NO
    assert refusals.order(("c4", "c5", "g1"), MIXED, 101.0) == ("g1",), "the pause is for the kind that refuses"
    assert refusals.order(("c4", "c5"), MIXED, 200.0) == ("c5",), "one that has not failed"
    refusals.accepted("g1", MIXED)
    assert refusals.order(("c5",), MIXED, 101.0) == ()
    refusals.accepted("c5", MIXED)
    assert refusals.order(("c4", "c6"), MIXED, 101.0) == ("c4", "c6")
    assert not refusals.problem


def test_a_slurm_that_does_not_answer_is_asked_for_nothing_for_a_while() -> None:
    refusals = Refusals()
    refusals.refused("c1", "sbatch: it did not end within 5 s", 0.0, FREE, MIXED)
    assert refusals.order(("c2", "g1"), MIXED, 4.9) == ()
    assert refusals.order(("c2", "g1"), MIXED, 5.0) == ("c2", "g1")
    refusals.forget()
    assert refusals.order(("c2", "g1"), MIXED, 0.0) == ("c2", "g1")


# How a pilot is submitted.


def test_the_submission_of_a_pilot_is_as_documented(tmp_path: Path) -> None:
    settings = SlurmSettings(
        partition="scavenger", account="lab", qos="low", constraint="gpu", options=("--gres=gpu:4",)
    )
    argv = submission(settings, Path("/shared/100%"), "n01", "bftrainer-abc", "ff")
    assert argv == (
        "sbatch",
        "--parsable",
        "--nodes=1",
        "--nodelist=n01",
        "--partition=scavenger",
        "--account=lab",
        "--qos=low",
        "--constraint=gpu",
        "--time=1:00:00",
        "--signal=B:TERM@1",
        "--no-requeue",
        "--exclusive",
        "--mem=0",
        "--job-name=bftrainer-abc",
        "--comment=bftrainer:abc:n01:ff",
        "--chdir=/shared/100%",
        "--output=/shared/100%%/n01.log",
        "--open-mode=truncate",
        "--gres=gpu:4",
        "/shared/100%/pilot.sh",
    )
    short = submission(settings, tmp_path, "n01", "bftrainer-abc", "ff", short=True)
    assert set(short) - set(argv) >= {"--time-min=0:05:00"}


@pytest.mark.waits
def test_the_script_becomes_the_agent_and_takes_the_secret_from_a_private_file(tmp_path: Path) -> None:
    folder = tmp_path / "it's $HOME"
    names = ("BFTRAINER_URL", "BFTRAINER_SECRET", "BFTRAINER_NODE")
    show = f"import os; print(*(os.environ[name] for name in {names}), os.getpid())"
    settings = SlurmSettings(partition="p", agent=("-c", show))
    write_files(settings, folder, {"BFTRAINER_URL": "http://x:1/$a`b`'", "BFTRAINER_SECRET": "hush"})
    assert "hush" not in pilot_script(settings, folder)
    env = {**os.environ, "SLURMD_NODENAME": "n7"}
    with subprocess.Popen(["/bin/sh", folder / "pilot.sh"], env=env, stdout=subprocess.PIPE, text=True) as script:
        said, _ = script.communicate()
    assert said.split() == ["http://x:1/$a`b`'", "hush", "n7", str(script.pid)]
    assert (folder / "agent-environment").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ["agent-environment", "call-backs", "pilot.sh"]


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BFTrainerError, match="cannot write the files of pilots to .*file.*: Not a directory"):
        write_files(SlurmSettings(partition="p"), tmp_path / "file" / "slurm", {})


def test_neither_defaults_of_the_user_nor_secrets_nor_gpus_of_the_controller_reach_slurms_commands() -> None:
    given = {
        **{"SBATCH_PARTITION": "x", "SQUEUE_STATES": "x", "SLURM_JOB_ID": "1", "SLURM_CONF": "/c", "HOME": "/h"},
        **{"BFTRAINER_SECRET": "x", "BFTRAINER_TOKEN": "x", "BFTRAINER_STATE": "/s", "LC_ALL": "de_DE"},
        **{"CUDA_VISIBLE_DEVICES": "3", "ROCR_VISIBLE_DEVICES": "0"},
    }
    kept = {"SLURM_CONF": "/c", "HOME": "/h", "BFTRAINER_STATE": "/s"}
    assert command_environment(given) == {**kept, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}


@pytest.mark.waits
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("exec sleep 600", "sinfo: it did not end within 0.5 s"),
        ("echo Unable to contact slurm controller >&2; exit 1", "sinfo: it failed with exit status 1: Unable to"),
        ("echo n1 foo bar", "sinfo: no line of the sinfo output ends with a node state"),
        ("exit 0", "sinfo: sinfo printed no node"),
        ("printf '\\377'", "sinfo: its output cannot be read"),
        ("yes 'n1 idle'", "sinfo: it prints more than 16 MiB"),
    ],
)
def test_a_command_that_misbehaves_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    executable(tmp_path / "sinfo", f"#!/bin/sh\n{body}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    patience_s = 0.5 if "0.5 s" in message else 30.0
    slurm = Slurm(SlurmSettings(partition="p", command_timeout_s=patience_s), tmp_path, "abc", "ff")
    with pytest.raises(SlurmCommandError, match=re.escape(message)) as error:
        asyncio.run(slurm.nodes())
    assert "\n" not in str(error.value)


@pytest.mark.waits
def test_the_separator_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show = 'echo "$@" > words; env > environment'
    executable(tmp_path / "squeue", f"#!/bin/sh\ncd {tmp_path}; {show}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    slurm = Slurm(SlurmSettings(partition="p", command_timeout_s=30.0), tmp_path, "abc", "ff")
    with pytest.raises(SlurmCommandError, match="must begin with its header"):
        asyncio.run(slurm.jobs())
    assert "\x1f" not in (tmp_path / "words").read_text()
    variables = (tmp_path / "environment").read_text().split("\n")
    (form,) = (line for line in variables if line.startswith("SQUEUE_"))
    assert re.fullmatch(r"SQUEUE_FORMAT2=JobArrayID:\x1f[0-9a-f]{8},.*,Comment:256\x1f[0-9a-f]{8}", form)


# Settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "`partition` must name the preemptible partition for pilots, but got ''"),
        ({"partition": "--x"}, "`partition` must name"),
        ({"partition": "p", "qos": "a b"}, "`qos` must be a name"),
        ({"partition": "p", "constraint": "[a|b]*2"}, "`constraint` must be features joined by & or |"),
        ({"partition": "p", "exclude": "n[1-"}, "`exclude` must be node names or host lists"),
        ({"partition": "p", "time_limit": "soon"}, "`time_limit` must be a time such as 4:00:00"),
        ({"partition": "p", "time_min": "5:00:00"}, "`time_min` must be at most `time_limit`, 1:00:00"),
        ({"partition": "p", "renew_s": 10}, "`renew_s` must be at least `grace_s`, 20, and less"),
        ({"partition": "p", "max_pending": 0}, "`max_pending` must be 1 or more"),
        ({"partition": "p", "interval_s": 0}, "`interval_s` must be more than 0"),
        ({"partition": "p", "options": ["scavenger"]}, "`options` must be options of sbatch"),
        ({"partition": "p", "gpus": "2"}, "`gpus` must be all or none, but got '2'"),
        ({"partition": "p", "gpus": "none", "options": ["-G2"]}, "`gpus` is none, but `options` asks for GPUs (-G2)"),
        ({"partition": "p", "agent": []}, "`agent` must be what Python runs"),
    ],
)
def test_wrong_settings_are_one_clear_line(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(f"pool slurm: {message}")) as error:
        make_pool("slurm", settings, tmp_path)
    assert "\n" not in str(error.value)


def test_the_defaults_that_the_page_names_are_the_defaults() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "pools.md").read_text()
    section = page.partition("\n## `slurm`\n")[2].partition("\n## ")[0]
    named = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))
    for each in fields(SlurmSettings):
        if each.name not in ("partition", "agent", "python"):
            default = each.default if not isinstance(each.default, tuple) else []
            text = f"`{str(default).lower()}`" if isinstance(default, list) else str(default)
            text = f'`"{default}"`' if isinstance(default, str) else text
            text = f"{default:g}" if isinstance(default, float) else text
            assert named[each.name] == text.replace("False", "false"), each.name


def test_a_pilot_that_waits_too_long_gives_way_to_short_ones_for_a_while() -> None:
    rule, pilot = ShortPilots(), Pilot(1, "n01", "waiting")
    assert not rule.waits(pilot, 0.0)
    assert not rule.waits(pilot, SHORT_AFTER_S - 1)
    assert not rule.is_short("n01", SHORT_AFTER_S - 1)
    assert rule.waits(pilot, SHORT_AFTER_S)
    assert not rule.waits(pilot, SHORT_AFTER_S + 1)  # it was said
    assert rule.is_short("n01", SHORT_AFTER_S + SHORT_FOR_S - 1)
    assert not rule.is_short("n02", SHORT_AFTER_S + 1)
    assert not rule.is_short("n01", SHORT_AFTER_S + SHORT_FOR_S)


def test_a_pilot_that_is_gone_has_not_waited() -> None:
    rule, pilot = ShortPilots(), Pilot(1, "n01", "waiting")
    rule.waits(pilot, 0.0)
    rule.keep(())
    assert not rule.waits(pilot, SHORT_AFTER_S)
