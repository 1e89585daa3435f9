"""What every launcher must do, told without processes: a new one is done when it passes this."""

from __future__ import annotations

from pathlib import Path

from bftrainer.cluster.launchers import HEAD
from support.cluster.bench import Bench


class Seat:
    """One trainer of one launcher on the bench; how to look at it differs, what must hold does not."""

    def __init__(self, folder: Path, launcher: str, nodes: str = "1-8", **more: object) -> None:
        self.bench = Bench(folder)
        self.launcher = launcher
        self.trainer = self.bench.submit(nodes, launcher=launcher, **more)

    @property
    def state(self) -> str:
        return self.bench.state(self.trainer)

    @property
    def running(self) -> dict[str, str]:
        """Its workers that have not ended, by name, and their nodes."""
        return {w.id: w.node for w in self.bench.workers.values() if w.status is None and w.trainer == self.trainer}

    @property
    def trains_on(self) -> set[str]:
        """The nodes that its program makes use of."""
        if self.launcher == "hosts":
            hosts = (self.bench.folder / "trainers" / self.trainer / "hosts.txt").read_text().split()
            assert HEAD in self.running.values() or not hosts
            return {line.removesuffix(":1") for line in hosts}
        return set(self.running.values()) - {HEAD}

    @property
    def script(self) -> str:
        """A worker that runs the user's program."""
        seats = {HEAD} if self.launcher == "hosts" else self.trains_on
        return next(worker for worker, node in self.running.items() if node in seats)

    def finish(self) -> None:
        """The user's program ends as it should, everywhere."""
        if self.launcher in ("elastic", "ddp"):
            self.bench.finish(self.trainer)
            return
        seats = {HEAD} if self.launcher == "hosts" else self.trains_on
        for worker in [worker for worker, node in self.running.items() if node in seats]:
            self.bench.end(worker, 0)


def starts_on_the_nodes_it_is_given(folder: Path, launcher: str) -> None:
    seat = Seat(folder, launcher)
    assert (seat.state, seat.running) == ("queued", {})
    seat.bench.join("n1", "n2")
    assert (seat.state, seat.trains_on) == ("running", {"n1", "n2"})


def starts_nothing_below_its_minimum(folder: Path, launcher: str) -> None:
    seat = Seat(folder, launcher, "2-4")
    seat.bench.join("n1")
    assert (seat.state, seat.running) == ("queued", {})
    seat.bench.join("n2")
    assert (seat.state, seat.trains_on) == ("running", {"n1", "n2"})
    seat.bench.take("n2")
    seat.bench.pass_time(1.0)
    assert (seat.state, seat.running) == ("waiting", {})
    seat.bench.join("n3")
    assert (seat.state, seat.trains_on) == ("running", {"n1", "n3"})


def grows_and_keeps_what_runs(folder: Path, launcher: str) -> None:
    seat = Seat(folder, launcher)
    seat.bench.join("n1")
    before = set(seat.running)
    seat.bench.join("n2", "n3")
    assert (seat.state, seat.trains_on) == ("running", {"n1", "n2", "n3"})
    assert before <= set(seat.running)


def shrinks_when_a_node_leaves(folder: Path, launcher: str) -> None:
    seat = Seat(folder, launcher)
    seat.bench.join("n1", "n2", "n3")
    kept = {worker for worker, node in seat.running.items() if node != "n2"}
    with seat.bench.store.transaction():
        seat.bench.act(seat.bench.cluster.leaving("n2", 5.0, seat.bench.now))
    seat.bench.settle()
    assert (seat.state, seat.trains_on) == ("running", {"n1", "n3"})
    assert seat.bench.dismissed == ["n2"]
    assert set(seat.running) == kept


def survives_the_loss_of_a_node(folder: Path, launcher: str) -> None:
    seat = Seat(folder, launcher)
    seat.bench.join("n1", "n2", "n3")
    kept = {worker for worker, node in seat.running.items() if node != "n2"}
    seat.bench.take("n2")
    assert (seat.state, seat.trains_on, set(seat.running)) == ("running", {"n1", "n3"}, kept)
    row = seat.bench.store.trainer(seat.trainer)
    assert row is not None
    assert (row.preemptions, row.failures) == (1, 0)
    assert [e.data["why"] for e in seat.bench.store.events(kind="rescale")] == ["start", "preempt"]


def is_done_when_its_program_is(folder: Path, launcher: str) -> None:
    seat = Seat(folder, launcher)
    seat.bench.join("n1", "n2")
    seat.finish()
    assert (seat.state, seat.running) == ("done", {})
    assert seat.bench.cluster.trainers == {}


def fails_with_the_last_line_of_its_program(folder: Path, launcher: str) -> None:
    seat = Seat(folder, launcher, max_restarts=1)
    seat.bench.join("n1")
    while seat.state != "failed":
        if seat.running:
            seat.bench.end(seat.script, 2, "Traceback …\nValueError: no such data\n")
        else:
            seat.bench.pass_time(0.5)
    row = seat.bench.store.trainer(seat.trainer)
    assert row is not None
    assert "ValueError: no such data" in row.reason
    assert row.failures == 2
    assert seat.running == {}


def what_cannot_be_started_fails_with_the_reason(folder: Path, launcher: str) -> None:
    seat = Seat(folder, launcher, max_restarts=1)
    seat.bench.join("n1")
    for _ in range(100):
        if seat.running:
            seat.bench.fail_to_start(seat.script, "there is no folder /nowhere")
        else:
            seat.bench.pass_time(0.5)
    row = seat.bench.store.trainer(seat.trainer)
    assert row is not None
    assert (row.state, row.failures) == ("failed", 2)
    assert "there is no folder /nowhere" in row.reason


def is_found_again_by_the_next_controller(folder: Path, launcher: str) -> None:
    seat = Seat(folder, launcher)
    seat.bench.join("n1", "n2")
    before = seat.running
    states = len(seat.bench.store.events(kind="trainer.state"))
    seat.bench.restart()
    assert (seat.state, seat.running) == ("running", before)
    assert len(seat.bench.store.events(kind="trainer.state")) == states
    seat.bench.join("n3")
    assert (seat.state, seat.trains_on) == ("running", {"n1", "n2", "n3"})
    seat.finish()
    assert seat.state == "done"


def leaves_nothing_when_it_is_cancelled(folder: Path, launcher: str) -> None:
    seat = Seat(folder, launcher)
    seat.bench.join("n1", "n2")
    with seat.bench.store.transaction():
        seat.bench.act(seat.bench.cluster.cancel(seat.trainer, "not wanted", seat.bench.now))
    seat.bench.settle()
    assert (seat.state, seat.running) == ("cancelled", {})
    assert seat.bench.cluster.trainers == {}
    assert [w.worker for w in seat.bench.store.workers(running=True)] == []


CASES = (
    starts_on_the_nodes_it_is_given,
    starts_nothing_below_its_minimum,
    grows_and_keeps_what_runs,
    shrinks_when_a_node_leaves,
    survives_the_loss_of_a_node,
    is_done_when_its_program_is,
    fails_with_the_last_line_of_its_program,
    what_cannot_be_started_fails_with_the_reason,
    is_found_again_by_the_next_controller,
    leaves_nothing_when_it_is_cancelled,
)
