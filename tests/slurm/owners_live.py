"""Two owners train as themselves on a real Slurm, under a real controller that is killed: `make owners` runs it.

It is not part of `make test`: its trainers import PyTorch on every node that changes its owner.
"""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from bftrainer.cluster.wire.lender_messages import NO_TOKEN
from support.cluster.live import Live, gone
from support.elastic.ledger import committed
from support.slurm.lab import cluster
from support.slurm.lent import LentUser, authority_of, files_with, new_token, url_of, users_of
from support.users.accounts import processes_of, public_python, unix_users
from support.waiting import wait_until

pytestmark = pytest.mark.slurm

WORKER = Path(__file__).resolve().parents[1] / "elastic" / "chaos_worker.py"
SAMPLES, EPOCHS, NODES = 600, 12, 3


@pytest.mark.parametrize("way", ["lend", "run-as"])
def test_two_owners_train_as_themselves_through_the_death_of_the_controller_and_of_a_lender(
    tmp_path: Path, way: str
) -> None:
    pytest.importorskip("torch")
    tmp_path.chmod(0o755)
    with cluster(NODES) as lab, unix_users("ann", "bob") as accounts, public_python() as python:
        lab.open_to_users()
        pool = {"partition": "scavenger", "interval_s": "0.5", "rest_s": "1", "submit": way, "python": python}
        words = [word for name, value in pool.items() for word in ("--set", f"pool.{name}={value}")]
        options = ("--pool", "slurm", "--set", "users.mode=own", "--set", "policy.horizon_s=20", *words)
        state, env = tmp_path / "state", {"SLURM_CONF": str(lab.conf)}
        with Live(state, *options, env=env) as live:
            users = [
                LentUser(
                    lab, one, python, lambda: url_of(state), new_token(state, one.name), lambda: authority_of(state)
                )
                for one in accounts
            ]
            trainers = {}
            try:
                for user in users:
                    if way == "lend":
                        user.lend("--python", python)
                        wait_until(lambda user=user: user.lent == "connected", lambda user=user: user.log.read_text())
                for user in users:
                    folder = user.account.home / "training"
                    folder.mkdir()
                    os.chown(folder, user.account.uid, user.account.gid)
                    trainers[user] = user.submit(WORKER, str(folder), str(EPOCHS), "0.3", nodes="1-3")
                    live.until_steps(
                        trainers[user], 2, timeout_s=120
                    )  # the second one is handed nodes of the first one
                by_name = {user.account.name: user for user in users}
                check_processes(live, by_name, users_of(lab))
                live.kill()
                if way == "lend":
                    users[0].end(signal.SIGKILL)
                    users[0].lend("--python", python)
                live.start()
                rows = [live.until_state(trainers[user], "done", "failed", timeout_s=240) for user in users]
                assert [row["state"] for row in rows] == ["done", "done"], rows
                assert live.api.events(limit=100, kind="node.handed_over")["events"]
                live.nodes()
            finally:
                for user in users:
                    if user.process is not None:
                        user.end()
            live.options = (*live.options, "--drain")
            assert live.stop() == 0
        with Live(state, *options, "--drain", env=env) as live:  # gives all nodes back at its end
            # Without lenders nobody can cancel pilots: agents end because they are told so when the controller ends.
            wait_until(lambda: not any(node["state"] == "awaited" for node in live.nodes()), live.nodes)
        for user in users:
            assert committed(user.account.home / "training") == {
                epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)
            }
            for path in (user.account.home, *user.account.home.rglob("*")):
                assert path.lstat().st_uid == user.account.uid, path
            assert stat.S_IMODE((user.account.home / ".bftrainer").stat().st_mode) == 0o700
        homes = [user.account.home for user in users]
        assert files_with("bfj1.", *homes) == [], "a join secret is left on disk"
        if way == "run-as":
            wait_until(lambda: not lab.jobs(), lab.jobs)
        gone(live.pids)
        wait_until(
            lambda: not any(processes_of(user.account.uid) for user in users),
            lambda: [user.processes() for user in users],
            120,
        )


