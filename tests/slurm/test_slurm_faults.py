"""Training goes on, or recovers, whatever happens to Slurm, to nodes and to the controller; nothing is lost or left."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from support.cluster.live import Live, gone
from support.cluster.made_pools import executable
from support.elastic.jobs import run_alone
from support.elastic.ledger import committed, same_as_alone
from support.slurm.lab import Lab, cluster
from support.waiting import wait_until

pytestmark = pytest.mark.slurm

WORKER = Path(__file__).resolve().parents[1] / "elastic" / "chaos_worker.py"
NODES, SAMPLES, EPOCHS, PACE_S = 3, 600, 16, "5"  # four minutes at least, unless it is told to hurry


def test_a_trainer_outlives_what_happens_to_slurm_to_nodes_and_to_the_controller(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    home, programs = tmp_path / "home", tmp_path / "bin"
    home.mkdir()
    programs.mkdir()
    pool = {"partition": "scavenger", "interval_s": "0.5", "command_timeout_s": "2", "join_s": "15"}
    pool |= {"rest_s": "2", "warm_pilots": str(NODES)}  # more nodes than the trainer can use
    settings = [word for name, value in pool.items() for word in ("--set", f"pool.{name}={value}")]
    with cluster(NODES) as lab:
        env = {"SLURM_CONF": str(lab.conf), "PATH": f"{programs}:{os.environ['PATH']}"}
        options = ("--pool", "slurm", "--drain", "--set", "trainers.snapshot_every_s=0.5", *settings)
        with Live(tmp_path / "state", *options, env=env) as live:
            trainer = live.submit(WORKER, str(home), str(EPOCHS), PACE_S, nodes="1-3")

            def settled() -> None:
                """Training goes on, and every node has its agent."""
                live.until_steps(trainer, 3)
                wait_until(lambda: len(live.nodes()) == NODES, "an agent on every node", 60)

            settled()
            lab.restart()
            settled()

            crash(lab, live, "n01", "n02")
            settled()

            pilots = list(lab.jobs("-p", "scavenger", "-t", "R"))
            lab.run("scancel", pilots[0])
            wait_until(lambda: pilots[0] not in lab.jobs(), "the end of a pilot", 30)
            settled()

            live.kill()
            live.start()
            settled()

            for answer in ("exec sleep 600", "echo nonsense"):
                executable(programs / "squeue", f"#!/bin/sh\n{answer}\n")
                wait_until(lambda: live.api.status()["pool"]["problem"], "a complaint about squeue", 30)
                live.until_steps(trainer, 2)
                (programs / "squeue").unlink()
                wait_until(lambda: not live.api.status()["pool"]["problem"], "an answer of squeue", 60)
            settled()

            (home / "hurry").touch()
            # Three workers of two threads each share two cores with the other tests: two minutes, and more when those
            # are busy. It is a limit for a training that hangs, not a promise.
            row = live.until_state(trainer, "done", "failed", "cancelled", timeout_s=400)
            assert row["state"] == "done", (row["reason"], row["traceback"], row["log_tail"])
            assert row["samples"] == row["total"] == SAMPLES * EPOCHS
            assert live.stop(timeout_s=60) == 0
            assert lab.jobs() == {}
            gone(live.pids)
            assert live.problems() == []
        assert set(lab.states().values()) == {"idle"}

    assert committed(home) == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}
    alone = tmp_path / "alone"
    alone.mkdir()
    run_alone(tmp_path, WORKER, alone, EPOCHS, 0)
    same_as_alone(alone, home)


def test_trainers_are_placed_near_each_other_by_slurms_own_tree_of_switches(tmp_path: Path) -> None:
    switches = {"a": {"n01", "n03", "n05"}, "b": {"n02", "n04", "n06"}}
    lines = [f"SwitchName={name} Nodes={','.join(sorted(nodes))}" for name, nodes in switches.items()]
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(600)\n")
    settings = ("pool.partition=scavenger", "pool.interval_s=0.5", "pool.warm_pilots=6", "policy.placement=compact")
    options = [word for setting in settings for word in ("--set", setting)]
    with cluster(6, LAB_TOPOLOGY="\n".join([*lines, "SwitchName=top Switches=a,b"])) as lab:
        with Live(
            tmp_path / "state", "--pool", "slurm", "--drain", *options, env={"SLURM_CONF": str(lab.conf)}
        ) as live:
            wait_until(lambda: len(live.nodes()) == 6, "an agent on every node", 60)
            trainers = [live.submit(script, nodes="3-3", name=name) for name in ("one", "two")]
            given = [wait_until(lambda t=t: live.trainer(t)["nodes"], f"nodes for {t}", 30) for t in trainers]
            assert sorted(map(sorted, given)) == sorted(map(sorted, switches.values()))
            assert live.stop(timeout_s=60) == 0
        assert lab.jobs() == {}


def crash(lab: Lab, live: Live, *nodes: str) -> None:
    """Kill the daemons of nodes, and on all but the first all that runs there, as a crash does. Then boot them."""
    agents = {node["node"]: node["agent_pid"] for node in live.nodes()}
    for number, node in enumerate(nodes):
        os.kill(lab.pid(f"slurmd.{node}"), signal.SIGKILL)
        if number:
            step = int(Path(f"/proc/{agents[node]}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(step, signal.SIGKILL)  # slurmstepd, the parent of the pilot
            os.kill(agents[node], signal.SIGKILL)
    wait_until(lambda: not {*nodes[1:]} & {node["node"] for node in live.nodes()}, "the loss of a node", 30)
    for node in nodes:
        lab.start_node(node)
