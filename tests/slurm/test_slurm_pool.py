"""The `slurm` pool on a real Slurm: pilots come, make way, and are found again."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cluster.pools.slurm import reservations
from bftrainer.cluster.pools.slurm.pool import SlurmPool
from bftrainer.cluster.pools.slurm.settings import read_duration
from bftrainer.errors import InputError
from support.cluster.fake_pool_host import FakePoolHost, command_lines
from support.cluster.made_pools import executable, slurm
from support.cluster.pool_conformance import CHECKS, Check, Setting
from support.slurm.lab import Lab, cluster
from support.waiting import until

pytestmark = pytest.mark.slurm

NODES = ("n01", "n02", "n03", "n04")


@pytest.fixture(scope="module")
def whole_lab() -> Iterator[Lab]:
    with cluster(len(NODES)) as lab:
        yield lab


@pytest.fixture
def lab(whole_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("SLURM_CONF", str(whole_lab.conf))
    yield whole_lab
    whole_lab.clear()


def setting(folder: Path, **settings: Any) -> Setting:
    return Setting(lambda: slurm(folder, nodelist=NODES[:2], **settings), folder, NODES[:2])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Check, lab: Lab, tmp_path: Path) -> None:
    asyncio.run(check(setting(tmp_path / "it's a state %j")))
    assert not lab.jobs()


def play(folder: Path, scene: Callable[[FakePoolHost, SlurmPool], Awaitable[None]], **settings: Any) -> FakePoolHost:
    """A scene with a pool on all nodes, drained at the end."""

    async def whole() -> FakePoolHost:
        async with FakePoolHost() as host:
            pool = slurm(folder, **settings)
            await pool.open(host)
            try:
                await scene(host, pool)
            finally:
                await pool.close(drain=True)
            return host

    return asyncio.run(whole())


def all_here(host: FakePoolHost) -> bool:
    return host.here == set(NODES)


def test_a_job_of_the_main_partition_starts_at_once_and_the_pilots_come_back_after_it(lab: Lab, tmp_path: Path) -> None:
    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: all_here(host), lambda: (host.said, lab.jobs()))
        job = lab.submit("-N3")
        await until(lambda: lab.jobs().get(job) == "RUNNING", lab.jobs)
        # Slurm and the pool may both make room; then the fourth pilot comes back.
        await until(lambda: len(host.here) == 1 and len(host.words("gone")) >= 3, lambda: host.said)
        reasons = {said[2] for said in host.said if said[0] == "gone"}
        assert reasons <= {"its pilot was preempted", "it was given up for a job that waited"}
        await asyncio.to_thread(lab.run, "scancel", job)
        await until(lambda: all_here(host), lambda: host.said)
        assert pool.describe()["pilots"] == 4 or pool.describe()["pending"]

    host = play(tmp_path, scene)
    assert "pilot_ended" not in host.words("note"), "being preempted is no failure"
    assert not lab.jobs()


def test_a_job_for_which_slurm_makes_no_room_is_given_the_nodes_it_lacks(lab: Lab, tmp_path: Path) -> None:
    lab.run(
        "scontrol", "update", "PartitionName=scavenger", "PreemptMode=off"
    )  # as after a preemption for the same job

    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: all_here(host))
        job = await asyncio.to_thread(lab.submit, "--nodes=2")
        await until(lambda: lab.jobs("-p", "main") == {job: "RUNNING"}, lambda: host.said)
        await until(lambda: len(host.here) == 2)
        looked = host.looks
        await until(lambda: host.looks > looked + 3)
        assert host.words("note").count("cancelled") == 2, host.said
        await asyncio.to_thread(lab.run, "scancel", job)
        await until(lambda: all_here(host), lambda: host.said)

    try:
        play(tmp_path, scene)
    finally:
        lab.run("scontrol", "update", "PartitionName=scavenger", "PreemptMode=cancel")


def test_a_reservation_over_pilots_needs_a_flag_and_then_its_node_is_left_before_it_begins(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "ASK_EVERY_S", 0.5)
    words = ("scontrol", "create", "reservation", "ReservationName=kernel", "StartTime=now+1hour", "Duration=5")
    words += ("Nodes=n03", "Users=root")

    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: all_here(host))
        with pytest.raises(AssertionError, match="Requested nodes are busy"):
            await asyncio.to_thread(lab.run, *words)
        await asyncio.to_thread(lab.run, *words, "Flags=IGNORE_JOBS")
        await until(lambda: host.here == {"n01", "n02", "n04"}, lambda: host.said)
        assert host.words("leaving") == ["n03"]
        looked = host.looks
        await until(lambda: host.looks > looked + 3)
        assert host.here == {"n01", "n02", "n04"}
        await asyncio.to_thread(lab.run, "scontrol", "delete", "ReservationName=kernel")
        await until(lambda: all_here(host), lambda: host.said)

    # The notice is longer than the time until the beginning: the node is left at once.
    play(tmp_path, scene, time_limit="4:00:00", renew_s=5000.0)


def test_a_cancelled_pilot_is_noticed(lab: Lab, tmp_path: Path) -> None:
    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: all_here(host))
        job = lab.run("squeue", "-h", "-w", "n02", "-o", "%i").strip()
        await asyncio.to_thread(lab.run, "scancel", job)
        await until(lambda: "pilot_ended" in host.words("note"), lambda: host.said)
        assert host.words("gone") == ["n02"]
        await until(lambda: all_here(host), lambda: host.said)

    play(tmp_path, scene)


def test_a_node_whose_daemon_and_agent_were_killed_is_gone(lab: Lab, tmp_path: Path) -> None:
    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: all_here(host))
        agent = host.pids["n03"]
        os.kill(int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        os.kill(agent, signal.SIGKILL)
        await until(lambda: "n03" not in host.here)
        await asyncio.to_thread(lab.run, "scontrol", "update", "NodeName=n03", "State=DOWN", "Reason=test")
        await until(lambda: "n03" in host.words("gone"), lambda: host.said)

    play(tmp_path, scene)


def test_while_slurm_hangs_nothing_is_lost_and_nothing_submitted(lab: Lab, tmp_path: Path) -> None:
    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: len(host.here) == 3)
        with lab.stopped("slurmctld"):
            await until(lambda: "slurm_failed" in host.words("note"), lambda: host.said)
            assert len(host.here) == 3
            assert "did not end within 0.5 s" in pool.describe()["problem"]
        await until(lambda: "slurm_works" in host.words("note"), lambda: host.said)
        assert len(lab.jobs()) == 3

    host = play(tmp_path, scene, reserve=1, command_timeout_s=0.5)
    assert sorted(host.joins) == sorted(NODES[:3])
    assert host.words("note").count("slurm_works") == 1


def test_a_restart_of_slurmctld_costs_no_node(lab: Lab, tmp_path: Path) -> None:
    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: all_here(host))
        await asyncio.to_thread(lab.restart)
        looked = host.looks
        await until(lambda: host.looks > looked + 3 and not pool.describe()["problem"], lambda: host.said)
        assert not {"gone", "leaving"} & {said[0] for said in host.said}
        await until(lambda: pool.describe()["pilots"] == 4)

    assert sorted(play(tmp_path, scene).joins) == sorted(NODES)


def test_a_squeue_that_hangs_or_lies_costs_no_node(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    answers = ("exit 0", "echo nonsense; exit 0", "exec sleep 600", "echo no >&2; exit 1")

    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: all_here(host))
        for number, answer in enumerate(answers, 1):
            executable(tmp_path / "bin" / "squeue", f"#!/bin/sh\n{answer}\n")
            await until(lambda n=number: host.words("note").count("slurm_failed") == n, lambda: host.said)
            (tmp_path / "bin" / "squeue").unlink()
            await until(lambda n=number: host.words("note").count("slurm_works") == n, lambda: host.said)
        assert not host.words("gone"), host.said

    assert len(play(tmp_path, scene, command_timeout_s=1.0).joins) == 4


def test_a_submission_whose_answer_is_lost_is_found_and_not_made_twice(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    real = subprocess.run(["which", "sbatch"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    executable(
        tmp_path / "bin" / "sbatch",
        f'#!/bin/sh\necho x >> {tmp_path}/calls\n{real} "$@"\n[ -e {tmp_path}/fine ] || exec sleep 600\n',
    )

    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: "submit_failed" in host.words("note"), lambda: host.said)
        (tmp_path / "fine").touch()
        await until(lambda: host.here == {"n01", "n02"}, lambda: (host.said, lab.jobs()))

    host = play(tmp_path, scene, command_timeout_s=1.0, nodelist=("n[01-02]",))
    assert sorted(host.joins) == ["n01", "n02"]
    assert (tmp_path / "calls").read_text().count("x") == 2


def test_a_pilot_that_was_being_submitted_by_a_killed_controller_is_found(lab: Lab, tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
sys.path[:0] = {[str(Path(__file__).parents[1])]!r}
from pathlib import Path
from types import SimpleNamespace
from support.cluster.made_pools import slurm
from support.cluster.fake_pool_host import FakePoolHost
async def main():
    before = SimpleNamespace(secret="hush-hush", port=int(sys.argv[1]), memory={{"slurm.id": '"abc"'}})
    host = FakePoolHost(follows=before)
    await slurm(Path({str(tmp_path)!r})).open(host)
    print("open", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""

    async def scene() -> None:
        async with FakePoolHost() as host:
            host.secret, host.memory = "hush-hush", {"slurm.id": '"abc"'}
            with subprocess.Popen([sys.executable, "-c", program, str(host.port)], stdout=subprocess.PIPE) as first:
                await until(lambda: lab.jobs("--name=bftrainer-abc"))
                first.kill()
            pool = slurm(tmp_path)
            await pool.open(host)
            await until(lambda: all_here(host), lambda: (host.said, lab.jobs()))
            assert sorted(host.joins) == sorted(NODES)
            await pool.close(drain=True)

    asyncio.run(scene())
    assert not lab.jobs()


def test_pilots_that_look_for_the_controller_elsewhere_are_replaced_and_those_of_others_left(
    lab: Lab, tmp_path: Path
) -> None:
    async def scene() -> None:
        async with FakePoolHost() as before, setting(tmp_path).opened(before, drain=False):
            pass
        other = lab.submit("-p", "scavenger", "-w", "n04", "--job-name=bftrainer-someone")
        async with FakePoolHost() as after:
            after.memory = before.memory
            async with setting(tmp_path).opened(after):
                assert not set(before.pids.values()) & set(after.pids.values())
            await until(lambda: list(lab.jobs()) == [other], lab.jobs)

    asyncio.run(scene())


def test_nodes_that_are_planned_for_a_waiting_job_are_left_alone(lab: Lab, tmp_path: Path) -> None:
    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: pool.describe()["nodes"] == len(NODES) and host.looks > 4)
        assert not lab.jobs("--partition=scavenger")
        assert not host.joins
        await asyncio.to_thread(lab.run, "scancel", waiting)
        await until(lambda: host.here == set(NODES) - {busy}, lambda: (host.said, lab.jobs(), lab.states()))

    running = lab.submit("-N1", "--time=60")
    waiting = lab.submit("-N4", "--time=60")
    asyncio.run(until(lambda: "planned" in lab.states().values() and lab.jobs()[waiting] == "PENDING"))
    busy = lab.run("squeue", "-h", "-j", running, "-o", "%N").strip()
    play(tmp_path, scene)


def test_planned_nodes_are_used_until_they_are_needed_if_that_is_wanted(lab: Lab, tmp_path: Path) -> None:
    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: len(host.here) == 3, lambda: (host.said, lab.jobs(), lab.states()))
        limits = lab.run("squeue", "-h", "-p", "scavenger", "-o", "%l").split()
        assert all(300 <= read_duration(limit) <= 3600 for limit in limits)
        await asyncio.to_thread(lab.run, "scancel", running)
        await until(lambda: lab.jobs().get(waiting) == "RUNNING", lab.jobs)

    running = lab.submit("-N1", "--time=60")
    waiting = lab.submit("-N4", "--time=60")
    asyncio.run(until(lambda: "planned" in lab.states().values() and lab.jobs()[waiting] == "PENDING"))
    play(tmp_path, scene, planned=True)


def test_drained_and_reserved_nodes_are_left_and_not_taken(lab: Lab, tmp_path: Path) -> None:
    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: host.here == {"n02", "n03", "n04"}, lambda: host.said)
        await asyncio.to_thread(lab.run, "scontrol", "update", "NodeName=n02", "State=DRAIN", "Reason=test")
        await until(lambda: "n02" in host.words("gone"), lambda: host.said)
        assert ("leaving", "n02", "0.0") in host.said
        assert host.here == {"n03", "n04"}

    lab.run("scontrol", "update", "NodeName=n01", "State=DRAIN", "Reason=test")
    try:
        play(tmp_path, scene, grace_s=0.0)
    finally:
        lab.run("scontrol", "update", "NodeName=n[01-02]", "State=RESUME")


def test_a_pilot_is_renewed_before_its_time_is_over(lab: Lab, tmp_path: Path) -> None:
    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: host.joins.count("n01") >= 2, lambda: host.said)
        assert ("leaving", "n01", "0.0") in host.said

    settings: dict[str, Any] = {"time_limit": "1:00", "time_min": "", "renew_s": 58.0, "grace_s": 0.0}
    host = play(tmp_path, scene, nodelist=("n01",), **settings)
    assert "pilot_ended" not in host.words("note")


def test_a_node_that_is_reserved_for_later_is_used_until_then(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bftrainer.cluster.pools.slurm.decide.SHORT_AFTER_S", 1.0)

    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: host.here == {"n01"}, lambda: (host.said, lab.jobs()))
        limit = read_duration(lab.run("squeue", "-h", "-w", "n01", "-o", "%l").strip())
        assert 300 <= limit <= 1800

    what = ("reservation=later", "starttime=now+30minutes", "duration=60", "nodes=n01", "flags=maint", "users=root")
    lab.run("scontrol", "create", *what)
    try:
        host = play(tmp_path, scene, nodelist=("n01",))
    finally:
        lab.run("scontrol", "delete", "reservation=later")
    assert host.words("note") == ["cancelled"], host.said


def test_no_more_pilots_than_the_most_and_a_pause_cancels_those_that_wait(lab: Lab, tmp_path: Path) -> None:
    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await asyncio.to_thread(lab.run, "scontrol", "update", "PartitionName=scavenger", "State=DOWN")
        await until(lambda: list(lab.jobs().values()) == ["PENDING"] * 2, lab.jobs)
        looked = host.looks
        await until(lambda: host.looks > looked + 2)
        assert len(lab.jobs()) == 2
        await pool.pause()
        await until(lambda: not lab.jobs(), lab.jobs)

    lab.run("scontrol", "update", "PartitionName=scavenger", "State=DOWN")
    try:
        play(tmp_path, scene, max_pilots=3, max_pending=2)
    finally:
        lab.run("scontrol", "update", "PartitionName=scavenger", "State=UP")


def test_nodes_that_refuse_pilots_keep_none_from_the_one_that_takes_them(lab: Lab, tmp_path: Path) -> None:
    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: host.here == {"n04"}, lambda: (host.said, lab.jobs()))
        assert "submit_failed" in host.words("note")
        assert pool.describe()["problem"] == ""
        assert pool.describe()["refusing"] > 0

    lab.run("scontrol", "update", "NodeName=n04", "AvailableFeatures=fast", "ActiveFeatures=fast")
    try:
        play(tmp_path, scene, options=("--constraint=fast",))
    finally:
        lab.run("scontrol", "update", "NodeName=n04", "AvailableFeatures=", "ActiveFeatures=")


def test_a_round_is_four_requests_to_slurmctld_and_agents_make_none(lab: Lab, tmp_path: Path) -> None:
    def requests() -> Counter[str]:
        table = lab.run("sdiag").partition("by message type")[2].partition("by user")[0]
        rows = (line.split("count:") for line in table.splitlines() if "count:" in line)
        return Counter({name.split()[0]: int(rest.split()[0]) for name, rest in rows})

    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: all_here(host) and pool.describe()["pilots"] == len(NODES), lambda: host.said)
        before, rounds = requests(), pool.figures().rounds  # the loop stands still: no round is under way twice
        await until(lambda: pool.figures().rounds >= rounds + 5)
        asked, rounds = requests() - before, pool.figures().rounds - rounds
        questions = ("REQUEST_PARTITION_INFO", "REQUEST_NODE_INFO", "REQUEST_JOB_INFO")
        assert sum(asked[name] for name in questions) <= 4 * (rounds + 1)
        assert not [name for name in asked if "JOB" in name and name not in questions], asked

    play(tmp_path, scene)


def test_pilots_stay_while_jobs_arrive_that_would_delay_a_planned_one(lab: Lab, tmp_path: Path) -> None:
    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: len(host.here) == 2, lambda: (host.said, lab.jobs()))
        ours = set(host.here)
        wide = lab.submit("-N4", "--time=60")
        await until(lambda: wide in pool._yield_rule._planned, lab.jobs)  # the pool has seen Slurm's plan
        for _ in range(3):
            lab.submit("-N1", "--time=1-0")
            rounds = pool.figures().rounds
            await until(lambda n=rounds: pool.figures().rounds >= n + 3)
        assert ours == set(host.here), host.said
        assert ours.isdisjoint(host.words("gone")), host.said
        short = lab.submit("-N1", "--time=5")
        await until(lambda: lab.jobs().get(short) == "RUNNING", lab.jobs)

    lab.submit("-N2", "--time=60")
    play(tmp_path, scene)


def test_the_secret_is_neither_in_the_script_nor_in_what_slurm_tells_of_the_job(lab: Lab, tmp_path: Path) -> None:
    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: host.here == {"n01"})
        job = next(iter(lab.jobs()))
        shown = lab.run("scontrol", "show", "job", job) + lab.run("scontrol", "write", "batch_script", job, "-")
        assert "exec " in shown
        assert host.secret not in shown + command_lines()
        assert host.secret in (tmp_path / "slurm" / "agent-environment").read_text()
        assert (tmp_path / "slurm" / "agent-environment").stat().st_mode & 0o777 == 0o600

    play(tmp_path, scene, max_pilots=1)


def test_pilots_that_cannot_reach_the_controller_are_not_submitted_again_and_one_that_dies_is_told(
    lab: Lab, tmp_path: Path
) -> None:
    program = (
        "import json, os\n"
        "words = {'url': os.environ['BFTRAINER_URL'], 'kind': 'timeout', 'reason': 'the connection timed out'}\n"
        "open(os.environ['BFTRAINER_CALL_BACK'], 'w').write(json.dumps(words))\n"
        "raise SystemExit(1)\n"
    )

    async def deaf(host: FakePoolHost, pool: SlurmPool) -> None:
        def submitted() -> list[int]:
            jobs = lab.run("squeue", "-h", "--states=all", f"--name={pool._at.name}", "-O", "ReqNodes:|")
            return [jobs.count(node) for node in NODES[:2]]

        await until(lambda: "from n01, n02: the connection timed out" in pool.describe()["problem"], pool.describe)
        looks = host.looks  # each round asks who is here, and otherwise a pilot that failed is replaced after 0.5 s
        await until(lambda: host.looks > looks + 40)
        assert submitted() == [1, 1]
        await pool.resume()
        await until(lambda: submitted() == [2, 2], pool.describe)

    async def dead(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: pool.describe()["problem"], pool.describe)
        assert "pilots on n03 ended before they reached the controller: no module; see" in pool.describe()["problem"]

    play(tmp_path / "deaf", deaf, agent=("-c", program), nodelist=NODES[:2])
    play(tmp_path / "dead", dead, agent=("-c", "raise SystemExit('no module')"), nodelist=NODES[2:3])


def test_what_is_missing_is_said_at_once(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_it(pool: SlurmPool) -> None:
        async with FakePoolHost() as host:
            await pool.open(host)

    with pytest.raises(InputError, match="no partition 'scavengr' in Slurm, only main, scavenger"):
        asyncio.run(open_it(slurm(tmp_path, partition="scavengr")))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="needs Slurm's commands, but sinfo, squeue, sbatch, scancel"):
        asyncio.run(open_it(slurm(tmp_path)))


@pytest.mark.skipif(
    not all(shutil.which(name, path=f"{os.defpath}:/usr/sbin") for name in ("slurmdbd", "mariadbd")),
    reason="needs slurmdbd and MariaDB: a QOS is kept in Slurm's accounting",
)
def test_pilots_of_a_low_qos_make_way_for_jobs_of_a_higher_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(lab: Lab) -> None:
        for words in (
            ("add", "qos", "low", "set", "preemptmode=cancel", "gracetime=0"),
            ("add", "qos", "high", "set", "preempt=low", "priority=100"),
            ("add", "account", "lab"),
            ("add", "user", "root", "account=lab", "qos=low,high", "defaultqos=high"),
        ):
            lab.run("sacctmgr", "-i", *words)

    async def scene(host: FakePoolHost, pool: SlurmPool) -> None:
        await until(lambda: len(host.here) == 2, lambda: (host.said, lab.jobs()))
        job = lab.submit("-p", "shared", "-N2", "--qos=high", "--account=lab")
        await until(lambda: lab.jobs() == {job: "RUNNING"}, lab.jobs)
        await until(lambda: len(host.words("gone")) == 2, lambda: host.said)
        reasons = {said[2] for said in host.said if said[0] == "gone"}  # the second one if Slurm takes its time
        assert reasons <= {"its pilot was preempted", "it was given up for a job that waited"}

    extra = "PreemptType=preempt/qos\nAccountingStorageEnforce=associations,qos\n"
    extra += "PartitionName=shared Nodes=ALL OverSubscribe=EXCLUSIVE DefaultTime=60 State=UP"
    with cluster(2, LAB_ACCOUNTING="1", LAB_EXTRA=extra) as lab:
        prepare(lab)
        monkeypatch.setenv("SLURM_CONF", str(lab.conf))
        play(tmp_path, scene, partition="shared", qos="low", account="lab")
