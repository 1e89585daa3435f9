"""Events keep their form in the database, whichever version wrote them; the pool is replayed from them."""

from __future__ import annotations

import json
import tarfile
from dataclasses import fields
from pathlib import Path

import pytest

from bftrainer.allocate.problem import Limits
from bftrainer.cluster.store import events
from bftrainer.cluster.store.event_columns import columns_of, event_of
from bftrainer.cluster.store.events import (
    Decided,
    HeadJoined,
    HeadLeft,
    LauncherChanged,
    LogEvent,
    NodeGpusChanged,
    NodeHandedOver,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeOwned,
    OtherEvent,
    OwnersChanged,
    PoolNote,
    PoolPaused,
    PoolResumed,
    Rescaled,
    ServeRestored,
    ServeStarted,
    ServeStopped,
    StateChanged,
    TrainerLearned,
    TrainerPruned,
    TrainerSubmitted,
    TypedEvent,
    WeightLimited,
    WorkerEnded,
    WorkerFailed,
    WorkerStarted,
    WorkerWarned,
)
from bftrainer.cluster.store.replay import PoolReplay
from bftrainer.cluster.store.rows import EventRow
from bftrainer.cluster.store.scheduling_events import decision_limits, learned_event, learned_trainer
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.core.curve import Curve
from bftrainer.core.trainer import Trainer

OLD_STATE = Path(__file__).with_name("state-0.1.0.tar.gz")
TRAINER = Trainer("t1", Curve((0, 1, 2), (0.0, 5.0, 9.5)), 1, 2, 1.5, 0.5, submit=7.0, owner="ann", weight=2.0)
LIMITS = {"caps": {"ann": 2}, "shares": {"bob": 1}}

STORED: list[tuple[LogEvent, str, str, str, str]] = [
    (NodeJoined("n1", "h1", "a1"), "node.joined", "", "n1", '{"host":"h1","agent":"a1"}'),
    (NodeJoined("n1", "h1", "a1", 4), "node.joined", "", "n1", '{"host":"h1","agent":"a1","gpus":4}'),
    (NodeGpusChanged("n1", 2), "node.gpus", "", "n1", '{"gpus":2}'),
    (NodeOwned("n1", "ann"), "node.owned", "", "n1", '{"owner":"ann"}'),
    (
        NodeHandedOver("n1", "ann", "bob", 1.5),
        "node.handed_over",
        "",
        "n1",
        '{"before":"ann","owner":"bob","took_s":1.5}',
    ),
    (HeadJoined("head", "h1", "a1"), "head.joined", "", "head", '{"host":"h1","agent":"a1"}'),
    (NodeLeaving("n1", 2.0), "node.leaving", "", "n1", '{"grace_s":2.0}'),
    (NodeLeft("n1", "silent"), "node.left", "", "n1", '{"reason":"silent"}'),
    (HeadLeft("head", "gone"), "head.left", "", "head", '{"reason":"gone"}'),
    (WorkerStarted("t1", "n1", "t1-1"), "worker.started", "t1", "n1", '{"worker":"t1-1"}'),
    (
        WorkerEnded("t1", "n1", "t1-1", None, "lost"),
        *("worker.ended", "t1", "n1", '{"worker":"t1-1","status":null,"outcome":"lost"}'),
    ),
    (
        WorkerWarned("t1", "n1", "t1-1", "no GPU"),
        *("worker.warned", "t1", "n1", '{"worker":"t1-1","warning":"no GPU"}'),
    ),
    (
        WorkerFailed("t1", "n1", "t1-1", "died", 2, 10.0),
        *("worker.failed", "t1", "n1", '{"worker":"t1-1","reason":"died","failures":2,"retry_s":10.0}'),
    ),
    (TrainerSubmitted("t1", "a", "ann"), "trainer.submitted", "t1", "", '{"name":"a","owner":"ann"}'),
    (StateChanged("t1", "", "queued", ""), "trainer.state", "t1", "", '{"from":"","to":"queued","reason":""}'),
    (TrainerPruned("t1", "log", 7, "ann"), "trainer.pruned", "t1", "", '{"part":"log","bytes":7,"by":"ann"}'),
    (
        LauncherChanged("t1", "ddp", "torchrun", "new_group"),
        *("trainer.launcher", "t1", "", '{"before":"ddp","after":"torchrun","why":"new_group"}'),
    ),
    (
        learned_event(TRAINER),
        *("trainer.learned", "t1", ""),
        '{"name":"t1","curve":{"nodes":[0,1,2],"rates":[0.0,5.0,9.5]},"min_nodes":1,"max_nodes":2,"up_s":1.5,'
        '"down_s":0.5,"submit":7.0,"owner":"ann","weight":2.0,"model":""}',
    ),
    (
        Rescaled("t1", 3, 1, 2, 0.5, None, 0.1, False, [1.5], "grow", {"form": 0.25}),
        *("rescale", "t1", ""),
        '{"generation":3,"world_before":1,"world":2,"pause_s":0.5,"form_s":null,"sync_s":0.1,"preempted":false,'
        '"start_s":[1.5],"why":"grow","parts":{"form":0.25}}',
    ),
    (
        Decided("exact", LIMITS, 3, None, {"t1": 2}, {"t1": ["n1", "n2"]}, [{"trainer": "t1"}], ["grows"], 1, 0.25),
        *("decision", "", ""),
        '{"allocator":"exact","limits":{"caps":{"ann":2},"shares":{"bob":1}},"pool":3,"horizon_s":null,'
        '"counts":{"t1":2},"nodes":{"t1":["n1","n2"]},"changes":[{"trainer":"t1"}],"reasons":["grows"],"waiting":1,'
        '"ms":0.25}',
    ),
    (WeightLimited("t1", 9.0, 1.0), "trainer.weight-limited", "t1", "", '{"weight":9.0,"max_weight":1.0}'),
    (OwnersChanged([{"owner": "ann"}]), "owners.changed", "", "", '{"owners":[{"owner":"ann"}]}'),
    (PoolPaused(), "pool.paused", "", "", "{}"),
    (PoolResumed(), "pool.resumed", "", "", "{}"),
    (PoolNote("killed", {"node": "n1"}), "pool.killed", "", "", '{"node":"n1"}'),
    (ServeStarted("local"), "serve.started", "", "", '{"pool":"local"}'),
    (ServeRestored(2, 3), "serve.restored", "", "", '{"trainers":2,"nodes":3}'),
    (ServeStopped(True), "serve.stopped", "", "", '{"drained":true}'),
    (OtherEvent("future", "t1", "n1", {"a": 1}), "future", "t1", "n1", '{"a":1}'),
]


