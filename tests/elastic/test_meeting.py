"""Ranks that meet through the store of their group: threads here, processes in life."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed import TCPStore

from bftrainer.elastic.torch.group import meeting
from bftrainer.elastic.torch.group.group import GroupBroken
from bftrainer.elastic.torch.group.meeting import Meetings
from bftrainer.elastic.torch.group.sealed_store import SealedStore, open_store
from bftrainer.errors import InputError

WAIT = timedelta(seconds=10)


class Ranks:
    """A few ranks of one group."""

    def __init__(self, world: int) -> None:
        self.hosted = open_store("127.0.0.1", WAIT)
        self.broken = threading.Event()
        self.world = world
        self.stores = [self._store(rank) for rank in range(world)]
        self._pool = ThreadPoolExecutor(world)

    def _store(self, rank: int) -> SealedStore:
        if rank == 0:
            return SealedStore(self.hosted, "secret", "g")
        port = self.hosted.port
        joined = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=WAIT)
        return SealedStore(joined, "secret", "g")

    def check(self) -> None:
        if self.broken.is_set():
            raise GroupBroken("a peer was lost")

    def meetings(self, ranks: tuple[int, ...] | None = None, series: str = "s") -> dict[int, Meetings]:
        chosen = ranks or tuple(range(self.world))
        return {rank: Meetings(self.stores[rank], rank, chosen, self.check, series) for rank in chosen}

    def all_do(self, calls: dict[int, Callable[[], Any]]) -> dict[int, Any]:
        """What each rank gets, or its exception."""

        def caught(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except Exception as problem:
                return problem

        futures = {rank: self._pool.submit(caught, call) for rank, call in calls.items()}
        return {rank: future.result(timeout=30) for rank, future in futures.items()}


@pytest.fixture
def three() -> Iterator[Ranks]:
    return Ranks(3)


def test_all_get_the_value_of_the_first(three: Ranks) -> None:
    found = three.meetings()
    values = three.all_do({r: lambda r=r: found[r].meet("here", value=b"%d" % r) for r in found})
    assert values == {0: b"0", 1: b"0", 2: b"0"}


def test_gathered_values_come_in_the_order_of_ranks(three: Ranks) -> None:
    found = three.meetings()
    values = three.all_do({r: lambda r=r: found[r].gather(b"row %d" % r) for r in found})
    assert values == {key: [b"row 0", b"row 1", b"row 2"] for key in range(3)}


def test_ranks_that_are_left_out_are_not_waited_for(three: Ranks) -> None:
    found = three.meetings((1, 2))
    values = three.all_do({r: lambda r=r: found[r].meet("here", value=b"%d" % r) for r in found})
    assert values == {1: b"1", 2: b"1"}


def test_ranks_at_different_points_are_all_told_so(three: Ranks) -> None:
    found = three.meetings()
    points = {0: "run.share()", 1: "the end of the batches", 2: "run.share()"}
    values = three.all_do({r: lambda r=r: found[r].meet(points[r]) for r in found})
    for value in values.values():
        assert isinstance(value, InputError)
        assert "rank 0 is at run.share(), rank 1 at the end of the batches" in str(value)


def test_a_rank_that_waits_in_a_step_instead_is_not_waited_for(three: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_DOUBT_S", 0.05)
    found = three.meetings()
    found[2].is_waiting("(0, 64, 2)")
    values = three.all_do({r: lambda r=r: found[r].meet("run.evaluate()") for r in (0, 1)})
    for value in values.values():
        assert isinstance(value, InputError)
        assert "rank 2 at run.step() (0, 64, 2)" in str(value)


def test_a_rank_that_waited_in_a_step_before_is_waited_for(three: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_DOUBT_S", 0.05)
    found = three.meetings()
    found[2].is_waiting("")
    slow = threading.Event()

    def late() -> bytes:
        slow.wait(1.0)  # several times as long as the others have no doubts
        return found[2].meet("run.evaluate()")

    calls: dict[int, Callable[[], Any]] = {r: lambda r=r: found[r].meet("run.evaluate()", b"v") for r in (0, 1)}
    assert three.all_do({**calls, 2: late}) == {0: b"v", 1: b"v", 2: b"v"}


def test_notes_of_all_ranks_are_judged_by_the_first_and_a_refusal_reaches_all(three: Ranks) -> None:
    found = three.meetings()

    def all_alike(notes: list[bytes]) -> bytes:
        if len(set(notes)) > 1:
            raise InputError(f"they differ: {notes}")
        return b"alike"

    same = three.all_do({r: lambda r=r: found[r].meet("here", b"", b"note", all_alike) for r in found})
    assert same == dict.fromkeys(range(3), b"alike")
    other = three.all_do({r: lambda r=r: found[r].meet("here", b"", b"note %d" % r, all_alike) for r in found})
    assert all(isinstance(value, InputError) and "they differ" in str(value) for value in other.values())


def test_a_lost_peer_ends_the_wait(three: Ranks) -> None:
    found = three.meetings()
    threading.Timer(0.2, three.broken.set).start()
    values = three.all_do({r: lambda r=r: found[r].meet("here") for r in (0, 1)})
    assert all(isinstance(value, GroupBroken) for value in values.values())


def test_a_store_whose_host_is_gone_means_that_the_group_is_broken() -> None:
    ranks = Ranks(2)
    found = ranks.meetings()
    ranks.stores[0] = None  # type: ignore[call-overload]
    del ranks.hosted
    found.pop(0)
    with pytest.raises(GroupBroken):
        found[1].meet("here")


def test_a_million_meetings_leave_no_more_behind_than_a_few(three: Ranks) -> None:
    found = three.meetings()

    def meet_often(times: int) -> int:
        for _ in range(times):
            three.all_do({r: lambda r=r: found[r].meet("here", value=b"v") for r in found})
        return three.hosted.num_keys()

    assert meet_often(3) == meet_often(20)


def test_who_hosts_the_store_parts_last(three: Ranks) -> None:
    found = three.meetings()
    order: list[int] = []

    def part(rank: int) -> None:
        found[rank].part()
        order.append(rank)

    three.all_do({r: lambda r=r: part(r) for r in found})
    assert sorted(order) == [0, 1, 2]
    assert three.stores[0].check(["s/bye/1", "s/bye/2"])
