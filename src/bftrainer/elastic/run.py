"""Run a training script on fake nodes of this machine: `python -m bftrainer.elastic.run [options] SCRIPT [ARGS…]`.

The stand-alone command line around `local.Coordinator`. What workers print goes to stdout with the node's name before
each line, what happens goes to stderr, and commands (`control.py`) come from the terminal or the job's socket.
Exit status: 0 done or ended in good order, 1 the script failed, 2 the call is wrong, 130 interrupted twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from bftrainer.elastic import control, protocol
from bftrainer.elastic.control import Desk, Order
from bftrainer.elastic.local import Coordinator, Happening, Outcome, Settings
from bftrainer.elastic.processes import ColdLauncher, Command, Launcher, Process
from bftrainer.elastic.protocol import Done, Formed, Left, Report
from bftrainer.elastic.torchrun import StoreHost, agent_command
from bftrainer.elastic.warm import WarmLauncher
from bftrainer.errors import BFTrainerError, InputError

LOOK_S = 0.1
"""How often the workers' output is looked at."""
INTERRUPTED = 130
_ENDED = "ended with status "


# The call.


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    script: tuple[str, ...]
    nodes: tuple[int, int]
    start: int
    folder: Path | None
    snapshots: Path | None
    silence_s: float
    grace_s: float
    threads: int
    warm: bool
    torchrun: bool
    quiet: bool
    json: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see: {self.prog} --help)")


def parse_args(argv: Sequence[str]) -> Options:
    """The options of a command line; an `InputError` if it makes no sense."""
    parser = _Parser(prog="python -m bftrainer.elastic.run", description="Run a script on fake nodes of this machine.")
    add = parser.add_argument
    add("--nodes", default="1-8", metavar="MIN-MAX", help="the fewest and the most nodes (default: 1-8), or N for both")
    add("--start", type=int, metavar="K", help="nodes at first (default: MAX)")
    add("--folder", type=Path, metavar="DIR", help="where logs and the control socket lie (default: a temporary one)")
    add("--snapshots", type=Path, metavar="DIR", help="where the state is kept in case all nodes go")
    add("--silence", type=float, metavar="S", help="seconds without a word after which a worker is taken for lost")
    add("--grace", type=float, default=10.0, metavar="S", help="seconds a worker has to leave in (default: 10)")
    add("--threads", type=int, default=1, metavar="T", help="threads of each worker (default: 1)")
    add("--no-warm", action="store_true", help="start each worker afresh rather than from a process with torch loaded")
    launchers = ("bftrainer", "torchrun")
    add("--launcher", choices=launchers, default=launchers[0], help="torchrun: for scripts that know only TorchElastic")
    add("--quiet", action="store_true", help="do not show what workers print")
    add("--json", action="store_true", help="at the end write figures to stdout, and all else to stderr")
    add("script", metavar="SCRIPT")
    add("args", nargs=argparse.REMAINDER, metavar="ARGS")
    found = parser.parse_args(argv)
    nodes, torchrun = parse_nodes(found.nodes), found.launcher == "torchrun"
    start = nodes[1] if found.start is None else found.start
    silence_s = found.silence if found.silence is not None else 5.0 if torchrun else Settings().silence_s
    if not 1 <= start <= nodes[1]:
        raise InputError(f"`--start` must be from 1 to {nodes[1]}, the most nodes, but got {start}")
    if not (3 if torchrun else 0.5) <= silence_s < math.inf:
        raise InputError(f"`--silence` must be at least {3 if torchrun else 0.5}, but got {silence_s:g}")
    if not 0 <= found.grace < math.inf:
        raise InputError(f"`--grace` must be 0 or more, but got {found.grace:g}")
    if found.threads < 1:
        raise InputError(f"`--threads` must be 1 or more, but got {found.threads}")
    return Options(
        script=(found.script, *found.args),
        nodes=nodes,
        start=start,
        folder=found.folder,
        snapshots=found.snapshots,
        silence_s=silence_s,
        grace_s=found.grace,
        threads=found.threads,
        warm=not found.no_warm,
        torchrun=torchrun,
        quiet=found.quiet,
        json=found.json,
    )


