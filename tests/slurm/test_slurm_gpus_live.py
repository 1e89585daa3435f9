"""A real Slurm whose nodes have different GPUs: pilots, and then the ranks of a trainer, get all of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cli import main
from support.cluster.fake_pool_host import FakePoolHost
from support.cluster.live import Live
from support.cluster.made_pools import slurm
from support.slurm.lab import Lab, cluster
from support.waiting import until, wait_until

pytestmark = pytest.mark.slurm

GRES = {"n01": "gpu:4", "n02": "gpu:4", "n03": "gpu:2", "n04": "-", "n05": "gpu:a100:1,gpu:1g.5gb:2"}
GPUS = {"n01": 4, "n02": 4, "n03": 2, "n04": 0, "n05": 3}
SCRIPT = Path(__file__).with_name("gpu_ranks.py")
VARIABLES = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")


@pytest.fixture(scope="module")
def whole_lab() -> Iterator[Lab]:
    with cluster(len(GRES), LAB_GRES=" ".join(GRES.values())) as lab:
        yield lab


@pytest.fixture
def lab(whole_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("SLURM_CONF", str(whole_lab.conf))
    yield whole_lab
    whole_lab.clear()


def jobs_on(lab: Lab) -> dict[str, tuple[str, str]]:
    """The generic resources that the job of each node asked for, and those that it was granted."""
    found: dict[str, tuple[str, str]] = {}
    for job in lab.run("scontrol", "show", "job", "-d", "-o").splitlines():
        asked = re.search(r" TresPerNode=(\S*)", job)
        granted = re.search(r" Nodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=(\S*)", job)
        if " JobState=RUNNING " in job and granted:
            found[granted[1]] = (
                asked[1].replace("gres:", "") if asked else "",
                re.sub(r"\(IDX:[^)]*\)", "", granted[2]),
            )
    return found


def pilots(lab: Lab, folder: Path, nodes: tuple[str, ...], **settings: Any) -> dict[str, tuple[str | None, ...]]:
    """What the pilot of each node asked for and was granted, and what its agent is told of GPUs."""
    told: dict[str, tuple[str | None, ...]] = {}

    async def whole() -> None:
        async with FakePoolHost() as host:
            pool = slurm(folder, nodelist=nodes, **settings)
            await pool.open(host)
            try:
                await until(lambda: host.here == set(nodes), lambda: (host.said, lab.jobs()))
                jobs = jobs_on(lab)
                for node, pid in host.pids.items():
                    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
                    environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                    told[node] = (*jobs[node], *(environment.get(name) for name in VARIABLES))
            finally:
                await pool.close(drain=True)

    asyncio.run(whole())
    return told


def test_each_pilot_is_granted_all_gpus_of_its_node_and_its_agent_is_told(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # of the controller
    assert pilots(lab, tmp_path, tuple(GRES)) == {
        "n01": ("gpu:4", "gpu:4", "4", "0,1,2,3", "0,1,2,3"),
        "n02": ("gpu:4", "gpu:4", "4", "0,1,2,3", "0,1,2,3"),
        "n03": ("gpu:2", "gpu:2", "2", "0,1", "0,1"),
        "n04": ("", "", None, None, None),
        "n05": ("gpu:a100:1,gpu:1g.5gb:2", "gpu:a100:1,gpu:1g.5gb:2", "3", "0,1,2", "0,1,2"),
    }


def test_agents_of_a_pool_without_gpus_are_told_of_none(lab: Lab, tmp_path: Path) -> None:
    told = pilots(lab, tmp_path, ("n03", "n04"), gpus="none")
    assert told["n03"] == ("", "gpu:2", None, None, "")  # a job that has its node to itself has all of it
    assert told["n04"] == ("", "", None, None, "")


def test_options_by_hand_are_all_that_a_pilot_asks_for(lab: Lab, tmp_path: Path) -> None:
    assert pilots(lab, tmp_path, ("n01",), options=("--gres=gpu:3",))["n01"][0] == "gpu:3"


def test_the_check_of_a_real_site_says_what_pilots_would_get(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BFTRAINER_STATE", str(tmp_path))
    monkeypatch.delenv("BFTRAINER_CONFIG", raising=False)
    monkeypatch.setitem(main.COMMANDS, "slurm", "admin.slurm")
    assert main.run(["slurm", "check", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    [gpus] = [finding for finding in findings if finding["check"] == "gpus"]
    assert gpus["what"] == (
        "2 nodes with 4 GPUs each (gpu:4): a pilot asks for --gres=gpu:4 and gets all of them; "
        "1 node with 2 GPUs (gpu:2): a pilot asks for --gres=gpu:2 and gets all of them; "
        "1 node with 3 GPUs (gpu:a100:1,gpu:1g.5gb:2): a pilot asks for --gres=gpu:a100:1,gpu:1g.5gb:2 and gets "
        "all of them; 1 node without GPUs"
    )
    assert {finding["check"]: finding["level"] for finding in findings}["pilot"] == "ok"


def test_each_node_is_used_with_as_many_ranks_as_it_was_granted_gpus_and_each_rank_sees_its_own(
    lab: Lab, tmp_path: Path
) -> None:
    settings = ("--set", "pool.partition=scavenger")  # nothing about GPUs
    with Live(tmp_path / "state", "--pool", "slurm", "--drain", *settings, env={"SLURM_CONF": str(lab.conf)}) as live:
        trainer = live.submit(SCRIPT, nodes="5-5", name="ranks")
        output = tmp_path / "state" / "trainers" / trainer / "output"

        def ranks() -> list[dict[str, str]]:
            return [json.loads(file.read_text()) for file in sorted(output.glob("*.json"))]

        number = sum(max(1, gpus) for gpus in GPUS.values())
        wait_until(lambda: len(ranks()) >= number, lambda: f"{number} ranks ({ranks()}, {jobs_on(lab)})", 90, 0.25)
        written = ranks()
        live.api.cancel(trainer)
        live.until_state(trainer, "cancelled")
        live.nodes()
        assert live.stop(timeout_s=60) == 0
    for node, gpus in GPUS.items():
        here = [rank for rank in written if rank["node"] == node]
        world = max(1, gpus)
        assert [rank["BFTRAINER_LOCAL_RANK"] for rank in here] == [str(i) for i in range(world)]
        assert {rank["BFTRAINER_LOCAL_WORLD"] for rank in here} == {str(world)}
        devices = [rank["CUDA_VISIBLE_DEVICES"] for rank in here]
        assert devices == ([str(i) for i in range(gpus)] if gpus else [None]), "one device for each rank, none without"
    assert lab.jobs() == {}
