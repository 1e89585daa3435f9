"""Decisions are stored as changes: readers see whole decisions, and every figure is as if they were stored in full."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.cluster.history.decisions import read_decisions
from bftrainer.cluster.report.rerun import KINDS, check
from bftrainer.cluster.report.usage import account
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store import assignments
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.events import Decided, OtherEvent
from bftrainer.cluster.store.json_columns import encoded
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.errors import BFTrainerError
from support.cluster.bench import Bench

Nodes = dict[str, list[str]]


def decided(nodes: Nodes, **counts: int) -> Decided:
    counts = {name: len(given) for name, given in nodes.items()} | counts
    return Decided("exact", None, 9, 120.0, counts, nodes, [], [], 0, 1.0)


def stored_in_full(path: Path) -> Path:
    """A copy of a database with its decisions as version 0.1.0 stored them."""
    copy = path.with_name("full.db")
    with Store.open(path, read_only=True) as store:
        store.backup(copy)
        rows = [(encoded(row.data), row.seq) for row in store.all_events((Decided.kind,))]
    with sqlite3.connect(copy) as db:
        db.execute("DROP TRIGGER events_refuse_update")
        db.executemany("UPDATE events SET data = ? WHERE seq = ?", rows)
    db.close()
    return copy


def churned(folder: Path, seed: int, steps: int = 60) -> Bench:
    """A cluster through which nodes and trainers have gone."""
    bench, rng = Bench(folder), random.Random(seed)
    for step in range(steps):
        match rng.choice(("join", "join", "take", "submit", "wait")):
            case "join":
                bench.join(f"n{step}")
            case "take" if bench.cluster.nodes:
                bench.take(rng.choice(sorted(bench.cluster.nodes)))
            case "submit" if step % 3 == 0:
                spec = TrainerSpec.model_validate({"script": "/train.py", "nodes": f"1-{rng.randint(1, 6)}"})
                with bench.store.transaction():
                    _, effects = bench.cluster.submit(spec, rng.choice(("ann", "bob")), bench.now)
                    bench.act(effects)
                bench.settle()
            case _:
                bench.pass_time(rng.choice((1, 5, 20)))
    bench.pass_time(5)
    return bench


@pytest.mark.parametrize("seed", range(3))
def test_reports_and_replays_are_the_same_for_decisions_in_changes_and_in_full(tmp_path: Path, seed: int) -> None:
    bench = churned(tmp_path, seed)
    policy, now, path = bench.cluster.planner.scheduler.policy, bench.now, bench.store.path
    bench.store.close()
    full = stored_in_full(path)
    with sqlite3.connect(path) as db:
        ((short,),) = db.execute("""SELECT count(*) FROM events WHERE data GLOB '{"moved":*'""")
    db.close()
    assert short > 5
    with Store.open(path) as new, Store.open(full) as old:
        assert list(new.all_events()) == list(old.all_events())
        assert account(new, now=now) == account(old, now=now)
        checked = check(new.all_events(KINDS), policy)
        assert checked == check(old.all_events(KINDS), policy)
        assert checked.decisions > 5
        assert checked.mismatches == ()
        for kind in ("", Decided.kind):
            for after in (None, 0, 7, 40):
                assert new.events(after=after, limit=25, kind=kind) == old.events(after=after, limit=25, kind=kind)
    for owner in (None, "ann"):
        pages = []
        for each in (path, full):
            db = Database.open(each, read_only=True)
            pages.append(read_decisions(db, 1 << 60, 50, owner))
            db.close()
        assert pages[0] == pages[1]


def test_a_decision_of_ten_thousand_nodes_takes_little_room(tmp_path: Path) -> None:
    nodes = {f"t{n}": [f"node{i:05d}" for i in range(n, 10_000, 10)] for n in range(10)}
    with Store.open(tmp_path / FILE) as store:
        for number in range(300):
            who = f"t{number % 10}"
            nodes = {**nodes, who: [*nodes[who][1:], f"new{number:05d}"]}
            store.log(float(number), decided(nodes))
        size = store._db.rows("SELECT avg(length(data)) FROM events")[0][0]
        assert size < 2000
        assert store.events(limit=1)[0].data["nodes"] == nodes


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_every_decision_is_read_as_it_was_logged_wherever_the_log_is_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    names = [f"n{i}" for i in range(8)]
    told: list[tuple[int, dict[str, Any]]] = []
    assignments_full = data.draw(st.integers(1, 6))
    with pytest.MonkeyPatch.context() as patch, Store.open(tmp_path_factory.mktemp("log") / FILE) as store:
        patch.setattr(assignments, "FULL_EVERY", assignments_full)
        for number in range(data.draw(st.integers(1, 25))):
            places = data.draw(st.lists(st.sampled_from(("t1", "t2", "t3", "")), min_size=8, max_size=8))
            order = data.draw(st.permutations(names)) if data.draw(st.booleans()) else names
            nodes: Nodes = {}
            for node, who in zip(order, places, strict=True):
                if who:
                    nodes.setdefault(who, []).append(node)
            counts = {"t4": 0} if data.draw(st.booleans()) else {}
            what = data.draw(st.sampled_from(("log", "log", "log", "roll back", "trim", "other")))
            event = decided(nodes, **counts)
            if what == "roll back":
                with suppress(BFTrainerError), store.transaction():
                    store.log(float(number), event)
                    raise BFTrainerError("undo")
            elif what == "other":
                store.log(float(number), OtherEvent("x"))
            else:
                seq = store.log(float(number), event)
                told.append((seq, {"nodes": event.nodes, "counts": event.counts}))
            if what == "trim":
                upto = data.draw(st.integers(0, store.event_span().last))
                store.event_log.trim(upto)
                told = [row for row in told if row[0] > upto]
        seen = _seen(store.all_events((Decided.kind,)))
        assert seen == told
        for seq, whole in told:
            assert _seen(store.events(after=seq - 1, limit=1)) == [(seq, whole)]


def _seen(rows: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(row.seq, {key: row.data[key] for key in ("nodes", "counts")}) for row in rows]


def test_a_damaged_decision_is_read_as_one_without_nodes(tmp_path: Path) -> None:
    rows: Sequence[Any] = ({"nodes": 7}, {}, {"nodes": {"t1": "n1"}})
    with Store.open(tmp_path / FILE) as store:
        for number, data in enumerate(rows):
            store.log(float(number), OtherEvent("decision", data=data))
        store.log(9.0, decided({"t1": ["n1"]}))
        assert [row.data.get("nodes") for row in store.all_events()][-1] == {"t1": ["n1"]}