def parse_nodes(text: str) -> tuple[int, int]:
    """The fewest and the most nodes of "1-8", or of "4" for exactly so many."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise InputError(f"`--nodes` must be MIN-MAX with 1 ≤ MIN ≤ MAX, or a number, but got {text!r}")
    return least, most


# What is shown and counted.


@dataclass(frozen=True, slots=True)
class Rescale:
    """A generation that formed; the times are the longest of its members.

    Of the pause, where anyone trained before: a newcomer waits, but nothing stands still for it.
    """

    generation: int
    at_s: float
    world: int
    pause_s: float
    form_s: float
    sync_s: float


def rescale(generation: int, at_s: float, members: Sequence[tuple[Formed, bool]]) -> Rescale:
    """The rescale that members speak of, each with whether it trained before."""
    pauses = [formed.pause_s for formed, trained in members if trained]
    return Rescale(
        generation,
        round(at_s, 6),
        members[0][0].world,
        max(pauses or [formed.pause_s for formed, _ in members]),
        max(formed.form_s for formed, _ in members),
        max(formed.sync_s for formed, _ in members),
    )


class Story:
    """What has happened so far: a line for what is of interest, the figures at the end."""

    def __init__(self) -> None:
        self.rescales: dict[int, Rescale] = {}
        self._step = self._samples = 0
        self._rates: dict[str, float] = {}
        self._started: set[str] = set()
        self._running: set[str] = set()
        self._over: set[str] = set()  # those that said good-bye
        self._expected: set[str] = set()  # those that were told to end
        self._finishing = False  # the script has come to its end somewhere
        self._trained: set[str] = set()
        self._formed: dict[int, dict[str, tuple[Formed, bool]]] = {}

    def expect_end(self, node: str) -> None:
        """The end of a node will be no loss."""
        self._expected.add(node)

    def heard(self, happening: Happening) -> str | None:
        """The line for a happening, if it is worth one."""
        node = happening.node
        match happening.message:
            case Formed() as formed:
                return self._has_formed(node, happening.at, formed)
            case Report(step=step, samples=samples, rates=rates):
                self._step, self._samples = max(self._step, step), max(self._samples, samples)
                self._rates |= rates
            case Left(step) | Done(step):
                self._step = max(self._step, step)
                self._over.add(node)
                self._finishing |= isinstance(happening.message, Done)
                return None if self._finishing else f"{node} left at step {step}"
        if happening.what == "started":
            again = node in self._started
            self._started.add(node)
            self._running.add(node)
            return f"{node} starts again" if again else f"{node} added"
        if happening.what == "silent":
            return f"{node} is silent: taken for lost"
        if happening.what.startswith(_ENDED):
            return self._has_ended(node, int(happening.what.removeprefix(_ENDED)))
        strange = happening.what.startswith("channel:") and "[Errno" not in happening.what  # not just gone
        return f"{node}: {happening.what}" if strange else None

    def _has_formed(self, node: str, at_s: float, formed: Formed) -> str | None:
        members = self._formed.setdefault(formed.generation, {})
        members[node] = formed, node in self._trained
        found = self.rescales[formed.generation] = rescale(formed.generation, at_s, list(members.values()))
        self._trained.add(node)
        if len(members) < formed.world:
            return None
        new = [name for name, (_, trained) in members.items() if not trained]
        joined = f"{', '.join(new)} joined: " if new else ""
        took = f", rescale took {found.pause_s:.2f} s" if len(new) < len(members) else ""
        return f"{joined}world size now {formed.world}{took}"

    def _has_ended(self, node: str, status: int) -> str | None:
        self._trained.discard(node)
        self._running.discard(node)
        if node in self._over:
            return None
        self._finishing |= status == 0 and node not in self._expected
        how = f" ({signal.Signals(-status).name})" if status < 0 else f" with status {status}" if status else ""
        if status == protocol.RESTART:
            return f"{node} lost a peer in the midst of its own communication"
        is_loss = status < 0 and node not in self._expected and not self._finishing
        nobody = "; no node is left, the job waits for one" if is_loss and not self._running else ""
        return f"{node} {'lost' if is_loss else 'ended'}{how}{nobody}"

    def summary(self, outcome: Outcome, seconds: float) -> dict[str, Any]:
        """The figures. What nobody reported is None: scripts of torchrun report nothing."""
        return {
            "status": outcome.status,
            "error": outcome.error,
            "seconds": round(seconds, 3),
            "steps": self._step if self._formed else None,
            "samples": self._samples if self._formed else None,
            "generations": len(self.rescales),
            "rates": {size: self._rates[size] for size in sorted(self._rates, key=int)},
            "rescales": [asdict(self.rescales[number]) for number in sorted(self.rescales)],
        }


class Follower:
    """Reads files that others append to, by whole lines."""

    def __init__(self, skip: Mapping[Path, int] | None = None) -> None:
        self._read = dict(skip or {})
        self._held: dict[Path, bytes] = {}

    def lines(self, path: Path, *, last: bool = False) -> list[str]:
        """What has come since the last call; the beginning of a line is held back unless nothing more will come."""
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
        except FileNotFoundError:
            new = b""
        self._read[path] = self._read.get(path, 0) + len(new)
        *whole, rest = (self._held.pop(path, b"") + new).split(b"\n")
        if last and rest:
            whole.append(rest)
        elif rest:
            self._held[path] = rest
        return [line.decode(errors="replace") for line in whole]


def say(text: str) -> None:
    """Tell the person at the terminal."""
    print(f"bftrainer: {text}", file=sys.stderr, flush=True)


# What runs.


class TorchrunLauncher:
    """Has the coordinator start, instead of the script, an agent of torchrun that runs it. See `Launcher`."""

    def __init__(self, inner: Launcher, store: StoreHost, options: Options) -> None:
        self._inner = inner
        self._store = store
        self._options = options

    async def start(self, command: Command) -> Process:
        """See `Launcher`."""
        own = (protocol.CHANNEL, protocol.WORKER, protocol.HOST)
        agent = agent_command(
            command.argv,
            nodes=self._options.nodes,
            node="127.0.0.1",
            endpoint=self._store.endpoint,
            run_id="bftrainer",
            env={name: value for name, value in command.env.items() if name not in own},
            cwd=command.cwd,
            output=command.output,
            silence_s=int(self._options.silence_s),
        )
        return await self._inner.start(agent)

    async def close(self) -> None:
        """See `Launcher`."""
        await self._inner.close()


async def _launcher(options: Options, stack: contextlib.AsyncExitStack) -> Launcher:
    launcher: Launcher = ColdLauncher()
    if options.warm and importlib.util.find_spec("torch") is not None:
        preload = ("torch.distributed.run",) if options.torchrun else ("torch", "bftrainer.elastic")
        launcher = WarmLauncher(preload=preload)
    if options.torchrun:
        store = await StoreHost.start()
        stack.push_async_callback(store.close)
        launcher = TorchrunLauncher(launcher, store, options)
    stack.push_async_callback(launcher.close)
    return launcher


class Console:
    """What the person at the terminal sees."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.story = Story()
        self._quiet = options.quiet
        self._json = options.json
        self._recent: dict[str, deque[str]] = {}
        # A folder may hold the logs of an earlier run.
        self._follower = Follower({path: path.stat().st_size for path in folder.glob("*.log")})
        self._began = time.monotonic()

    def watch(self, happening: Happening) -> None:
        """Tell of something that happened."""
        if line := self.story.heard(happening):
            say(line)

    def show(self, logs: Mapping[str, Path], *, last: bool = False) -> None:
        """Show what workers have printed since the last call."""
        if self._quiet:
            return
        for node, path in logs.items():
            recent = self._recent.setdefault(node, deque(maxlen=1000))
            for line in self._follower.lines(path, last=last):
                print(f"{node}: {line}", file=sys.stderr if self._json else sys.stdout, flush=True)
                recent.append(line)

    async def keep_showing(self, job: Coordinator) -> None:
        """Show what workers print, as it comes."""
        while True:
            self.show(job.logs)
            await asyncio.sleep(LOOK_S)

    def conclude(self, outcome: Outcome, logs: Mapping[str, Path]) -> None:
        """Show what is left to be shown."""
        self.show(logs, last=True)
        if outcome.status == "failed":
            traceback = outcome.traceback.strip()
            # Workers print it too, but may have been ended before they could.
            if traceback and not any(traceback in "\n".join(recent) for recent in self._recent.values()):
                print(traceback, file=sys.stderr)
            say(f"failed: {outcome.error}")
        if self._json:
            print(json.dumps(self.story.summary(outcome, time.monotonic() - self._began)), flush=True)


