"""Launchers: elastic, ddp, torchrun and hosts pass one suite; then what only one of them does, and real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.cluster.controller.head_agent import LOCK, LOG, STRAY_S, HeadAgent
from bftrainer.cluster.controller.node_ranks import default_ranks
from bftrainer.cluster.doctor.invariants import history
from bftrainer.cluster.launchers import HEAD, StateLayout, WorkerSlot
from bftrainer.cluster.launchers.base import Launch
from bftrainer.cluster.launchers.ddp import DdpLauncher
from bftrainer.cluster.launchers.elastic import ElasticLauncher
from bftrainer.cluster.launchers.hosts import FILE, SCRIPT, HostsLauncher
from bftrainer.cluster.launchers.torchrun import TorchrunLauncher
from bftrainer.cluster.report.rerun import KINDS, check
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.wire.messages import Gpu, Join, Start, Started
from bftrainer.elastic.protocol import Failed
from bftrainer.processes import variables
from support.cluster.bench import Bench
from support.cluster.launcher_conformance import CASES, Seat
from support.cluster.live import Live, gone
from support.processes import is_alive
from support.waiting import wait_until

LAUNCHERS = ("elastic", "ddp", "torchrun", "hosts")


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_launcher(case: Callable[[Path, str], None], launcher: str, tmp_path: Path) -> None:
    case(tmp_path, launcher)


def hosts_of(bench: Bench, trainer: str) -> str:
    return (bench.folder / "trainers" / trainer / "hosts.txt").read_text()


def words(start: Start) -> dict[str, str]:
    """The options of a torchrun agent."""
    return dict(word.split("=", 1) for word in start.argv if word.startswith("--") and "=" in word)


def test_torchrun_agents_of_one_crew_meet_in_one_store_also_after_a_restart_of_the_controller(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.submit("2-4", launcher="torchrun", max_restarts=3, env={"A": "b"})
    bench.join("n1", "n2")
    bench.restart()
    bench.join("n3")
    store, *agents = bench.started
    endpoint = store.argv[-1]
    assert store.argv == ("-m", "bftrainer.elastic.local.torchrun", "--store", endpoint)
    assert endpoint.startswith("127.0.0.1:")
    assert {words(agent)["--rdzv-endpoint"] for agent in agents} == {endpoint}
    assert {words(agent)["--rdzv-id"] for agent in agents} == {store.worker}
    assert [words(agent)["--local-addr"] for agent in agents] == ["n1", "n2", "n3"]
    assert {(words(a)["--nnodes"], words(a)["--max-restarts"], a.env["A"], a.speaks) for a in agents} == {
        ("2:4", "0", "b", False)
    }


def test_torchrun_starts_as_many_ranks_on_a_node_as_the_node_has(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.slots = {"n1": 4, "n2": 2}
    bench.submit("3-3", launcher="torchrun")
    bench.join("n1", "n2", "n3")
    store, *agents = bench.started
    assert {words(a)["--local-addr"]: words(a)["--nproc-per-node"] for a in agents} == {"n1": "4", "n2": "2", "n3": "1"}
    assert {start.ranks for start in (store, *agents)} == {1}  # torchrun itself starts the others


def test_torchrun_starts_as_many_ranks_on_every_node_as_its_user_says(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.slots = {"n1": 4}
    bench.submit("2-2", launcher="torchrun", ranks_per_node=3)
    bench.join("n1", "n2")
    assert [words(agent)["--nproc-per-node"] for agent in bench.started[1:]] == ["3", "3"]


def test_an_elastic_worker_is_started_with_the_ranks_of_its_slot(tmp_path: Path) -> None:
    launch, slot = Launch("t1", "a", TrainerSpec(script="train.py")), WorkerSlot("t1-1", "n1", "n1", ranks=4)
    assert ElasticLauncher(StateLayout(tmp_path, "id")).start(launch, slot).ranks == 4


def test_a_ddp_worker_is_an_elastic_worker_that_runs_the_script_in_place(tmp_path: Path) -> None:
    spec = TrainerSpec(script="train.py", args=("--lr", "1"), launcher="ddp", min_nodes=2, ranks_per_node=4)
    launch, slot = Launch("t1", "a", spec), WorkerSlot("t1-1", "n1", "n1", ranks=4)
    home = StateLayout(tmp_path, "id")
    start, elastic = DdpLauncher(home).start(launch, slot), ElasticLauncher(home).start(launch, slot)
    assert start.argv == ("-m", "bftrainer.elastic.ddp", "train.py", "--lr", "1")
    assert replace(start, argv=elastic.argv) == elastic
    assert start.env["BFTRAINER_RANKS"] == "8"


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({}, None),
        ({"ranks": 4}, 4),
        ({"launcher": "ddp", "nodes": "3-8"}, 3),
        ({"launcher": "ddp", "nodes": "3-8", "ranks_per_node": 2}, 6),
        ({"launcher": "ddp", "nodes": "3-8", "ranks": "5"}, 5),
    ],
)
def test_the_ranks_that_a_batch_was_chosen_for_are_given_or_those_on_the_fewest_nodes(
    given: dict[str, Any], ranks: int | None, tmp_path: Path
) -> None:
    spec = TrainerSpec.model_validate({"script": "train.py", **given})
    assert spec.chosen_ranks == ranks
    environment = StateLayout(tmp_path, "id").environment(Launch("t1", "a", spec))
    assert environment.get("BFTRAINER_RANKS") == (None if ranks is None else str(ranks))
    assert ("ranks" in spec.as_json()) == ("ranks" in given)  # controllers of version 0.1.0 do not know it
    assert TrainerSpec.model_validate(spec.as_json()) == spec


REFUSAL = "cannot train in place: train.py:7: torch.distributed.new_group: it names single ranks"


@pytest.mark.parametrize("told", ["by the worker", "by its output"])
def test_a_script_that_cannot_train_in_place_goes_on_with_torchrun(told: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.slow = told == "by its output"
    trainer = bench.submit("1-4", launcher="ddp", ranks=3, env={"A": "b"})
    bench.join("n1", "n2")
    first = [start.worker for start in bench.started]
    if told == "by the worker":
        bench.say(first[0], Failed(f"CannotStandInError: {REFUSAL}", ""))
        bench.settle()
    else:
        bench.end(first[0], 1, f"Traceback …\n{REFUSAL}\n", spoke=False)
    for worker in first:
        if worker in bench.workers and bench.workers[worker].status is None:
            bench.end(worker, 1)
    bench.pass_time(30.0)
    bench.settle()
    assert bench.state(trainer) == "running"
    store, *agents = bench.started[len(first) :]
    assert store.argv[:2] == ("-m", "bftrainer.elastic.local.torchrun")
    assert {(words(agent)["--local-addr"], agent.env["A"]) for agent in agents} == {("n1", "b"), ("n2", "b")}
    assert not {start.worker for start in (store, *agents)} & set(first)
    (changed,) = bench.store.events(kind="trainer.launcher")
    assert (changed.data["before"], changed.data["after"]) == ("ddp", "torchrun")
    assert REFUSAL in changed.data["why"]
    assert [event.data["to"] for event in bench.store.events(kind="trainer.state")].count("failed") == 0
    bench.restart()
    assert bench.state(trainer) == "running"
    assert bench.cluster.trainers[trainer].spec.launcher == "torchrun"


def test_a_ddp_trainer_leaves_out_nodes_with_older_agents_and_does_without_ddp_if_there_are_no_others(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.older = {"n2", "n3"}
    mixed = bench.submit("1-2", launcher="ddp")
    bench.join("n1", "n2")
    assert [worker.node for worker in bench.workers.values()] == ["n1"]
    assert bench.cluster.trainers[mixed].spec.launcher == "ddp"
    (tmp_path / "older").mkdir()
    bench = Bench(tmp_path / "older")
    bench.older = {"n3"}
    trainer = bench.submit("1-2", launcher="ddp")
    bench.join("n3")
    bench.pass_time(1.0)
    assert bench.cluster.trainers[trainer].spec.launcher == "torchrun"
    (changed,) = bench.store.events(kind="trainer.launcher")
    assert "the agent of n3 is of version 0.1.0, which does not know the launcher ddp" in changed.data["why"]


@pytest.mark.parametrize(("given", "ranks"), [("gpu", 8), (1, 1), (4, 4)])
def test_a_node_chooses_the_ranks_of_a_worker_unless_its_user_did(given: int | str, ranks: int) -> None:
    assert TrainerSpec(script="train.py", ranks_per_node=given).ranks_on(8) == ranks  # type: ignore[arg-type]


@pytest.mark.parametrize(("gpus", "slots", "ranks"), [(0, 0, 1), (4, 0, 4), (4, 2, 2), (0, 3, 3), (1, 8, 8)])
def test_a_node_has_the_ranks_that_its_pool_says_or_one_per_gpu(gpus: int, slots: int, ranks: int) -> None:
    assert default_ranks([Gpu(str(number)) for number in range(gpus)], slots) == ranks


def test_the_ranks_of_a_node_follow_from_the_gpus_that_its_agent_names(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.store.transaction():
        bench.act(bench.cluster.joined(Join("n1", "n1", "a", gpus=(Gpu("0"), Gpu("1")), knows_ranks=True), bench.now))
    assert bench.cluster.nodes["n1"].ranks == 2


def test_a_torchrun_agent_that_was_killed_is_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    seat = Seat(tmp_path, "torchrun")
    seat.bench.join("n1", "n2", "n3")
    before = seat.running
    seat.bench.end(seat.script, -9)
    assert (seat.state, seat.trains_on) == ("running", {"n1", "n2", "n3"})
    assert len(before.keys() & seat.running.keys()) == 3
    assert seat.bench.store.trainer(seat.trainer).failures == 0  # type: ignore[union-attr]


def test_when_the_head_is_lost_the_whole_crew_begins_anew(tmp_path: Path) -> None:
    seat = Seat(tmp_path, "torchrun")
    seat.bench.join("n1", "n2")
    before = seat.running
    seat.bench.take(HEAD)
    seat.bench.pass_time(1.0)
    assert (seat.state, seat.trains_on) == ("running", {"n1", "n2"})
    assert not before.keys() & seat.running.keys()
    ids = {words(start)["--rdzv-id"] for start in seat.bench.started[-2:]}
    assert ids == {next(worker for worker, node in seat.running.items() if node == HEAD)}


def test_a_driver_whose_head_is_lost_is_started_again(tmp_path: Path) -> None:
    seat = Seat(tmp_path, "hosts")
    seat.bench.join("n1")
    (before,) = seat.running
    seat.bench.take(HEAD)
    assert seat.state == "running"
    assert before not in seat.running
    assert seat.bench.store.trainer(seat.trainer).failures == 0  # type: ignore[union-attr]


def test_what_fails_of_a_node_that_went_is_no_failure_and_the_crew_begins_anew(tmp_path: Path) -> None:
    seat = Seat(tmp_path, "torchrun", max_restarts=0)
    seat.bench.join("n1", "n2", "n3")
    seat.bench.take("n3")
    before = seat.running
    seat.bench.end(seat.script, 1, "RuntimeError: Connection closed by peer")
    for _ in range(3):
        seat.bench.pass_time(1.0)
    assert (seat.state, seat.trains_on) == ("running", {"n1", "n2"})
    assert not before.keys() & seat.running.keys()
    for _ in range(70):
        seat.bench.pass_time(1.0)
    seat.bench.end(seat.script, 1, "RuntimeError: my own")
    assert seat.state == "failed"


def test_when_one_torchrun_agent_is_done_the_others_get_time_and_the_store_stays_for_them(tmp_path: Path) -> None:
    seat = Seat(tmp_path, "torchrun", work=1000)
    seat.bench.join("n1", "n2")
    seat.bench.end(seat.script, 0)
    assert seat.state == "done"
    assert sorted(seat.running.values()) == sorted([HEAD, *seat.trains_on])
    assert len(seat.trains_on) == 1
    seat.bench.pass_time(61.0)
    assert seat.running == {}
    row = seat.bench.store.trainer(seat.trainer)
    assert row is not None
    assert (row.samples, row.total) == (1000, 1000)


@pytest.mark.waits
def test_the_list_of_hosts_has_a_slot_for_each_node_and_the_executable_prints_it(tmp_path: Path) -> None:
    folder = tmp_path / "it's $HOME"
    folder.mkdir()
    bench = Bench(folder)
    trainer = bench.submit("1-4", launcher="hosts")
    bench.join("n1", "n2")
    assert hosts_of(bench, trainer) == "n1:1\nn2:1\n"
    launcher = HostsLauncher(StateLayout(folder, "id"))
    launcher.given(bench.cluster.trainers[trainer], [("a", 1), ("b", 4), ("a", 2)])
    (start,) = bench.started
    printed = subprocess.run([start.env[SCRIPT]], capture_output=True, text=True, check=True).stdout
    assert printed == "a:3\nb:4\n" == Path(start.env[FILE]).read_text()


def test_the_list_of_hosts_has_a_slot_for_each_rank_also_after_a_restart_of_the_controller(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.slots = {"n1": 4}
    trainer, told = bench.submit("2-2", launcher="hosts"), bench.submit("1-1", launcher="hosts", ranks_per_node=3)
    bench.join("n1", "n2")
    assert hosts_of(bench, trainer) == "n1:4\nn2:1\n"
    bench.crash()
    bench.open()
    assert hosts_of(bench, trainer) == "n1:4\nn2:1\n"  # before the agents are back: the program still runs there
    bench.restart()
    assert hosts_of(bench, trainer) == "n1:4\nn2:1\n"
    bench.join("n3")
    assert hosts_of(bench, told) == "n3:3\n"
    assert {start.ranks for start in bench.started} == {1}  # the programs on the head


def test_a_list_of_hosts_that_cannot_be_written_fails_its_trainer_and_nobody_else(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "t1").write_text("in the way")
    first, second = bench.submit("1-1", launcher="hosts"), bench.submit("1-1", launcher="hosts")
    bench.join("n1", "n2")
    assert (bench.state(first), bench.state(second)) == ("failed", "running")
    assert "cannot write" in bench.store.trainer(first).reason  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "mode", "python", "program"),
    [
        ("run.sh", 0o755, "", True),
        ("run.sh", 0o644, "", False),
        ("run.py", 0o755, "", False),
        ("run", 0o755, sys.executable, False),
    ],
)
def test_a_driver_is_a_program_if_it_is_executable_and_not_python(
    tmp_path: Path, name: str, mode: int, python: str, program: bool
) -> None:
    script = tmp_path / name
    script.touch(mode)
    bench = Bench(tmp_path)
    bench.submit("1-1", launcher="hosts", script=str(script), python=python)
    bench.join("n1")
    assert [start.program for start in bench.started] == [program]


def test_the_head_is_no_node_and_goes_when_nobody_needs_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    other = bench.submit("1-1", weight=0.1)
    trainer = bench.submit("1-1", launcher="hosts")
    assert HEAD not in bench.agents  # nobody has nodes yet
    bench.join("n1", "n2")
    assert set(bench.cluster.planner.state.pool) == {"n1", "n2"}
    with bench.store.transaction():
        bench.act(bench.cluster.pause(0.0, bench.now))
    bench.settle()
    assert HEAD in bench.agents
    with bench.store.transaction():
        bench.act(bench.cluster.resume(bench.now))
        bench.act(bench.cluster.cancel(trainer, "", bench.now))
    bench.join("n3")
    bench.pass_time(1.0)
    assert HEAD not in bench.agents
    assert bench.state(other) == "running"
    assert check(bench.store.all_events(KINDS), bench.policy).mismatches == ()


TORCHRUN_SAYS = """\
hello
Traceback (most recent call last):
  File "train.py", line 3, in <module>
