"""Nodes that serve one owner at a time: who may start what on them, and how they go from one owner to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.allocate.place import Homes, place
from bftrainer.cluster.controller.active import ControllerSettings, Disconnected
from bftrainer.cluster.controller.effects import Effects
from bftrainer.cluster.controller.nodes.hand_over import MOST_S, SETTLE_S, UNMEASURED_S
from bftrainer.cluster.controller.nodes.invitations import Invitations
from bftrainer.cluster.controller.owners import OwnerReach
from bftrainer.cluster.controller.start_up.preloads import Preloads
from bftrainer.cluster.owners.join_secrets import JoinSecrets
from bftrainer.cluster.owners.signatures import REFUSED
from bftrainer.cluster.report.rerun import KINDS, check
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.store import Store
from bftrainer.cluster.wire.messages import Bye, Ended, FromAgent, Going, Heard, Join, Started
from bftrainer.core.pool import Pool
from bftrainer.elastic import protocol
from support.cluster.bench import Bench


class OwnedBench(Bench):
    """A bench whose agents belong to owners. Dismissed agents say that they go; new ones come when the test says so."""

    owners: dict[str, str]
    handed: list[tuple[str, str]]
    farewells: list[str]

    def __post_init__(self) -> None:
        self.owners, self.handed, self.farewells = {}, [], []
        super().__post_init__()

    def submit_for(self, owner: str, nodes: str = "1-8", **more: Any) -> str:
        spec = TrainerSpec.model_validate({"script": "/train.py", "nodes": nodes, "signature": "v1:x", **more})
        with self.store.transaction():
            trainer, effects = self.cluster.submit(spec, owner, self.now)
            self.act(effects)
        self.settle()
        return trainer

    def join_for(self, owner: str, *nodes: str) -> None:
        for node in nodes:
            self.owners[node] = owner
        self.join(*nodes)

    def act(self, effects: Effects) -> None:
        self.handed += effects.hand_over
        effects.hand_over = []
        super().act(effects)

    def rejoin(self, node: str) -> None:
        with self.store.transaction():
            join = Join(node, node, self.agents[node], knows_ranks=True)
            self.act(self.cluster.joined(join, self.now, self.owners[node]))

    def _obey(self, node: str, message: object) -> None:
        if isinstance(message, Bye) and node not in self.cut:
            self.dismissed.append(node)
            self.farewells.append(message.reason)
            self.agents.pop(node, None)
            with self.store.transaction():
                self.act(self.cluster.agents_said([(node, Going("dismissed"))], self.now))
        else:
            super()._obey(node, message)

    def serving(self) -> Mapping[str, str]:
        return {name: node.owner for name, node in self.cluster.nodes.items()}

    def reruns(self) -> bool:
        return check(self.store.all_events(KINDS), self.policy).mismatches == ()


@pytest.fixture
def on(tmp_path: Path) -> OwnedBench:
    return OwnedBench(tmp_path, ControllerSettings(own_users=True))


def test_a_trainer_starts_on_nodes_of_its_owner_and_a_node_of_another_is_handed_over_first(on: OwnedBench) -> None:
    on.join_for("ann", "n1", "n2")
    anns = on.submit_for("ann", "1-2")
    assert {start.worker for start in on.started} == {f"{anns}-1", f"{anns}-2"}
    on.started.clear()
    bobs = on.submit_for("bob", "1-1")
    assert on.handed == [("n2", "bob")]
    assert on.dismissed == ["n2"]
    assert on.farewells == ["the node goes to another owner"], "whose it is next is no business of ann's"
    assert on.started == [], "no agent of bob is there yet"
    assert len(on.cluster.planner.state.pool) == 2, "the node stays in the pool"
    on.now += 3.0
    on.join_for("bob", "n2")
    assert [start.trainer for start in on.started] == [bobs]
    assert on.serving() == {"n1": "ann", "n2": "bob"}
    assert on.cluster.hand_overs.describe() == {"hand_overs": 1, "cost_s": 3.0, "under_way": 0}
    assert on.reruns()


def test_a_hand_over_that_is_not_needed_any_more_is_not_carried_out(on: OwnedBench) -> None:
    on.join_for("ann", "n1")
    anns = on.submit_for("ann", "1-1")
    on.workers[f"{anns}-1"].hangs = True  # so that its agent cannot be dismissed yet
    bobs = on.submit_for("bob", "1-1", weight=1.0)
    with on.store.transaction():
        on.act(on.cluster.cancel(bobs, "cancelled", on.now))
    on.settle()
    assert on.serving() == {"n1": "ann"}
    assert on.cluster.nodes["n1"].heir in ("", "ann")
    assert on.reruns()


def test_a_hand_over_waits_a_moment_while_more_agents_are_on_their_way(on: OwnedBench) -> None:
    on.cluster.hand_overs.more_come = lambda now: True
    on.join_for("ann", "n1")
    on.submit_for("ann", "2-2")
    on.submit_for("bob", "1-1")
    assert on.cluster.nodes["n1"].heir == "bob"
    assert on.dismissed == []
    on.join_for("ann", "n2")
    assert on.cluster.nodes["n1"].heir == "", "ann's trainer has enough nodes now"
    assert on.dismissed == []
    on.submit_for("bob", "3-3")
    assert len(on.started) == 2
    assert on.reruns()


def test_a_hand_over_does_not_wait_for_long(on: OwnedBench) -> None:
    on.cluster.hand_overs.more_come = lambda now: True
    on.join_for("ann", "n1")
    on.submit_for("bob", "1-1")
    assert on.handed == []
    on.pass_time(SETTLE_S)
    assert on.handed == [("n1", "bob")]


def test_a_node_whose_next_agent_does_not_come_is_lost(on: OwnedBench) -> None:
    on.join_for("ann", "n1")
    on.submit_for("bob", "1-1")
    assert on.handed == [("n1", "bob")]
    on.pass_time(MOST_S / 2)
    assert "n1" in on.cluster.nodes
    on.pass_time(MOST_S)
    assert "n1" not in on.cluster.nodes
    assert on.reruns()


def test_a_node_whose_former_agent_does_not_go_is_lost(on: OwnedBench) -> None:
    on.join_for("ann", "n1")
    on.cut.add("n1")  # it hears nothing, or does not listen
    on.submit_for("bob", "1-1")
    assert on.cluster.nodes["n1"].here
    on.pass_time(MOST_S + 1)
    assert "n1" not in on.cluster.nodes


def test_what_one_owners_agents_say_of_a_script_is_not_believed_for_another_owner(tmp_path: Path) -> None:
    spec = TrainerSpec.model_validate({"script": "/train.py", "signature": "v1:x"})
    with Store.open(tmp_path / "db") as store:
        preloads = Preloads(store)
        preloads.learn(spec, protocol.FirstStep({}, {"evil": 5.0}), 0.0, "ann")
        assert preloads.of(spec, "ann") == ("evil",)
        assert preloads.of(spec, "bob") == ()
        assert Preloads(store).of(spec, "ann") == ("evil",)


def test_a_node_that_leaves_while_it_changes_its_owner_is_lost(on: OwnedBench) -> None:
    on.join_for("ann", "n1")
    on.submit_for("bob", "1-1")
    with on.store.transaction():
        on.act(on.cluster.leaving("n1", 5.0, on.now))
    on.pass_time(0.25)
    assert on.cluster.nodes == {}
    assert on.reruns()


def test_the_time_of_a_hand_over_counts_as_a_start_unless_a_node_of_the_owner_is_idle(on: OwnedBench) -> None:
    on.join_for("ann", "n1", "n2")
    on.join_for("bob", "n3")
    anns, bobs = on.submit_for("ann", "1-1"), on.submit_for("bob", "1-4")
    on.pass_time(1.0)
    on.effects.decide = "now"
    on.settle()
    for trainer, longer_s in ((anns, UNMEASURED_S), (bobs, UNMEASURED_S)):
        live = on.cluster.trainers[trainer]
        assert live.known is not None
        assert live.known.start_s == live.learned.start_s + longer_s, "all nodes are in use"
    with on.store.transaction():
        on.act(on.cluster.cancel(anns, "cancelled", on.now))
    assert on.cluster.planner._hand_over_s("ann") == 0.0, "its node is idle"
    assert on.cluster.trainers[bobs].hand_over_s == UNMEASURED_S
    assert on.reruns()


def test_what_an_agent_refuses_to_start_is_not_tried_again(on: OwnedBench) -> None:
    on.join_for("ann", "n1")
    on.slow = True
    anns = on.submit_for("ann", "1-1")
    on.fail_to_start(f"{anns}-1", f"{REFUSED}it is not signed")
    row = on.store.trainer(anns)
    assert row is not None
    assert (row.state, row.error) == ("failed", f"{REFUSED}it is not signed")
    assert len(on.started) == 1


def test_after_a_restart_nodes_still_serve_their_owners(on: OwnedBench) -> None:
    on.join_for("ann", "n1")
    on.join_for("bob", "n2")
    on.restart()
    assert on.serving() == {"n1": "ann", "n2": "bob"}
    assert dict(on.cluster.planner.state.homes) == {"n1": "ann", "n2": "bob"}


def test_an_agent_can_speak_of_the_workers_on_its_own_node_only(on: OwnedBench) -> None:
    on.join_for("ann", "n1")
    on.join_for("bob", "n2")
    anns = on.submit_for("ann", "1-1")
    worker = next(iter(on.cluster.trainers[anns].job.workers))
    on.tell("n2", Heard(worker, protocol.as_json(protocol.Failed("a lie", ""))))
    with on.store.transaction():
        on.act(on.cluster.reports({worker: {"generation": 1, "samples": 10**6}}, on.now, "n2"))
    assert on.cluster.trainers[anns].job.outcome is None
    assert on.cluster.trainers[anns].job.progress.samples == 0


@pytest.mark.parametrize("speaker", ["n9", "n2", "n3"], ids=["unknown", "of another owner", "another of the owner"])
@pytest.mark.parametrize(
    "said",
    [
        lambda worker: Heard(worker, protocol.as_json(protocol.Failed("a lie", ""))),
        lambda worker: Heard(worker, protocol.as_json(protocol.Follow("evil:1", "secret"))),
        lambda worker: Heard(worker, protocol.as_json(protocol.Broken(1, "a lie"))),
        lambda worker: Heard(worker, protocol.as_json(protocol.Done(1))),
        lambda worker: Started(worker, 666, "a lie"),
        lambda worker: Ended(worker, -9, "a lie", "a lie"),
        lambda worker: Going("a lie"),
        lambda worker: Disconnected("a lie"),
    ],
    ids=["failed", "follow", "broken", "done", "started", "ended", "going", "disconnected"],
)
def test_nothing_that_another_agent_says_changes_anything_for_a_trainer(
    on: OwnedBench, said: Callable[[str], FromAgent | Disconnected], speaker: str
) -> None:
    on.join_for("ann", "n1", "n3")
    on.join_for("bob", "n2")
    anns = on.submit_for("ann", "1-1")
    (worker,) = on.cluster.trainers[anns].job.workers
    if on.cluster.trainers[anns].job.workers[worker].node == speaker:
        pytest.skip("it is the worker's own")
    on.cluster.nodes["n1"].beat(on.now)
    live, before = on.cluster.trainers[anns], repr(on.cluster.trainers[anns].job.__dict__)
    with on.store.transaction():
        effects = on.cluster.agents_said([(speaker, said(worker))], on.now)
        effects.add(on.cluster.reports({worker: {"generation": 1, "samples": 10**6}}, on.now, speaker))
        on.cluster.beat(speaker, on.now)
    assert (live.job.outcome, live.job.progress.samples) == (None, 0)
    assert repr(on.cluster.trainers[anns].job.__dict__) == before
    assert {node for node, _ in effects.messages} <= {speaker}
    assert speaker != "n9" or (effects.messages, effects.decide, effects.left) == ([], None, [])


def test_new_nodes_are_harvested_for_whom_the_scheduler_would_give_them(on: OwnedBench) -> None:
    planner = on.cluster.planner
    nodes = ["n1", "n2", "n3", "n4"]
    assert planner.owners_for(nodes, {}, on.now) == {}, "nobody could use one"
    on.submit_for("ann", "3")
    assert set(planner.owners_for(nodes, {}, on.now).values()) == {"ann"}
    assert len(planner.owners_for(nodes, {}, on.now)) == 3, "a fourth is of no use"
    assert planner.owners_for(["n1", "n2"], {}, on.now) == {}, "nor are two"
    on.submit_for("bob", "1")
    found = planner.owners_for(nodes, {}, on.now)
    assert sorted(found.values()) == ["ann", "ann", "ann", "bob"]
    assert planner.owners_for(["n4"], dict.fromkeys(nodes[:3], "ann"), on.now) == {"n4": "bob"}


def test_new_nodes_are_harvested_for_an_owner_whose_agents_can_be_started_from_now_on(on: OwnedBench) -> None:
    planner = on.cluster.planner
    planner.limits.reach = {"ann": OwnerReach(0, "no lender of ann is connected")}
    planner.tick(on.now)
    on.submit_for("ann", "1")
    assert planner.owners_for(["n1"], {}, on.now) == {}
    planner.limits.reach = {}
    planner.tick(on.now)
    assert planner.owners_for(["n1"], {}, on.now) == {"n1": "ann"}
    planner.limits.reach = {"ann": OwnerReach(0, "the lender of ann is gone")}
    planner.tick(on.now)
    assert planner.owners_for(["n1"], {}, on.now) == {}


def test_only_the_last_invitation_of_a_node_counts_and_only_for_the_agent_that_joined_with_it(tmp_path: Path) -> None:
    with Store.open(tmp_path / "db") as store:
        invitations = Invitations(store, JoinSecrets(b"k" * 32))
        old, new = invitations.invite("n1", "ann", 0.0), invitations.invite("n1", "bob", 1.0)
        assert invitations.pending(2.0) == {"n1": "bob"}
        first, second = (invitations.right(secret, 2.0) for secret in (old, new))
        assert first is not None
        assert second is not None
        join = Join("n1", "n1", "a1")
        assert "is good no more" in invitations.refusal(first, join)
        assert "and it says that it is n2" in invitations.refusal(second, replace(join, node="n2"))
        assert invitations.refusal(second, join) == ""
        again = invitations.right(invitations.joined(second, join, 2.0), 3.0)
        assert again is not None
        assert invitations.pending(3.0) == {}
        later = Invitations(store, JoinSecrets(b"k" * 32))  # after a restart
        for right in (second, again):
            assert later.refusal(right, join) == ""
            assert "another agent has joined" in later.refusal(right, replace(join, agent="a2"))
        later.left("n1", "another agent")
        assert later.refusal(again, join) == ""
        later.left("n1", "a1")
        assert "is good no more" in later.refusal(again, join)


def test_at_a_pause_only_agents_that_have_joined_keep_their_invitations(tmp_path: Path) -> None:
    with Store.open(tmp_path / "db") as store:
        invitations = Invitations(store, JoinSecrets(b"k" * 32))
        joins = {node: Join(node, node, "a") for node in ("n1", "n2", "n3")}
        rights = {node: invitations.right(invitations.invite(node, "ann", 0.0), 1.0) for node in joins}
        for node in ("n1", "n2"):
            right = rights[node]
            assert right is not None
            invitations.joined(right, joins[node], 1.0)
        later = Invitations(store, JoinSecrets(b"k" * 32))  # after a restart
        later.withdraw_all({"n1": "a", "n3": "b"})
        good = {node for node, right in rights.items() if right is not None and not later.refusal(right, joins[node])}
        assert good == {"n1"}


@given(st.data())
def test_as_few_nodes_as_possible_change_their_owner(data: st.DataObject) -> None:
    owners = ("ann", "bob", "cid")
    pool = Pool(MappingProxyType({f"n{i}": float(i % 3) for i in range(data.draw(st.integers(1, 12)))}))
    homes = {node: data.draw(st.sampled_from(owners)) for node in pool.since}
    of_trainers = {f"t{i}": data.draw(st.sampled_from(owners)) for i in range(data.draw(st.integers(1, 5)))}
    free, assigned = list(pool.since), dict[str, tuple[str, ...]]()
    for trainer, owner in of_trainers.items():
        own = [node for node in free if homes[node] == owner]
        assigned[trainer] = tuple(own[: data.draw(st.integers(0, 3))])
        free = [node for node in free if node not in assigned[trainer]]
    room, counts = len(pool), dict[str, int]()
    for trainer in of_trainers:
        counts[trainer] = data.draw(st.integers(0, room))
        room -= counts[trainer]
    placed = place(pool, assigned, counts, homes=Homes(homes, of_trainers))
    changed = sum(homes[node] != of_trainers[trainer] for trainer, nodes in placed.nodes.items() for node in nodes)
    needed = {owner: sum(counts[name] for name, mine in of_trainers.items() if mine == owner) for owner in owners}
    have = {owner: sum(home == owner for home in homes.values()) for owner in owners}
    assert changed == sum(max(0, needed[owner] - have[owner]) for owner in owners)