def check_processes(live: Live, users: dict[str, LentUser], jobs: dict[str, str]) -> None:
    """Every agent, worker and job belongs to the owner whom its node serves."""
    nodes = live.nodes()
    assert nodes
    assert {node["serves"] for node in nodes} <= set(users)  # one of them may have all nodes for a moment
    for node in nodes:
        user = users[node["serves"]]
        assert jobs[node["node"]] == user.account.name
        assert Path(f"/proc/{node['agent_pid']}").stat().st_uid == user.account.uid
    for row in live.api.trainers():
        for worker in filter(lambda worker: worker["pid"], live.trainer(row["id"])["workers"]):
            assert Path(f"/proc/{worker['pid']}").stat().st_uid == users[row["owner"]].account.uid


def test_the_commands_of_the_page_set_up_an_operator_and_a_user(tmp_path: Path) -> None:
    page = (WORKER.parents[2] / "docs" / "owners.md").read_text()
    config = tmp_path / "own.toml"
    config.write_text(page.partition("```toml\n")[2].partition("```")[0])
    typed = [line for line in page.splitlines() if line.startswith("bftrainer lend ")]
    assert len(typed) == 3
    tmp_path.chmod(0o755)
    with cluster(1) as lab, unix_users("ann") as (account,), public_python() as python:
        lab.open_to_users()
        state = tmp_path / "state"
        with Live(state, "--config", str(config), "--drain", env={"SLURM_CONF": str(lab.conf)}) as live:
            user = LentUser(lab, account, python, lambda: url_of(state), "")
            own = account.home / ".local" / "state" / "bftrainer"
            own.mkdir(parents=True)
            environment = {**os.environ, "BFTRAINER_STATE": str(state)}

            def token(*words: str) -> None:
                command = (sys.executable, "-m", "bftrainer", "token", *words)
                subprocess.run(command, env=environment, check=True)

            token("create", "ann", "--owner", account.name, "--client-file", str(own / "client.json"))
            for path in (account.home / ".local", own.parent, own, own / "client.json"):
                os.chown(path, account.uid, account.gid)
            tried, installed = (user.bftrainer(*line.split()[1:]) for line in typed[:2])
            assert "Slurm would accept it" in tried
            assert "systemctl --user enable --now bftrainer-lend.service" in installed
            unit = (account.home / ".config/systemd/user/bftrainer-lend.service").read_text()
            start = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
            assert shlex.split(start.removeprefix("ExecStart="))[1:] == ["-m", "bftrainer", *typed[1].split()[1:-1]]
            assert user.run(python, "-m", "bftrainer", *typed[2].split()[1:]).returncode == 1, "it does not run yet"
            user.lend("--max-pilots", "20")
            wait_until(lambda: user.lent == "connected", lambda: user.log.read_text())
            assert "connected; 0 of at most 20 pilots" in user.bftrainer(*typed[2].split()[1:])
            assert live.api.status()["pool"]["lenders"] == {account.name: 20}
            wrong = user.run(python, "-m", "bftrainer", "lend", "--partition", "nosuch", "--folder", str(own / "other"))
            assert (wrong.returncode, "partition nosuch does not exist" in wrong.stderr) == (2, True), wrong.stderr
            token("revoke", "ann")
            wait_until(lambda: user.lent == f"not connected: {NO_TOKEN}", lambda: (user.lent, user.log.read_text()))
            token("create", "ann", "--owner", account.name, "--client-file", str(tmp_path / "client.json"))
            os.chown(tmp_path / "client.json", account.uid, account.gid)
            (tmp_path / "client.json").replace(own / "client.json")
            wait_until(lambda: user.lent == "connected", lambda: (user.lent, user.log.read_text()))
            assert user.log.read_text().count("HTTP 403") == 0
            script = account.home / "train.py"
            script.write_text("import time; time.sleep(600)\n")
            trainer = user.submit(script, nodes="1")
            wait_until(
                lambda: live.trainer(trainer)["nodes"], lambda: (live.api.status()["pool"], user.log.read_text())
            )
            assert user.end() == 0
            assert user.run("scancel", "--me").returncode == 0
            wait_until(lambda: "no lender" in str(live.trainer(trainer)["reason"]), lambda: live.trainer(trainer))
            wait_until(lambda: live.api.status()["pool"]["idle"] == 1, lambda: live.api.status()["pool"])
            time.sleep(3)  # rounds in which nobody can get a node
            assert not lab.jobs()
            user.lend()
            wait_until(lab.jobs, lambda: (live.api.status()["pool"], user.log.read_text()))
            user.bftrainer("cancel", trainer)
            assert user.end() == 0
