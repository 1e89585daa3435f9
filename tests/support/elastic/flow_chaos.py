"""Strikes donors and newcomers of a job at named points while the state flows, and checks that nothing comes of it.

`test_following_chaos.py` does so once, `soak.py --flows` for as long as one likes. `flow_points.py` makes the strikes,
inside of the workers, so that they do not depend on how fast the machine is.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening
from bftrainer.elastic.protocol import Report
from support.elastic.churn import WORKER, Account, check
from support.elastic.jobs import SETTINGS, play

START = 3
"""Nodes at the beginning and after each round. The second and the third of them are never struck."""
HOLD_S = 0.05
FLOWS = replace(SETTINGS, silence_s=30.0)
"""No node hangs here, and one that is slow must not be taken for lost: each strike is to fall where it is meant to."""
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Round:
    """Newcomers join at once; a strike hits them or a donor at a point of the flow; then other nodes leave."""

    joins: int = 1
    point: str = ""
    at: str = "newcomer"
    """Who gets to the point, and strikes: the first newcomer or the donor."""
    hits: tuple[str, ...] = ()
    kind: str = "kill"
    """What the strike is: `kill`, or `leave` with notice."""
    leaves: int = 0

    @property
    def events(self) -> int:
        return self.joins + len(self.hits) + self.leaves


ROUNDS = (
    *(
        round_
        for point in ("copy", "catch-up", "switch")
        for round_ in (
            Round(1, point, "donor", ("donor",)),
            Round(1, point, "newcomer", ("newcomer",)),
            Round(2, point, "newcomer", ("donor", "newcomer")),
            Round(1, point, "donor", ("donor",), "leave"),
        )
    ),
    Round(3, leaves=3),
    Round(2, leaves=2),
)


class FlowChaos:
    """Plays rounds, one after the other. Each ends when as many nodes train as before."""

    def __init__(self, job: Coordinator, folder: Path, account: Account) -> None:
        self._job = job
        self._folder = folder
        self._account = account
        self._first_donor = True

    async def run(self, rounds: Sequence[Round]) -> None:
        await self._job.add(START)
        await self._trains(set(self._job.nodes))
        noted = "what all workers hold before the first newcomer"
        await self._job.until(lambda: all(_notes(self._folder, node) for node in self._job.nodes), WAIT_S, noted)
        (self._folder / "disturbed").touch()
        for round_ in rounds:
            await self._play(round_)
        (self._folder / "hurry").touch()

    async def _play(self, round_: Round) -> None:
        job, account = self._job, self._account
        before = job.members
        newcomers = [f"node-{len(job.logs) + number + 1}" for number in range(round_.joins)]
        # The first donor that is struck is rank 0, the others are those that joined last.
        who = {"newcomer": newcomers[0], "donor": before[0] if self._first_donor else before[-1]}
        self._first_donor &= "donor" not in round_.hits
        victims = [who[name] for name in round_.hits]
        if victims:
            self._prepare(round_, who[round_.at], victims)
        assert await job.add(round_.joins) == tuple(newcomers)
        account.counts["join"] += round_.joins
        await self._trains((set(before) | set(newcomers)) - set(victims))
        for node in job.members[len(job.members) - round_.leaves :]:
            account.told.add(node)
            account.counts["leave"] += 1
            job.remove(node)
        await self._trains(set(job.nodes) - account.told)
        assert len(job.members) == START
        assert not (self._folder / "strike").exists(), f"nobody got to the point of {round_}"

    def _prepare(self, round_: Round, at: str, victims: list[str]) -> None:
        signum = signal.SIGKILL if round_.kind == "kill" else signal.SIGTERM
        self._account.counts[round_.kind] += len(victims)
        if round_.kind == "kill":
            self._account.struck |= dict.fromkeys(victims, signum)
        else:
            self._account.told |= set(victims)
        strike = {"at": at, "point": round_.point, "workers": victims, "signal": signum}
        (self._folder / "strike.new").write_text(json.dumps(strike))
        (self._folder / "strike.new").rename(self._folder / "strike")

    async def _trains(self, nodes: set[str]) -> None:
        """Wait until exactly these nodes train together, and all others are gone."""
        job, account = self._job, self._account

        def settled() -> bool:
            assert not account.errors, account.errors[0]
            going = job.roster.going
            return (
                set(going.members) == nodes == set(job.nodes)
                and going.id == job.roster.generation.id
                and all(account.formed.get(node) == going.id for node in nodes)
            )

        await job.until(settled, WAIT_S, f"training on {sorted(nodes)}")


def disturb_flows(
    folder: Path,
    epochs: int,
    rounds: Sequence[Round] = ROUNDS,
    *,
    settings: CoordinatorSettings = FLOWS,
    account: Account | None = None,
) -> Account:
    """Train while all these rounds are played. `account` is filled in also where that fails."""
    folder.mkdir(parents=True)
    (folder / "limit").write_text("0")
    account = account or Account()
    jobs: list[Coordinator] = []

    async def scenario(job: Coordinator) -> None:
        jobs.append(job)
        await FlowChaos(job, folder, account).run(rounds)

    def watch(happening: Happening) -> None:
        account.watch(happening)
        if happening.what == "started":
            account.pids.add(jobs[0].pid(happening.node))
        if not isinstance(happening.message, Report):
            happenings.write(f"{happening.at:.3f} {happening.node} {happening.what} {happening.message or ''}\n")

    argv = [WORKER, str(folder), str(epochs), "1", f"--hold={HOLD_S}", "--flows"]
    with (folder / "happenings.txt").open("w", buffering=1) as happenings:
        outcome = play(scenario, folder, argv, settings=settings, watch=watch)
    assert outcome.status == "done", outcome
    return account


def check_flows(folder: Path, alone: Path, epochs: int, account: Account) -> None:
    """Assert that the training was exact and that no worker holds anything of a flow at its end."""
    check(folder, alone, epochs, account)
    notes = {node: _notes(folder, node) for node in _survivors(folder)}
    assert len(notes) == START, notes
    for node, found in notes.items():
        left = found[-1]["left"]
        assert not any(left[name] for name in ("threads", "flows", "buffers", "shared")), (node, left)
    # The third of the first nodes never hosts the store: its last group has as many sockets as its first one.
    steady = [found for found in notes.values() if len(found) > 1 and found[0]["rank"] and found[-1]["rank"]]
    assert steady, notes
    for found in steady:
        assert found[-1]["left"]["sockets"] <= found[0]["left"]["sockets"], found


def _survivors(folder: Path) -> list[str]:
    return [path.name.split("-", 1)[1].rsplit("-", 1)[0] for path in folder.glob("final-*.pt")]


def _notes(folder: Path, node: str) -> list[dict[str, Any]]:
    """What a worker has written down of the flows in it, in a group of the usual size."""
    lines = [line for log in folder.glob(f"steps-{node}-*.jsonl") for line in log.read_text().splitlines()]
    return [said for said in map(json.loads, lines) if "left" in said and said["world"] == START]
