"""Attacks of a hostile trainer on another owner, each a test, for every pool that can run trainers as their owners.

`attacked_system` has Ann train on two nodes, with a real group between them, while Bob's trainer tries everything of
`hostile.py`. The tests of `AttackTests` share one such system and look at what each attack got. A module of tests
subclasses it, and has a fixture `attacked`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cluster.controller.nodes.invitations import Invitation
from bftrainer.cluster.owners.accounts import Account, Accounts
from bftrainer.cluster.owners.join_secrets import JoinRight, JoinSecrets
from bftrainer.cluster.store.event_columns import event_of
from bftrainer.cluster.store.events import Decided, NodeHandedOver
from bftrainer.cluster.store.store import FILE, Store
from support.cluster.verdict import assert_decisions_can_be_made_again
from support.elastic.ledger import committed
from support.users.accounts import processes_of
from support.users.owned import Owned, facts_of, files_below, is_private, loot_of
from support.waiting import wait_until

TRAINS = Path(__file__).resolve().parents[2] / "elastic" / "chaos_worker.py"
HOSTILE = Path(__file__).with_name("hostile.py")
PASSWORD = "of-ann-alone"
ANNS_REQUESTS = (
    *("GET /v1/trainers/t1", "GET /v1/trainers/t1/logs", "GET /v1/trainers/t1/results", "GET /v1/trainers/t1/history"),
    *("POST /v1/trainers/t1/cancel", "GET /v1/events?trainer=t1"),
)
ADMINS_REQUESTS = ("GET /v1/events", "GET /v1/owners", "POST /v1/pause", "POST /v1/resume", "POST /v1/drain")


@dataclass
class Attacked:
    """The system, and what the hostile trainer got."""

    system: Owned
    loot: Mapping[str, Mapping[str, str]]
    """By attack and by what it was tried on: the name of the error, or `GOT` and what it got."""
    before: Mapping[str, Any]
    """Ann's trainer before the attacks."""


def attacked_system(system: Owned, more: Callable[[], Mapping[str, Any]] = dict) -> Attacked:
    """Let Ann and the hostile trainer of Bob train, until it has tried everything.

    `more` returns further targets, among them files, for the attacks on this kind of pool, once both train.
    """
    ann, bob, live = system.ann, system.bob, system.live
    folder = owned_folder(ann, "training")
    (ann.home / "password").write_text(PASSWORD)
    os.chown(ann.home / "password", ann.uid, ann.gid)
    options = ("--nodes", "2", "--env", f"PASSWORD={PASSWORD}")
    anns = system.submit(ann, TRAINS, folder, 1000, 0.2, options=options)
    targets, loot = bob.home / "targets.json", bob.home / "loot.json"
    # Ann has her nodes first: a hand-over of Bob's first node to her would end the secret that he misuses.
    live.until_state(anns, "running", timeout_s=90)
    bobs = system.submit(bob, HOSTILE, targets, loot, options=("--nodes", "1"))
    assert (anns, bobs) == ("t1", "t2")
    live.until_state(bobs, "running", timeout_s=90)
    before = live.until_steps(anns)
    wait_until(lambda: list(ann.home.glob(".bftrainer/trainers/*/snapshots/*")), "a snapshot", 60)
    own, further = _targets(system), more()
    targets.write_text(json.dumps({**own, **further, "files": own["files"] + further.get("files", [])}))
    os.chown(targets, bob.uid, bob.gid)
    wait_until(loot.exists, "the end of the attacks", 240)
    return Attacked(system, loot_of(loot), before)


def _targets(system: Owned) -> dict[str, Any]:
    """What the hostile trainer is told to attack. It could find most of it by itself."""
    ann, state = system.ann, system.state
    files = [path for path, facts in files_below(ann.home) if path.is_file()]
    files += [path for path in state.rglob("*") if path.is_file()]
    agents = [path for path in Path("/tmp").glob("bft-agent-*") if path.stat().st_uid == ann.uid]
    files += [path for folder in agents for path in folder.rglob("*") if path.is_file()]
    pids, sockets = [*processes_of(ann.uid), system.live.pid], []
    if (state / "host.json").exists():  # of virtual nodes
        sockets.append(json.loads((state / "host.json").read_text())["socket"])
        pids.append(int((state / "host.lock").read_text()))
    kept = {
        name: (state / name).exists() for name in ("bftrainer.db", "client.json", "join-key", "environments/t1.json")
    }
    assert all(kept.values()), kept
    assert agents
    return {
        "files": [str(path) for path in files],
        "folders": [str(path) for path in (ann.home, state, *agents)],
        "pids": pids,
        "sockets": [*sockets, *(str(path) for folder in agents for path in folder.rglob("*") if path.is_socket())],
        "requests": [*ANNS_REQUESTS, *ADMINS_REQUESTS],
        "url": system.url,
        "authority": (state / "tls" / "ca.pem").read_text(),
        "token": system.tokens[system.bob.name],
        "secret": _secret_of_agent(state, system.live.trainer("t2")["nodes"][0]),
        "owner": ann.name,
        "uid": ann.uid,
        "node": system.nodes_of(ann.name)[0],
    }


