"""Output of workers on its way to the logs: written in a thread, acknowledged late, and never more than allowed."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from bftrainer.cluster.config.keys import TrainerSettings
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.controller.output import logbook as logbook_module
from bftrainer.cluster.controller.output import writer as writer_module
from bftrainer.cluster.controller.output.budget import ALL_TRAINERS, BURST_S, OutputBudget
from bftrainer.cluster.controller.output.logbook import Logbook
from bftrainer.cluster.http import trainers as routes
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.wire import codec
from bftrainer.cluster.wire.messages import Beat, Join, Log
from bftrainer.processes import log_tail
from bftrainer.processes.log_tail import LogTail
from bftrainer.util.files import replace_file
from support.cluster import api
from support.cluster.in_memory import Wire, play
from support.waiting import until

TIMEOUT_S = 30.0


class HungFiles:
    """A file system that does not answer until the test lets it."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = threading.Event()

    def wait(self) -> None:
        self.asked.set()
        assert self.answers.wait(TIMEOUT_S), "the controller waited for the file system"


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungFiles]:
    files = HungFiles()

    def slow(name: str) -> None:
        method = getattr(Logbook, name)

        def waiting(*args: object) -> object:
            files.wait()
            return method(*args)

        monkeypatch.setattr(Logbook, name, waiting)

    for name in ("append", "tail", "read"):
        slow(name)
    yield files
    files.answers.set()


def piece(worker: str, offset: int, text: str = "a line\n") -> str:
    return codec.encode(Log(worker, offset, text, len(text)))


async def joined(controller: Controller, node: str = "n1") -> Wire:
    wire = Wire()
    wire.serve(controller)
    wire.to_controller.put_nowait(codec.encode(Join(node, node, f"agent of {node}")))
    await until(lambda: node in controller.agents.nodes)
    return wire


def test_a_file_system_that_hangs_keeps_nothing_but_output_waiting(tmp_path: Path, hung: HungFiles) -> None:
    async def scene(controller: Controller) -> None:
        wire = await joined(controller)
        wire.to_controller.put_nowait(piece("t1-1", 0))
        await until(hung.asked.is_set)
        other = await joined(controller, "n2")
        controller.cluster.nodes["n1"].heard = 0.0
        wire.to_controller.put_nowait(codec.encode(Beat()))
        await until(lambda: controller.cluster.nodes["n1"].heard > 0)
        controller.cluster.nodes["n2"].heard = 0.0
        await until(lambda: "n2" not in controller.cluster.nodes, "noticing a dead node")
        assert other.of_kind("welcome")
        assert not wire.of_kind("logged"), "nothing is written"
        hung.answers.set()
        await until(lambda: wire.of_kind("logged"))
        assert wire.of_kind("logged")[0]["offset"] == 7

    play(tmp_path, scene)
    assert (tmp_path / "t1" / "log").read_text().endswith("\ta line\n")


def test_a_trainer_that_prints_too_much_gets_its_acknowledgement_late(tmp_path: Path) -> None:
    text = "x" * 999 + "\n"

    async def scene(controller: Controller) -> None:
        wire = await joined(controller)
        for number in range(int(BURST_S)):
            wire.to_controller.put_nowait(piece("t1-1", 1000 * number, text))
            await until(lambda count=number + 1: len(wire.of_kind("logged")) == count)
        wire.to_controller.put_nowait(piece("t1-1", 1000 * int(BURST_S), text * 100))
        await until(lambda: (tmp_path / "t1" / "log").read_text().count("\n") == int(BURST_S) + 100)
        wire.to_controller.put_nowait(piece("t2-1", 0))
        await until(lambda: [row for row in wire.of_kind("logged") if row["worker"] == "t2-1"])
        own = [row for row in wire.of_kind("logged") if row["worker"] == "t1-1"]
        assert len(own) == int(BURST_S), "the next piece may come in a hundred seconds"

    play(tmp_path, scene, TrainerSettings(max_log_kb_per_s=1))