ValueError: no such data
E1115 15:32:10.223000 1071 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/venv/lib/python3.11/site-packages/torch/distributed/run.py", line 1032, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
"""


def test_of_what_a_torchrun_agent_prints_the_script_is_told_apart() -> None:
    said = TorchrunLauncher(StateLayout(Path(), ""), "h", lambda key, value: None, lambda key: 1).said
    assert said(TORCHRUN_SAYS).splitlines()[-1] == "ValueError: no such data"
    assert said("no report\nat all").splitlines() == ["no report", "at all"]
    assert said(TORCHRUN_SAYS[TORCHRUN_SAYS.index("Traceback", 200) :]) == ""
    assert said("") == ""
    lost = "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection has failed."
    assert said(TORCHRUN_SAYS[TORCHRUN_SAYS.index("Traceback", 200) :].splitlines()[2] + "\n" + lost).endswith(lost)


NODES = [f"n{i}" for i in range(5)]
STEPS = st.one_of(
    st.tuples(st.just("join"), st.sampled_from(NODES)),
    st.tuples(st.just("take"), st.sampled_from([*NODES, HEAD])),
    st.tuples(st.just("leave"), st.sampled_from(NODES)),
    st.tuples(st.just("end"), st.tuples(st.integers(0, 7), st.sampled_from([-9, 0, 1]))),
    st.tuples(st.just("submit"), st.tuples(st.sampled_from(["1-1", "1-4", "2-3"]), st.sampled_from(LAUNCHERS))),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("crash"), st.integers(0, 63)),
    st.tuples(st.just("time"), st.integers(1, 20)),
)


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=30))
def test_whatever_happens_all_that_shall_run_does_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, Any]]
) -> None:
    bench = Bench(tmp_path_factory.mktemp("mixed"))
    for what, value in steps:
        do(bench, what, value)
    for _ in range(200):
        bench.pass_time(1.0)
    running = {w.id: w.node for w in bench.workers.values() if w.status is None}
    assert {w.worker for w in bench.store.workers(running=True)} == running.keys()
    expected: list[tuple[str, str]] = []
    for trainer, live in bench.cluster.trainers.items():
        assert live.job.state == bench.state(trainer) == ("running" if live.job.nodes else live.job.state)
        quiet = live.spec.launcher in ("torchrun", "hosts") and live.job.nodes
        on_nodes = live.job.nodes if live.spec.launcher != "hosts" else ()
        expected += [(trainer, node) for node in (*on_nodes, *([HEAD] if quiet else []))]
    assert sorted((worker.rpartition("-")[0], node) for worker, node in running.items()) == sorted(expected)
    if not any(live.spec.launcher != "elastic" for live in bench.cluster.trainers.values()):
        assert HEAD not in bench.agents
    assert check(bench.store.all_events(KINDS), bench.policy).mismatches == ()
    told = bench.store.events(kind="trainer.state", limit=1000)
    assert not [finding for finding in history(told, bench.store.trainers(), trimmed=False) if finding.level == "error"]
    bench.store.close()


def do(bench: Bench, what: str, value: Any) -> None:
    trainers = list(bench.cluster.trainers)
    alive = [w.id for w in bench.workers.values() if w.status is None]
    if what == "join" and value not in bench.agents:
        bench.join(value)
    elif what == "take" and value in bench.agents:
        bench.take(value)
    elif what == "leave" and value in bench.cluster.nodes:
        with bench.store.transaction():
            bench.act(bench.cluster.leaving(value, 3.0, bench.now))
        bench.settle()
    elif what == "end" and alive:
        which, status = value
        worker = alive[which % len(alive)]
        quiet = not bench.workers[worker].speaks
        bench.end(worker, status if quiet else -9, "said")
    elif what == "submit" and len(trainers) < 5:
        bench.submit(value[0], launcher=value[1])
    elif what == "cancel" and trainers:
        with bench.store.transaction():
            bench.act(bench.cluster.cancel(trainers[value % len(trainers)], "", bench.now))
        bench.settle()
    elif what == "crash":
        names = [*NODES, HEAD]
        for node in [node for node in bench.agents if not value >> names.index(node) & 1]:
            del bench.agents[node]
            bench.workers = {w.id: w for w in bench.workers.values() if w.node != node}
        bench.crash()
        bench.open()
        for node in list(bench.agents):
            bench.rejoin(node)
        bench.settle()
    elif what == "time":
        bench.pass_time(float(value))


@pytest.mark.waits
def test_there_is_one_head_whoever_started_it_and_one_that_does_not_come_is_replaced(tmp_path: Path) -> None:
    environment = {variables.URL: "http://127.0.0.1:9", variables.SECRET: "nobody-listens-there"}

    def pid() -> int:
        return int((tmp_path / LOCK).read_text())

    async def scene() -> None:
        earlier, now = HeadAgent(tmp_path, environment), HeadAgent(tmp_path, environment)
        try:
            earlier.keep(wanted=False, here=False, now=0.0)
            assert not (tmp_path / LOCK).exists()
            earlier.keep(wanted=True, here=False, now=0.0)
            first = pid()
            earlier.keep(wanted=True, here=False, now=10.0)
            now.keep(wanted=True, here=False, now=100.0)  # the earlier controller is dead, its head is not
            now.keep(wanted=True, here=False, now=100.0 + STRAY_S)
            assert pid() == first
            now.keep(wanted=True, here=False, now=101.0 + STRAY_S)
            wait_until(lambda: not is_alive(first), "the end of one that does not find the controller", 10)
            now.keep(wanted=True, here=False, now=102.0 + STRAY_S)
            second = pid()
            assert second != first
            os.kill(second, signal.SIGKILL)
            wait_until(lambda: not is_alive(second), "its end", 10)
            now.keep(wanted=True, here=False, now=200.0)
            assert pid() == second  # not at once
            now.keep(wanted=True, here=False, now=230.0)
            third = pid()
            assert third != second
        finally:
            await now.end()
            earlier.keep(wanted=False, here=False)
        assert not is_alive(third)

    asyncio.run(scene())
    assert "nobody-listens-there" not in (tmp_path / LOG).read_text()


DRIVER = """
import os, pathlib, subprocess, sys, time

