"""The stand-alone command line: what it understands, what it shows, how it ends; and that its documentation is true."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.elastic import protocol
from bftrainer.elastic.local import commands, console, main
from bftrainer.elastic.local.commands import CommandRunner, Order, StatusRow
from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening, Outcome
from bftrainer.elastic.local.torchrun import TorchrunProcessLauncher
from bftrainer.elastic.protocol import Formed, Report
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes.launch import ColdLauncher, Command, Process
from support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "power_iteration.py")
PAGE = (ROOT / "docs" / "protocol.md").read_text()
DEADLINE_S = 60.0


class Started:
    """A command line that runs."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, errors: Path) -> None:
        self.process, self.folder, self.errors = process, folder, errors

    def wait_for(self, text: str, times: int = 1) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.errors.read_text().count(text) < times:
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline, f"{text!r} was not said, but: {self.errors.read_text()}"
            time.sleep(0.02)

    def ask(self, command: str) -> str:
        return commands.ask(self.folder, command.split(), DEADLINE_S)

    def end(self) -> tuple[int, str, str]:
        out, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, self.errors.read_text()


@contextmanager
def started(folder: Path, *args: str, stdin: int = subprocess.DEVNULL) -> Iterator[Started]:
    errors = folder.with_suffix(".err")
    argv = [sys.executable, "-m", "bftrainer.elastic.run", "--no-warm", "--folder", str(folder), *args]
    with errors.open("w") as stderr:
        process = subprocess.Popen(argv, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, text=True)
    with process:
        try:
            yield Started(process, folder, errors)
        finally:
            process.kill()


# What is parse_worker_message.


@pytest.mark.parametrize(("text", "nodes"), [("1-8", (1, 8)), ("4", (4, 4)), ("2-2", (2, 2)), (" 3-10 ", (3, 10))])
def test_a_range_of_nodes_is_read(text: str, nodes: tuple[int, int]) -> None:
    assert main.parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "0", "0-4", "5-4", "1-", "-3", "1-2-3", "two", "1.5"])
def test_what_is_no_range_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"but got {text!r}")):
        main.parse_nodes(text)


def test_what_follows_the_script_is_the_script_s_own() -> None:
    options = main.parse_args(["--nodes", "1-4", "--start", "2", "train.py", "--nodes", "7", "-x"])
    assert options.script == ("train.py", "--nodes", "7", "-x")
    assert (options.nodes, options.start, options.warm, options.torchrun) == ((1, 4), 2, True, False)
    assert main.parse_args(["--nodes", "3", "train.py"]).start == 3


def test_ranks_per_node_are_those_of_the_coordinator_or_of_torchruns_agents(tmp_path: Path) -> None:
    options = main.parse_args(["--ranks-per-node", "4", "train.py"])
    assert main._settings(options, tmp_path).ranks_per_node == 4
    assert main._settings(main.parse_args(["train.py"]), tmp_path).ranks_per_node == 1
    options = main.parse_args(["--ranks-per-node", "4", "--launcher", "torchrun", "train.py"])
    assert (options.ranks_per_node, main._settings(options, tmp_path).ranks_per_node) == (4, 1)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--nodes", "1-4", "--start", "5"], "`--start` must be from 1 to 4"),
        (["--start", "0"], "`--start` must be"),
        (["--silence", "0"], "`--silence` must be at least 0.5, but got 0"),
        (["--silence", "nan"], "`--silence` must be"),
        (["--launcher", "torchrun", "--silence", "2"], "`--silence` must be at least 3, but got 2"),
        (["--grace", "-1"], "`--grace` must be 0 or more, but got -1"),
        (["--threads", "0"], "`--threads` must be 1 or more, but got 0"),
        (["--ranks-per-node", "0"], "`--ranks-per-node` must be a whole number from 1 to 256, but got 0"),
        (["--ranks-per-node", "257"], "`--ranks-per-node` must be .* but got 257"),
        (["--ranks-per-node", "gpu"], "argument --ranks-per-node: invalid int value: 'gpu'"),
        (["--start", "many"], "invalid int value: 'many'"),
        (["--nonsense"], "unrecognized arguments|required"),
    ],
)
def test_a_wrong_call_is_one_line_and_status_2(
    args: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*args, EXAMPLE]) == 2
    said = capsys.readouterr().err
    assert re.search(problem, said)
    assert said.count("\n") == 1


