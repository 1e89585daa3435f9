"""Chaos for the whole live system: nodes churn while agents, workers and the controller are killed without warning.

`chaos` is one episode, for a test; run as a program it goes on for as long as one likes (`make soak-live`) and prints a
line per episode and a JSON object at the end. With `--ranks-per-node` it is one episode of `rank_chaos.py` instead
(`make soak-ranks`), which prints a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from support.cluster.live import Live, gone
from support.cluster.rank_chaos import rank_chaos
from support.cluster.verdict import assert_decisions_can_be_made_again, assert_trained_as_alone
from support.elastic.jobs import run_alone
from support.waiting import wait_until

WORKER = Path(__file__).resolve().parents[2] / "elastic" / "chaos_worker.py"
NODES = 6


@dataclass
class Tally:
    """What was done to the system."""

    controller_kills: int = 0
    agent_kills: int = 0
    worker_kills: int = 0
    seconds_without_controller: float = 0.0
    trainers: int = 0
    rescales: int = 0
    decisions: int = 0
    errors: list[str] = field(default_factory=list)


def chaos(folder: Path, seed: int, *, controller_kills: int, epochs: int, trainers: int = 2) -> Tally:
    """One episode: trainers under churn, `controller_kills` kills of the controller and more of everybody else.

    Asserts that every trainer is done, that each sample counted once an epoch, that the weights are those of an
    undisturbed run, that no process is left, that the doctor finds nothing, and that every decision can be made again.
    """
    rng, tally = random.Random(seed), Tally(trainers=trainers)
    folder.mkdir(parents=True, exist_ok=True)
    alone = folder / "alone"
    alone.mkdir()
    run_alone(folder, WORKER, alone, epochs, 0)
    homes = [folder / f"job-{i}" for i in range(trainers)]
    churn = folder / "churn.txt"
    churn.write_text(_churn(rng))
    settings = ["--set", f"pool.nodes={NODES}", "--set", f"pool.churn={churn}", "--set", "agents.silence_s=5"]
    settings += ["--set", "agents.reattach_s=6", "--set", "agents.leave_grace_s=5"]
    with Live(folder / "state", *settings) as live:
        refs = []
        for home in homes:
            home.mkdir()
            refs.append(live.submit(WORKER, str(home), str(epochs), "0.1", nodes="1-4"))
        wait_until(lambda: any(live.trainer(ref)["step"] > 2 for ref in refs), "the first steps", 60)
        while tally.controller_kills < controller_kills:
            _strike(live, refs, rng, tally)
        for ref in refs:
            row = live.until_state(ref, "done", "failed", "cancelled", timeout_s=240)
            assert row["state"] == "done", (row["reason"], row["traceback"], row["log_tail"])
            assert row["samples"] == row["total"] == 600 * epochs, row
            tally.rescales += row["rescales"]
        live.nodes()
        assert live.problems() == []
        assert live.stop() == 0
    gone(live.pids)
    for home in homes:
        assert_trained_as_alone(home, alone, epochs)
    tally.decisions = assert_decisions_can_be_made_again(folder / "state")
    assert live.problems() == []
    return tally


def _churn(rng: random.Random) -> str:
    """Nodes that come and go for ten minutes, as the local pool reads it. One stays, so that something trains."""
    lines = [f"0 join node-{n}" for n in range(1, NODES // 2 + 1)]
    at, here = 1.0, set(range(1, NODES // 2 + 1))
    while at < 600:
        away = set(range(1, NODES + 1)) - here
        if away and (len(here) <= 2 or rng.random() < 0.5):
            node = rng.choice(sorted(away))
            here.add(node)
            lines.append(f"{at:.1f} join node-{node}")
        else:
            node = rng.choice(sorted(here))
            here.discard(node)
            lines.append(f"{at:.1f} {rng.choice(['leave', 'kill'])} node-{node}")
        at += rng.uniform(1.5, 6.0)
    return "\n".join(lines) + "\n"


def _strike(live: Live, refs: list[str], rng: random.Random, tally: Tally) -> None:
    """Kill somebody, and let training get on a little."""
    time.sleep(rng.uniform(0.1, 1.5))  # when it strikes is chance, whether it is survived must not be
    what = rng.choice(["controller", "controller", "agent", "worker"])
    if what == "controller":
        down = rng.choice([0.0, 0.0, 0.5, 2.0])
        live.kill()
        time.sleep(down)
        tally.controller_kills += 1
        tally.seconds_without_controller += down
        live.start()
        return
    if what == "agent":
        pids = [node["agent_pid"] for node in live.nodes()]
    else:
        pids = [worker["pid"] for ref in refs for worker in live.trainer(ref)["workers"] if worker["pid"]]
    if pids:
        try:
            os.kill(rng.choice(pids), signal.SIGKILL)
        except ProcessLookupError:
            return
        if what == "agent":
            tally.agent_kills += 1
        else:
            tally.worker_kills += 1


def main_ranks(args: argparse.Namespace) -> None:
    """One episode with several ranks per node."""
    folder = Path(tempfile.mkdtemp(prefix="soak-ranks-"))
    try:
        tally = rank_chaos(
            folder,
            args.seed,
            events=args.events,
            nodes=args.nodes,
            ranks_per_node=args.ranks_per_node,
            epochs=2 * args.events,
        )
    except Exception:
        print(f"seed {args.seed} failed; its files are in {folder}\n{traceback.format_exc()}", flush=True)
        raise SystemExit(1) from None
    shutil.rmtree(folder)
    print(json.dumps(vars(tally)))


def main() -> None:
    """Episodes until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=2000)
    parser.add_argument("--ranks-per-node", type=int, default=0, help="one episode with so many ranks per node")
    parser.add_argument("--events", type=int, default=40, help="events of that episode")
    parser.add_argument("--nodes", type=int, default=3, help="nodes of that episode, 2 or more")
    args = parser.parse_args()
    if args.ranks_per_node:
        main_ranks(args)
        return
    began, episodes, failed = time.monotonic(), 0, []
    sums: Counter[str] = Counter()
    while time.monotonic() - began < args.minutes * 60:
        seed = args.seed + episodes
        folder = Path(tempfile.mkdtemp(prefix="soak-live-"))
        try:
            tally = chaos(folder, seed, controller_kills=20, epochs=120)
            sums.update({name: value for name, value in vars(tally).items() if isinstance(value, int | float)})
            shutil.rmtree(folder)
        except Exception:
            failed.append(seed)
            print(f"seed {seed} failed; its files are in {folder}\n{traceback.format_exc()}", flush=True)
        episodes += 1
        print(f"episode {episodes}, seed {seed}, {(time.monotonic() - began) / 60:.1f} min, {dict(sums)}", flush=True)
    minutes = round((time.monotonic() - began) / 60, 1)
    print(json.dumps({"minutes": minutes, "episodes": episodes, "failed_seeds": failed, **sums}))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
