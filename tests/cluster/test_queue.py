"""The queue on a fake cluster: who runs, what waiting trainers are told, and the weights that owners may use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bftrainer.cli.main import run
from bftrainer.cluster.controller.active import ControllerSettings
from bftrainer.cluster.controller.owners import QuotaError
from bftrainer.cluster.http.wait_reason import WaitReasons
from bftrainer.cluster.report.rerun import KINDS, check
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.rows import OwnerRow
from bftrainer.cluster.store.store import Store
from support.cluster.api import SPEC, by, play
from support.cluster.bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path)
    yield found
    found.store.close()


def automatic(bench: Bench) -> Bench:
    """The bench with the live default of max parallel."""
    bench.policy = replace(bench.policy, max_parallel=None)
    bench.cluster.planner.scheduler.policy = replace(bench.cluster.planner.scheduler.policy, max_parallel=None)
    return bench


def submit(bench: Bench, owner: str, nodes: str = "1-8", **more: Any) -> str:
    spec = TrainerSpec.model_validate({"script": "/train.py", "nodes": nodes, **more})
    with bench.store.transaction():
        trainer, effects = bench.cluster.submit(spec, owner, bench.now)
        bench.act(effects)
    bench.settle()
    return trainer


def why(bench: Bench, trainer: str) -> str:
    return WaitReasons(bench.cluster).of(bench.cluster.trainers[trainer])


def weight(bench: Bench, trainer: str) -> float:
    known = bench.cluster.trainers[trainer].known
    assert known is not None
    return known.weight


@pytest.mark.parametrize("auto", [False, True])
def test_ten_trainers_of_eight_nodes_do_not_stop_a_trainer_of_one(bench: Bench, auto: bool) -> None:
    if auto:
        automatic(bench)
    bench.join(*(f"n{i}" for i in range(6)))
    large = [submit(bench, "bob", "8-64") for _ in range(10)]
    small = submit(bench, "ann", "1-4")
    assert len(bench.nodes_of(small)) == 4
    assert why(bench, small) == ""
    assert {why(bench, one) for one in large} == {"needs at least 8 nodes; the pool has 6"}
    bench.restart()
    assert len(bench.nodes_of(small)) == 4
    bench.join(*(f"m{i}" for i in range(8)))
    assert len(bench.nodes_of(large[0])) >= 8, "the first one runs once it can"
    assert bench.nodes_of(small), "and nobody is thrown out for it"
    assert check(bench.store.all_events(KINDS), bench.policy).mismatches == ()


def test_one_that_waits_while_all_nodes_are_used_is_told_so(bench: Bench) -> None:
    automatic(bench).join("n1", "n2")
    trainers = [submit(bench, "ann", "1-1") for _ in range(12)]
    assert sum(bool(bench.nodes_of(one)) for one in trainers) == 2
    assert why(bench, trainers[-1]) == "waits for its turn: the nodes are used by earlier trainers"
    assert why(bench, trainers[5]) == "the nodes are worth more to other trainers now"


def test_a_weight_above_the_maximum_of_its_owner_is_refused(bench: Bench) -> None:
    with pytest.raises(QuotaError, match=r"weight is 1e\+09, but mallory may use at most 1: choose a smaller weight"):
        submit(bench, "mallory", weight=1e9)
    assert bench.store.trainers() == []
    submit(bench, "mallory", weight=0.5)
    bench.store.put_owner(OwnerRow("ann", max_weight=4.0))
    submit(bench, "ann", weight=4)
    with pytest.raises(QuotaError, match="ann may use at most 4"):
        submit(bench, "ann", weight=5)


def test_an_admin_is_bound_only_by_a_maximum_that_is_set(bench: Bench) -> None:
    bench.store.tokens.create(name="root", owner="root", role="admin", time=1.0)
    assert weight(bench, submit(bench, "root", weight=7)) == 7.0
    bench.store.put_owner(OwnerRow("root", max_weight=2.0))
    with pytest.raises(QuotaError, match="root may use at most 2"):
        submit(bench, "root", weight=7)


def test_a_heavy_trainer_of_an_earlier_version_keeps_running_with_a_smaller_weight_and_it_is_said_once(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, ControllerSettings(max_weight=1e12))
    bench.join(*(f"n{i}" for i in range(4)))
    heavy, light = submit(bench, "mallory", weight=1e9), submit(bench, "ann")
    assert not bench.nodes_of(light), "it has no chance"
    bench.settings = ControllerSettings()
    bench.restart()
    assert weight(bench, heavy) == 1.0
    bench.pass_time(60)
    bench.restart()
    said = bench.store.events(kind="trainer.weight-limited")
    assert [(e.trainer, e.data) for e in said] == [(heavy, {"weight": 1e9, "max_weight": 1.0})]
    assert bench.nodes_of(heavy)
    bench.finish(heavy)
    assert bench.store.kept("limited_weights") == {}
    bench.store.close()


def test_a_changed_maximum_counts_at_once(bench: Bench) -> None:
    bench.store.put_owner(OwnerRow("ann", max_weight=9.0))
    bench.pass_time(1)
    bench.join("n1", "n2", "n3", "n4")
    heavy, other = submit(bench, "ann", weight=9), submit(bench, "bob")
    assert (weight(bench, heavy), bench.nodes_of(other)) == (9.0, set())
    bench.store.put_owner(OwnerRow("ann", max_weight=0.001))
    bench.cluster.planner.limits.read()  # as every request of an owner does
    bench.pass_time(1)
    assert weight(bench, heavy) == 0.001
    assert len(bench.nodes_of(other)) == 4
    assert check(bench.store.all_events(KINDS), bench.policy).mismatches == ()


def test_the_api_refuses_a_weight_that_is_too_large_and_shows_the_maximum(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        bench.store.put_owner(OwnerRow("ann", max_weight=2.0))
        refused = await client.post("/v1/trainers", json={**SPEC, "weight": 3}, headers=by(tokens, "ann"))
        assert refused.status_code == 409
        assert "ann may use at most 2" in refused.text
        for name, limit in (("ann", 2.0), ("bob", 1.0), ("root", None)):
            mine = (await client.get("/v1/me", headers=by(tokens, name))).json()
            assert mine["limits"]["max_weight"] == limit

    play(tmp_path, scene)


def test_the_command_sets_and_lifts_a_maximum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def owner(*argv: str) -> int:
        return run(["owner", *argv, "--state", str(tmp_path)])

    assert owner("set", "ann", "--max-weight", "2.5") == 0
    assert capsys.readouterr().out == "ann: weights up to 2.5\n"
    assert owner("list") == 0
    assert "2.5" in capsys.readouterr().out
    for wrong in ("0", "-1", "nan", "much", "1e9"):
        assert owner("set", "ann", "--max-weight", wrong) != 0
        assert "weight must be" in capsys.readouterr().err
    assert owner("set", "ann", "--max-weight", "none") == 0
    store = Store.open(tmp_path / "bftrainer.db")
    assert store.owners()[0].max_weight is None
    store.close()
