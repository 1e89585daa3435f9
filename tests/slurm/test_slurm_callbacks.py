"""Pilots that cannot reach the controller: said once, tried again rarely, and forgotten when one gets through."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cluster.doctor.doctor import examine
from bftrainer.cluster.pools.keeper import Keeper, Timeouts
from bftrainer.cluster.pools.slurm import callbacks
from bftrainer.cluster.pools.slurm.callbacks import (
    PAUSE_S,
    CallBacks,
    FailedCall,
    prepare_folder,
    read_call_backs,
    take,
)
from bftrainer.cluster.pools.slurm.read import Pilot
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.processes import variables
from support.clocks import Clock

URL = "https://10.0.0.1:8765"
ROUTE = FailedCall(URL, "route", "there is no route: network is unreachable")
SECRET = FailedCall(URL, "secret", "the controller refuses the secret of this agent")
NODES = ("n1", "n2", "n3", "n4")


def rounds(calls: CallBacks, reaches: dict[str, float], seconds: int, every_s: int = 2) -> list[tuple[int, str]]:
    """When a pool submits pilots that fail 3 s later and end after 15 s, unless their node `reaches` by then."""
    keeper = Keeper(Timeouts(retry_s=5.0, longest_retry_s=300.0, silent_s=180.0))
    submitted: list[tuple[int, str]] = []
    since: dict[str, int] = {}
    for now in range(0, seconds, every_s):
        here = {node for node in since if now - since[node] >= 2 and now >= reaches.get(node, float("inf"))}
        calls.update(here, now)
        for node in since.keys() - here:
            if now - since[node] in (4, 5):
                calls.failed(node, ROUTE, now)
            if now - since[node] >= 15:
                keeper.ended(node, now)
        for node in [node for node in since if node not in here and now - since[node] >= 15]:
            del since[node]
        room = calls.room(20, len(since), now)
        for node in keeper.settle(now, NODES, here, held=calls.held(now), at_once=room).start:
            submitted.append((now, node))
            since[node] = now
    return submitted


def test_a_node_that_cannot_reach_the_controller_gets_no_second_pilot_within_five_minutes() -> None:
    submitted = rounds(CallBacks(), {}, 3600)
    for node in NODES:
        times = [now for now, name in submitted if name == node]
        assert all(later - earlier >= PAUSE_S for earlier, later in pairwise(times)), times
    assert [name for now, name in submitted if now < PAUSE_S] == list(NODES)
    # All failed in the same way, so one node at a time is tried from then on.
    tries = [now for now, _ in submitted if now >= PAUSE_S]
    assert 8 <= len(tries) <= 12
    assert all(later - earlier >= PAUSE_S for earlier, later in pairwise(tries)), tries


def test_when_the_one_that_is_tried_gets_through_all_are_tried_at_once() -> None:
    submitted = rounds(CallBacks(), dict.fromkeys(NODES, 400.0), 1200)
    assert [name for now, name in submitted if now < PAUSE_S] == list(NODES)
    late = [(now, name) for now, name in submitted if now >= 400]
    first = late[0][0]
    assert len(late) == len(NODES)
    assert all(now <= first + 4 for now, _ in late), late


def test_one_bad_node_does_not_stop_the_others() -> None:
    calls = CallBacks()
    calls.update({"n1"}, 0.0)
    for node in ("n2", "n3", "n4"):
        calls.failed(node, ROUTE, 1.0)
    assert (calls.held(2.0), calls.room(20, 1, 2.0)) == ({"n2", "n3", "n4"}, 20)
    assert (calls.problem, "n2, n3, n4: there is no route" in calls.warning) == ("", True)
    assert calls.held(1.0 + PAUSE_S) == set()
    calls.update({"n1", "n2"}, 3.0)
    assert "from n3, n4:" in calls.warning
    calls.update({"n1"}, 1.0 + 2 * PAUSE_S)
    assert calls.warning == ""


def test_different_reasons_are_of_the_nodes_and_many_nodes_are_counted() -> None:
    calls = CallBacks()
    calls.update((), 0.0)
    calls.failed("n1", ROUTE, 0.0)
    calls.failed("n2", SECRET, 1.0)
    assert calls.room(20, 0, 2.0) == 20
    assert "from n2: the controller refuses the secret" in calls.problem
    for number in range(3, 13):
        calls.failed(f"n{number}", SECRET, 2.0)
    assert calls.pausing(3.0)
    assert calls.room(20, 0, 3.0) == 0
    assert "from n2, n3, n4 and 8 more nodes: " in calls.problem
    assert "\n" not in calls.problem
    calls.forget()
    assert (calls.problem, calls.room(20, 0, 3.0), calls.held(3.0)) == ("", 20, set())


def test_files_are_read_once_and_those_of_others_and_nonsense_are_dropped(tmp_path: Path) -> None:
    prepare_folder(tmp_path)
    folder = tmp_path / callbacks.FOLDER
    assert folder.stat().st_mode & 0o777 == 0o700
    good = {"url": URL, "kind": "route", "reason": "there is no route:\nnetwork is unreachable"}
    for name, content in {
        "n1": json.dumps(good),
        "n2": json.dumps({**good, "url": "https://elsewhere:1"}),
        "n3": "[1, 2]",
        "n4": "{",
        "n5": "\0" * 20_000,
        ".n6.tmp": json.dumps(good),
    }.items():
        (folder / name).write_text(content)
    assert read_call_backs(folder, URL) == {"n1": ROUTE}
    assert read_call_backs(folder, URL) == {}
    assert read_call_backs(tmp_path / "none", URL) == {}
    (folder / "n1").write_text(json.dumps(good))
    prepare_folder(tmp_path)  # the next controller starts anew
    assert read_call_backs(folder, URL) == {}


class Host:
    """What `take` needs of a `PoolHost`."""

    def __init__(self) -> None:
        self.agent_environment = {variables.URL: URL}
        self.nodes: frozenset[str] = frozenset()
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.memory: dict[str, Any] = {}

    def note(self, what: str, **facts: Any) -> None:
        self.notes.append((what, facts))

    def remember(self, key: str, value: Any) -> None:
        self.memory[key] = value


def test_what_a_pilot_says_is_an_event_a_sentence_and_kept_for_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, host, calls = Clock(), Host(), CallBacks()
    monkeypatch.setattr(callbacks, "time", clock)
    prepare_folder(tmp_path)
    file = tmp_path / callbacks.FOLDER / "n1"
    words = json.dumps({"url": URL, "kind": ROUTE.kind, "reason": ROUTE.reason})

    def play(*pilots: Pilot) -> None:
        asyncio.run(take(calls, tmp_path, host, pilots))  # type: ignore[arg-type]

    file.write_text(words)
    play(Pilot(1, "n1", "waiting"))
    assert file.exists()  # nobody can have written it now
    assert (host.notes, host.memory) == ([], {callbacks.STORED: ""})
    play(Pilot(1, "n1", "running"))
    assert host.notes == [("call_back_failed", {"node": "n1", "reason": ROUTE.reason, "url": URL})]
    assert host.memory[callbacks.STORED] == calls.problem != ""
    file.write_text(words)
    play(Pilot(1, "n1", "ended"))  # it failed before it was seen running
    assert len(host.notes) == 2
    file.write_text(words)
    play(Pilot(1, "n1", "ended"))  # long known
    assert len(host.notes) == 2
    host.nodes = frozenset({"n1"})
    play(Pilot(2, "n1", "running"))
    assert (calls.problem, host.memory) == ("", {callbacks.STORED: ""})


def test_of_a_pilot_that_died_before_its_agent_could_speak_the_last_line_is_told(tmp_path: Path) -> None:
    host, calls = Host(), CallBacks()
    prepare_folder(tmp_path)
    (tmp_path / "n1.log").write_text("/shared/pilot.sh: 4: exec: /none/python: not found\n\n")
    (tmp_path / "n2.log").write_text("2026-11-16 n2: joined as n2\nTraceback: something later\n")

    def play(*pilots: Pilot) -> None:
        asyncio.run(take(calls, tmp_path, host, pilots))  # type: ignore[arg-type]

    play(Pilot(1, "n1", "ended", how="FAILED"))  # before this controller
    assert host.notes == []
    host.nodes = frozenset({"n3"})
    play(Pilot(4, "n3", "running"))
    host.nodes = frozenset()
    died = [Pilot(job, f"n{node}", "ended", how="FAILED") for job, node in ((2, 1), (3, 2), (4, 3))]
    play(*died, Pilot(5, "n4", "ended", how="PREEMPTED"))
    assert [facts["node"] for _, facts in host.notes] == ["n1"]
    assert calls.problem.startswith(
        "pilots on n1 ended before they reached the controller: /shared/pilot.sh: 4: exec: /none/python: not found; see"
    )
    assert (calls.held(0.0), calls.room(5, 0, 0.0)) == (set(), 5)  # the pool tries again by its own rule


def test_the_doctor_tells_what_pilots_said_and_of_keys_that_others_can_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls" / "ca.key").touch(0o644)
    (tmp_path / "tls" / "ca.key").chmod(0o644)
    told = []
    for sentence in (None, "pilots cannot reach the controller", ""):
        with Store.open(tmp_path / FILE) as store:
            if sentence is not None:
                store.keep(f"pool.{callbacks.STORED}", sentence)
        told.append([(found.level, found.what) for found in examine(tmp_path) if "pilot" in found.what])
    assert told == [
        [],
        [("error", "pilots cannot reach the controller")],
        [("ok", "no pilot says that it cannot reach the controller")],
    ]
    assert [finding.level for finding in examine(tmp_path) if "ca.key is open to others" in finding.what] == ["error"]
