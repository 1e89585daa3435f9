"""Command line for local runs: `python -m bftrainer.elastic.run [options] SCRIPT [ARGS…]`.

It runs a training script on virtual nodes of this machine with a `Coordinator`. `console.py` shows worker output and
events. Commands (`commands.py`) come from stdin (a terminal or a pipe) or the job's socket. Exit status: 0 done or
ended in good order, 1 the script failed, 2 the call is wrong, 130 interrupted twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import math
import os
import re
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bftrainer.elastic import defaults, protocol, start_files
from bftrainer.elastic.local import commands
from bftrainer.elastic.local.commands import CommandRunner, Order
from bftrainer.elastic.local.console import Console, say
from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Outcome
from bftrainer.elastic.local.torchrun import StoreHost, TorchrunProcessLauncher
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.explain import what_keeps_from_place
from bftrainer.processes.launch import ColdLauncher, ProcessLauncher
from bftrainer.processes.warm import PRELOAD, WarmLauncher

INTERRUPTED = 130


# Options.


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options from the command line."""

    script: tuple[str, ...]
    nodes: tuple[int, int]
    start: int
    folder: Path | None
    snapshots: Path | None
    output: Path | None
    silence_s: float
    grace_s: float
    threads: int
    ranks_per_node: int
    ranks: int | None
    warm: bool
    launcher: str
    quiet: bool
    json: bool

    @property
    def torchrun(self) -> bool:
        """Whether agents of torchrun start the script."""
        return self.launcher == "torchrun"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see: {self.prog} --help)")


def parse_args(argv: Sequence[str]) -> RunOptions:
    """Return the options of a command line; raise an `InputError` if they are invalid."""
    parser = _Parser(prog="python -m bftrainer.elastic.run", description="Run a script on fake nodes of this machine.")
    add = parser.add_argument
    add("--nodes", default="1-8", metavar="MIN-MAX", help="fewest and most nodes (default: 1-8), or N for both")
    add("--start", type=int, metavar="K", help="number of nodes at the start (default: MAX)")
    add("--folder", type=Path, metavar="DIR", help="folder for logs and the control socket (default: a temporary one)")
    add("--snapshots", type=Path, metavar="DIR", help="folder for snapshots, in case all nodes leave")
    add("--output", type=Path, metavar="DIR", help="folder for the output of the script (default: output in --folder)")
    add("--silence", type=float, metavar="S", help="seconds without a message after which a worker is lost")
    grace_s = defaults.LEAVE_GRACE_S
    add(
        "--grace",
        type=float,
        default=grace_s,
        metavar="S",
        help="seconds for a worker to leave (default: %(default)g)",
    )
    add("--threads", type=int, default=1, metavar="T", help="threads of each process (default: 1)")
    add("--ranks-per-node", type=int, default=1, metavar="N", help="processes of each node (default: 1)")
    add(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks that the batch size was chosen for (default: 1; ddp: on MIN nodes)",
    )
    add("--no-warm", action="store_true", help="start each worker as a new process, not from one with torch loaded")
    launchers = ("bftrainer", "ddp", "torchrun")
    told = "ddp: unchanged DDP scripts in place; torchrun: scripts that restart at each change"
    add("--launcher", choices=launchers, default=launchers[0], help=told)
    add("--quiet", action="store_true", help="do not show the output of workers")
    add("--json", action="store_true", help="write a JSON summary to stdout at the end, and all else to stderr")
    add("script", metavar="SCRIPT")
    add("args", nargs=argparse.REMAINDER, metavar="ARGS")
    given = parser.parse_args(argv)
    nodes, torchrun = parse_nodes(given.nodes), given.launcher == "torchrun"
    start = nodes[1] if given.start is None else given.start
    silence_s = given.silence if given.silence is not None else 5.0 if torchrun else defaults.SILENCE_S
    if not 1 <= start <= nodes[1]:
        raise InputError(f"`--start` must be from 1 to {nodes[1]}, the most nodes, but got {start}")
    if not (3 if torchrun else 0.5) <= silence_s < math.inf:
        raise InputError(f"`--silence` must be at least {3 if torchrun else 0.5}, but got {silence_s:g}")
    if not 0 <= given.grace < math.inf:
        raise InputError(f"`--grace` must be 0 or more, but got {given.grace:g}")
    if given.threads < 1:
        raise InputError(f"`--threads` must be 1 or more, but got {given.threads}")
    if not 1 <= given.ranks_per_node <= defaults.MOST_RANKS:
        rule = f"must be a whole number from 1 to {defaults.MOST_RANKS}"
        raise InputError(f"`--ranks-per-node` {rule}, but got {given.ranks_per_node}")
    ranks = given.ranks
    if ranks is not None and (ranks < 1 or torchrun):
        raise InputError(
            "`--ranks` is not for torchrun" if torchrun else f"`--ranks` must be 1 or more, but got {ranks}"
        )
    if ranks is None and given.launcher == "ddp":
        ranks = nodes[0] * given.ranks_per_node
    return RunOptions(
        script=(given.script, *given.args),
        nodes=nodes,
        start=start,
        folder=given.folder,
        snapshots=given.snapshots,
        output=given.output,
        silence_s=silence_s,
        grace_s=given.grace,
        threads=given.threads,
        ranks_per_node=given.ranks_per_node,
        ranks=ranks,
        warm=not given.no_warm,
        launcher=given.launcher,
        quiet=given.quiet,
        json=given.json,
    )


