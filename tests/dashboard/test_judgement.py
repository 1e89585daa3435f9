"""What efficiency, bound and work done mean: why the bound may be above 100 %, and what replays are charged."""

from __future__ import annotations

from pathlib import Path

import pytest

from bftrainer.cluster.jobs.learning import Learned
from bftrainer.cluster.report.efficiency import LiveEfficiency, judge
from bftrainer.cluster.report.rerun import _RunLog, as_study
from bftrainer.cluster.store.events import NodeJoined, NodeLeaving, NodeLeft, Rescaled
from bftrainer.cluster.store.scheduling_events import learned_event
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.core.curve import Curve
from bftrainer.core.trainer import Trainer
from bftrainer.scheduler import Policy


def judged(folder: Path, later: int) -> LiveEfficiency:
    """Two trainers for at most two nodes each, with 200 and 300 samples to make at one a second and node, in 500
    node-seconds: `later` nodes come after 100 seconds, or four are there and three leave then.
    """
    with Store.open(folder / FILE) as store, store.transaction():
        for i in range(4):
            store.log(0.0 if i < 4 - later else 100.0, NodeJoined(f"n{i}", "h", "a"))
        for name, work in (("a", 200), ("b", 300)):
            spec = {"script": "/t.py", "min_nodes": 1, "max_nodes": 2}
            row = store.add_trainer(name=name, owner="ann", spec=spec, time=0.0)
            curve = Curve((0, 1, 2), (0.0, 1.0, 2.0))
            known = Trainer(row.id, curve, 1, 2, 0.0, 0.0, submit=0.0, owner="ann")
            store.log(0.0, learned_event(known))
            store.update_trainer(row.id, state="done", started=0.0, ended=200.0, samples=work, total=work)
        for i in range(1, 4) if not later else ():
            store.log(100.0, NodeLeft(f"n{i}", "taken"))
    with Store.open(folder / FILE) as store:
        return judge(store, Policy())


def test_a_pool_that_is_large_while_there_is_much_to_do_beats_a_constant_one(tmp_path: Path) -> None:
    found = judged(tmp_path, later=0)
    assert found.eq_nodes == 2.5
    # Of two and a half nodes the first trainer would have had two up to 100 s, and then the other could use but two of
    # them, up to 225 s. The pool that shrank left nothing unused, and was done at 200 s.
    assert found.bound == pytest.approx(225 / 200)
    assert found.efficiency == pytest.approx(225 / 200), "this run lost nothing"


def test_a_pool_that_grows_late_does_not(tmp_path: Path) -> None:
    assert judged(tmp_path, later=3).bound <= 1.0


def test_a_replay_takes_rescales_that_were_never_measured_to_cost_what_the_scheduler_took_them_to(
    tmp_path: Path,
) -> None:
    with Store.open(tmp_path / FILE) as store, store.transaction():
        store.log(0.0, NodeJoined("n1", "h", "a"))
        for name, told in (("opaque", {}), ("told", {"up_s": 3.0})):
            spec = {"script": "/t.py", "min_nodes": 1, "max_nodes": 2, **told}
            row = store.add_trainer(name=name, owner="ann", spec=spec, time=0.0)
            known = Trainer(row.id, Curve((0, 1, 2), (0.0, 1.0, 2.0)), 1, 2, 10.0, 10.0, submit=0.0, owner="ann")
            store.log(0.0, learned_event(known))
            learned = Learned(None, 10.0, 10.0).as_json()
            store.update_trainer(row.id, state="done", started=0.0, ended=200.0, samples=9, total=9, learned=learned)
        study = as_study(store)
    assert [(trainer.up_s, trainer.down_s) for trainer in study.trainers] == [(10.0, 10.0), (3.0, 10.0)]


