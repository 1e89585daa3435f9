"""A command ends in time, or is killed with all it started; blocking and in an event loop alike."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bftrainer.processes import variables
from bftrainer.processes.run import (
    CommandError,
    CommandNotStartedError,
    CommandOutputError,
    CommandResult,
    CommandTimeoutError,
    run,
    run_async,
)
from support.processes import is_alive
from support.waiting import wait_until

pytestmark = pytest.mark.waits

Runner = Callable[..., CommandResult]


def run_in_loop(*args: object, **more: object) -> CommandResult:
    return asyncio.run(run_async(*args, **more))  # type: ignore[arg-type]


@pytest.fixture(
    params=[(run, True), (run_in_loop, True), (run, False), (run_in_loop, False)],
    ids=["blocking", "async", "blocking without pidfd", "async without pidfd"],
)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Each way to run a command, also where the kernel or a container has no `pidfd_open`."""
    found: Runner
    found, has_pidfd = request.param
    if not has_pidfd:
        refused = OSError(errno.ENOSYS, "Function not implemented")
        monkeypatch.setattr(os, "pidfd_open", lambda pid: (_ for _ in ()).throw(refused))
    return found


def shell(line: str) -> list[str]:
    return ["/bin/sh", "-c", line]


def test_the_result_has_the_status_and_the_output(runner: Runner) -> None:
    result = runner(shell("echo a; echo ' b ' >&2; echo >&2; exit 3"), 20.0)
    assert (result.status, result.out, result.complaints) == (3, b"a\n", ["b"])
    assert result.failure == "it failed with exit status 3"
    assert runner(shell("kill -9 $$"), 20.0).failure == "signal 9 ended it"


def test_much_output_arrives_whole_and_more_is_an_error(runner: Runner) -> None:
    assert len(runner(shell("head -c 3000000 /dev/zero"), 20.0).out) == 3_000_000
    assert len(runner(shell("head -c 3000000 /dev/zero >&2"), 20.0).err) == 1 << 16
    with pytest.raises(CommandOutputError, match="it prints more than 1 MiB"):
        runner(shell("yes"), 20.0, most=1 << 20)


def test_a_command_that_does_not_end_is_killed_with_its_children(runner: Runner, tmp_path: Path) -> None:
    with pytest.raises(CommandTimeoutError, match="it did not end within 1 s"):
        runner(shell(f"sleep 600 & echo $! > {tmp_path}/child; wait"), 1.0)
    wait_until(lambda: not is_alive(int((tmp_path / "child").read_text())), "the end of the child")


def test_a_child_that_keeps_the_output_open_is_waited_for_only_if_asked(tmp_path: Path) -> None:
    line = shell(f"sleep 600 & echo $! > {tmp_path}/child; echo done")
    assert run(line, 20.0, until_closed=False).out == b"done\n"
    os.kill(int((tmp_path / "child").read_text()), 9)
    with pytest.raises(CommandTimeoutError):
        run(line, 0.5)
    wait_until(lambda: not is_alive(int((tmp_path / "child").read_text())), "the end of the child")


@pytest.mark.parametrize("program", ["/no/such/program", "no-such-program"])
def test_a_program_that_is_not_there_is_named(runner: Runner, program: str) -> None:
    with pytest.raises(CommandNotStartedError, match=f"cannot run {program}: "):
        runner([program], 20.0)


def test_a_command_sees_no_token_of_ours(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variables.TOKEN, "of an admin")
    assert variables.TOKEN.encode() not in runner(["env"], 20.0).out
    assert runner(shell("echo $MINE"), 20.0, env={"MINE": "x", "PATH": os.environ["PATH"]}).out == b"x\n"


def test_a_command_whose_task_is_cancelled_is_killed(tmp_path: Path) -> None:
    async def play() -> None:
        task = asyncio.create_task(run_async(shell(f"echo $$ > {tmp_path}/pid; exec sleep 600"), 600.0))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_alive(int((tmp_path / "pid").read_text()))

    asyncio.run(play())


def test_no_descriptor_is_left_open(runner: Runner) -> None:
    runner(["true"], 20.0)
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    for line, timeout_s in (("true", 20.0), ("exit 1", 20.0), ("sleep 600", 0.05)):
        for _ in range(3):
            try:
                runner(shell(line), timeout_s)
            except CommandError:
                assert line == "sleep 600"
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before


def test_the_loop_goes_on_to_tell_of_descriptors_that_have_the_numbers_of_a_commands() -> None:
    async def scenario() -> list[tuple[int, ...]]:
        loop = asyncio.get_running_loop()
        before = set(loop._selector.get_map())  # type: ignore[attr-defined]
        left = []
        for _ in range(20):  # a command that complains: its end may be noticed before that of its complaints
            await run_async(shell("echo a; echo b >&2"), 20.0)
            left.append(tuple(set(loop._selector.get_map()) - before))  # type: ignore[attr-defined]
        return left

    assert asyncio.run(scenario()) == [()] * 20
