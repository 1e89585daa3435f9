"""What the `slurm` pool reads from Slurm's output and decides, without any Slurm."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.cluster.pools.registry import make_pool
from bftrainer.cluster.pools.slurm.commands import (
    Slurm,
    SlurmCommandError,
    command_environment,
    pilot_script,
    submission,
    write_files,
)
from bftrainer.cluster.pools.slurm.decide import (
    GIVE_UP_S,
    SHORT_AFTER_S,
    SHORT_FOR_S,
    YIELD_S,
    Nodes,
    Refusals,
    ShortPilots,
    YieldRule,
    choose,
    fate,
    has_features,
    sort_pilots,
    usable,
)
from bftrainer.cluster.pools.slurm.read import Pilot, WaitingJob, read_layout, read_nodes, read_pilots, read_queue
from bftrainer.cluster.pools.slurm.settings import SlurmSettings, read_duration
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.traces.recorder.states import read_sinfo
from support.cluster.made_pools import executable

PILOTS = "JOBID|STATE|REQ_NODES|NODELIST|TIME_LEFT|PREEMPT_TIME|REASON|COMMENT|\n"
QUEUE = "JOBID|PARTITION|NODES|REASON|SCHEDNODES|START_TIME|NAME\n"

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
    node = read_nodes("n1 gpu,a100,nvme idle\n")["n1"]
    fitting = ["", "gpu", "gpu&a100", "h100|a100", "h100&gpu|nvme", "gpu&nvme|x"]
    assert all(has_features(node, text) for text in fitting)
    assert not any(has_features(node, text) for text in ["h100", "gpu&h100", "h100|x&gpu"])
    assert not has_features(read_nodes("n1 (null) idle\n")["n1"], "gpu")


def test_pilots_are_read_with_their_nodes_times_and_fates() -> None:
    text = (
        PILOTS
        + "7|RUNNING|n01|n01|3:59:57|N/A|None|bftrainer:abc:n01:ff|\n"
        + "8|PENDING|n02||4:00:00|N/A|ReqNodeNotAvail, Reserved for maintenance|bftrainer:abc:n02:ff|\n"
        + "9|FAILED|n03|n03|4:59|1794757961|JobLaunchFailure|(null)|\n"
        + "10|RUNNING||n04|UNLIMITED|N/A|None|rewritten by | the site|\n"
        + "11|COMPLETING|n05|n05|1-00:00:01|N/A|None|bftrainer:abc:n05:ff|\n"
        + "12|CANCELLED|||INVALID|N/A|None|x|\n"
    )
    assert read_pilots(text) == (
        Pilot(7, "n01", "running", 4 * 3600.0 - 3, "", "ff", False, "RUNNING"),
        Pilot(8, "n02", "waiting", 4 * 3600.0, "ReqNodeNotAvail, Reserved for maintenance", "ff", False, "PENDING"),
        Pilot(9, "n03", "ended", 299.0, "JobLaunchFailure", "", True, "FAILED"),
        Pilot(10, "n04", "running", None, "", "", False, "RUNNING"),
        Pilot(11, "n05", "ending", 86401.0, "", "ff", False, "COMPLETING"),
    )
    assert read_pilots(PILOTS) == ()


def test_the_queue_holds_jobs_that_wait_for_nodes_and_no_pilots() -> None:
    text = (
        QUEUE
        + "4|main|4|Resources|n[01-04]|1794761561|a|b\n"
        + "5|main,long|2|Priority||N/A|x\n"
        + "12_[2-9%3]|main|1|None|(null)|N/A|x\n"
        + "13|main|1|Dependency||N/A|x\n"
        + "14|main|1|JobHeldUser||N/A|x\n"
        + "11|scavenger|1|None|n01|1794790440|bftrainer-0123\n"
    )
    assert read_queue(text) == (
        WaitingJob("4", ("main",), 4, False, frozenset({"n01", "n02", "n03", "n04"}), 1794761561.0),
        WaitingJob("5", ("main", "long"), 2),
        WaitingJob("12_[2-9%3]", ("main",), 1, several=True),
    )


@pytest.mark.parametrize("text", ["", "\n", "garbage", "JOBID|STATE\n1|x\n", PILOTS + "x|RUNNING|n1|n1|1:00|N/A||x|\n"])
@pytest.mark.parametrize("read", [read_pilots, read_queue])
def test_what_is_no_table_of_jobs_is_no_answer(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match="must begin with its header|no job"):
        read(text)


@given(st.text())
def test_no_text_is_too_strange(text: str) -> None:
    for head in ("", PILOTS, QUEUE):
        for read in (read_pilots, read_queue, read_layout, read_nodes):
            try:
                answer: object = read(head + text)
            except (ValueError, InputError) as problem:
                answer = str(problem).strip() or None  # an error says something
            assert answer is not None


def test_partitions_are_read_with_all_their_nodes() -> None:
    text = "main|n[01-02]\nmain|n07\nempty|\nscavenger|n01\n"
    assert read_layout(text) == {
        "main": {"n01", "n02", "n07"},
        "empty": frozenset(),
        "scavenger": {"n01"},
    }


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
LAYOUT = {"main": frozenset({*FREE, "n5", "n6"}), "small": frozenset({"n1"}), "other": frozenset({"n9"})}


def left_to_jobs(
    rule: YieldRule, now: float, *queue: WaitingJob, ours: tuple[str, ...] = ("n5",)
) -> tuple[set[str], int]:
    found = rule.plan(now, 1000.0 + now, queue, Nodes(FREE, ours), LAYOUT, 300.0)
    reserved, more = found.reserved, found.more
    return set(reserved), more


@pytest.mark.parametrize(
    ("job", "reserved", "more"),
    [
        (WaitingJob("1", ("main",), 2), set(), 2),
        (WaitingJob("1", ("main",), 5), set(), 5),
        (WaitingJob("1", ("main",), 6), set(), 0),
        (WaitingJob("1", ("small", "other"), 1), set(), 1),
        (WaitingJob("1", ("other",), 1), set(), 0),
        (WaitingJob("1", ("nowhere",), 1), set(), 0),
        (WaitingJob("1_[1-9]", ("main",), 1, several=True), set(), 4),
        (WaitingJob("1", ("main",), 6, planned_on=frozenset({"n1", "n6"}), start=1200.0), {"n1"}, 0),
        (WaitingJob("1", ("main",), 6, planned_on=frozenset({"n1", "n6"}), start=9000.0), set(), 0),
    ],
)
def test_idle_nodes_are_left_to_jobs_that_could_start_on_them(job: WaitingJob, reserved: set[str], more: int) -> None:
    assert left_to_jobs(YieldRule(), 0.0, job) == (reserved, more)


def test_a_job_that_could_have_started_for_long_is_kept_by_something_else() -> None:
    rule, job = YieldRule(), WaitingJob("1", ("main",), 2)
    assert left_to_jobs(rule, 0.0, job)[1] == 2
    assert left_to_jobs(rule, YIELD_S - 1, job)[1] == 2
    assert left_to_jobs(rule, YIELD_S, job, WaitingJob("2", ("main",), 1))[1] == 1
    assert left_to_jobs(rule, YIELD_S + 1)[1] == 0
    assert left_to_jobs(rule, YIELD_S + 2, job)[1] == 2, "it was gone in between: it counts anew"


def test_only_the_partitions_to_watch_count() -> None:
    job = WaitingJob("1", ("main", "small"), 2)
    assert left_to_jobs(YieldRule(("small",)), 0.0, job)[1] == 2
    assert left_to_jobs(YieldRule(("other",)), 0.0, job)[1] == 0


def test_enough_nodes_stay_free() -> None:
    assert choose(FREE, (), 0, 0) == FREE
    assert choose(FREE, (), 1, 3) == ("n1",)
    assert choose(FREE, (), 9, 0) == ()
    assert choose(FREE, {"n1", "n2"}, 0, 3) == ("n3",), "those reserved count as free"
    assert choose((), (), 2, 2) == ()


@given(st.integers(0, 6), st.integers(0, 6), st.sets(st.sampled_from(FREE)))
def test_what_is_chosen_is_never_spoken_for_nor_reserved(more: int, reserve: int, reserved: set[str]) -> None:
    chosen = choose(FREE, reserved, more, reserve)
    assert not set(chosen) & reserved
    assert not chosen or len(FREE) - len(chosen) >= max(more + len(reserved), reserve)


def test_submissions_that_are_refused_again_and_again_are_tried_ever_less_often() -> None:
    refusals = Refusals()
    assert refusals.refused("no such account", 0.0)
    assert refusals.until < 0.0, "it may have been the node's fault"
    assert not refusals.refused("no such account", 0.0)
    waits = []
    for _ in range(8):
        refusals.refused("no such account", 100.0)
        waits.append(refusals.until - 100.0)
    assert waits == [10, 20, 40, 80, 160, 300, 300, 300]
    refusals.forget()
    assert refusals == Refusals()


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
    assert sorted(path.name for path in folder.iterdir()) == ["agent-environment", "pilot.sh"]


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BFTrainerError, match="cannot write the files of pilots to .*file.*: Not a directory"):
        write_files(SlurmSettings(partition="p"), tmp_path / "file" / "slurm", {})


def test_neither_defaults_of_the_user_nor_secrets_reach_slurms_commands() -> None:
    given = {
        **{"SBATCH_PARTITION": "x", "SQUEUE_STATES": "x", "SLURM_JOB_ID": "1", "SLURM_CONF": "/c", "HOME": "/h"},
        **{"BFTRAINER_SECRET": "x", "BFTRAINER_TOKEN": "x", "BFTRAINER_STATE": "/s", "LC_ALL": "de_DE"},
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


def given_up(rule: YieldRule, now: float, queue: Sequence[WaitingJob], nodes: Nodes) -> tuple[str, ...]:
    return rule.plan(now, 1000.0 + now, queue, nodes, LAYOUT, 300.0).give


def test_nodes_that_a_job_lacks_are_given_up_at_first_sight() -> None:
    rule, job, nodes = YieldRule(), WaitingJob("1", ("main",), 4), Nodes(("n1", "n2"), ("n3", "n4", "n5"))
    assert given_up(rule, 0.0, [job], nodes) == ("n3", "n4")
    leaving = Nodes(("n1", "n2"), ("n5",), ("n3", "n4"))
    assert given_up(rule, 1.0, [job], leaving) == (), "those that are on their way out are enough"
    assert given_up(rule, GIVE_UP_S, [job], nodes) == (), "something else keeps it"


def test_nothing_is_given_up_for_a_job_that_could_not_start_all_the_same() -> None:
    rule, nodes = YieldRule(), Nodes(("n1",), ("n2", "n3"))
    wide = WaitingJob("1", ("main",), 4)
    for now in (0.0, 1.0, 2.0):
        assert given_up(rule, now, [wide, WaitingJob("3", ("other",), 1)], nodes) == ()
    assert not rule.plan(3.0, 1003.0, [wide], nodes, LAYOUT, 300.0).again
    assert rule.plan(4.0, 1004.0, [WaitingJob("4", ("main",), 2)], nodes, LAYOUT, 300.0).again


def test_jobs_that_wait_together_are_each_given_what_they_lack() -> None:
    rule, nodes = YieldRule(), Nodes(("n1",), ("n2", "n3", "n4", "n5"))
    queue = [WaitingJob("1", ("main",), 2), WaitingJob("2", ("main",), 2)]
    assert given_up(rule, 0.0, queue, nodes) == ("n2", "n3", "n4")
    planned = WaitingJob("9", ("main",), 2, planned_on=frozenset({"n6"}), start=9000.0)
    assert given_up(rule, 2.0, [planned], nodes) == ("n2",), "Slurm could start it now, it just has not seen that"
    found = rule.plan(3.0, 1003.0, [planned], nodes, LAYOUT, 300.0)
    assert (found.reserved, found.more) == (frozenset(), 2), "what is given up is not taken again"


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
