"""Disturbs a training on one GPU with NCCL between its ranks, and judges what came of it: `make soak-gpu`.

    PYTHONPATH=src:tests python3 tests/elastic/soak_gpu.py --model gpt2|cnn [--events N] [--only KIND…] [--seed S]

Workers (`benchmarks/workers/soak_worker.py`) join, leave, are killed and hang by the schedule of `soak_schedule.py`.
Spare workers are warm before they are needed, so that a join does not wait for the start of CUDA. The verdict is that
of `soak_verdict.py`. With `--ranks-per-node` each worker has several ranks, and every other kill or stop hits only one
of them; the worker is lost as a whole all the same. Prints a line for each event and a JSON object at the end; exit
status 1 if anything is wrong. When nothing is committed for a minute it prints the stacks and logs of all workers and
stops. It needs only torch and numpy. On a CPU: `--small --device cpu --backend gloo`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening
from bftrainer.elastic.protocol import Arrived, Formed, Ready
from bftrainer.processes.launch import ProcessLauncher
from bftrainer.processes.warm import WarmLauncher
from soak_schedule import GPT2, KINDS, START, mixed
from soak_verdict import TIMES, Commits, Ending, Event, Run, describe, median_and_worst, summary, timed, violations

WORKER = Path(__file__).parents[2] / "benchmarks" / "workers" / "soak_worker.py"
SAMPLES = {"gpt2": 96, "cnn": 600}
MOST = {"gpt2": 3, "cnn": 4}
LOOK_S = 0.02
STARTING_S = 90.0
"""The first commit may take so much longer than others: torch is imported and CUDA started."""
SUSPICIOUS = re.compile(r"watchdog|Traceback|Error|terminate|[Aa]bort|SIG[A-Z]{3,}|FATAL|bftrainer:")


class Stopped(Exception):  # noqa: N818 - the reason why the soak ends early
    """The job does not go on."""


class Soak:
    """One job and what is done to it."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder = folder
        self.args = args
        self.rng = random.Random(args.seed)
        self.began = time.monotonic()
        self.commits = Commits(folder)
        self.events: list[Event] = []
        self.endings: list[Ending] = []
        self.silent: list[str] = []
        self.pids: set[int] = set()
        self.spares: list[str] = []
        self.going: set[str] = set()  # let in, not trained yet
        self.holders: set[str] = set()  # those that have the state
        self.leaving: set[str] = set()  # told to leave
        self.struck: set[str] = set()  # killed or stopped by us, whether that was noticed yet or not
        self.over = False
        self.single = False  # whether the last kill or stop hit only one rank of a worker
        self.short = ""
        """Why there were fewer events than planned."""
        self.triggers: list[Callable[[Happening], bool]] = []
        self.job: Coordinator

    # What is seen.

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.2f} s  {text}", file=sys.stderr, flush=True)

    def watch(self, happening: Happening) -> None:
        node, now = happening.node, time.monotonic()
        if isinstance(happening.message, Formed):
            self.holders.add(node)
            self.going.discard(node)
        if happening.what == "silent":
            for event in self.events:
                if event.kind == "stop" and node in event.nodes:
                    event.noticed, event.generation = now, self.job.roster.generation.id - 1
            if node not in self.struck:
                self.silent.append(node)
                self.say(f"{node} is silent, which nobody caused")
        if happening.what.startswith("ended with status "):
            ending = Ending(node, int(happening.what.rpartition(" ")[2]), self.over or node in self.struck)
            self.endings.append(ending)
            self.holders.discard(node)
            self.going.discard(node)
            if ending.status and not ending.ours:
                self.say(f"{node} ended with {describe(ending.status)}, which nobody caused")
        self.triggers = [trigger for trigger in self.triggers if not trigger(happening)]

    def training(self) -> list[str]:
        """The healthy workers that have the state, by rank."""
        here = [node for node in self.job.members if node in self.holders and node in self.job.nodes]
        return [node for node in here if node not in self.struck | self.leaving]

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something, as long as the job goes on."""
        while not condition():
            await asyncio.sleep(LOOK_S)
            self.commits.look()
            last = self.commits.latest or self.began + STARTING_S
            if self.over:
                raise Stopped(f"the job ended while the harness waited for {what}")
            if time.monotonic() - last > self.args.stall:
                raise Stopped(f"no commit for {self.args.stall:g} s while the harness waited for {what}")
            if time.monotonic() - self.began > (self.args.minutes + 1) * 60:
                raise Stopped(f"no time is left to wait for {what}")

    # What is done.

    async def play(self, kinds: tuple[str, ...]) -> None:
        """The whole schedule; then all train to the same end."""
        small = self.args.small
        await self.start(START + (1 if small else self.args.spares))
        await self.until(lambda: len(self.warm()) >= START, "the first workers")
        for node in self.warm()[:START]:
            self.let_in(node)
        await self.until(lambda: len(self.training()) == START and self.commits.all, "the first commits")
        self.say(f"{START} workers train; {len(kinds)} events follow, seed {self.args.seed}")
        for number, kind in enumerate(kinds):
            if time.monotonic() - self.began > self.args.minutes * 60:
                self.short = f"only {number} of {len(kinds)} events took place within {self.args.minutes:g} minutes"
                break
            event = await self.cause(kind)
            patient = self.rng.random() < 0.75 or number + 1 == len(kinds)
            self.say(f"event {number + 1}: {kind} of {', '.join(event.nodes)}" + ("" if patient else ", in a burst"))
            if patient:
                await self.until(lambda event=event: self.settled(event), f"a commit after {kind} of {event.nodes}")
                row = timed(event, self.commits, self.events)
                self.say(f"  again after {row['recovery_s']} s, longest pause {row['pause_s']} s")
        await self.end()

    def settled(self, event: Event) -> bool:
        return event.generation is not None and bool(self.commits.after(event)) and not self.going

    async def cause(self, kind: str) -> Event:
        if kind in ("join", "newcomer", "survivor"):
            return await self.join(kind)
        least = {"two": 3}.get(kind, 2)
        await self.until(lambda: len(self.training()) >= least, f"{least} workers to choose from for {kind}")
        if kind == "leave":
            node = self.rng.choice(self.training())
            event = self.note(kind, node)
            self.leaving.add(node)
            self.job.remove(node)
            return event
        if kind == "rank0":
            await self.until(lambda: self.training()[:1] == list(self.job.members[:1]), "a healthy rank 0")
            return self.strike(kind, self.training()[0])
        return self.strike(kind, *self.rng.sample(self.training(), 2 if kind == "two" else 1))

    async def join(self, kind: str) -> Event:
        """Let a worker in; kill it or a member on the way, if the event is such a one."""
        await self.until(lambda: self.warm() and len(self.training()) >= (2 if kind == "survivor" else 1), f"a {kind}")
        node = self.warm()[0]
        done: list[Event] = []
        when = self.rng.choice(("ready", "arrived", "go", "go", "later"))
        delay_s = 0.0 if when != "later" else self.rng.random() * (0.01 if self.args.backend == "gloo" else 0.6)

        def strike() -> None:
            formed = node in self.holders
            members = [name for name in self.training() if name != node]
            victims = members if kind == "survivor" else [node]
            if len(members) + formed - (kind == "survivor") >= 1:  # the state must survive
                done.append(self.strike(kind, self.rng.choice(victims), in_join=not formed))

        def look(happening: Happening) -> bool:
            mine = happening.node == node
            if kind == "join":
                if not (mine and isinstance(happening.message, Ready)):
                    return False
                # The generation with the newcomer is announced by now; commits of the present one come before.
                done.append(self.note(kind, node, self.job.roster.going.id))
                return True
            now = {
                "ready": mine and isinstance(happening.message, Ready),
                "arrived": mine and isinstance(happening.message, Arrived),
            }.get(when, node in self.job.roster.going.members)
            if now:
                asyncio.get_running_loop().call_later(delay_s, strike) if delay_s else strike()
            return now

        self.triggers.append(look)
        self.let_in(node)
        await self.start(1)
        await self.until(lambda: done, f"{node} to join, for {kind}")
        return done[0]

    def note(self, kind: str, node: str, generation: int | None = None) -> Event:
        now = self.job.roster.generation.id
        event = Event(kind, time.monotonic(), (node,), now if generation is None else generation)
        self.events.append(event)
        return event

    def strike(self, kind: str, *nodes: str, in_join: bool | None = None) -> Event:
        """SIGKILL, or SIGSTOP, and when that was."""
        generation = None if kind == "stop" else self.job.roster.generation.id
        event = Event(kind, time.monotonic(), nodes, generation, in_join=in_join)
        self.events.append(event)
        for node in nodes:
            self.struck.add(node)
            self.going.discard(node)
            self.single = self.args.ranks_per_node > 1 and not self.single
            rank = self.rng.randrange(self.args.ranks_per_node) if self.single else None
            self.job.signal(node, signal.SIGSTOP if kind == "stop" else signal.SIGKILL, rank)
        return event

    # Spare workers.

    async def start(self, count: int) -> None:
        for node in await self.job.add(count):
            self.spares.append(node)
            self.pids |= {self.job.pid(node, rank) for rank in range(self.args.ranks_per_node)}

    def warm(self) -> list[str]:
        """The spare workers of which all ranks are warm."""
        return [
            node for node in self.spares if all((self.folder / f"warm-{name}").exists() for name in self.names(node))
        ]

    def names(self, node: str) -> list[str]:
        """The names under which the ranks of a worker write."""
        return [f"{node}.{rank}" if rank else node for rank in range(self.args.ranks_per_node)]

    def let_in(self, node: str) -> None:
        self.spares.remove(node)
        self.going.add(node)
        (self.folder / f"go-{node}").touch()

    async def end(self) -> None:
        """When all that was struck is gone and all that was let in trains, name the last epoch."""
        for node in self.spares:
            self.struck.add(node)
            self.job.signal(node, signal.SIGKILL)
        await self.until(lambda: sorted(self.training()) == sorted(self.job.nodes), "the last of the changes")
        await self.until(lambda: all(map(self.settled, self.events)), "a commit after every event")
        self.say(f"{len(self.training())} workers train to the end")
        beside = self.folder / "last-epoch.part"
        beside.write_text(str(max(commit.place[0] for commit in self.commits.all) + 2))
        beside.rename(self.folder / "last-epoch")

    # When it does not go on.

    async def explain(self, reason: str) -> None:
        """Print where everything stands: the roster, the stacks of all workers, the last lines of their logs."""
        job, roster = self.job, self.job.roster
        self.say(f"STOPPED: {reason}")
        print(f"announced {roster.generation}, formed {roster.going}, missing {roster.missing()}", file=sys.stderr)
        for node in job.nodes:
            about = [word for word, true in (("struck", node in self.struck), ("spare", node in self.spares)) if true]
            about += ["leaving"] if node in self.leaving else []
            print(f"{node} pid {job.pid(node)} {' '.join(about)} {job.report(node)}", file=sys.stderr)
            if node not in self.struck:
                job.signal(node, signal.SIGUSR1)
        await asyncio.sleep(1.5)
        crashed = {ending.worker for ending in self.endings if ending.status and not ending.ours}
        for path in sorted((self.folder / "logs").glob("*.log")):
            node, lines = path.stem.partition(".")[0], path.read_text(errors="replace").splitlines()
            whole = node in crashed or (node in job.nodes and node not in self.struck)
            shown = lines[-400:] if whole else [line for line in lines if SUSPICIOUS.search(line)][-15:]
            if shown:
                print(f"--- log of {path.stem}", *shown, sep="\n", file=sys.stderr)
        sys.stderr.flush()


async def soak(args: argparse.Namespace, folder: Path, launcher: ProcessLauncher) -> dict[str, Any]:
    """Run one job through its schedule and judge it."""
    if args.only:
        kinds = tuple(itertools.islice(itertools.cycle(args.only), args.events))
    elif args.model == "gpt2":
        kinds = GPT2[: args.events]
    else:
        kinds = mixed(args.events, args.seed, MOST[args.model])
    watcher = Soak(folder, args)
    environment = {"BFTRAINER_BACKEND": args.backend}
    if args.backend == "nccl":
        environment["BFTRAINER_RIG"] = "1"
    settings = CoordinatorSettings(
        silence_s=args.silence,
        grace_s=20.0,
        background_start=not args.small,
        threads=1 if args.small else 2,
        ranks_per_node=args.ranks_per_node,
        environment=environment,
    )
    argv = [str(WORKER), str(folder), args.model, "small" if args.small else "full", args.device]
    problem, survivors = "", ()
    async with Coordinator(
        argv, launcher, nodes=(1, 16), folder=folder / "logs", settings=settings, watch=watcher.watch
    ) as job:
        watcher.job = job
        end = asyncio.create_task(job.wait())
        end.add_done_callback(lambda _: setattr(watcher, "over", True))
        try:
            await watcher.play(kinds)
            survivors = tuple(name for node in watcher.training() for name in watcher.names(node))
            await asyncio.wait_for(asyncio.shield(end), args.stall + 30)
        except (Stopped, TimeoutError) as reason:
            problem = str(reason) or f"the workers did not come to the end within {args.stall + 30:g} s"
        if end.done() and (end.result().status != "done" or problem):
            problem = f"{end.result().error or end.result().status}\n{end.result().traceback}\n{problem}".strip()
        if problem:
            await watcher.explain(problem)
        watcher.over = True
    left = sorted(pid for pid in watcher.pids if Path(f"/proc/{pid}").exists())
    watcher.commits.look()
    rows = [timed(event, watcher.commits, watcher.events) for event in watcher.events]
    seen = Run(folder, SAMPLES[args.model], survivors, watcher.endings, rows, watcher.silent, left, args.limit or None)
    wrong = [f"job: {reason.splitlines()[0]}" for reason in (problem, watcher.short) if reason] + violations(seen)
    deaths = [ending for ending in watcher.endings if ending.status]
    losses = [row for row in rows if row["kind"] not in ("join", "leave")]
    return {
        "model": args.model,
        "backend": args.backend,
        "device": args.device,
        "small": args.small,
        "ranks_per_node": args.ranks_per_node,
        "seed": args.seed,
        "seconds": round(time.monotonic() - watcher.began, 1),
        "events": len(watcher.events),
        "planned": len(kinds),
        "commits": len({commit.place for commit in watcher.commits.all}),
        "epochs": max((commit.place[0] + 1 for commit in watcher.commits.all), default=0),
        "generations": max((commit.generation for commit in watcher.commits.all), default=0),
        "survivors": list(survivors),
        "losses": {name: value for key in TIMES[:2] for name, value in median_and_worst(losses, key).items()},
        "by_kind": summary(rows),
        "killed_in_a_join": sum(row.get("in_join", False) for row in rows),
        "ended_by_others": [f"{e.worker}: {describe(e.status)}" for e in deaths if not e.ours],
        "all": rows,
        "violations": wrong,
    }


def worst_lines(folder: Path) -> list[str]:
    """The lines of the workers' logs that look like trouble."""
    found = []
    for log in sorted((folder / "logs").glob("*.log")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if SUSPICIOUS.search(line)]
        found += [f"{log.stem}: {line[:300]}" for line in lines[-8:]]
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt2", "cnn"], default="gpt2")
    parser.add_argument("--events", type=int, default=None, help="18 for gpt2 (all), 100 for cnn")
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, help="these events again and again, instead of the schedule"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model and few spare workers, for a CPU")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="processes of each worker; all share the GPU")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin no event after so many minutes")
    parser.add_argument("--limit", type=float, default=None, help="seconds a recovery may take (3; small: 0, any time)")
    parser.add_argument("--silence", type=float, default=3.0, help="seconds after which a silent worker is lost")
    parser.add_argument("--spares", type=int, default=3, help="workers that are started before they are needed")
    parser.add_argument("--stall", type=float, default=60.0, help="seconds without a commit after which to give up")
    parser.add_argument("--folder", type=Path, help="a new folder for ledgers and logs; it is kept")
    parser.add_argument("--json", action="store_true", help="the JSON object with every event, not only the summary")
    args = parser.parse_args(argv)
    if args.backend == "nccl" and args.device == "cpu":
        parser.error("NCCL needs a GPU; on a CPU use --backend gloo")
    args.events = args.events or (len(GPT2) if args.model == "gpt2" else 100)
    if args.limit is None:
        args.limit = 0.0 if args.small else 3.0
    return args


async def run_alone(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    launcher = WarmLauncher()
    try:
        return await soak(args, folder, launcher)
    finally:
        await launcher.close()


def main() -> None:
    args = parse()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="soak-gpu-"))).absolute()
    folder.mkdir(parents=True, exist_ok=args.folder is None)
    found = asyncio.run(run_alone(args, folder))
    if found["violations"]:
        print(*found["violations"], *worst_lines(folder), f"files: {folder}", sep="\n", file=sys.stderr, flush=True)
    elif args.folder is None:
        shutil.rmtree(folder)
    for kind, times in found["by_kind"].items():
        print(f"{kind:9}", *(f"{name} {value}" for name, value in times.items()), file=sys.stderr)
    print(json.dumps(found if args.json else {name: value for name, value in found.items() if name != "all"}))
    raise SystemExit(bool(found["violations"]))


if __name__ == "__main__":
    main()
