"""`DailyEfficiency` computes the efficiency of the last day in a separate process.

The figures are those of `bftrainer report` for the last 24 hours (`usage.py`, `efficiency.py`). They require a replay
of the run, which may take many seconds of a core. A process of low priority does it
(`python -m bftrainer.cluster.report.daily`): at most once a minute (sooner while there is no figure yet), for at most a
twentieth of the time, and only while an open page asks for it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bftrainer.cluster.config.keys import Config, PolicySettings
from bftrainer.cluster.report.lost_samples import read_costs
from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.store import Store
from bftrainer.errors import BFTrainerError
from bftrainer.processes import variables
from bftrainer.processes.launch import dying_with

WINDOW_S = 86400.0
EVERY_S = 60.0
SOON_S = 10.0
"""Interval while there is no figure yet, so that a run that has just begun has one soon."""
SHARE = 0.05
"""Largest share of the time in which such a process runs."""
MOST_S = 120.0
MOST_EVENTS = 300_000

Insight = dict[str, Any]


class DailyEfficiency:
    """Holds the newest figures, and starts a process for new ones when they are due."""

    def __init__(self, path: Path, policy: PolicySettings) -> None:
        self._path = path
        self._policy = policy
        self._found: Insight | None = None
        self._due = 0.0
        self._task: asyncio.Task[None] | None = None

    def newest(self) -> Insight | None:
        """Return the newest figures, or None. Starts a process for new ones if they are due."""
        if time.monotonic() >= self._due and (self._task is None or self._task.done()):
            self._due = time.monotonic() + EVERY_S
            self._task = asyncio.get_running_loop().create_task(self._look())
        return self._found

    async def _look(self) -> None:
        words = [str(self._path), json.dumps(asdict(self._policy))]
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *dying_with(os.getpid(), [sys.executable, "-m", __name__, *words]),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env=variables.inherited(os.environ),
        )  # fmt: skip
        try:
            said, _ = await asyncio.wait_for(process.communicate(), MOST_S)
            self._found = json.loads(said) if process.returncode == 0 else self._found
        except (TimeoutError, ValueError):
            pass
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        took_s = time.monotonic() - began
        known = self._found is not None and self._found["efficiency"] is not None
        self._due = time.monotonic() + max(EVERY_S if known else SOON_S, took_s / SHARE)


def look_back(path: Path, policy: PolicySettings, now: float, window_s: float = WINDOW_S) -> Insight:
    """Return efficiency and bound of the last day, and the samples lost in it."""
    # Imported here, because the controller needs none of these.
    from bftrainer.cluster.config.policy import policy_of
    from bftrainer.cluster.report.efficiency import efficiency_of
    from bftrainer.cluster.report.usage import account

    db = Database.open(path, read_only=True)
    with Store(db) as store:
        started = db.row("SELECT min(time) FROM events")
        since = max(started[0] or now, now - window_s) if started else now
        found: Insight = {
            "computed": now,
            "since": since,
            "efficiency": None,
            "bound": None,
            "work_done": None,
            "why": "",
        }
        found["lost"] = read_costs(db, since, now)
        if store.event_span().count > MOST_EVENTS:
            return {**found, "why": "the log is too long to be replayed every minute"}
        try:
            day = account(store, since, now, now=now)
            judged = efficiency_of(store, day, policy_of(Config(policy=policy)), at_any_cost=True)
        except BFTrainerError as problem:
            return {**found, "why": str(problem)}
        return {
            **found,
            "efficiency": judged.efficiency,
            "bound": judged.bound,
            "work_done": judged.work,
            "why": judged.why,
        }


def main(words: Sequence[str] | None = None) -> None:
    """Compute the figures once and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("policy", type=lambda policy: PolicySettings(**json.loads(policy)), help="as JSON")
    asked = parser.parse_args(words)
    os.nice(19)
    print(json.dumps(look_back(asked.path, asked.policy, time.time()), allow_nan=False))


if __name__ == "__main__":
    main()
