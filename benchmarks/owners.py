"""What it costs that a node changes its owner, where trainers run as their owners on Slurm.

    python benchmarks/owners.py --json
    python benchmarks/owners.py --way run-as --repetitions 9 --json

One node of a test cluster and two owners. The owners' trainers follow each other: Ann, Ann, Bob, Bob, Ann, … Every
second one finds an agent of its owner on the node; every other one waits until the node was handed over: the former
agent is dismissed, its pilot ends, and Slurm starts a pilot of the other owner. Measured is the time from the decision
to the first step. With `--way lend` lenders of the owners submit the pilots, with `--way run-as` the controller, by
`runuser`. Needs root and Slurm, and makes two Unix users, which it removes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
from support.cluster.live import Live  # type: ignore[import-not-found] # noqa: E402 - the path comes first
from support.slurm.lab import cluster  # type: ignore[import-not-found] # noqa: E402 - the path comes first
from support.slurm.lent import LentUser, authority_of, new_token, url_of  # type: ignore[import-not-found] # noqa: E402 - the same
from support.users.accounts import public_python, unix_users  # type: ignore[import-not-found] # noqa: E402 - the same
from support.waiting import wait_until  # type: ignore[import-not-found] # noqa: E402 - the same

WORKER = HERE.parent / "tests" / "elastic" / "chaos_worker.py"
LEAST = 5


def measure(way: str, repetitions: int) -> dict[str, Any]:
    """Return the times of both arms, in the order in which they were measured."""
    with (
        tempfile.TemporaryDirectory(prefix="bft-owners-") as folder,
        cluster(1) as lab,
        unix_users("ann", "bob") as accounts,
        public_python() as python,
    ):
        lab.open_to_users()
        pool = {"partition": "scavenger", "submit": way, "python": python, "linger_s": "300"}
        words = [word for name, value in pool.items() for word in ("--set", f"pool.{name}={value}")]
        state, env = Path(folder) / "state", {"SLURM_CONF": str(lab.conf)}
        with Live(state, "--pool", "slurm", "--drain", "--set", "users.mode=own", *words, env=env) as live:
            users = [
                LentUser(
                    *(lab, account, python, lambda: url_of(state), new_token(state, account.name)),
                    authority=lambda: authority_of(state),
                )
                for account in accounts
            ]
            try:
                if way == "lend":
                    for user in users:
                        user.lend("--python", python)
                        wait_until(lambda user=user: user.lent == "connected", "the lender")
                return _turns(live, users, repetitions)
            finally:
                for user in users:
                    if user.process is not None:
                        user.end()


def _turns(live: Any, users: list[Any], repetitions: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"same": [], "other": []}
    turns = itertools.cycle((users[0], users[0], users[1], users[1]))
    for number, user in zip(range(2 * repetitions + 1), turns, strict=False):
        folder = user.account.home / f"run-{number}"
        folder.mkdir()
        os.chown(folder, user.account.uid, user.account.gid)
        trainer = user.submit(WORKER, str(folder), "1", "0", nodes="1")
        live.until_state(trainer, "done", timeout_s=120)
        if number:  # the first one starts on an empty pool
            times["same" if number % 2 else "other"].append(_start_s(live, trainer))
    events = live.api.events(limit=1000, kind="node.handed_over")["events"]
    return {"times": times, "hand_over_s": [event["data"]["took_s"] for event in events]}


def _start_s(live: Any, trainer: str) -> float:
    """Return the seconds from the decision that gave a trainer its node to its first step."""
    events = live.api.events(limit=1000)["events"]
    decided = next(
        event["time"]
        for event in events
        if event["kind"] == "decision" and any(change["trainer"] == trainer for change in event["data"]["changes"])
    )
    first = next(event["time"] for event in events if event["kind"] == "rescale" and event["trainer"] == trainer)
    return float(first - decided)


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("lend", "run-as"), default="lend")
    parser.add_argument("--repetitions", type=int, default=LEAST, help=f"of each arm, {LEAST} or more")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.repetitions < LEAST:
        parser.error(f"--repetitions must be {LEAST} or more")
    found = measure(options.way, options.repetitions)
    same, other = found["times"]["same"], found["times"]["other"]
    result = {
        "way": options.way,
        "load": os.getloadavg()[0],
        "same_owner_s": [round(time, 2) for time in same],
        "other_owner_s": [round(time, 2) for time in other],
        "same_owner_median_s": round(statistics.median(same), 2),
        "other_owner_median_s": round(statistics.median(other), 2),
        "hand_over_median_s": round(statistics.median(found["hand_over_s"]), 2),
        "hand_overs": len(found["hand_over_s"]),
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"from the decision to the first step, medians of {len(same)} ({options.way}):")
    print(f"  the node has an agent of this owner     {result['same_owner_median_s']:6.2f} s")
    print(f"  the node must change its owner          {result['other_owner_median_s']:6.2f} s")
    print(f"  of it until the new agent has joined    {result['hand_over_median_s']:6.2f} s")


if __name__ == "__main__":
    main()
