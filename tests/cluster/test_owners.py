"""Several users on one pool: caps and shares hold while nodes come and go, and nobody waits behind others."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.allocate.admission import admit
from bftrainer.allocate.equal import EqualAllocator
from bftrainer.allocate.problem import Limits
from bftrainer.allocate.quotas import Quota, limits_in_force
from bftrainer.cli.main import run
from bftrainer.cluster.controller import owners
from bftrainer.cluster.controller.owners import QuotaError
from bftrainer.cluster.report.rerun import KINDS, check
from bftrainer.cluster.report.usage import account
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.rows import OwnerRow
from bftrainer.core.curve import Curve
from bftrainer.core.pool import Event, Fragment
from bftrainer.core.trace import Trace, Window
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.scheduler import Policy, Scheduler, State
from bftrainer.simulate.replay import ReplaySettings, replay
from support.cluster.api import SPEC, by, play
from support.cluster.bench import Bench

CURVE = Curve((0, 1, 8), (0.0, 10.0, 60.0))


def trainer(name: str, owner: str, least: int = 1, most: int = 8, submit: float = 0.0) -> Trainer:
    return Trainer(name, CURVE, least, most, 2.0, 1.0, submit=submit, owner=owner)


def queue(**numbers: int) -> tuple[Trainer, ...]:
    return tuple(trainer(f"{owner}{i}", owner) for owner, number in numbers.items() for i in range(number))


def names(trainers: tuple[Trainer, ...]) -> list[str]:
    return [one.name for one in trainers]


# What quotas mean.


@given(
    st.dictionaries(st.sampled_from("abcde"), st.floats(0, 100) | st.integers(0, 40), min_size=1),
    st.integers(0, 50),
    st.sets(st.sampled_from("abcde")),
)
def test_shares_are_whole_nodes_near_what_they_should_be_and_never_more_than_the_pool(
    given_shares: dict[str, float], pool: int, with_work: set[str]
) -> None:
    quotas = {
        owner: Quota(share_nodes=share) if isinstance(share, int) else Quota(share_percent=share)
        for owner, share in given_shares.items()
    }
    limits = limits_in_force(quotas, pool, [trainer(owner, owner, most=1000) for owner in with_work])
    assert limits.owner_shares.keys() <= with_work
    assert sum(limits.owner_shares.values()) <= pool
    wanted = {owner: min(quotas[owner].share_of(pool), 1000) for owner in with_work if owner in quotas}
    scale = min(1.0, pool / sum(wanted.values())) if sum(wanted.values()) else 1.0
    for owner, share in wanted.items():
        assert abs(limits.owner_shares.get(owner, 0) - share * scale) < 1 + 1e-6


def test_a_share_is_no_more_than_its_owner_can_use_and_a_cap_only_counts_below_the_pool() -> None:
    quotas = {"ann": Quota(max_nodes=4, share_percent=50), "bob": Quota(share_nodes=6), "cyd": Quota(max_nodes=99)}
    limits = limits_in_force(quotas, 12, [trainer("a", "ann"), trainer("b", "bob", most=3), trainer("c", "cyd")])
    assert (dict(limits.owner_caps), dict(limits.owner_shares)) == ({"ann": 4}, {"ann": 4, "bob": 3})
    assert not limits_in_force(quotas, 12, [trainer("d", "dan")])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"max_nodes": -1}, "max nodes must be from 0"),
        ({"share_percent": 101.0}, "from 0% to 100%"),
        ({"share_percent": float("nan")}, "from 0% to 100%"),
        ({"share_nodes": 1, "share_percent": 1.0}, "both"),
        ({"max_nodes": 2, "share_nodes": 3}, "more than max nodes"),
    ],
)
def test_a_quota_that_cannot_be_meant_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Quota(**values)


# Who is considered.


@given(st.integers(0, 4), st.integers(0, 12), st.integers(-1, 6))
def test_without_limits_the_queue_is_first_come_first_served(admitted: int, waiting: int, room: int) -> None:
    all_of_them = queue(ann=admitted + waiting)
    found = admit(all_of_them[:admitted], all_of_them[admitted:], room, Limits(), 8)
    assert found == all_of_them[admitted:][: max(room, 0)]


def test_an_owner_whose_share_is_not_met_is_admitted_before_and_beyond_max_parallel() -> None:
    both = queue(ann=10, bob=3)
    limits = Limits(owner_shares={"bob": 9})
    assert names(admit((), both, 3, limits, 16)) == ["ann0", "bob0", "bob1"]
    assert names(admit(both[:10], both[10:], 0, limits, 16)) == ["bob0", "bob1"]  # 16 nodes are enough for a share of 9
    assert names(admit(both[:12], both[12:], 0, limits, 16)) == []


def test_an_owner_at_their_cap_keeps_nobody_waiting() -> None:
    both = queue(ann=10, bob=2)
    limits = Limits(owner_caps={"ann": 2})
    assert names(admit((), both, 3, limits, 8)) == ["ann0", "ann1", "bob0"]  # a third of ann's could never run
    wide = Limits(owner_caps={"ann": 4})
    assert names(admit(both[:4], both[4:], 0, wide, 8)) == ["bob0"]  # ann's four fill max parallel, not the pool
    assert names(admit(both[:4], both[4:], 0, wide, 4)) == []
    giant = (trainer("giant", "bob", least=9, most=9), trainer("small", "bob"))
    assert names(admit((), giant, 0, Limits(owner_shares={"bob": 2}), 8)) == ["small"]


@pytest.mark.parametrize(("cap", "least"), [(0, 1), (1, 2)])
def test_trainers_that_may_not_run_any_more_keep_nobody_waiting(cap: int, least: int) -> None:
    state, _ = State().pool_changed(Event(0.0, joined=tuple(f"n{i}" for i in range(40))))
    state = state.submitted(*(trainer(f"ann{i}", "ann", least) for i in range(10)), *queue(bob=5))
    state = state.after(Scheduler(Policy(max_parallel=10)).decide(state))
    assert len(state.admitted) == 10
    plan = Scheduler(Policy(max_parallel=10, quotas={"ann": Quota(max_nodes=cap)})).decide(state)
    assert sum(n for name, n in plan.counts.items() if name.startswith("ann")) == 0
    assert sum(plan.counts.values()) == 40


def test_max_parallel_does_not_void_a_share_for_one_that_needs_more_than_it() -> None:
    state, _ = State().pool_changed(Event(0.0, joined=tuple(f"n{i}" for i in range(6))))
    state = state.submitted(trainer("a", "ann", 6, 6), trainer("b", "bob", 1, 6), trainer("c", "ann", 1, 3))
    quotas = {"ann": Quota(share_percent=50), "bob": Quota(share_percent=50)}
    plan = Scheduler(Policy(max_parallel=2, quotas=quotas)).decide(state)
    assert plan.counts == {"b": 3, "c": 3}
    alone = Scheduler(Policy(max_parallel=1, quotas={"ann": Quota(share_nodes=2)})).decide(
        State()
        .pool_changed(Event(0.0, joined=("n1", "n2", "n3")))[0]
        .submitted(trainer("b", "bob", 1, 3), trainer("a", "ann", 3, 3))
    )  # what needs more than the share is admitted for it, where there is nothing else
    assert alone.counts == {"a": 3}


def test_a_cap_holds_before_there_is_a_node() -> None:
    limits = limits_in_force({"ann": Quota(max_nodes=0)}, 0, queue(ann=1))
    assert admit((), queue(ann=1), 10, limits, 0) == ()


def test_where_the_optimum_keeps_to_the_limits_it_stands() -> None:
    state, _ = State().pool_changed(Event(0.0, joined=tuple(f"n{i}" for i in range(12))))
    state = state.submitted(*queue(ann=2, bob=2))
    loose = Scheduler(Policy(quotas={"ann": Quota(max_nodes=11), "bob": Quota(share_nodes=1)})).decide(state)
    assert (loose.allocator, dict(loose.limits.owner_caps)) == ("exact", {"ann": 11})
    assert loose.counts == Scheduler(Policy()).decide(state).counts
    tight = Scheduler(Policy(quotas={"ann": Quota(max_nodes=1)})).decide(state)
    assert (tight.allocator, sum(tight.counts.get(name, 0) for name in ("ann0", "ann1"))) == ("exact", 1)
    plain = Scheduler(Policy(allocator=EqualAllocator(), quotas={"ann": Quota(max_nodes=1)})).decide(state)
    assert (plain.allocator, plain.counts) == ("exact", tight.counts)


def test_a_decision_made_again_with_the_limits_it_records_is_the_same() -> None:
    state, _ = State().pool_changed(Event(0.0, joined=tuple(f"n{i}" for i in range(12))))
    state = state.submitted(*queue(ann=10, bob=2))
    limited = Scheduler(Policy(max_parallel=4, quotas={"bob": Quota(share_percent=50), "ann": Quota(max_nodes=5)}))
    plan = limited.decide(state)
    assert plan.allocator == "exact"
    assert sum(n for name, n in plan.counts.items() if name.startswith("ann")) <= 5
    assert sum(n for name, n in plan.counts.items() if name.startswith("bob")) >= 6
    after = state.after(plan)
    assert {one.name for one in (*after.admitted, *after.waiting)} == {one.name for one in state.waiting}
    again = Scheduler(Policy(max_parallel=4)).decide(state, plan.limits)
    assert (again.counts, again.placed) == (plan.counts, plan.placed)
    assert Scheduler(Policy(quotas={"dan": Quota(max_nodes=1)})).decide(state).allocator == "exact"


def test_the_simulator_holds_the_same_limits() -> None:
    nodes = tuple(f"n{i}" for i in range(8))
    trace = Trace.from_fragments([Fragment(node, 0.0, 3600.0) for node in nodes], nodes, Window(0.0, 3600.0))
    policy = Policy(max_parallel=2, quotas={"bob": Quota(share_nodes=4), "ann": Quota(max_nodes=3)})
    most: defaultdict[str, int] = defaultdict(int)

    def watch(_time: float, plan: Any, _state: State) -> None:
        counts: defaultdict[str, int] = defaultdict(int)
        for one in plan.considered:
            counts[one.owner] += plan.counts[one.name]
        for owner, count in counts.items():
            most[owner] = max(most[owner], count)
        assert counts["ann"] <= 3
        assert "bob" not in counts or counts["bob"] >= min(4, plan.pool)

    replay(trace, [*queue(ann=4), trainer("late", "bob", submit=600.0)], ReplaySettings(policy), watch)
    assert most["ann"] == 3
    assert most["bob"] >= 4


# The live system.


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.store.close()


def submit(bench: Bench, owner: str, nodes: str = "1-8") -> str:
    spec = TrainerSpec.model_validate({"script": "/train.py", "nodes": nodes})
    with bench.store.transaction():
        found, effects = bench.cluster.submit(spec, owner, bench.now)
        bench.act(effects)
    bench.settle()
    return found


def held(bench: Bench) -> dict[str, int]:
    """Nodes by owner."""
    found: dict[str, int] = defaultdict(int)
    for name, nodes in bench.cluster.planner.state.assigned.items():
        found[bench.cluster.trainers[name].owner] += len(nodes)
    return found


def test_two_users_have_their_shares_over_a_churning_hour_and_the_accounts_add_up(bench: Bench) -> None:
    rng = random.Random(7)
    quotas = {"ann": Quota(max_nodes=8, share_percent=25), "bob": Quota(share_percent=50)}
    bench.store.put_owner(OwnerRow("ann", max_nodes=8, share_percent=25.0))
    bench.store.put_owner(OwnerRow("bob", share_percent=50.0))
    bench.pass_time(1)
    for _ in range(10):
        submit(bench, "ann")  # they fill max parallel
    start, nodes = bench.now, [f"n{i}" for i in range(16)]
    bench.join(*nodes[:6])
    for _ in range(3):
        submit(bench, "bob")
    integral: dict[str, float] = defaultdict(float)
    seen_decisions = 0
    while bench.now < start + 3600:
        step = rng.uniform(20, 100)
        for owner, count in held(bench).items():
            integral[owner] += count * step
        integral["free"] += (len(bench.cluster.planner.state.pool) - sum(held(bench).values())) * step
        bench.pass_time(step)
        here, away = sorted(bench.agents), sorted(set(nodes) - set(bench.agents))
        if away and (len(here) < 4 or rng.random() < 0.5):
            bench.join(*rng.sample(away, rng.randint(1, min(3, len(away)))))
        else:
            bench.take(*rng.sample(here, rng.randint(1, min(3, len(here) - 1))))
        if rng.random() < 0.05:
            bench.restart()
        elif rng.random() < 0.1:
            running = [t for t, live in bench.cluster.trainers.items() if live.job.state == "running"]
            owner = bench.cluster.trainers[ended := rng.choice(running)].owner
            bench.finish(ended)
            submit(bench, owner)
        now, pool = held(bench), len(bench.cluster.planner.state.pool)
        assert now["ann"] <= 8
        for owner, quota in quotas.items():
            assert now[owner] > quota.share_of(pool) - 1, (owner, now, pool)
        seen_decisions += 1
    assert seen_decisions > 40
    assert bench.cluster.planner.last_decision is not None
    assert bench.cluster.planner.last_decision["allocator"] == "exact"
    # Who had how much: as the cluster counts it, and as it was seen here.
    past = bench.store.totals.of_finished()
    use = {owner: owners.as_json(owner, bench.cluster, past, bench.now)["use"] for owner in quotas}
    for owner in quotas:
        assert use[owner]["node_seconds"] == pytest.approx(integral[owner], rel=1e-6)
    pool_s = bench.cluster.planner.pool_time.node_seconds(bench.now)
    assert sum(use[owner]["node_seconds"] for owner in quotas) + integral["free"] == pytest.approx(pool_s, rel=1e-6)
    report = account(bench.store, start, bench.now, now=bench.now)
    assert {share.owner for share in report.owners()} == {"ann", "bob"}
    for share in report.owners():
        assert share.used_us / 1e6 == pytest.approx(integral[share.owner], rel=1e-6)
    assert sum(share.used_us for share in report.owners()) + report.unused_us == report.pool_us
    # And all of it comes out again from the log.
    checked = check(bench.store.all_events(KINDS), bench.policy)
    assert checked.mismatches == ()
    assert checked.decisions > 60


def test_limits_take_effect_on_a_running_controller_and_are_lifted_again(bench: Bench) -> None:
    trainer_id = submit(bench, "ann")
    bench.join(*(f"n{i}" for i in range(6)))
    assert held(bench) == {"ann": 6}
    bench.store.put_owner(OwnerRow("ann", max_nodes=2))
    bench.pass_time(1)
    assert held(bench) == {"ann": 2}
    decision = bench.store.events(kind="decision", limit=1)[0].data
    assert decision["limits"] == {"caps": {"ann": 2}, "shares": {}}
    assert "within owners' limits: ann at most 2 nodes" in decision["reasons"]
    bench.restart()
    assert held(bench) == {"ann": 2}
    assert bench.store.remove_owner("ann")
    bench.pass_time(1)
    assert held(bench) == {"ann": 6}
    decision = bench.store.events(kind="decision", limit=1)[0].data
    assert (decision["allocator"], decision["limits"]) == ("exact", None)
    assert bench.state(trainer_id) in ("running", "rescaling")
    assert [e.data["owners"] for e in bench.store.events(kind="owners.changed")][-1] == []


def test_one_trainer_too_many_is_refused_and_changes_nothing(bench: Bench) -> None:
    bench.store.put_owner(OwnerRow("ann", max_trainers=1, max_nodes=4))
    with pytest.raises(QuotaError, match="could never run"):
        submit(bench, "ann", "5-8")
    first = submit(bench, "ann")
    with pytest.raises(QuotaError, match="ann may have 1 unfinished trainers and has 1"):
        submit(bench, "ann")
    submit(bench, "bob")
    with bench.store.transaction():
        bench.act(bench.cluster.cancel(first, "", bench.now))
    submit(bench, "ann")
    assert len(bench.store.trainers()) == 3


def test_the_api_says_who_one_is_and_refuses_what_is_too_much(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        bench.store.put_owner(OwnerRow("ann", max_nodes=4, max_trainers=2, share_percent=12.5))
        mine, other, admin = (by(tokens, name) for name in ("ann", "bob", "root"))
        for number in range(2):
            made = await client.post("/v1/trainers", json={**SPEC, "name": f"mine{number}"}, headers=mine)
            assert made.status_code == 201
        refused = await client.post("/v1/trainers", json=SPEC, headers=mine)
        assert (refused.status_code, list(refused.json())) == (409, ["error"])
        bench.join("n1", "n2", "n3")
        found = (await client.get("/v1/me", headers=mine)).json()
        assert (found["owner"], found["role"], found["token"]) == ("ann", "user", "ann")
        limits = {"max_nodes": 4, "max_trainers": 2, "share": "12.5%", "max_weight": 1.0, "disk_bytes": None}
        assert found["limits"] == limits
        assert (found["use"]["nodes"], found["use"]["trainers"]) == (3, 2)
        nobody = (await client.get("/v1/me", headers=other)).json()
        assert nobody["limits"] == {**dict.fromkeys(limits), "max_weight": 1.0}
        assert set(nobody["use"].values()) == {0}
        assert (await client.get("/v1/owners", headers=other)).status_code == 403
        rows = (await client.get("/v1/owners", headers=admin)).json()["owners"]
        assert [(row["owner"], row["use"]["trainers"]) for row in rows] == [("ann", 2)]

    play(tmp_path, scene)


def test_names_are_each_owners_own(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        mine, other, admin = (by(tokens, name) for name in ("ann", "bob", "root"))
        for headers in (mine, other):
            made = await client.post("/v1/trainers", json={**SPEC, "name": "same"}, headers=headers)
            assert (made.status_code, made.json()["name"]) == (201, "same")
            assert (await client.get("/v1/trainers/same", headers=headers)).json()["id"] == made.json()["id"]
        assert (await client.get("/v1/trainers/same", headers=admin)).json()["id"] == "t2"
        own = await client.post("/v1/trainers", json={**SPEC, "name": "same"}, headers=admin)
        await client.post("/v1/trainers", json={**SPEC, "name": "same2"}, headers=other)
        assert (await client.get("/v1/trainers/same", headers=admin)).json()["id"] == own.json()["id"]
        assert (await client.get("/v1/trainers/same2", headers=admin)).status_code == 200
        assert (await client.post("/v1/trainers/same/cancel", headers=mine)).json()["id"] == "t1"
        assert (await client.get("/v1/trainers/t2", headers=other)).json()["state"] == "queued"
        assert (await client.get("/v1/trainers/t2", headers=mine)).status_code == 404

    play(tmp_path, scene)


# The command.


def test_the_command_sets_lists_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ["--state", str(tmp_path)]
    assert run(["owner", "set", "ann", "--max-nodes", "8", "--share", "25%", *state]) == 0
    assert capsys.readouterr().out == "ann: at most 8 nodes, a share of 25%\n"
    assert run(["owner", "set", "ann", "--max-trainers", "3", "--max-nodes", "none", *state]) == 0
    assert capsys.readouterr().out == "ann: at most 3 trainers, a share of 25%\n"
    assert run(["owner", "set", "böb <b>", "--share", "80%", *state]) == 0
    assert "105%" in capsys.readouterr().err
    assert run(["owner", "list", "--json", *state]) == 0
    shown = json.loads(capsys.readouterr().out)["owners"]
    limits = {"max_nodes": None, "max_trainers": 3, "share": "25%", "max_weight": None, "max_disk_mb": None}
    assert shown[0] == {"owner": "ann", **limits, "trainers": 0, "disk_bytes": 0}
    assert run(["owner", "list", *state]) == 0
    assert "böb <b>" in capsys.readouterr().out
    assert run(["owner", "remove", "ann", *state]) == 0
    assert run(["owner", "remove", "ann", *state]) == 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "give at least one limit"),
        (("--max-nodes", "-1"), "--max-nodes must be"),
        (("--max-nodes", "1e3"), "--max-nodes must be"),
        (("--max-trainers", "9999999"), "max trainers must be from 0"),
        (("--share", "half"), "a share must be a number of nodes"),
        (("--share", "120%"), "from 0% to 100%"),
        (("--share", "5", "--max-nodes", "4"), "more than max nodes"),
    ],
)
def test_a_wrong_call_is_one_line_and_changes_nothing(
    args: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["owner", "set", "ann", *args, "--state", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert run(["owner", "set", "a\nb", "--share", "1", "--state", str(tmp_path)]) == 2
    assert run(["owner", "list", "--json", "--state", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"owners": []}