async def run_job(options: Options) -> int:
    """Run a job to its end; the exit status."""
    folder = options.folder or Path(tempfile.mkdtemp(prefix="bftrainer-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"`--folder` must be a folder, but got {folder}: {problem.strerror}") from None
    console = Console(options, folder)
    loop = asyncio.get_running_loop()
    at_once: asyncio.Future[None] = loop.create_future()  # by an error, or because the person wants so

    def interrupted() -> None:
        if desk.quit():
            say("all shall leave; once more to end at once")
        elif not at_once.done():
            at_once.set_result(None)

    def failed(task: asyncio.Task[Any]) -> None:
        problem = None if task.cancelled() else task.exception()
        if problem is not None and desk.quitting is None and not at_once.done():
            at_once.set_exception(problem)

    async with contextlib.AsyncExitStack() as stack:
        launcher = await _launcher(options, stack)
        job = await stack.enter_async_context(
            Coordinator(
                options.script,
                launcher,
                nodes=options.nodes,
                folder=folder,
                settings=_settings(options),
                watch=console.watch,
            )
        )
        desk = Desk(job, console.story.expect_end, torchrun=options.torchrun)
        await stack.enter_async_context(control.serving(folder, desk.obey))
        say(f"logs and commands in {folder}")
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, interrupted)
        stack.callback(_hear_terminal(loop, desk))
        ended = asyncio.create_task(job.wait())
        starting = asyncio.create_task(desk.obey(Order("add", count=options.start)))
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


def _settings(options: Options) -> Settings:
    found = Settings(silence_s=options.silence_s, grace_s=options.grace_s, threads=options.threads)
    if options.snapshots is None:
        return found
    return replace(found, environment={protocol.SNAPSHOTS: str(options.snapshots.absolute())})


def _hear_terminal(loop: asyncio.AbstractEventLoop, desk: Desk) -> Callable[[], None]:
    """Take commands from the terminal, where there is one and it is ours; gives what ends that."""
    if sys.stdin is None or not sys.stdin.isatty():
        return lambda: None
    terminal, held, tasks = sys.stdin.fileno(), bytearray(), set[asyncio.Task[None]]()
    with contextlib.suppress(OSError):
        if os.tcgetpgrp(terminal) != os.getpgrp():
            return lambda: None  # in the background: reading would stop this process

    async def obey(words: list[str]) -> None:
        try:
            print(await desk.obey(control.parse(words)), file=sys.stderr, flush=True)
        except BFTrainerError as problem:
            say(str(problem))

    def read() -> None:
        new = os.read(terminal, 4096)
        if not new:
            loop.remove_reader(terminal)
        held.extend(new)
        while b"\n" in held:
            line, _, rest = bytes(held).partition(b"\n")
            held[:] = rest
            if words := line.decode(errors="replace").split():
                tasks.add(task := asyncio.ensure_future(obey(words)))
                task.add_done_callback(tasks.discard)

    loop.add_reader(terminal, read)
    say(f"commands: {control.USAGE}")

    def end() -> None:
        loop.remove_reader(terminal)

    return end


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    try:
        options = parse_args(sys.argv[1:] if argv is None else argv)
        if not Path(options.script[0]).is_file():
            raise InputError(f"there is no script {options.script[0]}")
        return asyncio.run(run_job(options))
    except BFTrainerError as problem:
        say(str(problem))
        return problem.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left, as `head` does. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