def test_a_replay_takes_the_rates_that_were_measured_in_the_end_and_not_those_of_the_last_decision(
    tmp_path: Path,
) -> None:
    with Store.open(tmp_path / FILE) as store, store.transaction():
        store.log(0.0, NodeJoined("n1", "h", "a"))
        row = store.add_trainer(
            name="a", owner="ann", spec={"script": "/t.py", "min_nodes": 1, "max_nodes": 4}, time=0.0
        )
        curve = Curve((0, 1, 2, 3, 4), (0.0, 100.0, 180.0, 240.0, 280.0))
        store.log(0.0, learned_event(Trainer(row.id, curve, 1, 4, 0.0, 0.0, submit=0.0, owner="ann")))
        learned = {**Learned().as_json(), "in_use": {"1": 90.0, "2": 162.0}}
        store.update_trainer(row.id, state="done", started=0.0, ended=200.0, samples=9, total=9, learned=learned)
        (trainer,) = as_study(store).trainers
    measured = [trainer.curve.rate(nodes) for nodes in (1, 2, 3, 4)]
    assert measured == pytest.approx([90.0, 162.0, 216.0, 252.0], rel=0.01), "the shape is as the scheduler was told"


def started(folder: Path, *, work: int | None) -> Store:
    """One trainer on two nodes for 100 s, at one sample per second and node. Workers take 10 s to start."""
    store = Store.open(folder / FILE)
    with store.transaction():
        for node in ("n1", "n2"):
            store.log(0.0, NodeJoined(node, "h", "a"))
        spec = {"script": "/t.py", "min_nodes": 1, "max_nodes": 2}
        row = store.add_trainer(name="a", owner="ann", spec=spec, time=0.0)
        known = Trainer(row.id, Curve((0, 1, 2), (0.0, 1.0, 2.0)), 1, 2, 0.0, 0.0, submit=0.0, owner="ann")
        store.log(0.0, learned_event(known))
        store.log(11.0, Rescaled(row.id, 1, 0, 2, 1.0, 0.5, 0.5, False, (11.0, 11.0), "start"))
        store.log(100.0, NodeLeaving("n1", 5.0))
        store.log(100.0, NodeLeft("n2", "taken"))
        learned = Learned(None, 0.0, 0.0).as_json()
        ended = {"state": "done", "ended": 100.0} if work else {"state": "running"}
        store.update_trainer(row.id, started=0.0, samples=180, total=work, learned=learned, **ended)
    return store


def test_replays_are_charged_the_starts_that_were_measured(tmp_path: Path) -> None:
    with started(tmp_path, work=None) as store:
        study, found = as_study(store), judge(store, Policy(), endless=True)
    assert study.start_s == study.trainers[0].start_s == 10.0, "the pause of the rescale is not part of the start"
    assert study.unannounced == 0.5
    assert found.start_s == 10.0
    # The best is 200 samples. Whoever decides, the nodes compute nothing for the first 10 of 100 s.
    assert found.work.live == pytest.approx(0.9)
    assert found.work.simulated == pytest.approx(0.9)
    assert found.work.equal == pytest.approx(0.9)


def test_work_that_ends_gives_a_makespan_ratio_and_the_same_work_done(tmp_path: Path) -> None:
    with started(tmp_path, work=180) as store:
        found = judge(store, Policy())
    assert found.efficiency == found.simulated == pytest.approx(0.9)
    assert found.work.live == pytest.approx(0.9)
    assert found.bound == pytest.approx(1.0)


@pytest.mark.parametrize(("reason", "unannounced"), [("SIGTERM", 0.0), ("connection closed", 1.0)])
def test_an_agent_that_leaves_at_a_signal_has_let_its_worker_save(
    tmp_path: Path, reason: str, unannounced: float
) -> None:
    with started(tmp_path, work=None) as store:
        with store.transaction():
            store.log(50.0, NodeJoined("n3", "h", "a"))
            store.log(60.0, NodeLeft("n3", reason))
        rows = [row for row in store.all_events() if row.node not in ("n1", "n2") or row.kind == "node.joined"]
        assert _RunLog.read(rows).unannounced == unannounced
