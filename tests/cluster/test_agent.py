"""The agent of a node, against a controller that the test plays itself."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bftrainer.cluster.agent import workers
from bftrainer.cluster.agent.agent import Agent
from bftrainer.cluster.agent.link import Lost, Refused
from bftrainer.cluster.wire.messages import Beat, Ended, Forget, Heard, Join, Start, Started, Stop
from bftrainer.elastic.protocol import Generation
from support.cluster.agents import (
    SLEEPS,
    TINY,
    agent_of,
    agent_process,
    ended,
    form,
    resolved,
    say,
    script,
    start,
)
from support.cluster.fake_controller import FakeController
from support.processes import is_alive
from support.waiting import until

pytestmark = pytest.mark.waits

# Joining.


def test_it_joins_with_the_secret_and_beats() -> None:
    async def scene() -> None:
        async with FakeController() as controller, agent_of(controller):
            join = await controller.hears(Join)
            await controller.hears(Beat, 2)
            assert (join.node, join.host, join.pid, join.workers) == ("node-1", "127.0.0.1", os.getpid(), ())
            assert len(join.agent) == 32
            assert controller.heard[0] is join
            assert controller.connections == 1

    asyncio.run(scene())


def test_it_says_how_many_ranks_its_pool_gave_the_node() -> None:
    async def scene() -> None:
        async with FakeController() as controller:
            agent = Agent(replace(resolved(controller), slots=3), os.environ, preload=())
            running = asyncio.create_task(agent.run())
            assert (await controller.hears(Join)).slots == 3
            agent.leave("the test is over")
            await asyncio.wait_for(running, 20)

    asyncio.run(scene())


def test_the_warm_parent_of_an_owners_agent_keeps_torchs_folder_at_the_owners_home(tmp_path: Path) -> None:
    seen, name = tmp_path / "seen", "TORCHINDUCTOR_CACHE_DIR"
    (tmp_path / "imported_ahead.py").write_text(f"import os\nopen({str(seen)!r}, 'w').write(os.environ[{name!r}])\n")
    environment = {key: value for key, value in os.environ.items() if key != name}
    environment |= {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}

    async def scene() -> None:
        async with FakeController() as controller:
            agent = Agent(replace(resolved(controller), owner="ann"), environment, preload=("imported_ahead",))
            running = asyncio.create_task(agent.run())
            await until(lambda: seen.exists() and seen.read_text())
            agent.leave("the test is over")
            await asyncio.wait_for(running, 20)

    asyncio.run(scene())
    assert seen.read_text() == str(tmp_path / ".bftrainer" / "compiled" / "parent")


def test_a_wrong_secret_ends_it_at_once() -> None:
    async def scene() -> None:
        async with FakeController() as controller:
            with pytest.raises(Refused, match="refuses the secret"):
                await Agent(resolved(controller, "another"), os.environ, preload=()).run()
            controller.secret, wrong = "new", controller.secret
            with agent_process(FakeController(wrong, port=controller.port)) as process:
                assert await ended(process) == 2
                assert process.stderr is not None
                lines = process.stderr.read().decode().splitlines()
            assert len(lines) == 1
            assert lines[0].startswith("bftrainer: the controller refuses the secret")
            assert wrong not in lines[0]

    asyncio.run(scene())


def test_a_secret_that_is_refused_later_does_not_end_it() -> None:
    async def scene() -> None:
        async with FakeController() as controller, agent_of(controller) as running:
            await controller.hears(Join)
            secret, controller.secret = controller.secret, "changed"
            await controller.cut()
            await until(lambda: controller.refusals >= 2)
            assert not running.done()
            controller.secret = secret
            await controller.hears(Join, 2)

    asyncio.run(scene())


def test_without_a_controller_for_too_long_it_kills_its_workers_and_gives_up() -> None:
    async def scene() -> None:
        async with FakeController(welcome={"give_up_s": 0.5}) as controller, agent_of(controller) as running:
            await controller.hears(Join)
            await controller.say(start())
            pid = (await controller.hears(Started)).pid
            await controller.close()
            with pytest.raises(Lost, match="no controller at .* for 0.5 s"):
                await asyncio.wait_for(running, 20)
            assert not is_alive(pid)

    asyncio.run(scene())


# Workers.


def test_a_worker_starts_forms_reports_and_leaves() -> None:
    async def scene() -> None:
        async with FakeController(forgets=False) as controller, agent_of(controller):
            await controller.hears(Join)
            await controller.say(start(env={"COLOUR": "blue"}))
            await controller.hears(Started)
            # Before it has connected: the newest generation is kept for it.
            await controller.say(say("t1-1", Generation(1, ("other",))))
            await form(controller, generation=2)
            assert controller.said("t1-1") == ["ready", "arrived", "formed"]
            await until(lambda: any("t1-1" in beat.reports for beat in controller.all(Beat)[-3:]))
            await until(lambda: any(b.reports.get("t1-1", {}).get("samples") for b in controller.all(Beat)))
            assert not any(m.message["type"] in ("hello", "report") for m in controller.all(Heard))
            await controller.cut()
            (status,) = (await controller.hears(Join, 2)).workers
            assert (status.ready, status.holds_state, status.newest, status.formed) == (True, True, 2, 2)
            assert (status.arrived, status.address, status.over) == (2, "127.0.0.1:0", False)
            assert status.report is not None
            assert status.report["generation"] == 2
            await controller.say(say("t1-1", Generation(3, ("other",))))
            assert await controller.hears(Ended) == Ended("t1-1", 0, "hello from node-1 blue\n")
            assert controller.said("t1-1") == ["ready", "arrived", "formed", "left"]
            assert controller.heard.index(controller.all(Heard)[-1]) < controller.heard.index(controller.all(Ended)[0])
            await until(lambda: controller.logs == {"t1-1": "hello from node-1 blue\n"})

    asyncio.run(scene())


def test_a_start_is_carried_out_once_and_answered_as_often_as_it_comes(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeController(forgets=False) as controller, agent_of(controller):
            await controller.hears(Join)
            path = script(tmp_path, "import sys; print('once'); sys.stdin.read(); sys.exit(3)")
            for _ in range(3):
                await controller.say(start("t1-1", path, speaks=False))
            first = await controller.hears(Ended)
            assert first == Ended("t1-1", 3, "once\n")
            await controller.say(start("t1-1", path, speaks=False))
            assert await controller.hears(Ended, 2) == first
            assert len({message.pid for message in controller.all(Started)}) == 1

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (start("t1-1", "x.py", cwd="/no/such/folder"), "there is no folder /no/such/folder"),
        (start("t1-1", "x.py", python="/no/python"), "there is no interpreter /no/python"),
        (start("t1-1", "no-such-program", program=True), "there is no program no-such-program"),
        (start("t1-1", "x.py", env={"A": "b\0c"}), "text without NUL"),
        (start("t1-1", "x.py", env={"A": "\ud800"}), "surrogates not allowed"),
        (start("t1-1", "x.py", env={"A=B": "c"}), "has a `=`"),
        (Start("../t1-1", "t1", ("x.py",)), "the name of a worker must match"),
    ],
)
def test_a_worker_that_cannot_be_started_has_ended(order: Start, error: str) -> None:
    async def scene() -> None:
        async with FakeController(forgets=False) as controller, agent_of(controller):
            await controller.hears(Join)
            await controller.say(order)
            message = await controller.hears(Ended)
            assert (message.worker, message.status) == (order.worker, -1)
            assert error in message.error
            await controller.cut()
            assert [w.status for w in (await controller.hears(Join, 2)).workers] == [-1]
            assert (await controller.hears(Ended, 2)).error == message.error

    asyncio.run(scene())


def test_a_script_that_fails_tells_why_before_it_has_ended(tmp_path: Path) -> None:
    text = """
