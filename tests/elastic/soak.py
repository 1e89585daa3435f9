"""Disturbs elastic jobs by as many joins, leaves, SIGKILLs and SIGSTOPs as asked for, or for as long: `make soak`.

Each episode is one job on up to eight fake nodes with 80 events in a random order. Afterwards every sample must have
counted once in each epoch, the weights must be those of an undisturbed training to 1e-12, and no process, descriptor,
thread or file may be left. With `--ranks-per-node` each node has several ranks, and a kill or stop hits all of them or
one. With `--flows` the state flows to all newcomers before they join, and these or those that send it are killed, or
leave, at points of the flow. Prints one line per episode and a JSON object at the end; the status is 1 if anything
failed. An episode that failed is run again by `--seed SEED --faults 1`; its files are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from bftrainer.elastic.local.coordinator import CoordinatorSettings
from support.elastic.churn import EVENTS, Account, check, disturb, undisturbed
from support.elastic.flow_chaos import ROUNDS, check_flows, disturb_flows
from support.elastic.leftovers import PATIENCE_S, Leftovers, children, held, marked

EPISODE = EVENTS * 2
EPOCHS = 80
SETTINGS = CoordinatorSettings(silence_s=2.0, grace_s=20.0, background_start=False)
"""Workers report once a second, so silence of 2 s is the shortest that does not take the living for lost."""


@dataclass(slots=True)
class Episode:
    """What became of one job."""

    seed: int
    error: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    single: Counter[str] = field(default_factory=Counter)
    """Of these, the kills and stops that hit only one of a node's ranks."""
    extra_joins: int = 0
    silent: list[str] = field(default_factory=list)
    pauses: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    pid: int = 0
    """The process that coordinated it."""
    mark: str = ""
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    """Descriptors and threads that this process and the parent of its workers have after the episode."""

    @property
    def faults(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        said = ", ".join(f"{count} {kind}s" for kind, count in sorted(self.counts.items()))
        kills = self.pauses.get("kill", [0.0])
        line = (
            f"seed {self.seed}: {said}; {self.seconds:.0f} s, worst pause after a kill {max(kills):.2f} s, {self.held}"
        )
        return f"{line}\n{self.error}" if self.error else line


@cache
def _place(root: Path) -> tuple[Path, Leftovers, Path]:
    """What a process makes once: its folder, its eye on what is left over, and the training to compare with."""
    folder = root / str(os.getpid())
    leftovers = Leftovers(folder / "tmp")
    return folder, leftovers, undisturbed(folder / "alone", EPOCHS)


def episode(root: Path, seed: int, snapshots: bool, ranks_per_node: int = 1, flows: bool = False) -> Episode:
    """Run one job and look at what it left. Its files are removed if all is well."""
    folder, leftovers, alone = _place(root)
    began, account, where = time.monotonic(), Account(), folder / f"seed-{seed}"
    result = Episode(seed, pid=os.getpid(), mark=leftovers.mark)
    settings = replace(SETTINGS, ranks_per_node=ranks_per_node)
    try:
        if flows:
            rounds = random.Random(seed).sample(ROUNDS * 2, len(ROUNDS) * 2)
            account = disturb_flows(where, EPOCHS, rounds, account=account)
            check_flows(where, alone, EPOCHS, account)
        else:
            account = disturb(where, seed, EPOCHS, EPISODE, settings=settings, snapshots=snapshots, account=account)
            check(where, alone, EPOCHS, account)
        result.pauses = dict(account.pauses(where))
        left = leftovers.find(account.pids)
        assert left == [], left
        shutil.rmtree(where)
    except Exception:
        result.error = f"seed {seed} failed; its files are in {where}\n{traceback.format_exc()}"
    result.counts, result.extra_joins, result.silent = account.counts, account.extra_joins, account.silent
    result.single = account.single
    result.held = {"coordinator": held(os.getpid())}
    for warm in children(os.getpid()):
        result.held["warm parent"] = held(warm)
    result.seconds = time.monotonic() - began
    return result


def run(root: Path, args: argparse.Namespace) -> list[Episode]:
    """Run episodes side by side until there were enough faults, or the time is over."""
    began, seed, done = time.monotonic(), args.seed, []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        going = set()
        while True:
            while len(going) < args.jobs and (
                sum(found.faults for found in done) + len(going) * len(EPISODE) < args.faults
                if args.faults
                else time.monotonic() - began < args.minutes * 60
            ):
                going.add(pool.submit(episode, root, seed, args.snapshots, args.ranks_per_node, args.flows))
                seed += 1
            if not going:
                return done
            over, going = wait(going, return_when=FIRST_COMPLETED)
            for found in (future.result() for future in over):
                done.append(found)
                faults, minutes = sum(e.faults for e in done), (time.monotonic() - began) / 60
                print(f"episode {len(done)}, {faults} faults, {minutes:.1f} min, {found}", flush=True)


def grown(episodes: list[Episode]) -> list[str]:
    """Processes that hold more descriptors or threads after their last episode than after their first."""
    found = []
    for pid in {e.pid for e in episodes}:
        first, *_, last = [e.held for e in episodes if e.pid == pid] * 2
        for who, before in first.items():
            after = last.get(who, before)
            found += [f"{who} {pid}: {before[k]} {k}, then {after[k]}" for k in before if after[k] > before[k] + 2]
    return found


def still_there(episodes: list[Episode]) -> list[str]:
    """Processes of this run that outlive it."""
    deadline = time.monotonic() + PATIENCE_S
    marks = {e.mark for e in episodes}
    while (found := [pid for mark in marks for pid in marked(mark)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"process {pid}" for pid in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=0, help="go on until so many faults have happened")
    parser.add_argument("--minutes", type=float, default=30.0, help="go on for so long, where --faults is not given")
    parser.add_argument("--seed", type=int, default=1000, help="that of the first episode; the next ones follow")
    parser.add_argument("--jobs", default="auto", help="episodes side by side; auto: one for two cores")
    parser.add_argument("--snapshots", action="store_true", help="snapshots are taken every half second")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="processes of each node")
    parser.add_argument("--flows", action="store_true", help="newcomers follow, and are struck while the state flows")
    args = parser.parse_args()
    if args.flows and (args.snapshots or args.ranks_per_node > 1):
        parser.error("--flows goes with neither --snapshots nor --ranks-per-node")
    args.jobs = max(1, (os.cpu_count() or 2) // 2) if args.jobs == "auto" else int(args.jobs)
    root, began = Path(tempfile.mkdtemp(prefix="soak-")), time.monotonic()
    episodes = run(root, args)
    left = grown(episodes) + still_there(episodes)
    failed = sorted(e.seed for e in episodes if e.error)
    pauses = {kind: [s for e in episodes for s in e.pauses.get(kind, ())] for kind in ("kill", "stop")}
    print(
        json.dumps(
            {
                "minutes": round((time.monotonic() - began) / 60, 1),
                "episodes": len(episodes),
                "jobs": args.jobs,
                "snapshots": args.snapshots,
                "flows": args.flows,
                "faults": sum(e.faults for e in episodes),
                "by_kind": dict(sorted(sum((e.counts for e in episodes), Counter()).items())),
                "ranks_per_node": args.ranks_per_node,
                "of_single_ranks": dict(sorted(sum((e.single for e in episodes), Counter()).items())),
                "extra_joins": sum(e.extra_joins for e in episodes),
                "seconds_to_next_commit": {
                    kind: {"median": round(statistics.median(found), 3), "worst": round(max(found), 3)}
                    for kind, found in pauses.items()
                    if found
                },
                "taken_for_silent": [f"seed {e.seed}: {node}" for e in episodes for node in e.silent],
                "failed_seeds": failed,
                "left_over": left,
            }
        )
    )
    if not failed:
        shutil.rmtree(root)
    sys.exit(bool(failed or left))


if __name__ == "__main__":
    main()