def test_output_of_a_trainer_that_is_over_is_stored_once_and_within_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logbook_module, "_SCAN", 1)  # a logbook that is opened again does not find the last piece
    text = "x" * 999 + "\n"

    async def scene(controller: Controller) -> None:
        ticks: list[object] = []
        tick = controller.agents.output.tick

        def counted(trainers: Collection[str]) -> None:
            tick(trainers)
            ticks.append(trainers)

        async def next_tick() -> None:
            seen = len(ticks)
            await until(lambda: len(ticks) > seen + 1)

        monkeypatch.setattr(controller.agents.output, "tick", counted)
        wire = await joined(controller)
        assert "t7" not in controller.cluster.trainers
        wire.to_controller.put_nowait(piece("t7-1", 0, text * int(BURST_S)))
        await until(lambda: wire.of_kind("logged"))
        await next_tick()
        wire.to_controller.put_nowait(piece("t7-1", 1000 * int(BURST_S), text * 100))
        await until(lambda: (tmp_path / "t7" / "log").read_text().count("\n") == int(BURST_S) + 100)
        await next_tick()
        assert len(wire.of_kind("logged")) == 1, "the next piece may come in a hundred seconds"
        monkeypatch.setattr(writer_module, "KEPT_S", -1000.0)
        await until(lambda: not controller.agents.output.printing(), "forgetting it in the end")

    play(tmp_path, scene, TrainerSettings(max_log_kb_per_s=1))


def test_a_budget_has_bytes_and_lines_for_each_trainer_and_for_all_of_them() -> None:
    budget = OutputBudget(1000.0, 10.0)
    assert budget.spend("t1", int(1000 * BURST_S), 1, 100.0) == 0.0
    assert budget.spend("t1", 2000, 1, 100.0) == pytest.approx(2.0)
    assert budget.spend("t1", 0, 0, 102.0) == 0.0
    assert budget.spend("t2", 10, int(10 * BURST_S) + 30, 102.0) == pytest.approx(3.0)
    for number in range(100):
        last_s = budget.spend(f"u{number}", int(1000 * BURST_S), 1, 102.0)
    assert last_s > 100 * BURST_S / ALL_TRAINERS - 2 * BURST_S, "all together"
    budget.keep_only([])
    assert budget.spend("t1", 10, 1, 1000.0) == 0.0


def test_output_that_finds_the_queue_full_is_sent_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MOST_WAITING_CHARACTERS", 5)
    monkeypatch.setattr(writer_module, "AGAIN_S", 0.01)

    async def scene(controller: Controller) -> None:
        wire = await joined(controller)
        wire.to_controller.put_nowait(piece("t1-1", 0))
        await until(lambda: wire.of_kind("logged"))
        assert wire.of_kind("logged")[0]["offset"] == 0, "not taken"
        monkeypatch.setattr(writer_module, "MOST_WAITING_CHARACTERS", 500)
        wire.to_controller.put_nowait(piece("t1-1", 0))
        await until(lambda: len(wire.of_kind("logged")) == 2)
        assert wire.of_kind("logged")[1]["offset"] == 7

    play(tmp_path, scene)


def test_an_agent_that_comes_again_gets_the_acknowledgement_of_what_it_sent_before(
    tmp_path: Path, hung: HungFiles
) -> None:
    async def scene(controller: Controller) -> None:
        first = await joined(controller)
        first.to_controller.put_nowait(piece("t1-1", 0))
        await until(hung.asked.is_set)
        again = await joined(controller)
        await until(lambda: again.of_kind("welcome"))
        again.to_controller.put_nowait(piece("t1-1", 0, "a line\nand more\n"))
        again.to_controller.put_nowait(codec.encode(Beat()))
        hung.answers.set()
        await until(lambda: again.of_kind("logged"))
        again.to_controller.put_nowait(piece("t1-1", 7, "and more\n"))
        await until(lambda: len(again.of_kind("logged")) == 2)
        assert [row["offset"] for row in again.of_kind("logged")] == [7, 16]

    play(tmp_path, scene)
    lines = (tmp_path / "t1" / "log").read_text().splitlines()
    assert [line.split("\t")[4] for line in lines] == ["a line", "and more"]


