"""From the controller's decision to the first committed step on a node: how long a new worker computes nothing.

    python benchmarks/start.py [--json] [--imports transformers] [--repetitions 5] [--waits 20] [--scenarios fresh …]

A controller without a pool gets agents that this program starts. In each repetition, in turns:
- fresh: the trainer waits when the agent comes, so its worker is started at once;
- waiting: the agent has been there for `--waits` seconds, while another trainer of the script ran elsewhere;
- changing: the agent's node goes from one trainer of the script to the next.
`new` is a script whose imports the controller knows. `old` is a copy of it that the controller has never seen, so its
workers import everything themselves, as all did before. The parts are those that `bftrainer status TRAINER` shows.

Without the library that `--imports` names, a tree of modules stands in, which computes for `--seconds` while it is
imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bftrainer import __version__
from bftrainer.client.api import ApiClient, find_controller
from bftrainer.processes.start_up import PARTS

WORKER = Path(__file__).resolve().parent / "workers" / "importing.py"
STAND_IN = "stand_in_library"
SCENARIOS = ("fresh", "waiting", "changing")
MODULES = 90
DEADLINE_S = 300.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Return what a condition returns, once it is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"start.py: waited {DEADLINE_S:g} s for {what}")
        time.sleep(0.02)
    return found


def stand_in(folder: Path, seconds: float) -> dict[str, str]:
    """Make the tree of modules, as if it were installed. Return the variable by which it is found."""
    site = folder / "site-packages"
    package = site / STAND_IN
    package.mkdir(parents=True)
    work = f"import time\nend = time.process_time() + {seconds / MODULES}\nwhile time.process_time() < end:\n    pass\n"
    for number in range(MODULES):
        (package / f"part_{number}.py").write_text(work)
    (package / "__init__.py").write_text("".join(f"from . import part_{number}\n" for number in range(MODULES)))
    path = os.pathsep.join((str(site), *filter(None, [os.environ.get("PYTHONPATH")])))
    return {"PYTHONPATH": path}


class Site:
    """A controller, its agents, and the scripts that are run."""

    def __init__(self, folder: Path, imports: str, env: dict[str, str]) -> None:
        self.folder = folder
        self.imports = imports
        self.env = {**os.environ, **env, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self.state = folder / "state"
        self.steps = folder / "steps"
        self.steps.mkdir()
        self.known = folder / "known" / "train.py"
        self.known.parent.mkdir()
        shutil.copy(WORKER, self.known)
        self.count = 0
        self._log = (folder / "log").open("ab")
        serve = ("serve", "--port", "0", "--pool", "script", "--set", "pool.command=/bin/true")
        self._controller = self._run(*serve, "--state", str(self.state))
        self.api: ApiClient = wait_for(self._answer, "an answer of the controller")

    def _run(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "bftrainer", *words]
        return subprocess.Popen(command, env=self.env, stdout=self._log, stderr=self._log, cwd=self.folder)

    def _answer(self) -> ApiClient | None:
        if self._controller.poll() is not None:
            raise SystemExit(f"start.py: the controller ended:\n{(self.folder / 'log').read_text()[-3000:]}")
        try:
            api = ApiClient(find_controller(self.state))
            return api if api.health()["ok"] else None
        except Exception:  # it is not there yet
            return None

    def close(self) -> None:
        """End the controller."""
        self._controller.send_signal(signal.SIGTERM)
        self._controller.wait(60)
        self._log.close()

    @contextmanager
    def agent(self) -> Iterator[str]:
        """Start an agent of a new node, and end it."""
        self.count += 1
        node = f"node-{self.count}"
        where = ("--url", find_controller(self.state).url, "--secret-file", str(self.state / "agent-secret"))
        process = self._run("agent", *where, "--node", node, "--host", "127.0.0.1")
        try:
            yield node
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            wait_for(lambda: not self.has(node), f"the end of {node}")

    def has(self, node: str) -> bool:
        """Whether a node is in the pool."""
        return any(row["node"] == node for row in self.api.nodes())

    def script(self, side: str) -> Path:
        """Return the script of a side."""
        if side == "new":
            return self.known
        self.count += 1
        copy = self.folder / f"copy-{self.count}" / "train.py"
        copy.parent.mkdir()
        shutil.copy(WORKER, copy)
        return copy

    def submit(self, script: Path, *more: str) -> str:
        """Queue a trainer of one node."""
        self.count += 1
        spec = {"script": str(script), "args": [self.imports, str(self.steps), *more], "name": f"run-{self.count}"}
        return str(self.api.submit({**spec, "min_nodes": 1, "max_nodes": 1, "cwd": str(script.parent)})["id"])

    def measure(self, trainer: str) -> dict[str, float]:
        """Wait for the end of a trainer. Return the seconds from the decision to its first step, and their parts."""
        row = self.finished(trainer)
        events = self.api.events(trainer=trainer, kind="worker.started")["events"]
        stepped = float((self.steps / row["name"]).read_text())
        return {"total": stepped - events[-1]["time"], **row["start_parts"]}

    def finished(self, trainer: str) -> dict[str, Any]:
        """Return a trainer that is done, with the parts of its start."""

        def done() -> Any:
            row = self.api.trainer(trainer)
            if row["state"] in ("failed", "cancelled"):
                raise SystemExit(f"start.py: {row['error']}\n{row['traceback']}")
            return row if row["state"] == "done" else None

        found: dict[str, Any] = wait_for(done, f"the end of {trainer}")
        return found


def fresh(site: Site, side: str) -> dict[str, float]:
    """The trainer is there first."""
    trainer = site.submit(site.script(side))
    with site.agent():
        return site.measure(trainer)


def waiting(site: Site, side: str, waits_s: float) -> dict[str, float]:
    """The agent is there first, and has had time."""
    with site.agent() as node:
        wait_for(lambda: site.has(node), node)
        time.sleep(waits_s)
        return site.measure(site.submit(site.script(side)))


def changing(site: Site, side: str) -> dict[str, float]:
    """The node had a trainer of the script before."""
    with site.agent() as node:
        wait_for(lambda: site.has(node), node)
        site.finished(site.submit(site.script(side)))
        return site.measure(site.submit(site.script(side)))


Runs = dict[str, list[dict[str, float]]]


def run(site: Site, scenarios: Sequence[str], repetitions: int, waits_s: float) -> dict[str, Runs]:
    """Measure some scenarios, both sides in turns."""
    fresh(site, "new")  # from here on the controller knows what the script imports
    found: dict[str, Runs] = {name: {"old": [], "new": []} for name in scenarios}
    turns = [(repetition, side) for repetition in range(repetitions) for side in ("old", "new")]
    for _, side in turns:
        for name, measure in (("fresh", fresh), ("changing", changing)):
            if name in found:
                found[name][side].append(measure(site, side))
    if "waiting" not in found:
        return found
    end = site.folder / "end"
    with site.agent():
        other = site.submit(site.known, str(end))
        wait_for(lambda: site.api.trainer(other)["start_parts"], "the other trainer")
        for _, side in turns:
            found["waiting"][side].append(waiting(site, side, waits_s))
        end.touch()
        site.finished(other)
    return found


def main() -> None:
    """Run it and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--imports", default="transformers", help="the library that the script imports")
    parser.add_argument("--seconds", type=float, default=9.0, help="of computing, where a tree of modules stands in")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--waits", type=float, default=20.0, help="seconds that an agent is there before its trainer")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        there = importlib.util.find_spec(args.imports) is not None
        env = {} if there else stand_in(folder / "library", args.seconds)
        site = Site(folder, args.imports if there else STAND_IN, env)
        try:
            found = run(site, args.scenarios, args.repetitions, args.waits)
        finally:
            site.close()
    medians = {
        scenario: {
            side: {part: round(statistics.median(each[part] for each in runs), 3) for part in ("total", *PARTS)}
            for side, runs in sides.items()
        }
        for scenario, sides in found.items()
    }
    if args.json:
        about = {"version": __version__, "imports": site.imports, "cores": os.cpu_count(), "waits_s": args.waits}
        print(json.dumps({**about, "repetitions": args.repetitions, "median_s": medians, "runs_s": found}, indent=2))
        return
    print(f"{site.imports}; seconds from the decision to the first step, medians of {args.repetitions}")
    print(f"{'':18}{'total':>9}" + "".join(f"{part:>12}" for part in PARTS))
    for scenario, sides in medians.items():
        for side, parts in sides.items():
            print(f"{scenario + ', ' + side:18}{parts['total']:9.2f}" + "".join(f"{parts[p]:12.2f}" for p in PARTS))


if __name__ == "__main__":
    main()