from bftrainer.elastic.membership import Membership
job = Membership.connect()
job.report_failures()
raise ValueError("wrong " * 20000)
"""

    async def scene() -> None:
        async with FakeController(forgets=False) as controller, agent_of(controller):
            await controller.hears(Join)
            await controller.say(start("t1-1", script(tmp_path, text)))
            await controller.hears(Ended)
            assert controller.said("t1-1") == ["failed"]
            assert len(controller.all(Heard)[0].message["traceback"]) == 20_000
            assert controller.all(Ended)[0].status == 1
            await controller.cut()
            (status,) = (await controller.hears(Join, 2)).workers
            assert status.over
            assert status.failed.startswith("ValueError: wrong")

    asyncio.run(scene())


def test_an_end_is_told_again_until_it_may_be_forgotten(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeController(forgets=False) as controller, agent_of(controller):
            await controller.hears(Join)
            await controller.say(start("t1-1", script(tmp_path, "print('short')"), speaks=False))
            await controller.hears(Ended)
            for connection in (2, 3):
                await controller.cut()
                (status,) = (await controller.hears(Join, connection)).workers
                assert (status.status, status.tail) == (0, "short\n")
                assert await controller.hears(Ended, connection) == Ended("t1-1", 0, "short\n")
            await controller.say(Forget("t1-1"))
            await controller.hears(Beat, len(controller.all(Beat)) + 2)
            await controller.cut()
            assert (await controller.hears(Join, 4)).workers == ()

    asyncio.run(scene())


# Ending workers.


def test_a_worker_has_its_grace_and_no_more(tmp_path: Path) -> None:
    text = """