def test_a_script_that_does_not_exist_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([str(tmp_path / "no.py")]) == 2
    assert capsys.readouterr().err == f"bftrainer: there is no script {tmp_path}/no.py\n"


@pytest.mark.parametrize(
    ("line", "order"),
    [
        ("add", Order("add", count=1)),
        ("add 3", Order("add", count=3)),
        ("remove 2", Order("remove", count=2)),
        ("remove node-2", Order("remove", "node-2")),
        ("kill random", Order("kill", "random")),
        ("stop node-1", Order("stop", "node-1")),
        ("continue node-1", Order("continue", "node-1")),
        ("status", Order("status")),
        ("quit", Order("quit")),
    ],
)
def test_commands_are_read(line: str, order: Order) -> None:
    assert commands.parse(line.split()) == order


@pytest.mark.parametrize("line", ["", "ad", "add 0", "add -1", "add x", "remove", "remove -2", "kill", "status now"])
def test_what_is_no_command_is_refused(line: str) -> None:
    with pytest.raises(InputError, match="must be"):
        commands.parse(line.split())


# What is shown.


def test_status_is_a_table_with_dashes_for_what_is_not_known() -> None:
    rows = [StatusRow("node-1", "training", 0, 1200, 0.123456), StatusRow("node-10", "starting")]
    assert commands.render(rows).splitlines() == [
        "2 nodes, 1 training",
        "node     state     rank  step    loss",
        "node-1   training     0  1200  0.1235",
        "node-10  starting     -     -       -",
    ]


@given(st.lists(st.binary(max_size=5).map(lambda b: b.replace(b"x", b"\n")), max_size=12))
def test_however_output_comes_it_is_shown_by_whole_lines_and_nothing_is_lost(chunks: list[bytes]) -> None:
    follower, lines, written = console.Follower(), list[str](), b""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node-1.log"
        for chunk in chunks:
            with path.open("ab") as file:
                file.write(chunk)
            written += chunk
            lines += follower.lines(path)
            assert len(lines) == written.count(b"\n")
        lines += follower.lines(path, last=True)
    assert "\n".join(lines) == written.removesuffix(b"\n").decode(errors="replace")


def test_lines_of_an_earlier_run_are_not_shown_again(tmp_path: Path) -> None:
    log = tmp_path / "node-1.log"
    log.write_text("old\n")
    follower = console.Follower({log: log.stat().st_size})
    log.write_text("old\nnew\n")
    assert follower.lines(log) == ["new"]


def test_a_rescale_takes_as_long_as_the_slowest_of_those_that_trained_before() -> None:
    members = [(Formed(4, 3, 0.2, 0.05, 0.1, {"send": 0.1}), True), (Formed(4, 3, 9.0, 0.06, 0.1), False)]
    found = console.rescale(4, 12.0, members)
    assert (found.world, found.pause_s, found.form_s, found.sync_s) == (3, 0.2, 0.06, 0.1)
    assert found.parts == {"send": 0.1}
    assert console.rescale(1, 1.0, members[1:]).pause_s == 9.0


