"""What does a controller need for a thousand nodes, and how quick is it? The real one, against agents that are made up.

    python benchmarks/controller.py [--json] [--seconds 60] [--agents 1000] [--trainers 200] [--churn 10]
                                    [--max-parallel 10,200] [--profile FILE] [--busy 2] [--dead 5] [--silence 10]
    python benchmarks/controller.py --ranks-per-node 1,8 [--turns 3] [--json] …
    python benchmarks/controller.py --flood 64 [--json] [--seconds 60] [--busy 2]

`bftrainer serve` runs as it does anywhere: its own process, SQLite on disk, real websockets. A second process holds the
agents' ends of the connections (`workers/simulated_agents.py`): every agent beats once a second with its worker's
report, workers start, form generations, print and end as real ones do. This process submits trainers of up to 64 nodes,
puts a new one in the place of each that is done, and asks the API 20 times a second.

Nodes come and go at `--churn` times the rate of Summit (42 joins and 29 leaves an hour, in groups as large as those of
the synthetic Summit trace on 1,024 nodes). Half of the leaves are announced by the agent, half are cut connections.

An *event* is one agent that begins to connect, or a group of nodes that is taken at once. Its *commands* are:
- for each worker left behind by a lost member, the first generation (or stop) that it is told;
- all starts of the first decision after the event, as the event log has them (`worker.started` of the same instant);
- for each trainer that this decision shrinks, the first generation or stop that any of its workers is told.
`event_to_command_ms` is the time from the event, on the agents' side, to the arrival there of the last of these. What
workers themselves need (to become ready, to come to a step boundary) is not in it; coalescing, the decision, the store
and the network are.

`--dead` nodes fall silent in the course of a run, without closing their connections. `unnoticed_s` is the time from
each one's last heartbeat to the event that says that it is lost. `--busy` processes beside all this do nothing but use
a processor each.

`--flood` is another measurement: that many connections, all from one process, send output as fast as the controller
acknowledges it. `loop_lag_ms` is how long `/v1/health`, which looks at nothing, takes to answer: an upper bound of the
event loop's lag.

Each value of `--max-parallel` is a run of its own (`runs`); the figures at the top are the worst of them.

`--ranks-per-node K` gives each node K GPUs and each worker K ranks. Several values, such as `1,8`, are compared: their
runs alternate, `--turns` times. `ranks` has the medians of each value and all its runs, and `ratio` the medians of the
last value over those of the first one.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bftrainer import __version__
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.traces.synthetic.synth import synthesise
from controller_events import Book

AGENTS = Path(__file__).with_name("workers") / "simulated_agents.py"
FLOOD = Path(__file__).with_name("workers") / "flooding_agents.py"
JOINS_PER_HOUR, LEAVES_PER_HOUR = 42.0, 29.0
SUMMIT_NODES = 1024
REQUESTS_PER_S = 20.0
CLIENTS = 4
"""So that one slow answer does not keep the others from being asked for."""
PATHS = ("/v1/status", "/v1/trainers/{id}", "/v1/nodes", "/v1/events?limit=100", "/v1/trainers")
WARM_UP_S = 60.0
LIMIT_S = 120.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Load:
    """What is put on the controller."""

    agents: int
    trainers: int
    seconds: float
    churn: float
    """Times the rate of Summit."""
    seed: int = 0
    warm_up_s: float = WARM_UP_S
    dead: int = 0
    """How many nodes fall silent."""
    silence_s: float = 10.0
    ranks_per_node: int = 0
    """GPUs of each node, with one rank each; 0: nodes without GPUs, with one rank."""


@dataclass(slots=True)
class Asked:
    """What the API clients saw."""

    took_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    problems: list[str] = field(default_factory=list)


def churn(load: Load) -> dict[str, Any]:
    """How often nodes come and go, and how many at a time."""
    events = list(synthesise("summit", nodes=SUMMIT_NODES, hours=50, seed=load.seed).events())
    share = min(load.agents / SUMMIT_NODES, 1.0)
    return {
        "joins_per_hour": JOINS_PER_HOUR * load.churn,
        "leaves_per_hour": LEAVES_PER_HOUR * load.churn,
        "join_sizes": [max(round(len(event.joined) * share), 1) for event in events if event.joined],
        "leave_sizes": [max(round(len(event.left) * share), 1) for event in events if event.left],
    }


class Api:
    """One connection to the API."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        self._headers = {"Authorization": f"Bearer {token}"}

    def ask(self, path: str, body: Any = None) -> Any:
        """The answer, as JSON."""
        sent = None if body is None else json.dumps(body)
        headers = {**self._headers, "Content-Type": "application/json"} if sent else self._headers
        self._connection.request("GET" if body is None else "POST", path, sent, headers)
        answer = self._connection.getresponse()
        found = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"{path}: HTTP {answer.status}: {found[:200]!r}")
        return json.loads(found)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def trainer(number: int, rng: random.Random) -> dict[str, Any]:
    """What is submitted: from one node to as many as 64, for a minute or some."""
    least = rng.choice((1, 1, 1, 2, 4))
    most = max(least, rng.choice((1, 4, 8, 16, 32, 64)))
    rate = rng.uniform(50, 500)
    seconds = rng.uniform(30, 300)
    args = ["--rate", f"{rate:.1f}", "--total", str(int(rate * min(most, 8) * seconds))]
    return {"script": "/train.py", "name": f"load-{number}", "nodes": f"{least}-{most}", "args": args, "cwd": "/"}