import signal, sys, time
def leave(*_): print("asked"); sys.exit(7)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "ignores" in sys.argv else leave)
print("up")
while True:
    time.sleep(0.1)  # a signal just before a sleep is handled after it
"""

    async def scene() -> None:
        async with FakeController() as controller, agent_of(controller):
            await controller.hears(Join)
            path = script(tmp_path, text)
            for worker, argv in (("polite", ()), ("deaf", ("ignores",)), ("hit", ("ignores",))):
                await controller.say(start(worker, path, *argv, speaks=False))
                await until(lambda worker=worker: controller.logs.get(worker) == "up\n")
            await controller.say(Stop("polite", 60.0))
            assert (await controller.hears(Ended)) == Ended("polite", 7, "up\nasked\n")
            await controller.say(Stop("hit"))
            assert (await controller.hears(Ended, 2)) == Ended("hit", -signal.SIGKILL, "up\n")
            await controller.say(Stop("deaf", 60.0))
            await controller.hears(Beat, len(controller.all(Beat)) + 2)
            assert len(controller.all(Ended)) == 2
            await controller.say(Stop("deaf", 0.1))  # impatient now
            assert (await controller.hears(Ended, 3)) == Ended("deaf", -signal.SIGKILL, "up\n")

    asyncio.run(scene())


def test_a_worker_that_is_stopped_before_it_has_started_has_ended(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(1000)")

    async def scene(patched: pytest.MonkeyPatch) -> None:
        patched.setenv("PYTHONPATH", str(tmp_path))
        async with FakeController() as controller, agent_of(controller, ("slow_to_import",)):
            await controller.hears(Join)
            await controller.say(start())
            await controller.say(Stop("t1-1"))
            assert await controller.hears(Ended) == Ended("t1-1", -signal.SIGKILL, spoke=False)
            assert controller.all(Started) == []

    with pytest.MonkeyPatch.context() as patched:
        asyncio.run(scene(patched))


def test_a_worker_that_hangs_is_killed_and_one_that_never_speaks_is_not(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeController(welcome={"silence_s": 1.5}) as controller, agent_of(controller):
            await controller.hears(Join)
            await controller.say(start("quiet", script(tmp_path, SLEEPS), speaks=False))
            await controller.say(start("stopped"))
            await until(lambda: controller.said("stopped") == ["ready"])
            os.kill(next(m.pid for m in controller.all(Started) if m.worker == "stopped"), signal.SIGSTOP)
            assert (await controller.hears(Ended)).worker == "stopped"
            assert controller.all(Ended)[0].status == -signal.SIGKILL
            assert is_alive(next(m.pid for m in controller.all(Started) if m.worker == "quiet"))

    asyncio.run(scene())


def test_nobody_is_silent_while_the_agent_itself_is_away() -> None:
    async def scene() -> None:
        async with FakeController(welcome={"silence_s": 1.2}) as controller:
            with agent_process(controller) as process:
                await controller.hears(Join)
                await controller.say(start())
                await until(lambda: controller.said("t1-1") == ["ready"])
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(1.5)  # longer than a worker may be silent
                process.send_signal(signal.SIGCONT)
                await form(controller)
                await controller.hears(Beat, len(controller.all(Beat)) + 10)
                assert controller.all(Ended) == []

    asyncio.run(scene())


def test_a_program_runs_with_all_it_starts_in_one_group() -> None:
    async def scene() -> None:
        async with FakeController() as controller, agent_of(controller):
            await controller.hears(Join)
            order = ("sh", "-c", 'trap "" TERM; sleep 1000 & echo $! $COLOUR; wait; wait')
            await controller.say(start("t1-1", *order, program=True, speaks=False, env={"COLOUR": "blue"}))
            await until(lambda: controller.logs.get("t1-1"))
            child, colour = controller.logs["t1-1"].split()
            assert colour == "blue"
            assert is_alive(int(child))
            await controller.say(Stop("t1-1", 0.05))
            await controller.hears(Ended)
            await until(lambda: not is_alive(int(child)))

    asyncio.run(scene())


# The controller goes and comes.


def test_the_last_output_comes_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bftrainer.cluster.agent.agent.LOOK_AT_LOGS_S", 60.0)  # no look at the logs comes between

    async def scene() -> None:
        async with FakeController(forgets=False) as controller, agent_of(controller):
            await controller.hears(Join)
            await controller.say(start("t1-1", script(tmp_path, "print('all done')"), speaks=False))
            await controller.hears(Ended)
            assert controller.logs.get("t1-1") == "all done\n"

    asyncio.run(scene())


def test_output_is_stored_once_over_lost_connections() -> None:
    async def scene() -> None:
        async with FakeController() as controller, agent_of(controller):
            await controller.hears(Join)
            await controller.say(start("t1-1", TINY, "prints"))
            await form(controller)
            for connection in range(2, 5):
                stored = len(controller.logs.get("t1-1", ""))
                await until(lambda stored=stored: len(controller.logs.get("t1-1", "")) > stored + 50)
                controller.acknowledges = connection % 2 == 0  # the last one is stored, but the agent does not know
                await controller.cut()
                await controller.hears(Join, connection)
            controller.acknowledges = True
            await controller.cut()
            await controller.hears(Join, 5)
            await controller.say(say("t1-1", Generation(2, ())))
            await controller.hears(Ended)
            lines = controller.logs["t1-1"].splitlines()
            await until(lambda: controller.logs["t1-1"].endswith(controller.all(Ended)[-1].tail[-20:]))
            lines = controller.logs["t1-1"].splitlines()
            assert lines == ["hello from node-1 ", *(f"step {n}" for n in range(len(lines) - 1))]
            assert len(lines) > 20

    asyncio.run(scene())


def test_workers_go_on_without_a_controller_and_all_is_told_to_the_next(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeController(forgets=False) as controller, agent_of(controller):
            await controller.hears(Join)
            await controller.say(start("t1-1", TINY, "prints"))
            await form(controller)
            path = script(
                tmp_path, f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
            )
            await controller.say(start("t2-1", path, speaks=False))
            await controller.hears(Started, 2)
            pids = {message.worker: message.pid for message in controller.all(Started)}
            await controller.close()
            (tmp_path / "go").touch()
            await until(lambda: not is_alive(pids["t2-1"]))
            await controller.open()
            join = await controller.hears(Join, 2)
            assert join.agent == controller.all(Join)[0].agent
            told = {status.worker: status for status in join.workers}
            assert (told["t1-1"].status, told["t1-1"].formed, told["t1-1"].pid) == (None, 1, pids["t1-1"])
            assert (await controller.hears(Ended)).worker == "t2-1"
            await controller.cut()
            told = {status.worker: status for status in (await controller.hears(Join, 3)).workers}
            assert (told["t1-1"].status, told["t2-1"].status) == (None, 0)
            assert is_alive(pids["t1-1"])
            await controller.say(say("t1-1", Generation(2, ())))
            await until(lambda: "left" in controller.said("t1-1"))

    asyncio.run(scene())


def test_frames_that_make_no_sense_are_survived(caplog: pytest.LogCaptureFixture) -> None:
    garbage: list[str | bytes] = [
        "{",
        "[]",
        b"\xff\x00",
        '{"type": "start"}',
        '{"type": "start", "worker": 7, "trainer": null, "argv": 5}',
        '{"type": "start", "worker": "w", "trainer": "t", "argv": ["x"], "env": [1]}',
        '{"type": "stop", "worker": {}, "grace_s": "soon"}',
        '{"type": "say", "worker": "t1-1", "message": {"type": "generation", "id": "x"}}',
        '{"type": "say", "worker": "t1-1", "message": []}',
        '{"type": "logged", "worker": "t1-1", "offset": "far"}',
        '{"type": "welcome", "beat_s": "often"}',
        '{"type": "never heard of"}',
        '{"type": "join", "node": "a", "host": "b", "agent": "c"}',
    ]

    async def scene() -> None:
        async with FakeController() as controller, agent_of(controller) as running:
            await controller.hears(Join)
            await controller.say(start())
            await until(lambda: controller.said("t1-1") == ["ready"])
            for frame in garbage:
                await controller.say_raw(frame)
            await form(controller)
            assert controller.connections == 1
            assert not running.done()

    asyncio.run(scene())
    assert "not understood" in caplog.text


# The interpreter.


def test_the_interpreter_a_worker_was_submitted_from_runs_it_where_it_is_there(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntouch {tmp_path}/used\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)

    async def scene() -> None:
        async with FakeController() as controller, agent_of(controller):
            await controller.hears(Join)
            await controller.say(start(submitted_python=str(python)))
            assert (await controller.hears(Started)).warning == ""
            assert (tmp_path / "used").exists()

    asyncio.run(scene())


def test_where_the_interpreter_of_the_submission_is_not_there_the_worker_ends_with_what_to_do() -> None:
    async def scene() -> None:
        async with FakeController() as controller, agent_of(controller):
            await controller.hears(Join)
            await controller.say(start(submitted_python="/nowhere/bin/python"))
            error = (await controller.hears(Ended)).error
            assert "there is no interpreter /nowhere/bin/python on this node" in error
            assert "`--python agent`" in error
            assert controller.all(Started) == []

    asyncio.run(scene())


def test_the_interpreter_of_the_agent_under_another_name_is_its_own(tmp_path: Path) -> None:
    """A warm parent is ready for it."""
    other = Path(sys.executable).with_name("python-of-another-name")
    assert workers._unless_own(sys.executable) == ""
    assert workers._unless_own(str(other)) == str(other)
    (tmp_path / "python").symlink_to(sys.executable)  # of another environment, which has other packages
    assert workers._unless_own(str(tmp_path / "python")) == str(tmp_path / "python")