@pytest.mark.parametrize(("event", "kind", "trainer", "node", "data"), STORED, ids=[row[1] for row in STORED])
def test_an_event_is_stored_as_ever_and_read_again(
    event: LogEvent, kind: str, trainer: str, node: str, data: str, tmp_path: Path
) -> None:
    with Store.open(tmp_path / FILE) as store:
        store.log(1.5, event)
        row = ("kind", "trainer", "node", "data")
        assert store._db.rows(f"SELECT {', '.join(row)} FROM events") == [(kind, trainer, node, data)]
        (read,) = store.events()
        assert columns_of(event_of(read)) == (kind, trainer, node, json.loads(data))
        if kind != TrainerLearned.kind:  # its curve is written as tuples
            assert event_of(read) == event


def test_every_kind_is_in_the_table_above() -> None:
    known = {each for each in vars(events).values() if isinstance(each, type) and issubclass(each, TypedEvent)}
    assert known - {type(row[0]) for row in STORED} == {TypedEvent, events.ExcerptEnd}


def test_events_of_version_0_1_0_are_read_completely(tmp_path: Path) -> None:
    with tarfile.open(OLD_STATE) as archive:
        archive.extractall(tmp_path, filter="data")
    (path,) = tmp_path.rglob(FILE)
    with Store.open(path) as store:
        rows = list(store.all_events())
    assert len({row.kind for row in rows}) >= 8
    for row in rows:
        event = event_of(row)
        assert not isinstance(event, OtherEvent)
        assert not getattr(event, "extra", None)
        again = columns_of(event)
        assert again == (row.kind, row.trainer, row.node, row.data)
        assert list(again.data) == list(row.data)


def test_data_of_other_versions_survive() -> None:
    row = EventRow(1, 1.0, "node.left", "", "n1", {"reason": "taken", "by": "job 7"})
    event = event_of(row)
    assert event == NodeLeft("n1", "taken", extra={"by": "job 7"})
    assert columns_of(event).data == row.data
    unknown = EventRow(2, 1.0, "node.moved", "t1", "n1", {"to": "n2"})
    assert columns_of(event_of(unknown)) == ("node.moved", "t1", "n1", {"to": "n2"})
    learned = columns_of(learned_event(TRAINER)).data | {"colour": "red"}
    read = event_of(EventRow(3, 1.0, "trainer.learned", "t1", "", json.loads(json.dumps(learned))))
    assert isinstance(read, TrainerLearned)
    assert learned_trainer(read) == TRAINER


@pytest.mark.parametrize("kind", [row[1] for row in STORED])
@pytest.mark.parametrize("value", [None, "text", 7, 0.5, True, [1], {"a": 1}])
def test_a_missing_or_damaged_value_is_empty(kind: str, value: object) -> None:
    keys = ("reason", "from", "to", "generation", "nodes", "pause_s", "start_s", "worker", "drained")
    for data in ({}, dict.fromkeys(keys, value)):
        event = event_of(EventRow(1, 1.0, kind, "t1", "n1", data))
        if isinstance(event, TypedEvent):
            types = {"str": str, "int": int, "float": int | float, "bool": bool}
            for each in fields(event):
                if str(each.type) in types:
                    assert isinstance(getattr(event, each.name), types[str(each.type)]), each.name


def test_a_decision_tells_the_limits_that_were_in_force() -> None:
    decided = Decided("exact", LIMITS, 0, None, {}, {}, [], [], 0, 0.0)
    assert decision_limits(decided) == Limits({"ann": 2}, {"bob": 1})


def replay(*told: LogEvent) -> tuple[PoolReplay, list[tuple[str, bool, float | None]]]:
    pool = PoolReplay()
    rows = [EventRow(n, float(n), *columns_of(event)) for n, event in enumerate(told, 1)]
    return pool, [(at.event.kind, at.lost, at.since) for at in pool.read(rows)]


def test_a_node_that_announces_its_departure_is_lost_once() -> None:
    pool, found = replay(
        NodeJoined("n1", "", ""),
        NodeLeaving("n1", 2.0),
        NodeLeft("n1", ""),
        NodeJoined("n1", "", ""),
        NodeLeft("n1", ""),
    )
    assert found == [
        ("node.joined", False, None),
        ("node.leaving", True, 1.0),
        ("node.left", False, None),
        ("node.joined", False, None),
        ("node.left", True, 4.0),
    ]
    assert (pool.here, pool.gone) == ({}, {"n1"})


def test_a_node_that_joined_before_the_log_begins_is_lost_too() -> None:
    pool, found = replay(NodeLeft("n1", ""), NodeJoined("n2", "", ""), NodeLeft("n1", ""))
    assert found == [("node.left", True, None), ("node.joined", False, None), ("node.left", False, None)]
    assert pool.here == {"n2": 2.0}