def test_the_story_tells_what_is_of_interest() -> None:
    story = console.RunHistory()

    def heard(node: str, what: str, message: Any = None) -> str | None:
        return story.heard(Happening(1.0, node, what, message))

    assert heard("a", "started") == "a added"
    assert heard("b", "started") == "b added"
    assert heard("a", "ready", protocol.Ready()) is None
    assert heard("a", "formed", Formed(1, 2, 0, 0, 0)) is None
    assert heard("b", "formed", Formed(1, 2, 0, 0, 0)) == "a, b joined: 2 nodes now"
    assert heard("a", "report", Report(1, 7, samples=70, rates={"2": 5.0})) is None
    assert heard("a", "report", Report(1, 8, samples=80, rates={"10": 9.0})) is None
    assert heard("b", "ended with status -9") == "b lost (SIGKILL)"
    assert heard("a", "formed", Formed(2, 1, 0.25, 0, 0)) == "1 node now, rescale took 0.25 s"
    assert heard("b", "started") == "b starts again"
    assert heard("b", "formed", Formed(3, 2, 0, 0, 0)) is None
    assert heard("a", "formed", Formed(3, 2, 0.5, 0, 0)) == "b joined: 2 nodes now, rescale took 0.50 s"
    story.expect_end("b")
    assert heard("b", "ended with status -9") == "b ended (SIGKILL)"
    assert heard("a", "left", protocol.Left(9)) == "a left at step 9"
    assert heard("a", "ended with status 0") is None
    summary = story.summary(Outcome("stopped"), 2.0)
    assert (summary["steps"], summary["samples"], summary["generations"]) == (9, 80, 3)
    assert list(summary["rates"]) == ["2", "10"]
    assert [found["pause_s"] for found in summary["rescales"]] == [0, 0.25, 0.5]


def test_a_kill_is_a_loss_after_another_has_left_but_not_when_the_job_is_done() -> None:
    story = console.RunHistory()
    for node in "abc":
        story.heard(Happening(0.0, node, "started"))
    assert story.heard(Happening(1.0, "a", "left", protocol.Left(3))) == "a left at step 3"
    assert story.heard(Happening(1.0, "a", "ended with status 0")) is None
    assert story.heard(Happening(2.0, "b", "ended with status -9")) == "b lost (SIGKILL)"
    story.heard(Happening(2.0, "b", "started"))
    assert story.heard(Happening(3.0, "c", "done", protocol.Done(9))) is None
    assert story.heard(Happening(3.0, "b", "ended with status -9")) == "b ended (SIGKILL)"


def test_the_story_says_when_no_node_is_left() -> None:
    story = console.RunHistory()
    for node, what in [("a", "started"), ("b", "started"), ("a", "ended with status -9")]:
        assert "no node is left" not in (story.heard(Happening(0.0, node, what)) or "")
    assert story.heard(Happening(0.0, "b", "ended with status -9")) == (
        "b lost (SIGKILL); no node is left, the job waits for one"
    )


@pytest.mark.parametrize("snapshots", [False, True])
def test_the_story_warns_if_steps_are_made_again_because_all_nodes_were_lost(snapshots: bool) -> None:
    story = console.RunHistory(snapshots=snapshots)

    def heard(what: str, message: Any = None) -> str:
        return story.heard(Happening(1.0, "a", what, message)) or ""

    heard("started")
    heard("formed", Formed(1, 1, 0, 0, 0))
    heard("report", Report(1, 120))
    assert ("WARNING: it will begin again" in heard("ended with status -9")) is not snapshots
    heard("started")
    warning = heard("report", Report(2, 3))
    assert "WARNING: all nodes were lost after step 120; training has gone back to step 3" in warning
    assert ("Give --snapshots DIR" in warning) is not snapshots
    assert heard("report", Report(2, 4)) == ""


# How it runs.


@pytest.mark.waits
def test_nodes_come_and_go_on_command_and_quit_ends_in_good_order(tmp_path: Path) -> None:
    with started(tmp_path / "job", "--nodes", "1-3", "--start", "2", "--json", EXAMPLE, "0.1") as job:
        job.wait_for("2 nodes now")
        mode = stat.S_IMODE((tmp_path / "job" / commands.SOCKET).stat().st_mode)
        assert mode == 0o600
        assert job.ask("add") == "node-3 added"
        job.wait_for("3 nodes now")
        assert job.ask("status").startswith("3 nodes, 3 training\n")
        with pytest.raises(InputError, match="at most 3 nodes"):
            job.ask("add")
        with pytest.raises(InputError, match="there is no node 'node-7'; there are node-1, node-2, node-3"):
            job.ask("stop node-7")
        with pytest.raises(InputError, match="a job already runs in "):
            asyncio.run(serve_in(tmp_path / "job"))
        job.ask("kill node-1")
        job.wait_for("node-1 lost (SIGKILL)")
        job.wait_for("2 nodes now", times=2)
        assert job.ask("remove 1") == "node-3 must leave"
        job.wait_for("node-3 left")
        job.wait_for("1 node now")
        assert job.ask("quit") == "all nodes must leave"
        status, out, said = job.end()
    assert status == 0
    assert "node-2 left at step" in said
    figures = json.loads(out)
    assert (figures["status"], figures["error"]) == ("stopped", "")
    assert figures["steps"] > 0
    assert figures["generations"] == len(figures["rescales"]) >= 4
    assert all(found["pause_s"] >= found["form_s"] > 0 for found in figures["rescales"])
    with pytest.raises(InputError, match="no job listens in"):
        commands.ask(tmp_path / "job", ["status"])