def parse_nodes(text: str) -> tuple[int, int]:
    """Return the fewest and the most nodes of "1-8", or of "4" for exactly that many."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise InputError(f"`--nodes` must be MIN-MAX with 1 ≤ MIN ≤ MAX, or a number, but got {text!r}")
    return least, most


# The run.


async def _launcher(options: RunOptions, stack: contextlib.AsyncExitStack) -> ProcessLauncher:
    launcher: ProcessLauncher = ColdLauncher()
    if options.warm and importlib.util.find_spec("torch") is not None:
        preload = ("torch.distributed",) if options.torchrun else PRELOAD
        launcher = WarmLauncher(preload=preload)
    if options.torchrun:
        store = await StoreHost.start()
        stack.push_async_callback(store.close)
        launcher = TorchrunProcessLauncher(
            launcher,
            store,
            nodes=options.nodes,
            silence_s=int(options.silence_s),
            ranks=options.ranks_per_node,
        )
    stack.push_async_callback(launcher.close)
    return launcher


async def run_job(options: RunOptions) -> int:
    """Run a job to its end and return the exit status."""
    folder = options.folder or Path(tempfile.mkdtemp(prefix="bftrainer-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"`--folder` must be a folder, but got {folder}: {problem.strerror}") from None
    output = (options.output or folder / "output").absolute()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"`--output` must be a folder, but got {output}: {problem.strerror}") from None
    if options.launcher == "ddp" and options.snapshots is None:
        start_files.forget(output)
    snapshots = options.snapshots is not None or bool(os.environ.get(protocol.SNAPSHOTS))
    console = Console(folder, quiet=options.quiet, as_json=options.json, snapshots=snapshots)
    loop = asyncio.get_running_loop()
    at_once: asyncio.Future[None] = loop.create_future()  # set by an error or a second interrupt

    def interrupted() -> None:
        if runner.quit():
            say("all workers are leaving; press Ctrl-C again to end at once")
        elif not at_once.done():
            at_once.set_result(None)

    def failed(task: asyncio.Task[Any]) -> None:
        problem = None if task.cancelled() else task.exception()
        if problem is not None and runner.quitting is None and not at_once.done():
            at_once.set_exception(problem)

    async with contextlib.AsyncExitStack() as stack:
        launcher = await _launcher(options, stack)
        job = await stack.enter_async_context(
            Coordinator(
                (*defaults.DDP_ENTRY, *options.script) if options.launcher == "ddp" else options.script,
                launcher,
                nodes=options.nodes,
                folder=folder,
                settings=_settings(options, output),
                watch=console.watch,
            )
        )
        runner = CommandRunner(job, console.history.expect_end, torchrun=options.torchrun)
        await stack.enter_async_context(commands.serving(folder, runner.obey))
        say(f"logs and commands in {folder}")
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, interrupted)
        stack.callback(_hear_commands(loop, runner))
        ended = asyncio.create_task(job.wait())
        starting = asyncio.create_task(runner.obey(Order("add", count=options.start)))
        showing = asyncio.create_task(console.keep_showing(job))
        starting.add_done_callback(failed)
        showing.add_done_callback(failed)
        either: set[asyncio.Future[Any]] = {ended, at_once}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        outcome = ended.result() if ended.done() else Outcome("stopped", "interrupted")
        tasks: list[asyncio.Task[Any]] = [starting, showing, ended]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if at_once.done() and at_once.exception() is not None:
        at_once.result()
    console.conclude(outcome, job.logs)
    return INTERRUPTED if outcome.error == "interrupted" else int(outcome.status == "failed")


def _settings(options: RunOptions, output: Path) -> CoordinatorSettings:
    environment = {protocol.OUTPUT: str(output)}
    if options.snapshots is not None:
        environment[protocol.SNAPSHOTS] = str(options.snapshots.absolute())
    if options.ranks is not None:
        environment[protocol.RANKS] = str(options.ranks)
    return CoordinatorSettings(
        silence_s=options.silence_s,
        grace_s=options.grace_s,
        threads=options.threads,
        ranks_per_node=1 if options.torchrun else options.ranks_per_node,  # an agent of torchrun starts its own ranks
        speaks=not options.torchrun,
        environment=environment,
    )


def _hear_commands(loop: asyncio.AbstractEventLoop, runner: CommandRunner) -> Callable[[], None]:
    """Accept commands from stdin: a terminal in the foreground, a pipe or a socket. Return a function that ends that.

    The end of a pipe is not the end of the job.
    """
    if sys.stdin is None or sys.stdin.closed:
        return lambda: None
    source, held, tasks = sys.stdin.fileno(), bytearray(), set[asyncio.Task[None]]()
    is_terminal, mode = os.isatty(source), os.fstat(source).st_mode
    if not (is_terminal or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        if stat.S_ISREG(mode):
            say("commands are read from a terminal or a pipe, not from a file: `cat FILE | python -m …`")
        return lambda: None
    with contextlib.suppress(OSError):
        if is_terminal and os.tcgetpgrp(source) != os.getpgrp():
            return lambda: None  # in the background, reading would stop this process

    async def obey(words: list[str]) -> None:
        try:
            print(await runner.obey(commands.parse(words)), file=sys.stderr, flush=True)
        except BFTrainerError as problem:
            say(str(problem))

    def read() -> None:
        new = os.read(source, 4096)
        if not new:
            loop.remove_reader(source)
        held.extend(new)
        while b"\n" in held:
            line, _, rest = bytes(held).partition(b"\n")
            held[:] = rest
            if words := line.decode(errors="replace").split():
                tasks.add(task := asyncio.ensure_future(obey(words)))
                task.add_done_callback(tasks.discard)

    loop.add_reader(source, read)
    if is_terminal:
        say(f"commands: {commands.USAGE}")

    def end() -> None:
        loop.remove_reader(source)

    return end


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    try:
        options = parse_args(sys.argv[1:] if argv is None else argv)
        if not Path(options.script[0]).is_file():
            raise InputError(f"there is no script {options.script[0]}")
        if options.launcher == "ddp":
            fewer_ranks = (options.ranks or 1) > options.nodes[0] * options.ranks_per_node
            notice = what_keeps_from_place(options.script, Path.cwd(), fewer_ranks=fewer_ranks)
            if notice is not None:
                raise InputError(f"{notice.file}:{notice.line}: {notice.what}; {notice.remedy}")
        return asyncio.run(run_job(options))
    except BFTrainerError as problem:
        say(str(problem))
        return problem.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output ended, as `head` does. Python would report that again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
