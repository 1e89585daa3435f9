"""A Slurm whose nodes are hosts of their own: nothing works by accident through the loopback of one machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bftrainer.client.api import ApiClient, find_controller
from support.docs.pages import DOCS, steps
from support.slurm.lab import Lab, cluster
from support.waiting import wait_until

pytestmark = pytest.mark.slurm

WORKER = Path(__file__).resolve().parents[1] / "elastic" / "chaos_worker.py"
NODES = ("n01", "n02", "n03")
CHECK, SERVE = (step.command for step in steps(DOCS / "slurm_admin.md")[:2])
"""The recipe at the top of the administrators' page, as a reader types it."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with cluster(len(NODES), LAB_NAMESPACES="1") as one:
        yield one


class Site:
    """The host `head` with a user's home on it, where commands are typed."""

    def __init__(self, lab: Lab, home: Path) -> None:
        self._lab = lab
        self._path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.home = home
        self.state = home / ".local" / "state" / "bftrainer"
        home.mkdir()

    @property
    def _environment(self) -> dict[str, str]:
        ours = {"HOME": str(self.home), "PATH": self._path, "SLURM_CONF": str(self._lab.conf), "COLUMNS": "500"}
        return {**{name: text for name, text in os.environ.items() if not name.startswith("BFTRAINER_")}, **ours}

    def type(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        words = [*self._lab.at("head"), *shlex.split(command)]
        return subprocess.run(words, env=self._environment, cwd=self.home, capture_output=True, text=True, timeout=60)

    @contextmanager
    def running(self, command: str) -> Iterator[Callable[..., Any]]:
        """Run a controller. Gives a function that returns the answer of the API on a path."""
        words = [*self._lab.at("head"), *shlex.split(command)]
        log = self.home / "serve.log"
        with (
            log.open("wb") as out,
            subprocess.Popen(words, env=self._environment, cwd=self.home, stdout=out, stderr=out) as serve,
            self._lab.network("head") as there,
        ):
            try:
                wait_until(lambda: "serves at" in log.read_text() or serve.poll() is not None, "its first line", 60)
                assert serve.poll() is None, log.read_text()
                client = there.submit(lambda: ApiClient(find_controller(self.state, env={}))).result()
                yield lambda path, **query: there.submit(client._ask, "GET", path, query).result()
                there.submit(client.drain).result()
                there.submit(client.close).result()
                assert serve.wait(60) == 0, log.read_text()
            finally:
                if serve.poll() is None:
                    serve.send_signal(signal.SIGKILL)
        assert self._lab.jobs() == {}


def pilots(lab: Lab) -> Counter[str]:
    """How many pilots each node has had so far, ended ones included."""
    rows = lab.run("squeue", "-h", "--states=all", "-p", "scavenger", "-O", "ReqNodes:|").splitlines()
    return Counter(row.strip().strip("|") for row in rows)


def test_the_recipe_typed_as_written_trains_on_three_hosts_loses_one_and_trains_on(lab: Lab, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    site = Site(lab, tmp_path / "home")
    assert site.type(CHECK).returncode in (0, 1)
    work = tmp_path / "work"
    work.mkdir()
    with site.running(SERVE) as ask:
        address = find_controller(site.state, env={})
        assert address.url == "https://10.77.0.1:8765"
        assert address.authority == str(site.state / "tls" / "ca.pem")
        submitted = site.type(f"bftrainer submit --nodes 2-3 --name job {WORKER} {work} 400 0.2")
        assert submitted.returncode == 0, submitted.stderr
        wait_until(lambda: len(ask("/v1/nodes")["nodes"]) == len(NODES), "an agent on every node", 60)
        assert {(node["node"], node["host"]) for node in ask("/v1/nodes")["nodes"]} == {(node, node) for node in NODES}

        def made_steps(more: int, nodes: set[str]) -> Mapping[str, Any] | None:
            row: dict[str, Any] = ask("/v1/trainers/job")
            assert row["state"] not in ("failed", "cancelled"), (row["reason"], row["log_tail"])
            return row if row["step"] >= more and {worker["node"] for worker in row["workers"]} == nodes else None

        before = wait_until(lambda: made_steps(3, set(NODES)), "steps on three hosts", 60)
        job = lab.submit("--nodelist=n02")
        wait_until(lambda: lab.jobs("-p", "main").get(job) == "RUNNING", "the main job on n02", 30)
        wait_until(lambda: made_steps(before["step"] + 5, {"n01", "n03"}), "steps on two hosts", 60)
        lab.run("scancel", job)
        assert not ask("/v1/status")["pool"]["problem"]


def test_an_address_that_the_nodes_cannot_reach_is_one_clear_sentence_and_no_pilot_is_sent_again(
    lab: Lab, tmp_path: Path
) -> None:
    site = Site(lab, tmp_path / "home")
    before = pilots(lab)
    with site.running(f"{SERVE} --set pool.interval_s=0.5 --set pool.warm_pilots=3 --host 10.78.0.1") as ask:
        url = find_controller(site.state, env={}).url
        sentence = wait_until(lambda: ask("/v1/status")["pool"]["problem"], "the reason", 60)
        wait_until(lambda: "n01, n02, n03" in ask("/v1/status")["pool"]["problem"], "all nodes in it", 30)
        assert sentence.startswith(f"pilots cannot reach the controller at {url} from n0")
        assert "there is no route: network is unreachable; set server.host" in sentence
        status, doctor = site.type("bftrainer status"), site.type("bftrainer doctor")
        assert f"the pool has a problem: pilots cannot reach the controller at {url}" in status.stdout
        assert f"pilots cannot reach the controller at {url}" in doctor.stdout
        assert doctor.returncode == 1
        told = ask("/v1/events", kind="pool.call_back_failed")["events"]
        assert sorted(event["node"] or event["data"]["node"] for event in told) == sorted(NODES), told
        assert pilots(lab) - before == Counter(NODES)  # for how long: test_slurm_callbacks.py
    refused = site.type(f"{SERVE} --host 127.0.0.1")
    assert refused.returncode == 2
    assert "only this machine can reach" in refused.stderr
    assert "such as 10.77.0.1" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
