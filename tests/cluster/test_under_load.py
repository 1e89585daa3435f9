"""A controller that lags, stands still or whose clock is set: dead nodes are noticed, living ones are not lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from bftrainer.cluster.controller import agents as agents_module
from bftrainer.cluster.controller import controller as controller_module
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.controller.tick_clock import TickClock
from bftrainer.cluster.wire import codec
from bftrainer.cluster.wire.messages import Beat, Join
from support.cluster.bench import Bench
from support.cluster.in_memory import Wire, play
from support.waiting import until

SILENCE_S = 10.0


class Clocks:
    """Both clocks of a machine. Stands in for the module `time`."""

    def __init__(self) -> None:
        self.wall = 1_000_000.0
        self.steady = 50.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.steady

    def go_on(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    found = Clocks()
    monkeypatch.setattr(controller_module, "TICK_S", 0.005)
    for module in (controller_module, agents_module):
        monkeypatch.setattr(module, "time", found)
    return found


async def connect(controller: Controller, *nodes: str) -> dict[str, Wire]:
    wires = {node: Wire() for node in nodes}
    for node, wire in wires.items():
        wire.serve(controller)
        wire.to_controller.put_nowait(codec.encode(Join(node, node, "a")))
    await until(lambda: controller.agents.nodes == set(nodes))
    return wires


async def ticks(controller: Controller, seen: list[int], count: int = 2) -> None:
    """Wait for whole ticks."""
    before = len(seen)
    await until(lambda: len(seen) >= before + count)


def counted(controller: Controller) -> list[int]:
    """Count the controller's ticks."""
    seen: list[int] = []
    tick = controller.cluster.tick

    def counting(now: float) -> object:
        seen.append(1)
        return tick(now)

    controller.cluster.tick = counting  # type: ignore[assignment,method-assign]
    return seen


@pytest.mark.parametrize("lag_s", [0.25, 1.1, 4.0, 9.0])
def test_a_dead_node_is_noticed_although_every_tick_is_late(tmp_path: Path, clocks: Clocks, lag_s: float) -> None:
    async def scene(controller: Controller) -> None:
        wires = await connect(controller, "dead", "alive")
        seen, began = counted(controller), clocks.wall
        while "dead" in controller.cluster.nodes:
            assert clocks.wall - began < 2 * SILENCE_S, "not noticed"
            clocks.go_on(lag_s)
            wires["alive"].to_controller.put_nowait(codec.encode(Beat()))
            await ticks(controller, seen)
        assert "alive" in controller.cluster.nodes

    play(tmp_path, scene)


@pytest.mark.parametrize("kind", ["suspended", "stopped", "set forward", "set back"])
def test_no_node_is_lost_because_the_controller_stood_still(tmp_path: Path, clocks: Clocks, kind: str) -> None:
    async def scene(controller: Controller) -> None:
        wires = await connect(controller, "n1", "n2", "dead")
        seen = counted(controller)
        if kind == "stopped":
            clocks.go_on(3600)
        else:
            clocks.wall += -3600 if kind == "set back" else 3600
        await ticks(controller, seen)
        assert set(controller.cluster.nodes) == {"n1", "n2", "dead"}
        began = clocks.wall
        while "dead" in controller.cluster.nodes:
            assert clocks.wall - began < 2 * SILENCE_S, "deadlines were moved too far"
            clocks.go_on(1.0)
            for node in ("n1", "n2"):
                wires[node].to_controller.put_nowait(codec.encode(Beat()))
            await ticks(controller, seen)
        assert set(controller.cluster.nodes) == {"n1", "n2"}

    play(tmp_path, scene)


def test_the_deadlines_of_leaving_workers_come_although_every_tick_is_late(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    trainer = bench.submit("1-2")
    bench.join("n1", "n2")
    assert len(bench.members(trainer)) == 2
    for worker in bench.workers.values():
        worker.hangs = True
    with bench.store.transaction():
        bench.act(bench.cluster.leaving("n2", 30.0, bench.now))
    clock, began = TickClock(bench.now, 0.0, bench.settings.silence_s / 2), bench.now
    while bench.now - began < 60 and "n2" not in bench.dismissed:
        bench.now += 8.0
        bench.cluster.was_away(clock.missed(bench.now, bench.now - began), bench.now)
        bench.pass_time(0.0)
    assert "n2" in bench.dismissed
    bench.store.close()


def test_small_steps_of_the_clock_move_nothing() -> None:
    clock = TickClock(1000.0, 10.0, 5.0)
    assert clock.missed(1000.25, 10.25) == 0.0
    assert clock.missed(1001.0, 10.5) == 0.0, "the clock was adjusted by half a second"
    assert clock.missed(1005.0, 14.5) == 0.0, "late, and less than counts"
    assert clock.missed(1013.0, 22.5) == pytest.approx(3.0)
    assert clock.missed(4613.0, 22.75) == pytest.approx(3599.75)
