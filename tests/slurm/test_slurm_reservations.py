"""Pilots leave nodes that are reserved, before the reservation begins."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from bftrainer.cluster.pools.slurm.commands import Slurm
from bftrainer.cluster.pools.slurm.read import SlurmNode
from bftrainer.cluster.pools.slurm.reservations import (
    ASK_EVERY_S,
    NodeReservation,
    ReservationWatch,
    read_reservations,
)
from bftrainer.cluster.pools.slurm.settings import SlurmSettings
from bftrainer.slurm.check import PILOT_S, choose, examine
from bftrainer.slurm.site import seconds
from support.slurm.recorded_site import found, judged, program, recorded, site

BEGIN = 1_794_851_961.0


def nodes() -> dict[str, SlurmNode]:
    return {name: SlurmNode(name, ("idle",)) for name in ("n01", "n02", "n03")}


def test_what_slurm_prints_is_read() -> None:
    assert read_reservations("No reservations in the system\n") == ()
    assert read_reservations("") == ()
    first, second = read_reservations(recorded("reservations"))
    assert first == NodeReservation(frozenset({"n01"}), BEGIN, BEGIN + 60, first.name)
    watch = ReservationWatch(60.0)
    watch.learned((first, second))
    assert watch.by_name() == {first.name: {"n01"}, second.name: {"n01", "n02"}}
    assert second.nodes == {"n01", "n02"}
    licences = recorded("reservations").splitlines()[0].replace("Nodes=n01", "Nodes=(null)")
    assert read_reservations(licences) == ()
    for nonsense in ("slurm_load_reservations error: Unable to contact slurm controller", "ReservationName=a Nodes=n1"):
        with pytest.raises(ValueError, match="reservation|float"):
            read_reservations(nonsense)


def test_reserved_nodes_are_wanted_back_a_notice_before_and_free_afterwards() -> None:
    now = BEGIN - 61.0
    watch = ReservationWatch(60.0, lambda: now)
    watch.learned((NodeReservation(frozenset({"n01", "n09"}), BEGIN, BEGIN + 60),))
    assert all(node.may_stay for node in watch.marked(nodes()).values())
    for now in (BEGIN - 60.0, BEGIN, BEGIN + 59.0):  # noqa: B007 - the clock reads it
        marked = watch.marked(nodes())
        assert [name for name, node in marked.items() if not node.may_stay] == ["n01"]
        assert [name for name, node in marked.items() if not node.free(planned=True)] == ["n01"]
    now = BEGIN + 60.0
    assert all(node.free() for node in watch.marked(nodes()).values())


def test_slurm_is_asked_once_a_minute_and_again_when_the_clock_was_set_back() -> None:
    now = BEGIN
    watch = ReservationWatch(60.0, lambda: now)
    assert watch.ask_now()
    assert not watch.ask_now()
    now += ASK_EVERY_S
    assert watch.ask_now()
    now -= 3600.0
    assert watch.ask_now()


@pytest.mark.waits
@pytest.mark.parametrize("answer", ["exit 1", "echo nonsense", "echo No reservations in the system"])
def test_nodes_are_listed_although_reservations_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    program(tmp_path, "sinfo", "echo n01 idle")
    program(tmp_path, "scontrol", answer)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    slurm = Slurm(SlurmSettings(partition="scavenger"), tmp_path, "id", "mark")
    assert asyncio.run(slurm.nodes())["n01"].free()


def test_the_check_says_for_how_long_pilots_can_be_in_the_way() -> None:
    assert seconds(SlurmSettings(partition="p").time_limit) == PILOT_S
    finding = found(judged(site()), "reservations")
    assert finding.level == "ok"
    assert "1:00:00" in finding.what
    assert "IGNORE_JOBS" in finding.what
    one = site()
    longer = found(examine(one, choose(one), limit_s=4 * PILOT_S), "reservations")
    assert longer.level == "warning"
    assert "4:00:00" in longer.what
