"""What was harvested adds up: whatever happens, the time of all owners and the unused time are the pool's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.cluster.report.efficiency import efficiency_of
from bftrainer.cluster.report.usage import UsageReport, account, hours
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.events import NodeJoined, OtherEvent, ServeStopped, TrainerSubmitted
from bftrainer.cluster.store.store import Store
from bftrainer.errors import InputError
from support.cluster.bench import Bench

NODES = ("n1", "n2", "n3", "n4", "n5")


@contextmanager
def bench(folder: Path) -> Iterator[Bench]:
    made = Bench(folder)
    try:
        yield made
    finally:
        made.store.close()


def submit(on: Bench, owner: str, nodes: str = "1-3") -> str:
    spec = TrainerSpec.model_validate({"script": "/train.py", "nodes": nodes})
    with on.store.transaction():
        trainer, effects = on.cluster.submit(spec, owner, on.now)
        on.act(effects)
    on.settle()
    return trainer


def adds_up(found: UsageReport) -> None:
    """The one thing that must hold, to the last microsecond."""
    assert sum(share.used_us for share in found.owners()) + found.unused_us == found.pool_us
    assert sum(one.used_us for one in found.trainers) == found.used_us
    assert found.unused_us >= 0
    assert sum(share.gpu_us for share in found.owners()) + found.unused_gpu_us == found.pool_gpu_us
    assert sum(one.gpu_us for one in found.trainers) == found.gpu_us
    assert found.unused_gpu_us >= 0
    for one in found.trainers:
        assert 0 <= one.computing_us <= one.used_us


Step = tuple[str, int, float]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("join", "take", "submit", "report", "finish", "cancel", "leaving", "crash", "wait")),
        st.integers(0, 9),
        st.floats(0.0, 100.0),
    ),
    min_size=3,
    max_size=30,
)


def play(on: Bench, steps: list[Step]) -> float:
    """A story, whatever of it is possible; the node-seconds of its pool."""
    held = 0.0
    for what, number, seconds in steps:
        node = NODES[number % len(NODES)]
        live = [name for name in on.cluster.trainers if on.cluster.trainers[name].job.outcome is None]
        mine = live[number % len(live)] if live else ""
        match what:
            case "join" if node not in on.agents and node not in on.cluster.nodes:
                on.join(node)
            case "take" if node in on.agents:
                on.take(node)
            case "submit" if len(live) < 4:
                submit(on, ("ann", "bob", "eve")[number % 3], ("1-3", "2-2", "1-8")[number % 3])
            case "report" if mine and on.members(mine):
                on.report(mine, samples=on.cluster.trainers[mine].job.progress.samples + number, step=number)
            case "finish" if mine and on.members(mine):
                on.finish(mine)
            case "cancel" if mine:
                with on.store.transaction():
                    on.act(on.cluster.cancel(mine, "enough", on.now))
                on.settle()
            case "leaving" if node in on.agents and node in on.cluster.nodes:
                with on.store.transaction():
                    on.act(on.cluster.leaving(node, 5.0, on.now))
                on.settle()
            case "crash":
                on.restart()
        passing = min(seconds, 9.0) if number % 2 else seconds / 20
        held += len(on.cluster.planner.state.pool) * passing
        on.pass_time(passing)
    return held


@given(STEPS, st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_owners_and_the_unused_make_up_the_pool_in_any_window_of_any_story(
    steps: list[Step], one: float, other: float
) -> None:
    with tempfile.TemporaryDirectory() as folder, bench(Path(folder)) as on:
        began = on.now
        on.gpus = {"n1": 4, "n4": 1, "n5": 8}
        on.join("n1", "n2")
        submit(on, "ann")
        on.pass_time(1.0)
        held = 2.0 + play(on, steps)
        whole = account(on.store, now=on.now)
        adds_up(whole)
        rows = {row.id: row.node_seconds for row in on.store.trainers()}
        counted = rows | {name: live.held.node_seconds(on.now) for name, live in on.cluster.trainers.items()}
        assert sum(counted.values()) <= on.cluster.planner.pool_time.node_seconds(on.now) + 1e-3
        if not any(what == "crash" for what, _, _ in steps):  # with which some seconds of the counters are lost
            told = {usage.trainer: usage.used_us / 1e6 for usage in whole.trainers}
            assert counted == pytest.approx({name: told.get(name, 0.0) for name in counted}, abs=1e-3)
            rows = {row.id: row.gpu_seconds for row in on.store.trainers()}
            counted = rows | {name: live.held.gpu_seconds(on.now) for name, live in on.cluster.trainers.items()}
            told = {usage.trainer: usage.gpu_us / 1e6 for usage in whole.trainers}
            assert counted == pytest.approx({name: told.get(name, 0.0) for name in counted}, abs=1e-2)
            pool_gpu_s = on.cluster.planner.pool_time.gpu_seconds(on.now)
            assert whole.pool_gpu_us / 1e6 == pytest.approx(pool_gpu_s, abs=1e-2)
        assert whole.pool_us == pytest.approx(held * 1e6, abs=1 + 5 * len(steps))
        span = on.now - began
        cut, cut2 = sorted((began + span * one, began + span * other))
        parts = []
        for start, end in ((began, cut), (cut, cut2), (cut2, on.now)):
            if end - start > 1e-3:
                parts.append(account(on.store, start, end, now=on.now))
                adds_up(parts[-1])
        slack = 40 * len(parts)  # a window's borders are whole microseconds, and up to ten nodes cross them
        assert sum(part.pool_us for part in parts) == pytest.approx(whole.pool_us, abs=slack + 20_000)
        if len(parts) == 3:
            assert sum(part.pool_us for part in parts) == pytest.approx(whole.pool_us, abs=slack)
            assert sum(part.computing_us for part in parts) == pytest.approx(whole.computing_us, abs=slack)
            assert sum(part.samples for part in parts) == pytest.approx(whole.samples, abs=1e-3)


def test_node_time_is_told_by_owner_and_by_trainer(tmp_path: Path) -> None:
    with bench(tmp_path) as on:
        on.join("n1", "n2", "n3")
        on.pass_time(10)  # nobody has work: unused
        mine = submit(on, "ann", "1-2")
        on.pass_time(100)
        on.report(mine, samples=1000, step=1)
        on.finish(mine)
        on.pass_time(20)
        found = account(on.store, now=on.now)
        adds_up(found)
        assert found.pool_us == 3 * 130 * 1_000_000
        (share,) = found.owners()
        assert (share.owner, share.used_us, share.samples) == ("ann", 2 * 100 * 1_000_000, 1000)
        assert found.unused_us == found.pool_us - share.used_us
        assert hours(found.pool_us) == pytest.approx(390 / 3600)
        (one,) = found.trainers
        assert one.finished
        assert found.most_nodes == 3


def test_gpu_time_is_that_of_the_gpus_of_assigned_nodes(tmp_path: Path) -> None:
    with bench(tmp_path) as on:
        on.gpus = {"n1": 4, "n2": 2}
        on.join("n1", "n2", "n3")
        on.pass_time(10)
        mine = submit(on, "ann", "3-3")
        on.pass_time(100)
        on.take("n2")
        on.pass_time(5)
        on.join("n2")
        on.pass_time(50)
        counted = on.cluster.trainers[mine].held
        assert counted.node_seconds(on.now) == 3 * 150
        assert counted.gpu_seconds(on.now) == 6 * 150
        assert on.cluster.planner.pool_time.gpu_seconds(on.now) == 6 * 160 + 4 * 5
        on.finish(mine)
        found = account(on.store, now=on.now)
        adds_up(found)
        (one,) = found.trainers
        assert (one.used_us, one.gpu_us) == (3 * 150 * 1_000_000, 6 * 150 * 1_000_000)
        assert found.pool_gpu_us == (6 * 160 + 4 * 5) * 1_000_000
        assert on.store.totals.of_finished() == {"ann": (1, 450.0, 0, 900.0)}


def test_gpu_time_goes_on_while_no_controller_runs_and_follows_what_a_node_has_after_that(tmp_path: Path) -> None:
    with bench(tmp_path) as on:
        on.gpus = {"n1": 4}
        on.join("n1")
        mine = submit(on, "ann")
        on.pass_time(100)
        on.now += 5
        on.crash()
        on.gpus = {"n1": 2}  # two GPUs fell out of the node
        on.open()
        on.pass_time(10)  # its agent is awaited
        on.rejoin("n1")
        on.settle()
        on.pass_time(100)
        assert on.cluster.trainers[mine].held.gpu_seconds(on.now) == pytest.approx(4 * 110 + 2 * 100, abs=4 * 5)
        found = account(on.store, now=on.now)
        adds_up(found)
        assert found.gpu_us == found.pool_gpu_us == (4 * 115 + 2 * 100) * 1_000_000
        assert [event.data for event in on.store.events(kind="node.gpus")] == [{"gpus": 2}]
        assert on.store.nodes()[0].gpus == 2


def test_what_members_lose_in_a_pause_is_used_but_not_computing(tmp_path: Path) -> None:
    with bench(tmp_path) as on:
        on.join("n1")
        submit(on, "ann", "1-4")
        on.pass_time(50)
        on.join("n2")  # every change takes the imaginary members 0.2 s
        on.pass_time(50)
        (one,) = account(on.store, now=on.now).trainers
        assert one.used_us == 150 * 1_000_000
        assert one.computing_us == one.used_us - 200_000
        assert one.rescales == 1


def test_samples_across_the_borders_of_a_window_are_shared_out_by_what_computed(tmp_path: Path) -> None:
    with bench(tmp_path) as on:
        on.join("n1")
        mine = submit(on, "ann", "1-1")
        began = on.now
        for made in range(4, 401, 4):
            on.pass_time(1)
            on.report(mine, samples=made, step=made)
        on.finish(mine)
        first = account(on.store, began, began + 50, now=on.now)
        second = account(on.store, began + 50, on.now, now=on.now)
        assert first.samples == pytest.approx(200, abs=8)  # what a worker says counts from when it is stored
        assert first.samples + second.samples == pytest.approx(400)


def test_samples_that_a_loss_took_back_count_in_no_window(tmp_path: Path) -> None:
    with bench(tmp_path) as on:
        on.join("n1")
        mine = submit(on, "ann")
        for node, samples in (("n1", 800), ("n2", 300), ("n2", 600)):
            if node not in on.agents:
                on.take("n1")
                on.join(node)  # and training goes on from a snapshot
            on.report(mine, samples=samples, step=samples)
            on.pass_time(60.0)
        middle = on.now - 120.0
        parts = [account(on.store, None, middle, now=on.now), account(on.store, middle, None, now=on.now)]
        whole = account(on.store, now=on.now)
        assert whole.samples == 600
        assert sum(part.samples for part in parts) == pytest.approx(600)


def test_nodes_that_were_gone_when_the_controller_came_back_count_until_it_went(tmp_path: Path) -> None:
    with bench(tmp_path) as on:
        on.join("n1", "n2")
        submit(on, "ann", "1-2")
        on.pass_time(10)
        with on.store.transaction():
            on.store.log(on.now, ServeStopped(drained=False))
        on.crash()
        on.now += 3600.0
        del on.agents["n2"]
        on.workers = {w.id: w for w in on.workers.values() if w.node != "n2"}
        on.open()
        on.rejoin("n1")
        on.settle()
        on.pass_time(20)
        found = account(on.store, now=on.now)
        adds_up(found)
        assert found.pool_us == (10 + 3600 + 20 + 10) * 1_000_000


def test_a_node_that_was_leaving_when_the_controller_died_counts_again_once_it_is_back(tmp_path: Path) -> None:
    with bench(tmp_path) as on:
        on.slow = True  # its worker does not leave at once
        on.join("n1", "n2")
        submit(on, "ann", "2-2")
        on.pass_time(10)
        with on.store.transaction():
            on.act(on.cluster.pause(60.0, on.now))
            on.store.log(on.now + 1.0, TrainerSubmitted("t9", "x", "x"))  # the last that is known of that life
        on.crash()  # and the agents with it
        on.agents.clear()
        on.workers.clear()
        on.now += 100.0
        on.open()
        on.pass_time(16.0)  # agents.reattach_s, and a little more
        on.pass_time(1.0)
        assert [event.data["reason"] for event in on.store.events(kind="node.left")] == ["did not come back"] * 2
        with on.store.transaction():
            on.act(on.cluster.resume(on.now))
        on.join("n1", "n2")
        on.pass_time(50)
        found = account(on.store, now=on.now)
        adds_up(found)
        assert found.pool_us == 2 * (10 + 50) * 1_000_000


def test_a_dry_run_holds_nothing(tmp_path: Path) -> None:
    with bench(tmp_path) as on:
        with on.store.transaction():
            on.store.log(1000.0, NodeJoined("n1", "n1", "none"))
            on.store.log(1001.0, OtherEvent("decision", data={"nodes": {"t1": ["n1"]}, "counts": {"t1": 1}}))
        found = account(on.store, now=2000.0)
        adds_up(found)
        assert found.pool_us == 0


def test_a_log_whose_beginning_was_dropped_is_told_of_from_there_on(tmp_path: Path) -> None:
    with bench(tmp_path) as on:
        on.gpus = {"n1": 4, "n3": 2}
        on.join("n1", "n2", "n3")
        submit(on, "ann", "1-2")
        on.pass_time(100)
        before = account(on.store, now=on.now)
        on.take("n3")
        on.pass_time(10)
        on.join("n4")
        on.pass_time(10)
        kept = on.store.event_span().last - next(e.seq for e in on.store.all_events(("node.left",))) + 1
        on.store.trim_events(kept)
        found = account(on.store, 1.0, now=on.now)
        adds_up(found)
        assert any("dropped" in note for note in found.notes)
        assert found.pool_us == (2 * 10 + 3 * 10) * 1_000_000
        assert found.pool_gpu_us == 4 * 20 * 1_000_000
        assert before.pool_us == 300 * 1_000_000


def test_a_clock_that_is_set_back_takes_nothing_away(tmp_path: Path) -> None:
    with bench(tmp_path) as on:
        on.join("n1")
        on.pass_time(100)
        on.now -= 50
        on.join("n2")
        on.pass_time(10)
        found = account(on.store, now=on.now)
        adds_up(found)


@pytest.mark.parametrize(
    ("start", "end", "says"),
    [(5.0, 4.0, "after its start"), (1e9, 2e9, "no events in that time"), (1.0, 2.0, "no events in that time")],
)
def test_a_window_without_anything_is_refused(tmp_path: Path, start: float, end: float, says: str) -> None:
    with bench(tmp_path) as on:
        on.join("n1")
        on.pass_time(10)
        with pytest.raises(InputError, match=says):
            account(on.store, start, end, now=on.now)


def test_nothing_to_report_is_said(tmp_path: Path) -> None:
    with Store.open(tmp_path / "empty.db") as store, pytest.raises(InputError, match="nothing has happened"):
        account(store)


def test_the_efficiency_of_a_window_is_between_nothing_and_the_bound(tmp_path: Path) -> None:
    with bench(tmp_path) as on:
        on.join("n1", "n2")
        mine = submit(on, "ann", "1-4")
        for step in range(1, 9):
            on.pass_time(10)
            world = len(on.members(mine))
            on.report(mine, samples=step * 150, step=step, rates={str(world): 8.0 * world})
        found = account(on.store, on.now - 40, on.now, now=on.now)
        judged = efficiency_of(on.store, found, on.policy)
        assert judged.why == ""
        assert judged.efficiency is not None
        assert judged.bound is not None
        assert 0 < judged.efficiency <= judged.bound * 1.05 <= 1.3
        nothing = account(on.store, now=on.now)
        object.__setattr__(nothing, "trainers", ())
        assert efficiency_of(on.store, nothing, on.policy).why == "no sample was made"
