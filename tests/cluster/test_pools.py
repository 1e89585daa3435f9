"""What every pool does, the decisions that pools share, and how they are made from their settings."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cluster.pools.keeper import Keeper, Orders, Timeouts
from bftrainer.cluster.pools.local.pool import LocalPool, LocalSettings
from bftrainer.cluster.pools.registry import SETTINGS, make_pool
from bftrainer.cluster.pools.script.pool import ScriptPool
from bftrainer.errors import InputError
from support.cluster.made_pools import settings_of
from support.cluster.pool_conformance import CHECKS, Check


@pytest.mark.waits
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", ["local", "script"])
def test_conformance(kind: str, check: Check, tmp_path: Path) -> None:
    asyncio.run(check(settings_of(kind, tmp_path / "state")))


# What pools that start agents themselves share.


def test_a_failing_node_is_tried_at_growing_intervals_up_to_a_limit() -> None:
    keeper, now, waits = Keeper(Timeouts()), 0.0, []
    for _ in range(8):
        assert keeper.settle(now, ["a"], ()).start == ("a",)
        keeper.ended("a", now)
        orders = keeper.settle(now, ["a"], ())
        assert not orders.start
        waits.append(orders.again_at - now)
        now = orders.again_at
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]


def test_one_that_ran_for_long_is_forgiven_its_earlier_failures() -> None:
    keeper = Keeper(Timeouts())
    keeper.settle(0.0, ["a"], ())
    keeper.ended("a", 1.0)
    assert keeper.settle(2.0, ["a"], ()).start == ("a",)
    keeper.ended("a", 3.0)
    assert not keeper.settle(4.9, ["a"], ()).start
    assert keeper.settle(5.0, ["a"], ()).start == ("a",)
    keeper.ended("a", 500.0)
    assert keeper.settle(501.0, ["a"], ()).start == ("a",)


def test_a_silent_agent_is_killed_and_one_that_is_here_is_not() -> None:
    keeper = Keeper(Timeouts(silent_s=60.0))
    keeper.settle(0.0, ["a", "b"], ())
    assert not keeper.settle(59.0, ["a", "b"], {"a"}).kill
    assert [node for node, _ in keeper.settle(61.0, ["a", "b"], {"a"}).kill] == ["b"]
    assert not keeper.settle(62.0, ["a", "b"], {"a"}).kill
    assert [node for node, _ in keeper.settle(63.0, ["a", "b"], {"a"}).kill] == ["b"], "it did not end: again"


def test_a_pause_does_not_count_as_silence() -> None:
    keeper = Keeper(Timeouts(silent_s=60.0))
    keeper.settle(0.0, ["a"], ())
    assert not keeper.settle(500.0, ["a"], (), may_start=False).kill
    assert not keeper.settle(501.0, ["a"], ()).kill


def test_an_agent_that_never_joined_is_not_asked_to_leave_but_killed() -> None:
    keeper = Keeper(Timeouts(grace_s=10.0))
    keeper.settle(0.0, ["a"], ())
    orders = keeper.settle(1.0, [], ())
    assert orders.kill == (("a", "it is not wanted any more"),)
    assert not orders.leave


def test_one_that_has_yet_to_come_back_after_a_restart_is_asked_to_leave_when_it_does() -> None:
    keeper = Keeper(Timeouts(grace_s=10.0))
    keeper.found("a", 0.0)
    assert keeper.settle(1.0, [], ()) == Orders()
    assert keeper.settle(5.0, [], {"a"}).leave == ("a",)
    assert not keeper.settle(16.9, [], {"a"}).kill
    assert keeper.settle(17.0, [], {"a"}).kill == (("a", "its time to leave is over"),)


def test_a_node_wanted_again_while_it_leaves_is_started_after_it_has_left() -> None:
    keeper = Keeper(Timeouts(grace_s=10.0))
    keeper.settle(0.0, ["a"], ())
    assert keeper.settle(1.0, [], {"a"}).leave == ("a",)
    assert keeper.settle(2.0, ["a"], {"a"}) == keeper.settle(3.0, ["a"], {"a"})
    assert not keeper.ended("a", 4.0)
    assert keeper.settle(4.0, ["a"], ()).start == ("a",)


def test_no_more_run_than_the_most_and_no_more_start_than_at_once() -> None:
    keeper = Keeper(Timeouts())
    wanted = [f"n{i}" for i in range(10)]
    assert keeper.settle(0.0, wanted, (), most=5, at_once=3).start == ("n0", "n1", "n2")
    assert keeper.settle(0.0, wanted, (), most=5, at_once=3).start == ("n3", "n4")
    assert not keeper.settle(0.0, wanted, (), most=5, at_once=3).start


# The registry.


def test_a_pool_is_made_from_its_settings(tmp_path: Path) -> None:
    pool = make_pool("local", {"nodes": "3", "churn": [[1, "leave", "node-1"]], "loop": "no", "pace": 0.5}, tmp_path)
    assert isinstance(pool, LocalPool)
    assert pool.settings == replace(LocalSettings(), nodes=3, churn=((1, "leave", "node-1"),), loop=False, pace="0.5")
    other = make_pool("script", {"command": "bslots -o 'a b'", "exclude": ["x"]}, tmp_path)
    assert isinstance(other, ScriptPool)
    assert other.settings.command == ("bslots", "-o", "a b")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("locl", {}, "unknown kind of pool 'locl': did you mean 'local'"),
        ("", {}, "unknown kind of pool '': must be one of local, script"),
        ("local", {"node": 3}, "pool local: unknown setting 'node': did you mean 'nodes'"),
        ("local", {"nodes": "many"}, "pool local: `nodes` must be a whole number, but got 'many'"),
        ("local", {"nodes": 2.5}, "pool local: `nodes` must be a whole number, but got 2.5"),
        ("local", {"nodes": 0}, "pool local: `nodes` must be from 1 to 10000, but got 0"),
        ("local", {"speed": float("nan")}, "pool local: `speed` must be more than 0, but got nan"),
        ("local", {"abrupt": 2}, "pool local: `abrupt` must be from 0 to 1, but got 2"),
        ("local", {"loop": 3}, "pool local: `loop` must be true or false, but got 3"),
        ("script", {}, "pool script: `command` must name the executable"),
        ("script", {"command": "x", "start": []}, "pool script: `start` must be the command"),
        ("script", {"command": ["x", 3]}, "pool script: `command` must be a list of texts"),
        ("script", {"command": "it's"}, "pool script: `command` must be a list of texts"),
        ("script", {"command": "x", "interval_s": 0}, "pool script: `interval_s` must be more than 0, but got 0"),
    ],
)
def test_wrong_settings_are_one_clear_line(kind: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        make_pool(kind, settings, tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_every_setting_is_documented() -> None:
    for kind, known in SETTINGS.items():
        for field in fields(known):
            assert field.metadata["doc"], f"{kind}.{field.name}"
            assert "\n" not in field.metadata["doc"]


def test_the_page_about_pools_has_every_setting() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "pools.md").read_text()
    for kind, known in SETTINGS.items():
        section = page.partition(f"\n## `{kind}`\n")[2].partition("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [field.name for field in fields(known)], kind