def test_a_connection_that_was_replaced_is_served_to_its_end_also_if_nobody_refers_to_it(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        first = await joined(controller)
        assert first.serving is not None
        ends: list[BaseException | None] = []
        first.serving.add_done_callback(lambda task: ends.append(task.exception()))
        del first
        again = await joined(controller)
        gc.collect()
        await until(lambda: again.of_kind("welcome"))
        await until(lambda: ends, "the end of the connection that was replaced")
        assert ends == [None]

    play(tmp_path, scene)


def test_output_that_waits_too_long_is_left_out_and_the_log_says_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "MOST_WAITING_BYTES", 1000)
    monkeypatch.setattr(log_tail, "MOST_MESSAGE_BYTES", 100)
    path = tmp_path / "worker.log"
    path.write_text("".join(f"line {number:4}\n" for number in range(200)))
    tail = LogTail(path)
    note = tail.next(0.0, ended=False)
    assert note is not None
    assert note.text == "… 190 lines left out\n"
    tail.seek(note.offset + note.size)
    rest = tail.next(0.0, ended=False)
    assert rest is not None
    assert rest.text.splitlines()[0] == "line  190"
    assert rest.offset + rest.size == path.stat().st_size


def test_the_api_answers_although_the_file_system_of_the_logs_hangs(
    tmp_path: Path, hung: HungFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "TAIL_S", 0.01)
    monkeypatch.setattr(routes, "LOG_S", 0.01)

    async def scene(client: api.httpx.AsyncClient, bench: api.Bench, tokens: dict[str, str]) -> None:
        made = await client.post("/v1/trainers", json=api.SPEC, headers=api.by(tokens, "ann"))
        ref = made.json()["id"]
        shown = await client.get(f"/v1/trainers/{ref}", headers=api.by(tokens, "ann"))
        assert shown.status_code == 200
        assert "does not answer" in shown.json()["log_tail"][0]
        log = await client.get(f"/v1/trainers/{ref}/logs", headers=api.by(tokens, "ann"))
        assert log.status_code == 503
        assert "file system" in log.json()["error"]
        hung.answers.set()

        async def read() -> int:
            return (await client.get(f"/v1/trainers/{ref}/logs", headers=api.by(tokens, "ann"))).status_code

        monkeypatch.setattr(routes, "LOG_S", TIMEOUT_S)
        assert await read() == 200

    api.play(tmp_path, scene)


def test_workers_are_started_after_the_files_of_their_trainer_and_nobody_else_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, written = HungFiles(), []

    def given(launch: object, hosts: list[tuple[str, int]]) -> None:
        files.wait()
        replace_file(tmp_path / "hosts", "".join(host for host, _ in hosts))
        written.append(hosts)

    async def scene(controller: Controller) -> None:
        wire = await joined(controller)
        launcher = controller.cluster.launchers["elastic"]
        monkeypatch.setattr(launcher, "given", given, raising=False)
        spec = TrainerSpec.model_validate({"script": "/train.py", "nodes": "1-4"})
        controller.submit(spec, "ann")
        await until(files.asked.is_set)
        other = await joined(controller, "n2")
        other.to_controller.put_nowait(codec.encode(Beat()))
        await until(lambda: controller.cluster.planner.state.assigned.get("t1") == ("n1", "n2"))
        assert not wire.of_kind("start")
        files.answers.set()
        await until(lambda: wire.of_kind("start") and other.of_kind("start"))
        assert written

    play(tmp_path, scene)


def test_a_piece_that_does_not_fit_on_the_disk_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Logbook(tmp_path, 1 << 20)
    assert book.append(1.0, "t1-1", "n1", 0, "first\n", 6) == 6
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
        with pytest.raises(OSError, match="No space left"):
            book.append(2.0, "t1-1", "n1", 6, "second\n", 7)
    assert book.append(3.0, "t1-1", "n1", 6, "second\n", 7) == 13
    assert [line.split("\t")[-1] for line in book.path.read_text().splitlines()] == ["first", "second"]