def _secret_of_agent(state: Path, node: str) -> str:
    """The join secret of a node's agent. Its owner's processes could read it in the agent's memory."""
    with Store.open(state / FILE, read_only=True) as store:
        invited = Invitation(**store.kept(f"invitation.{node}"))
    right = JoinRight(invited.owner, node, invited.pilot, time.time() + 600)
    return JoinSecrets.at(state, Accounts()).issue(right)


class AttackTests:
    """What the attacks got."""

    def test_every_process_and_every_file_of_a_trainer_is_its_owners(self, attacked: Attacked) -> None:
        system = attacked.system
        for user, trainer in ((system.ann, "t1"), (system.bob, "t2")):
            row = system.live.trainer(trainer)
            workers = [rank["pid"] for worker in row["workers"] for rank in worker["ranks"]]
            agents = [node["agent_pid"] for node in system.live.nodes() if node["node"] in row["nodes"]]
            assert len(workers) == len(agents) == len(row["nodes"])
            for pid in (*workers, *agents):
                facts = facts_of(pid)
                assert facts["Uid"] == [str(user.uid)] * 4
                assert facts["Gid"] == [str(user.gid)] * 4
                assert set(facts["Groups"]) == {str(group) for group in user.groups}
            for folder in (user.home / ".bftrainer", user.home / ".config" / "bftrainer"):
                found = list(files_below(folder))
                assert all(facts.st_uid == user.uid for _, facts in found)
                assert is_private(folder.lstat())
        assert not list(system.state.rglob("*.bft"))
        assert not list(system.state.glob("trainers/*/snapshots"))

    def test_another_owners_files_and_the_controllers_cannot_be_read_or_written(self, attacked: Attacked) -> None:
        for attack in ("read_files", "write_files", "list_folders"):
            got = attacked.loot[attack]
            assert any("snapshots" in path for path in got) or attack == "list_folders"
            assert set(got.values()) == {"PermissionError"}, attack

    def test_another_owners_processes_cannot_be_looked_into(self, attacked: Attacked) -> None:
        got = attacked.loot["read_processes"]
        assert any(path.endswith("environ") for path in got)
        assert {path: word for path, word in got.items() if word != "PermissionError"} == {}

    def test_another_owners_processes_cannot_be_signalled(self, attacked: Attacked) -> None:
        assert set(attacked.loot["signal_processes"].values()) == {"PermissionError"}

    def test_no_process_of_an_owner_shares_the_controllers_session(self, attacked: Attacked) -> None:
        system = attacked.system
        session = os.getsid(system.live.pid)
        for user in (system.ann, system.bob):
            sessions = set()
            for pid in processes_of(user.uid):
                with suppress(ProcessLookupError):
                    sessions.add(os.getsid(pid))
            assert sessions
            assert session not in sessions

    def test_importing_torch_makes_no_folder_in_tmp_whose_name_others_can_guess(self, attacked: Attacked) -> None:
        for user in (attacked.system.ann, attacked.system.bob):
            assert not Path("/tmp", f"torchinductor_{user.name}").exists()
            assert list(user.home.glob(".bftrainer/compiled/parent"))

    def test_the_sockets_of_another_owners_agents_and_of_the_host_of_nodes_cannot_be_reached(
        self, attacked: Attacked
    ) -> None:
        got = attacked.loot["connect_to_sockets"]
        assert len(got) > 1
        assert set(got.values()) == {"PermissionError"}

    @pytest.mark.parametrize("request_of", ANNS_REQUESTS)
    def test_the_api_does_not_know_another_owners_trainer(self, attacked: Attacked, request_of: str) -> None:
        assert attacked.loot["ask_the_api"][request_of] == "Status404"

    @pytest.mark.parametrize("request_of", ADMINS_REQUESTS)
    def test_the_api_refuses_what_is_for_admins(self, attacked: Attacked, request_of: str) -> None:
        assert attacked.loot["ask_the_api"][request_of] == "Status403"

    @pytest.mark.parametrize(
        ("way", "answer"),
        [
            ("as another's node", "bye its secret is for the node"),
            ("as its own node, beside its own agent", "bye another agent has joined with its secret"),
            ("as the head", "bye its secret is for the node"),
            ("with another owner in its secret", "status 403"),
            ("with a user's token", "status 403"),
            ("without a secret", "status 403"),
        ],
    )
    def test_nobody_joins_as_an_agent_of_another_owner(self, attacked: Attacked, way: str, answer: str) -> None:
        assert "the attack itself" not in attacked.loot["join_for_another"], attacked.loot["join_for_another"]["at"]
        got = attacked.loot["join_for_another"]
        assert got[way].startswith(answer)

    def test_another_owners_rendezvous_tells_nothing_and_training_goes_on(self, attacked: Attacked) -> None:
        got = dict(attacked.loot["use_the_rendezvous"])
        assert int(got.pop("ports")) > 0
        for what in got.values():
            assert not what.startswith("{") or json.loads(what)["known"] is False
            assert "default_pg" not in what
        after = attacked.system.live.until_steps("t1", 3)
        assert after["state"] == "running"
        assert after["failures"] == attacked.before["failures"]

    def test_values_of_a_trainers_environment_are_in_no_file_that_others_can_read(self, attacked: Attacked) -> None:
        system = attacked.system
        assert json.loads((system.state / "environments" / "t1.json").read_text()) == {"PASSWORD": PASSWORD}
        with sqlite3.connect(f"file:{system.state / 'bftrainer.db'}?mode=ro", uri=True) as database:
            assert PASSWORD not in str(database.execute("SELECT spec FROM trainers").fetchall())
        assert PASSWORD not in json.dumps(attacked.loot)

    def test_with_a_stolen_token_nothing_runs_as_its_owner_and_the_status_says_why(self, attacked: Attacked) -> None:
        system = attacked.system
        options = ("--nodes", "1", "--name", "stolen")
        stolen = system.submit(system.bob, HOSTILE, "none", "none", options=options, token_of=system.ann)
        row = system.live.until_state(stolen, "failed", timeout_s=60)
        assert row["owner"] == system.ann.name
        assert "not the one that its owner signed" in row["error"]
        assert "signed" in system.command(system.ann, "status", stolen)

    def test_a_killed_controller_finds_the_agents_of_all_owners_again(self, attacked: Attacked) -> None:
        live = attacked.system.live
        agents = {node["node"]: node["agent_pid"] for node in live.nodes() if node["trainer"]}
        live.kill()
        live.start()
        for trainer in ("t1", "t2"):
            live.until_state(trainer, "running", timeout_s=60)
            live.until_steps(trainer)
        assert {node["node"]: node["agent_pid"] for node in live.nodes() if node["trainer"]} == agents