class Client:
    """Asks all the time, from threads of its own."""

    def __init__(self, address: tuple[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
        self.asked = Asked()
        self._address = address
        self._ids = [row["id"] for row in rows]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> Asked:
        """No more questions."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return self.asked

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        api = Api(*self._address)
        due = time.monotonic() + number / REQUESTS_PER_S
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due += CLIENTS / REQUESTS_PER_S
            kind = rng.choice(PATHS)
            path = kind.replace("{id}", rng.choice(self._ids))
            began = time.perf_counter()
            try:
                api.ask(path)
            except (OSError, RuntimeError, http.client.HTTPException) as problem:
                self.asked.problems.append(f"{path}: {problem}")
                api.close()
            self.asked.took_ms[kind].append((time.perf_counter() - began) * 1e3)
        api.close()


@contextmanager
def serving(
    state: Path, max_parallel: int, profile: str = "", silence_s: float = 10.0
) -> Iterator[subprocess.Popen[bytes]]:
    """A controller whose pool finds nothing: agents that come by themselves are welcome."""
    command = [sys.executable, *(["-m", "cProfile", "-o", profile] if profile else []), "-m", "bftrainer", "serve"]
    command += ["--state", str(state), "--port", "0", "--pool", "script", "--keep"]
    settings = ['pool.command=["true"]', 'pool.start=["true"]', f"policy.max_parallel={max_parallel}"]
    for setting in (*settings, f"agents.silence_s={silence_s}"):
        command += ["--set", setting]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("BFTRAINER_")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise SystemExit(f"controller: `bftrainer serve` ended with status {process.wait()}")
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep processors busy with something else."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextmanager
def agents(state: Path, load: Load, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The other ends."""
    command = [sys.executable, str(AGENTS), "--state", str(state), "--agents", str(load.agents)]
    command += ["--churn", json.dumps(churn(load)), "--seed", str(load.seed), "--out", str(out)]
    command += ["--ranks-per-node", str(load.ranks_per_node)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[bytes], word: str) -> None:
    """Say something to the simulated agents."""
    assert process.stdin is not None
    process.stdin.write(f"{word}\n".encode())
    process.stdin.flush()


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def waited_s(pid: int) -> float:
    """How long a process could have run but had no processor: what others on this machine cost it."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def memory_mb(pid: int, key: str) -> float:
    """VmRSS now, or VmHWM, the most that it was."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    return 0.0


def say(what: str) -> None:
    """Print the progress of the benchmark on stderr."""
    print(f"controller: {what}", file=sys.stderr, flush=True)


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Count, p50, p99 and the largest."""
    found = sorted(values)
    if not found:
        return {"count": 0, "p50": None, "p99": None, "max": None}
    at = min(int(len(found) * 0.99), len(found) - 1)
    return {
        "count": len(found),
        "p50": round(statistics.median(found), 2),
        "p99": round(found[at], 2),
        "max": round(found[-1], 2),
    }


def run(load: Load, max_parallel: int, state: Path, profile: str = "") -> dict[str, Any]:
    """One controller under load."""
    out = state.with_name(state.name + ".story")
    rng = random.Random(load.seed)
    with serving(state, max_parallel, profile, load.silence_s) as controller:
        found = json.loads((state / "client.json").read_text())
        address = (found["url"], found["token"])
        api = Api(*address)
        pid = controller.pid
        with agents(state, load, out) as fleet:
            assert fleet.stdout is not None
            connected = json.loads(fleet.stdout.readline() or "{}")
            if not connected:
                raise SystemExit("controller: the simulated agents ended")
            say(f"{load.agents} agents connected in {connected['connected_s']:.1f} s")
            numbers = itertools.count(1)
            rows = [api.ask("/v1/trainers", trainer(next(numbers), rng)) for _ in range(load.trainers)]
            say(f"{load.trainers} trainers submitted")
            api.close()  # the controller does not keep idle connections; the next question opens one
            time.sleep(load.warm_up_s)
            tell(fleet, "churn")
            client = Client(address, rows)
            cpu, waited, fleet_cpu, began = cpu_s(pid), waited_s(pid), cpu_s(fleet.pid), time.monotonic()
            states: dict[str, int] = {}
            dead = 0
            while time.monotonic() - began < load.seconds:
                time.sleep(1.0)
                if load.dead * (time.monotonic() - began) > dead * load.seconds and dead < load.dead:
                    tell(fleet, "die")
                    dead += 1
                status = api.ask("/v1/status")
                states = defaultdict(int)
                for row in status["trainers"]:
                    states[row["state"]] += 1
                finished = sum(states[name] for name in ("done", "failed", "cancelled"))
                for _ in range(load.trainers - len(status["trainers"]) + finished):
                    api.ask("/v1/trainers", trainer(next(numbers), rng))
            wall = time.monotonic() - began
            cpu, fleet_cpu = (cpu_s(pid) - cpu) / wall, (cpu_s(fleet.pid) - fleet_cpu) / wall
            waited = (waited_s(pid) - waited) / wall
            asked = client.stop()
            tell(fleet, "calm")
            time.sleep(3 * load.silence_s if load.dead else 1.0)  # for what is still to be noticed or on its way
            memory = memory_mb(pid, "VmRSS"), memory_mb(pid, "VmHWM")
            tell(fleet, "stop")
            fleet.wait(LIMIT_S)
            api.close()
    story = json.loads(out.read_text())
    with Store.open(state / FILE) as store:
        book = Book(store, story["commands"])
        decisions = [row.data["ms"] for row in store.all_events(("decision",))]
        lost = [(row.node, row.time) for row in store.all_events(("node.left",))]
    noticed = []
    for died in (event for event in story["events"] if event["kind"] == "dead"):
        later = (at - died["time"] for name, at in lost if name in died["nodes"] and at > died["time"])
        noticed.append(min(later, default=None))
    took: dict[str, list[float]] = defaultdict(list)
    for event in story["events"]:
        if event["kind"] != "dead" and (answers := book.answers(event)):
            took[event["kind"]].append((max(answers) - event["time"]) * 1e3)
    changes = [event for event in story["events"] if event["kind"] != "join"]
    everything = [value for values in asked.took_ms.values() for value in values]
    hours = wall / 3600
    return {
        "api_p99_ms": summary(everything)["p99"],
        "event_to_command_p99_ms": summary([value for values in took.values() for value in values])["p99"],
        "cpu_cores": round(cpu, 3),
        "cpu_cores_waited_for": round(waited, 3),
        "rss_mb": round(memory[0], 1),
        "peak_rss_mb": round(memory[1], 1),
        "api_ms": {"all": summary(everything), **{kind: summary(asked.took_ms[kind]) for kind in PATHS}},
        "event_to_command_ms": {kind: summary(took[kind]) for kind in ("join", "leave", "cut")},
        "decision_ms": summary(decisions),
        "silence_s": load.silence_s,
        "unnoticed_s": summary([value for value in noticed if value is not None]),
        "never_noticed": noticed.count(None),
        "agents_mean": round(statistics.fmean(story["sizes"] or [0]), 1),
        "nodes_joined_per_hour": round(sum(event["kind"] == "join" for event in story["events"]) / hours),
        "nodes_left_per_hour": round(sum(len(event["nodes"]) for event in changes) / hours),
        "commands": len(story["commands"]),
        "connected_s": round(connected["connected_s"], 2),
        "database_mb": round((state / FILE).stat().st_size / 1e6, 1),
        "states": dict(states),
        "generator": {"cpu_cores": round(fleet_cpu, 3), "lag_ms": summary([lag * 1e3 for lag in story["lag_s"]])},
        "problems": (story["problems"] + asked.problems)[:20],
    }


def run_flood(connections: int, seconds: float, state: Path, profile: str = "") -> dict[str, Any]:
    """One controller whose agents send output without pause."""
    with serving(state, 10, profile) as controller:
        found = json.loads((state / "client.json").read_text())
        command = [sys.executable, str(FLOOD), "--state", str(state), "--connections", str(connections)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flooding:
            api, lags = Api(found["url"], found["token"]), []
            cpu, began = cpu_s(controller.pid), time.monotonic()
            while time.monotonic() - began < seconds:
                asked = time.perf_counter()
                api.ask("/v1/health")
                lags.append((time.perf_counter() - asked) * 1e3)
                time.sleep(0.01)
            wall = time.monotonic() - began
            cpu = (cpu_s(controller.pid) - cpu) / wall
            nodes = len(api.ask("/v1/nodes")["nodes"])
            api.close()
            told = json.loads(flooding.communicate(b"\n", LIMIT_S)[0])
        written = sum(path.stat().st_size for path in state.glob("trainers/*/log*"))
    return {
        "loop_lag_ms": summary(lags),
        "connections": connections,
        "nodes": nodes,
        "acknowledged_mb_per_s": round(told["bytes"] / wall / 1e6, 2),
        "pieces": told["pieces"],
        "connections_ended": told["ended"],
        "log_mb": round(written / 1e6, 1),
        "cpu_cores": round(cpu, 3),
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }


def measure(load: Load, max_parallel: Sequence[int], profile: str = "") -> dict[str, Any]:
    """A run for each, and the worst figures of all."""
    runs = {}
    for value in max_parallel:
        with tempfile.TemporaryDirectory() as folder:
            runs[str(value)] = run(load, value, Path(folder, "state"), profile and f"{profile}.{value}")
    return {
        "bftrainer": __version__,
        "agents": load.agents,
        "trainers": load.trainers,
        "seconds": load.seconds,
        "churn_speedup": load.churn,
        "churn_events_per_hour": (JOINS_PER_HOUR + LEAVES_PER_HOUR) * load.churn,
        "ranks_per_node": load.ranks_per_node or 1,
        **{key: max(run[key] or 0.0 for run in runs.values()) for key in FIGURES},
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "runs": runs,
    }


FIGURES = ("api_p99_ms", "event_to_command_p99_ms", "cpu_cores", "rss_mb")


def compare(load: Load, ranks: Sequence[int], max_parallel: Sequence[int], turns: int) -> dict[str, Any]:
    """Runs for each number of ranks per node in turns, their medians, and those of the last over those of the first."""
    sides: dict[int, list[dict[str, Any]]] = {value: [] for value in ranks}
    for turn in range(turns):
        for value in ranks:
            found = measure(replace(load, ranks_per_node=value), max_parallel)
            sides[value].append(found)
            say(f"turn {turn + 1}, {value} ranks per node: " + ", ".join(f"{key} {found[key]}" for key in FIGURES))
    medians = {
        value: {key: round(statistics.median(found[key] for found in runs), 3) for key in FIGURES}
        for value, runs in sides.items()
    }
    first, last = medians[ranks[0]], medians[ranks[-1]]
    return {
        "bftrainer": __version__,
        "agents": load.agents,
        "trainers": load.trainers,
        "seconds": load.seconds,
        "churn_speedup": load.churn,
        "turns": turns,
        "ratio": {key: round(last[key] / first[key], 3) if first[key] else None for key in FIGURES},
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "ranks": {str(value): {**medians[value], "turns": runs} for value, runs in sides.items()},
    }


def print_compared(found: Mapping[str, Any]) -> None:
    """The medians of each number of ranks per node, and the ratio."""
    print(
        f"{found['agents']:,} agents, {found['trainers']:,} trainers, {found['churn_speedup']:g} times Summit's churn"
    )
    print(f"{'ranks per node':>14} {'API p99':>10} {'commands p99':>14} {'cores':>7} {'memory':>8}")
    for value, row in found["ranks"].items():
        api, commands = row["api_p99_ms"], row["event_to_command_p99_ms"]
        print(f"{value:>14} {api:>7.1f} ms {commands:>11.1f} ms {row['cpu_cores']:>7.2f} {row['rss_mb']:>5.0f} MB")
    print(f"cores, last over first: {found['ratio']['cpu_cores']:.2f}; load average {found['load_average']:.1f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--trainers", type=int, default=200)
    parser.add_argument("--churn", type=float, default=10.0, help="times the rate of Summit")
    parser.add_argument("--max-parallel", default="10,200", help="the policy's, one run each")
    parser.add_argument("--ranks-per-node", default="", help="GPUs and ranks of each node; several values are compared")
    parser.add_argument("--turns", type=int, default=1, help="how often the values of --ranks-per-node alternate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", default="", help="write cProfile's record of the controller to FILE.N")
    parser.add_argument("--busy", type=int, default=0, help="processes beside it that use a processor each")
    parser.add_argument("--dead", type=int, default=0, help="nodes that fall silent in the course of a run")
    parser.add_argument("--silence", type=float, default=10.0, help="agents.silence_s of the controller")
    parser.add_argument("--flood", type=int, default=0, help="only connections that send output without pause")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes it started end too
    if args.flood:
        with busy(args.busy), tempfile.TemporaryDirectory() as folder:
            flooded = run_flood(args.flood, args.seconds, Path(folder, "state"), args.profile)
        lag = flooded["loop_lag_ms"]
        line = f"{args.flood} connections that print without pause: loop lag p50 {lag['p50']} ms, p99 {lag['p99']} ms"
        print(json.dumps(flooded, indent=1) if args.json else line)
        return
    values = [int(value) for value in args.max_parallel.split(",")]
    load = Load(args.agents, args.trainers, args.seconds, args.churn, args.seed, dead=args.dead, silence_s=args.silence)
    ranks = [int(value) for value in args.ranks_per_node.split(",") if value]
    with busy(args.busy):
        if len(ranks) > 1:
            found = compare(load, ranks, values, args.turns)
        else:
            load = replace(load, ranks_per_node=ranks[0] if ranks else 0)
            found = measure(load, values, args.profile)
    found["busy"] = args.busy
    if args.json:
        print(json.dumps(found, indent=1))
        return
    if len(ranks) > 1:
        print_compared(found)
        return
    print(f"{args.agents:,} agents, {args.trainers:,} trainers, {args.churn:g} times the churn of Summit")
    print(f"{'max parallel':>14} {'API p99':>10} {'commands p99':>14} {'cores':>7} {'memory':>8}")
    for value, row in found["runs"].items():
        api, commands = row["api_p99_ms"], row["event_to_command_p99_ms"] or 0.0
        print(f"{value:>14} {api:>7.1f} ms {commands:>11.1f} ms {row['cpu_cores']:>7.2f} {row['rss_mb']:>5.0f} MB")
        if args.dead:
            longest, missed = row["unnoticed_s"]["max"], row["never_noticed"]
            print(f"dead nodes: noticed after at most {longest} s (silence_s {args.silence:g}), never: {missed}")


if __name__ == "__main__":
    main()