folder = pathlib.Path(sys.argv[1])
assert pathlib.Path(os.environ["BFTRAINER_HOSTS_FILE"]).is_file()
seen = []
while not (folder / "stop").exists():
    found = subprocess.run([os.environ["BFTRAINER_HOSTS_SCRIPT"]], capture_output=True, text=True, check=True).stdout
    if not seen or seen[-1] != found:
        seen.append(found)
        with (folder / "seen").open("a") as out:
            out.write(found.strip() + "\\n")
    time.sleep(0.02)
print("all done")
"""


@pytest.mark.waits
def test_a_driver_on_the_head_sees_its_hosts_change_and_outlives_the_controller(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    seen = tmp_path / "seen"
    with Live(tmp_path / "state", "--set", "pool.nodes=2") as live:
        trainer = live.submit(tmp_path / "driver.py", str(tmp_path), nodes="1-3", launcher="hosts")
        wait_until(lambda: seen.exists() and seen.read_text().endswith("127.0.0.1:2\n"), what="both hosts")
        row = live.until_state(trainer, "running")
        assert [(worker["node"], worker["state"]) for worker in row["workers"]] == [(HEAD, "training")]
        assert row["nodes"] == ["node-1", "node-2"]
        heads = [node for node in live.nodes() if node["node"] == HEAD]
        assert [node["state"] for node in heads] == ["head"]
        assert live.api.status()["pool"]["size"] == 2
        live.kill()
        live.start()
        wait_until(lambda: len([node for node in live.nodes() if node["state"] != "awaited"]) == 3, what="all agents")
        assert live.trainer(trainer)["workers"] == row["workers"]
        (victim,) = [node["agent_pid"] for node in live.nodes() if node["node"] == "node-1"]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: "127.0.0.1:1\n" in seen.read_text(), what="one host less")
        wait_until(lambda: seen.read_text().endswith("127.0.0.1:2\n"), what="the host again")
        (tmp_path / "stop").touch()
        done = live.until_state(trainer, "done", "failed")
        assert (done["state"], done["failures"], done["preemptions"]) == ("done", 0, 1)
        live.until_printed(trainer, lambda lines: lines[-1:] == ["all done"])
        wait_until(lambda: not [node for node in live.nodes() if node["node"] == HEAD], what="the head's leave")
        assert live.problems() == []
        assert live.stop() == 0
    gone(live.pids)


ORDINARY = """
import os, sys, time
import torch
import torch.distributed as dist

