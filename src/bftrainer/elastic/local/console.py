"""Console of a job on virtual nodes: prints events and worker output, and the final figures.

The input is the `Happening`s of the coordinator and the log files of the workers. Worker output goes to stdout, with
the node's name before each line. Events of interest go to stderr. If a JSON summary is requested, it goes to stdout and
all else to stderr. `main.py` uses this module.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bftrainer.elastic import protocol
from bftrainer.elastic.local.coordinator import FAILED_ALONE, Coordinator, Happening, Outcome
from bftrainer.elastic.protocol import Done, Formed, Left, Report

LOOK_S = 0.1
"""Seconds between two looks at the workers' output."""
_ENDED = "ended with status "
_NO_SNAPSHOTS = "Give --snapshots DIR, and it continues from its last snapshot"


@dataclass(frozen=True, slots=True)
class FormedGeneration:
    """A generation that formed. The times are the longest of its members.

    For `pause_s` only members that trained before count, if there are any: a newcomer waits, but no training stands
    still for it.
    """

    generation: int
    at_s: float
    world: int
    pause_s: float
    form_s: float
    sync_s: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of the pause of the member with the longest one."""


def rescale(generation: int, at_s: float, members: Sequence[tuple[Formed, bool]]) -> FormedGeneration:
    """Return the rescale that the members reported. Each comes with a flag whether it trained before."""
    trained = [formed for formed, trained in members if trained] or [formed for formed, _ in members]
    slowest = max(trained, key=lambda formed: formed.pause_s)
    return FormedGeneration(
        generation,
        round(at_s, 6),
        members[0][0].world,
        slowest.pause_s,
        max(formed.form_s for formed, _ in members),
        max(formed.sync_s for formed, _ in members),
        slowest.parts,
    )


class RunHistory:
    """History of the job so far: a line for each event of interest, and the figures at the end."""

    def __init__(self, *, snapshots: bool = True) -> None:
        """`snapshots`: whether the job was given a folder for snapshots."""
        self._snapshots = snapshots
        self._gone_at: int | None = None  # the newest step when no node was left, until training goes on
        self.rescales: dict[int, FormedGeneration] = {}
        self._step = self._samples = 0
        self._rates: dict[str, float] = {}
        self._started: set[str] = set()
        self._running: set[str] = set()
        self._over: set[str] = set()  # nodes that said that they left or are done
        self._expected: set[str] = set()  # nodes that were told to end
        self._finishing = False  # the script has ended on some node
        self._trained: set[str] = set()
        self._formed: dict[int, dict[str, tuple[Formed, bool]]] = {}

    def expect_end(self, node: str) -> None:
        """Mark a node whose end will not count as a loss."""
        self._expected.add(node)

    def heard(self, happening: Happening) -> str | None:
        """Return the line for an event, or None if it is not of interest."""
        node = happening.node
        match happening.message:
            case Formed() as formed:
                return self._has_formed(node, happening.at, formed)
            case Report(step=step, samples=samples, rates=rates):
                went_back = self._went_back(step)
                self._step, self._samples = max(self._step, step), max(self._samples, samples)
                self._rates |= rates
                return went_back
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
        if happening.what.startswith(FAILED_ALONE):
            self._expected.add(node)
            return f"{node} failed before it joined, the others go on: {happening.what.removeprefix(FAILED_ALONE)}"
        if happening.what.startswith(_ENDED):
            return self._has_ended(node, int(happening.what.removeprefix(_ENDED)))
        strange = happening.what.startswith("channel:") and "[Errno" not in happening.what  # not just disconnected
        return f"{node}: {happening.what}" if strange else None

    def _has_formed(self, node: str, at_s: float, formed: Formed) -> str | None:
        members = self._formed.setdefault(formed.generation, {})
        members[node] = formed, node in self._trained
        formation = self.rescales[formed.generation] = rescale(formed.generation, at_s, list(members.values()))
        self._trained.add(node)
        if len(members) < formed.world:
            return None
        new = [name for name, (_, trained) in members.items() if not trained]
        joined = f"{', '.join(new)} joined: " if new else ""
        took = f", rescale took {formation.pause_s:.2f} s" if len(new) < len(members) else ""
        return f"{joined}{formed.world} node{'s' * (formed.world != 1)} now{took}"

    def _went_back(self, step: int) -> str | None:
        """Return a line if steps are made again because all nodes were lost."""
        gone_at, self._gone_at = self._gone_at, None
        if gone_at is None or step >= gone_at:
            return None
        remedy = "" if self._snapshots else f". {_NO_SNAPSHOTS}"
        return f"WARNING: all nodes were lost after step {gone_at}; training has gone back to step {step}{remedy}"

    def _has_ended(self, node: str, status: int) -> str | None:
        self._trained.discard(node)
        self._running.discard(node)
        if not self._running:
            self._gone_at = self._step
        if node in self._over:
            return None
        self._finishing |= status == 0 and node not in self._expected
        how = f" ({signal.Signals(-status).name})" if status < 0 else f" with status {status}" if status else ""
        if status == protocol.RESTART:
            return f"{node} lost a peer during its own communication"
        is_loss = status < 0 and node not in self._expected and not self._finishing
        note = "; no node is left, the job waits for one" if is_loss and not self._running else ""
        if note and self._formed and not self._snapshots:
            note += f". WARNING: it will begin again, unless the script keeps snapshots itself. {_NO_SNAPSHOTS}"
        return f"{node} {'lost' if is_loss else 'ended'}{how}{note}"

    def summary(self, outcome: Outcome, seconds: float) -> dict[str, Any]:
        """Return the figures. Values that no worker reported are None: scripts under torchrun report nothing."""
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
    """Reads, by complete lines, files that other processes append to."""

    def __init__(self, skip: Mapping[Path, int] | None = None) -> None:
        self._read = dict(skip or {})
        self._held: dict[Path, bytes] = {}

    def lines(self, path: Path, *, last: bool = False) -> list[str]:
        """Return the lines added since the last call. An incomplete line is held back unless `last` is set."""
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
    """Print a message to the terminal, on stderr."""
    print(f"bftrainer: {text}", file=sys.stderr, flush=True)


class Console:
    """Output of a local run on the terminal."""

    def __init__(self, folder: Path, *, quiet: bool, as_json: bool, snapshots: bool) -> None:
        self.history = RunHistory(snapshots=snapshots)
        self._quiet = quiet
        self._json = as_json
        self._recent: dict[str, deque[str]] = {}
        # A folder may hold the logs of an earlier run.
        self._follower = Follower({path: path.stat().st_size for path in folder.glob("*.log")})
        self._began = time.monotonic()

    def watch(self, happening: Happening) -> None:
        """Print a line for an event, if it is of interest."""
        if line := self.history.heard(happening):
            say(line)

    def show(self, logs: Mapping[str, Path], *, last: bool = False) -> None:
        """Print what workers have written since the last call."""
        if self._quiet:
            return
        for node, path in logs.items():
            recent = self._recent.setdefault(node, deque(maxlen=1000))
            for line in self._follower.lines(path, last=last):
                print(f"{node}: {line}", file=sys.stderr if self._json else sys.stdout, flush=True)
                recent.append(line)

    async def keep_showing(self, job: Coordinator) -> None:
        """Print worker output continuously."""
        while True:
            self.show(job.logs)
            await asyncio.sleep(LOOK_S)

    def conclude(self, outcome: Outcome, logs: Mapping[str, Path]) -> None:
        """Print the remaining output, the error if the job failed, and the summary if requested."""
        self.show(logs, last=True)
        if outcome.status == "failed":
            traceback = outcome.traceback.strip()
            # Workers print the traceback too, but may have been killed before they could.
            if traceback and not any(traceback in "\n".join(recent) for recent in self._recent.values()):
                print(traceback, file=sys.stderr)
            say(f"failed: {outcome.error}")
        if self._json:
            print(json.dumps(self.history.summary(outcome, time.monotonic() - self._began)), flush=True)