def churn(system: Owned, most: int, victims: Callable[[], list[int]]) -> None:
    """Let both owners train while nodes change hands between them and agents are killed, and judge all decisions.

    Each trainer takes 1 to `most` nodes. `victims` returns the processes of which one is killed.
    """
    live, rng = system.live, random.Random(5)
    for trainer in ("t1", "t2"):
        live.api.cancel(trainer)
    for user in (system.ann, system.bob):
        system.as_admin("owner", "set", user.name, "--share", str(most // 2))
    began = live.api.events(limit=1)["last"]
    homes = {"ann": owned_folder(system.ann, "long")}
    sizes = ("--nodes", f"1-{most}")
    anns = system.submit(system.ann, TRAINS, homes["ann"], 24, 0.2, options=(*sizes, "--name", "long"))
    live.until_state(anns, "running", timeout_s=60)
    for number in range(2):  # nodes go to bob, and back when his trainer is done
        home = homes[f"bob {number}"] = owned_folder(system.bob, f"short-{number}")
        bobs = system.submit(system.bob, TRAINS, home, 3, 0.1, options=(*sizes, "--name", f"short-{number}"))
        live.until_steps(bobs, 2)
        with suppress(ProcessLookupError):
            os.kill(rng.choice(victims()), signal.SIGKILL)
        live.until_state(bobs, "done")
    (homes["ann"] / "hurry").touch()
    live.until_state(anns, "done")
    for name, home in homes.items():
        counts = committed(home)
        assert len(counts) == (24 if name == "ann" else 3)
        assert all(counter == Counter(range(600)) for counter in counts.values()), name
    _judge_decisions(system, began)
    assert live.problems() == []


def owned_folder(user: Account, name: str) -> Path:
    """Make a folder in a user's home that belongs to them."""
    folder = user.home / name
    folder.mkdir()
    os.chown(folder, user.uid, user.gid)
    return folder


def _judge_decisions(system: Owned, began: int) -> None:
    """Look at all decisions since an event: shares, idle nodes, changes of owner; and make them again."""
    with Store.open(system.state / FILE, read_only=True) as store:
        owner_of = {row.id: row.owner for row in store.trainers()}
        typed = [event_of(row) for row in store.events(after=began, limit=10_000)]
    decisions = [event for event in typed if isinstance(event, Decided)]
    for decision in decisions:
        idle = decision.pool - sum(decision.counts.values())
        # A trainer that runs may do without: its measured curve says that it would not be faster. That the decision is
        # the optimum, whoever the nodes serve, is what making it again shows.
        assert idle == 0 or all(decision.counts.values()), "a node is idle, and a trainer that could use it waits"
        for owner, share in (decision.limits or {"shares": {}})["shares"].items():
            held = sum(count for name, count in decision.counts.items() if owner_of[name] == owner)
            assert held >= share or owner not in {owner_of[name] for name in decision.counts}
    took_s = [event.took_s for event in typed if isinstance(event, NodeHandedOver)]
    assert took_s
    print(f"{len(took_s)} nodes changed their owner in {len(decisions)} decisions: {min(took_s)} to {max(took_s)} s")
    assert assert_decisions_can_be_made_again(system.state) >= len(decisions)