folder = sys.argv[1]
checkpoint = os.path.join(folder, "checkpoint.pt")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
state = torch.load(checkpoint) if os.path.exists(checkpoint) else {"step": 0, "weight": torch.zeros(1)}

stop = torch.zeros(1)
while not stop:
    gradient = torch.ones(1)
    dist.all_reduce(gradient)
    state = {"step": state["step"] + 1, "weight": state["weight"] + gradient / world}
    if rank == 0:
        torch.save(state, checkpoint + ".new")
        os.replace(checkpoint + ".new", checkpoint)
        with open(os.path.join(folder, "steps"), "a") as steps:
            steps.write(f"{state['step']} {world} {state['weight'].item()}\\n")
        stop += os.path.exists(os.path.join(folder, "stop"))
    dist.broadcast(stop, 0)
    time.sleep(0.02)
dist.destroy_process_group()
print("all done")
"""


@pytest.mark.waits
def test_an_ordinary_torch_script_goes_on_through_the_loss_of_a_node_and_of_the_controller(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ORDINARY)
    record = tmp_path / "steps"

    def steps() -> list[tuple[int, int, float]]:
        lines = record.read_text().splitlines(keepends=True) if record.exists() else []
        found = [line.split() for line in lines if line.endswith("\n")]
        return [(int(step), int(world), float(weight)) for step, world, weight in found]

    def goes_on_with(world: int) -> None:
        """Ten steps from now on."""
        before = len(steps())
        wait_until(lambda: [of for _, of, _ in steps()[before:]][-10:] == [world] * 10, f"steps of {world}", 90)

    with Live(tmp_path / "state", "--set", "pool.nodes=2") as live:
        trainer = live.submit(tmp_path / "train.py", str(tmp_path), nodes="1-2", launcher="torchrun")
        goes_on_with(2)
        live.trainer(trainer)
        live.kill()
        goes_on_with(2)
        live.start()
        wait_until(lambda: len([node for node in live.nodes() if node["state"] != "awaited"]) == 3, what="all agents")
        (victim,) = [node["agent_pid"] for node in live.nodes() if node["node"] == "node-1"]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: live.trainer(trainer)["preemptions"] == 1, what="the loss")
        goes_on_with(2)  # the node comes back
        (tmp_path / "stop").touch()
        done = live.until_state(trainer, "done", "failed")
        assert (done["state"], done["failures"], done["preemptions"]) == ("done", 0, 1), done["log_tail"]
        live.until_printed(trainer, lambda lines: "all done" in lines)
        assert live.problems() == []
        assert live.stop() == 0
    gone(live.pids)
    numbers = [step for step, _, _ in steps()]
    assert numbers == sorted(set(numbers))
    assert all(weight == pytest.approx(step) for step, _, weight in steps())


@pytest.mark.waits
def test_an_unchanged_ddp_script_trains_in_place_and_one_that_cannot_goes_on_with_torchrun(tmp_path: Path) -> None:
    epochs = ["epoch 0", "epoch 1", "epoch 2"]
    text = (Path(__file__).resolve().parents[1] / "elastic" / "ddp" / "slow_validation.py").read_text()
    group = 'dist.init_process_group("gloo")\n'
    for name, added in (("good", ""), ("other", "dist.new_group([0])\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "go").touch()
        (tmp_path / f"{name}.py").write_text(text.replace(group, group + added))
    with Live(tmp_path / "state", "--set", "pool.nodes=2") as live:
        good = live.submit(tmp_path / "good.py", str(tmp_path / "good"), "3", nodes="2-2", launcher="ddp")
        done = live.until_state(good, "done", "failed")
        assert (done["state"], done["failures"]) == ("done", 0), done["log_tail"]
        live.until_printed(good, lambda lines: [line.partition(":")[0] for line in lines] == epochs)
        other = live.submit(tmp_path / "other.py", str(tmp_path / "other"), "3", nodes="2-2", launcher="ddp")
        done = live.until_state(other, "done", "failed", timeout_s=240.0)
        assert (done["state"], done["launcher"]) == ("done", "torchrun"), done["log_tail"]
        (changed,) = live.api.events(kind="trainer.launcher")["events"]
        assert "other.py:16: dist.new_group" in changed["data"]["why"]
        assert live.problems() == []
        assert live.stop() == 0
    gone(live.pids)
    models = [torch_load(tmp_path / name / "model.pt") for name in ("good", "other")]
    assert models[0]["best"] == pytest.approx(models[1]["best"], rel=1e-10)


def torch_load(path: Path) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    found: dict[str, Any] = torch.load(path)
    return found


PLACES = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "BFTRAINER_NODE")
with open(sys.argv[1], "a") as places:
    places.write(" ".join((*(os.environ[name] for name in names), str(int(total)))) + "\\n")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.waits
def test_an_ordinary_torch_script_has_four_ranks_on_two_nodes_with_two_ranks_each(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLACES)
    with Live(tmp_path / "state", "--set", "pool.nodes=2") as live:
        script = (tmp_path / "train.py", str(tmp_path / "places"))
        trainer = live.submit(*script, nodes="2-2", launcher="torchrun", ranks_per_node=2)
        done = live.until_state(trainer, "done", "failed")
        assert (done["state"], done["failures"]) == ("done", 0), done["log_tail"]
        assert live.stop() == 0
    gone(live.pids)
    places = sorted(line.split() for line in (tmp_path / "places").read_text().splitlines())
    assert [place[:5] for place in places] == [
        ["0", "4", "0", "2", "0"],
        ["1", "4", "1", "2", "0"],
        ["2", "4", "0", "2", "1"],
        ["3", "4", "1", "2", "1"],
    ]
    assert [place[-1] for place in places] == ["4"] * 4
    first, second, third, fourth = (place[5] for place in places)
    assert (first == second, third == fourth) == (True, True)
    assert {first, third} == {"node-1", "node-2"}


@pytest.mark.parametrize("launcher", ["torchrun", "hosts"])
def test_a_script_that_fails_at_once_is_shown_as_failing_and_given_up_within_seconds(
    launcher: str, tmp_path: Path
) -> None:
    seat = Seat(tmp_path, launcher)
    seat.bench.join("n1")
    began, states = seat.bench.now, list[str]()
    while seat.state != "failed":
        assert seat.bench.now < began + 60
        if HEAD in seat.running.values() and seat.trains_on:
            states.append(seat.state)
            seat.bench.pass_time(2.0)  # so long it takes to fail
            states.append(seat.state)
            seat.bench.end(seat.script, 1, "Traceback …\nAssertionError: needs CUDA\n")
            row = seat.bench.store.trainer(seat.trainer)
            assert row is not None
            assert "AssertionError: needs CUDA" in row.reason
            assert row.failures == len(states) / 2
        else:
            seat.bench.pass_time(0.5)
    assert states == ["running", "running", "starting", "starting", "starting", "starting"]
    assert seat.bench.now - began < 15
    assert seat.running == {}
    assert [e.data["why"] for e in seat.bench.store.events(kind="rescale")] == ["start"]  # nothing computed since


def test_a_torchrun_script_that_fails_alike_on_two_nodes_is_given_up_though_nodes_went_before(tmp_path: Path) -> None:
    seat = Seat(tmp_path, "torchrun")
    seat.bench.join("n1", "n2", "n3")
    seat.bench.take("n3")
    failed: set[str] = set()
    while seat.state != "failed":
        assert seat.bench.now < 1060
        scripts = {node: worker for worker, node in seat.running.items() if node != HEAD}
        fresh = [node for node in scripts if node not in failed]
        if len(scripts) == 2 and fresh and seat.bench.now > 1005:
            failed.add(fresh[0])
            seat.bench.end(scripts[fresh[0]], 1, "needs CUDA")
        elif seat.bench.now == 1003.0 and scripts:
            seat.bench.end(next(iter(scripts.values())), 1, "Connection closed by peer")  # of the loss
        seat.bench.pass_time(0.5)
    assert failed == {"n1", "n2"}


def test_torchrun_retries_by_itself_only_once_the_script_has_run_for_a_minute(tmp_path: Path) -> None:
    seat = Seat(tmp_path, "torchrun", max_restarts=3)

    def restarts() -> list[str]:
        return [word for start in seat.bench.started for word in start.argv if word.startswith("--max-restarts=")]

    seat.bench.join("n1")
    assert restarts() == ["--max-restarts=0"]
    for _ in range(61):
        seat.bench.pass_time(1.0)
    seat.bench.join("n2")
    assert restarts() == ["--max-restarts=0", "--max-restarts=3"]


def test_a_script_that_works_after_a_failure_is_running_again_a_minute_later(tmp_path: Path) -> None:
    seat = Seat(tmp_path, "torchrun")
    seat.bench.join("n1")
    seat.bench.end(seat.script, 1, "the file server is away")
    for _ in range(50):
        seat.bench.pass_time(1.0)
    assert seat.state == "starting"
    for _ in range(20):
        seat.bench.pass_time(1.0)
    assert seat.state == "running"
    row = seat.bench.store.trainer(seat.trainer)
    assert row is not None
    assert (row.reason, row.failures) == ("", 1)


def test_a_trainer_has_a_folder_for_its_output_and_its_workers_are_told(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.submit("1-2", launcher="torchrun")
    bench.submit("1-2", launcher="torchrun", env={"BFTRAINER_OUTPUT": "/elsewhere"})
    bench.join("n1", "n2")
    told = {start.trainer: start.env["BFTRAINER_OUTPUT"] for start in bench.started if start.env}
    assert told == {"t1": str(tmp_path / "trainers" / "t1" / "output"), "t2": "/elsewhere"}
    assert Path(told["t1"]).is_dir()


def test_what_a_worker_is_warned_of_is_an_event(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.submit("1-2", launcher="torchrun")
    bench.join("n1")
    worker = next(w.id for w in bench.workers.values() if w.node == "n1")
    bench.tell("n1", Started(worker, 1, "another interpreter runs it"))
    (event,) = bench.store.events(kind="worker.warned")
    assert (event.node, event.data["warning"]) == ("n1", "another interpreter runs it")