async def serve_in(folder: Path) -> None:
    async with commands.serving(folder, echo):
        pass


async def echo(order: Order) -> str:
    return f"{order.verb} {order.node}"


@pytest.mark.waits
def test_what_workers_print_is_shown_with_the_node_s_name_and_the_job_is_done(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    connect = "from bftrainer.elastic.membership import Membership\nmembership = Membership.connect()\n"
    script.write_text(f"{connect}print('one\\ntwo')\nprint('the end', end='')\n")
    with started(tmp_path / "job", "--nodes", "1", str(script)) as job:
        status, out, _ = job.end()
    assert (status, out) == (0, "node-1: one\nnode-1: two\nnode-1: the end\n")


@pytest.mark.waits
@pytest.mark.parametrize("output", ["job/output", "elsewhere/mine"])
def test_a_script_is_told_where_to_put_what_it_makes(tmp_path: Path, output: str) -> None:
    script = tmp_path / "writes.py"
    connect = "from bftrainer.elastic.membership import Membership\nmembership = Membership.connect()\n"
    script.write_text(f"{connect}import os\nopen(os.environ['BFTRAINER_OUTPUT'] + '/model', 'w').close()\n")
    options = ["--output", str(tmp_path / output)] if "job" not in output else []
    with started(tmp_path / "job", "--nodes", "1", "--no-warm", *options, str(script)) as job:
        assert job.end()[0] == 0
    assert (tmp_path / output / "model").exists()


@pytest.mark.waits
@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_a_script_that_fails_is_status_1_and_its_traceback_is_shown_once(tmp_path: Path, quiet: list[str]) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('no such luck')\n")
    with started(tmp_path / "job", "--nodes", "1", *quiet, str(script)) as job:
        status, out, said = job.end()
    assert status == 1
    assert (out + said).count("Traceback (most recent call last)") == 1
    assert "ended with status 1: ValueError: no such luck" in said
    assert "failed: node-1 ended with status 1" in said


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from bftrainer.elastic.membership import Membership
Membership.connect().ready()
time.sleep(600)
"""


@pytest.mark.waits
def test_the_first_signal_ends_in_good_order_and_the_second_at_once(tmp_path: Path) -> None:
    with started(tmp_path / "a", "--nodes", "1", EXAMPLE, "0.1") as job:
        job.wait_for("1 node now")
        job.process.send_signal(signal.SIGTERM)
        status, _, said = job.end()
    assert status == 0
    assert "node-1 left at step" in said
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    with started(tmp_path / "b", "--nodes", "1", "--grace", "600", str(script)) as job:
        job.wait_for("node-1 added")
        wait_until(lambda: " ready" in job.ask("status"))
        job.process.send_signal(signal.SIGINT)
        wait_until(lambda: " leaving" in job.ask("status"))
        job.process.send_signal(signal.SIGINT)
        assert job.end()[0] == main.INTERRUPTED


@pytest.mark.waits
def test_commands_can_be_typed(tmp_path: Path) -> None:
    terminal, line = pty.openpty()
    try:
        with started(tmp_path / "job", "--nodes", "1", EXAMPLE, "0.1", stdin=line) as job:
            job.wait_for("1 node now")
            os.write(terminal, b"status\nnonsense\n")
            job.wait_for("1 node, 1 training")
            job.wait_for("a command must be one of")
            os.write(terminal, b"quit\n")
            assert job.end()[0] == 0
    finally:
        os.close(terminal)
        os.close(line)


@pytest.mark.waits
def test_commands_can_come_from_a_pipe_whose_end_does_not_end_the_job(tmp_path: Path) -> None:
    line, commands_to = os.pipe()
    try:
        with started(tmp_path / "job", "--nodes", "1", EXAMPLE, "0.1", stdin=line) as job:
            job.wait_for("1 node now")
            os.write(commands_to, b"status\n")
            job.wait_for("1 node, 1 training")
            os.close(commands_to)
            assert "1 training" in job.ask("status")
            job.ask("quit")
            assert job.end()[0] == 0
    finally:
        os.close(line)


@pytest.mark.waits
def test_the_command_line_does_not_load_torch() -> None:
    code = "import bftrainer.elastic.local.main, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The socket.


def test_a_folder_with_a_long_path_has_its_socket_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / ("long-" * 20)
    folder.mkdir()

    async def scene() -> str:
        async with commands.serving(folder, echo) as path:
            assert len(str(path)) < commands.LONGEST_PATH
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            answer = await asyncio.to_thread(commands.ask, folder, ["stop", "node-1"])
        assert not path.parent.exists()
        return answer

    assert asyncio.run(scene()) == "stop node-1"
    assert list(folder.iterdir()) == []


def test_a_socket_left_behind_does_no_harm(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / commands.SOCKET))
    assert stat.S_ISSOCK((tmp_path / commands.SOCKET).stat().st_mode)
    asyncio.run(serve_in(tmp_path))
    assert not (tmp_path / commands.SOCKET).exists()


@pytest.mark.parametrize("line", [b"nonsense\n", b"{}\n", b'{"command": "add"}\n', b'{"command": ["fly"]}\n', b"[1]\n"])
def test_a_request_that_makes_no_sense_is_answered(tmp_path: Path, line: bytes) -> None:
    async def scene() -> dict[str, str]:
        async with commands.serving(tmp_path, echo) as path:
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(line)
            answer = json.loads(await reader.readline())
            writer.close()
            await writer.wait_closed()
            return answer

    assert "must be" in asyncio.run(scene())["error"]


def test_the_client_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([str(tmp_path / "no"), "status"]) == 2
    assert commands.main([str(tmp_path), "status"]) == 2
    assert commands.main([str(tmp_path), "fly"]) == 2
    no_folder, nobody, no_command = capsys.readouterr().err.splitlines()
    assert f"there is no folder {tmp_path}/no" in no_folder
    assert f"no job listens in {tmp_path}" in nobody
    assert "must be one of add" in no_command


# Agents of torchrun.


def test_torchrun_s_agents_get_the_script_and_nothing_of_ours(tmp_path: Path) -> None:
    seen: list[Command] = []

    class Recorder:
        async def start(self, command: Command) -> Process:
            seen.append(command)
            raise BFTrainerError("seen")

        async def close(self) -> None: ...

    store: Any = SimpleNamespace(endpoint="h:5")
    launcher = TorchrunProcessLauncher(Recorder(), store, nodes=(2, 3), silence_s=7, ranks=4)
    ours = {protocol.CHANNEL, protocol.WORKER, protocol.HOST, protocol.LOCAL_RANK, protocol.LOCAL_WORLD}
    env = {**dict.fromkeys(ours, "x"), protocol.SNAPSHOTS: "s"}
    with pytest.raises(BFTrainerError, match="seen"):
        asyncio.run(launcher.start(Command(("t.py", "x"), env, str(tmp_path), "node-1.log")))
    (command,) = seen
    assert command.argv[-2:] == ("t.py", "x")
    assert "--rdzv-endpoint=h:5" in command.argv
    assert {"--nnodes=2:3", "--nproc-per-node=4"} <= set(command.argv)
    assert any("keep_alive_max_attempt=7" in word for word in command.argv)
    assert (command.cwd, command.output) == (str(tmp_path), "node-1.log")
    assert not ours & command.env.keys()
    assert command.env[protocol.SNAPSHOTS] == "s"


AGENT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved" if len(sys.argv) < 2 else None))
print("here", flush=True)
while True:
    time.sleep(0.1)  # a signal just before a sleep is handled after it
"""


@pytest.mark.waits
def test_an_agent_is_removed_by_a_signal_which_is_no_failure(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    expected: list[str] = []

    async def scene(job: Coordinator) -> None:
        desk = CommandRunner(job, expected.append, torchrun=True)
        await desk.obey(Order("add", count=2))
        await job.until(lambda: all("here" in job.log(node) for node in job.nodes), DEADLINE_S)
        assert "node-2  running" in await desk.obey(Order("status"))
        await desk.obey(Order("remove", count=1))
        assert "node-2  leaving" in await desk.obey(Order("status"))
        with pytest.raises(InputError, match="node-2 is leaving already"):
            await desk.obey(Order("remove", "node-2"))
        await job.until(lambda: job.nodes == ("node-1",), DEADLINE_S)
        assert "saved" in job.log("node-2")
        await desk.obey(Order("quit"))
        with pytest.raises(InputError, match="the job is ending"):
            await desk.obey(Order("add"))
        assert (await asyncio.wait_for(job.wait(), DEADLINE_S)).status == "stopped"
        assert "saved" in job.log("node-1")

    coordinated(scene, [str(script)], tmp_path)
    assert expected == ["node-2", "node-1"]


def coordinated(scene: Callable[[Coordinator], Awaitable[None]], script: list[str], folder: Path) -> None:
    async def main() -> None:
        launcher = ColdLauncher()
        try:
            async with Coordinator(
                script, launcher, folder=folder / "logs", settings=CoordinatorSettings(grace_s=30.0)
            ) as job:
                await scene(job)
        finally:
            await launcher.close()

    asyncio.run(main())


# The documentation.


def shown(module: str) -> list[list[str]]:
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    prompt = f"$ python -m {module} "
    return [
        shlex.split(line.removeprefix(prompt), comments=True)
        for block in blocks
        for line in block.splitlines()
        if line.startswith(prompt)
    ]


def test_the_commands_that_the_protocol_s_page_shows_are_understood() -> None:
    runs, controls = shown("bftrainer.elastic.run"), shown("bftrainer.elastic.control")
    assert len(runs) >= 3
    assert {words[1] for words in controls} == {"add", "remove", "kill", "stop", "continue", "status", "quit"}
    for words in runs:
        script = main.parse_args(words).script[0]
        assert not script.startswith("examples/") or (ROOT / script).is_file()
    for _, *words in controls:
        commands.parse(words)


def test_the_exchange_that_the_protocol_s_page_shows_is_one() -> None:
    (block,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    said = [re.fullmatch(r"(node-\d) ([→←]) (\{.*\})", line) for line in block.splitlines()]
    assert len(said) > 10
    kinds = set()
    for found in said:
        assert found is not None
        message = protocol.decode(found[3].encode())
        assert protocol.encode(message) == found[3].encode() + b"\n"
        assert isinstance(message, get_args(protocol.FromWorker if found[2] == "→" else protocol.FromManager))
        kinds.add(type(message))
    assert kinds >= {protocol.Hello, protocol.Ready, protocol.Arrived, protocol.Formed, protocol.Left, protocol.Done}


@pytest.mark.parametrize("kind", get_args(protocol.Message), ids=lambda kind: kind.__name__)
def test_the_protocol_s_page_names_every_message_and_field(kind: type[Any]) -> None:
    (row,) = re.findall(rf"^\| `{kind.__name__.lower()}` \|.*$", PAGE, re.MULTILINE)
    for field in fields(kind):
        assert f"`{field.name}`" in row


def test_the_protocol_s_page_names_every_variable() -> None:
    for name in (protocol.CHANNEL, protocol.WORKER, protocol.HOST, protocol.SNAPSHOTS, protocol.BACKEND):
        assert f"`{name}`" in PAGE
    assert f"status {protocol.RESTART}" in PAGE
