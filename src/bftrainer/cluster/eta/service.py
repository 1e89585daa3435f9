"""`EtaService` keeps predictions of finishing times up to date, and answers users' questions about them.

The controller starts it. The work is done by a process of the lowest priority (`worker.py`), which ends with the
controller. If that process dies or hangs, another one is started for the next question. `CpuBudget` says when the next
regular prediction may begin. Nothing that goes wrong here ends the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bftrainer.cluster.config.keys import Config
from bftrainer.cluster.eta.beliefs import NO_RATE
from bftrainer.cluster.eta.budget import MOST_DEBT_S, CpuBudget
from bftrainer.cluster.eta.question import (
    WHAT_IF,
    AskedTrainer,
    LiveCluster,
    PredictorSettings,
    Question,
    group_key,
    question_of,
)
from bftrainer.cluster.eta.records import has_ended
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.wire.api import EtaAnswer, EtaView
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes import variables
from bftrainer.processes.launch import dying_with

FIRST_AFTER_S = 20.0
"""Time before the first regular prediction: the pool and the trainers have to start."""
EVERY_S = 15.0
"""Least time between two regular predictions."""
LOOK_S = 1.0
FIRST_S = 3.0
"""CPU seconds that may be used at the start."""
REGULAR_CPU_S, ASKED_CPU_S = 3.0, 1.5
"""CPU seconds after which a prediction begins no more futures: a regular one, and an answer to a user."""
MOST_S = 120.0
"""A process that takes longer for an answer is ended."""
ANSWER_S = 15.0
"""How long a user waits for an answer."""
FUTURES = 60
LONGEST_LINE = 1 << 26

_log = logging.getLogger(__name__)


class NoPredictionError(BFTrainerError):
    """Raised when a question is not answered now."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """The newest answer: estimates by set, as the process gave them."""

    computed: float = 0.0
    basis: str = ""
    futures: int = 0
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, name: str, deadline: float | None = None) -> EtaView | None:
        """The estimate of a trainer or a group; None if it was not asked for."""
        found = self.sets.get(name)
        if found is None:
            return None
        return {
            "point": found.get("point"),
            "low": found.get("low"),
            "high": found.get("high"),
            "why": found.get("why", ""),
            "deadline": deadline,
            "likely": found.get("likely"),
            "basis": self.basis,
            "computed": self.computed,
            "futures": self.futures,
        }


class EtaService:
    """Predictions of one controller. Use it in the thread of the event loop only."""

    def __init__(self, path: Path, config: Config, cluster: LiveCluster) -> None:
        profile = config.eta.profile
        if profile == "auto":
            profile = "summit" if config.pool.kind == "slurm" else "steady"
        settings = PredictorSettings(config.policy, config.trainers.snapshot_every_s, profile)
        self.newest = Predictions()
        self.budget = CpuBudget(config.eta.cpu_share, FIRST_S, time.monotonic())
        self._words = [sys.executable, "-m", "bftrainer.cluster.eta.worker", str(path), settings.as_text()]
        self._path = path
        self._cluster = cluster
        self._process: asyncio.subprocess.Process | None = None
        self._cpu_s = 0.0
        """CPU seconds of the present process that are paid for."""
        self._turn = asyncio.Lock()
        self._due = time.monotonic() + FIRST_AFTER_S

    def trainer(self, id_: str, deadline: float | None) -> EtaView | None:
        """The newest estimate of a trainer."""
        return self.newest.of(id_, deadline)

    def group(self, owner: str, group: str) -> EtaView | None:
        """The newest estimate of a group: when all its trainers are done."""
        return self.newest.of(group_key(owner, group))

    async def what_if(
        self, ids: Sequence[str], specs: Sequence[TrainerSpec], sizes: tuple[int, int] | None, owner: str
    ) -> EtaAnswer:
        """Answer when trainers would be done: unfinished ones, and some that `owner` would submit now.

        `sizes` is another least and most number of nodes for all of them. Raises `NoPredictionError`.
        """
        now = time.time()
        new = [AskedTrainer.of_spec(spec, f"{WHAT_IF}-{place}", owner, now) for place, spec in enumerate(specs)]
        question = question_of(self._cluster, now).with_more(new)
        known_ids = {one.id for one in question.trainers}
        names = {id_: id_ for id_ in ids if id_ in known_ids}
        names |= {one.id: spec.name or one.id for one, spec in zip(new, specs, strict=True)}
        if not names:
            raise InputError("none of these trainers is unfinished: there is nothing to predict")
        if sizes is not None:
            question = question.with_sizes(names, *sizes)
        sets = {**{id_: (id_,) for id_ in names}, WHAT_IF: tuple(names)}
        question = replace(question, sets=sets)
        hopeless = not question.has_speeds and not await asyncio.to_thread(has_ended, self._path)
        # A new controller knows no speed: no process is needed to say so.
        unknown = Predictions(now, sets={name: {"why": NO_RATE} for name in sets})
        found = unknown if hopeless else await self.ask(question)
        limits = {one.id: one.deadline for one in question.trainers if one.id in names}
        known = [limit for limit in limits.values() if limit is not None]
        whole = found.of(WHAT_IF, max(known) if known else None)
        assert whole is not None
        each = {names[id_]: eta for id_ in names if (eta := found.of(id_, limits.get(id_))) is not None}
        return {"eta": whole, "trainers": each}

    async def keep(self) -> None:
        """Keep the predictions up to date, for ever."""
        if self.budget.share <= 0:
            return
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                now = time.monotonic()
                self.budget = self.budget.later(now)
                if not self._cluster.trainers:
                    self.newest = Predictions()
                    if now - self._due > MOST_S:
                        await self._end()  # it would only take memory
                    continue
                if now < self._due or self.budget.wait_s() > 0 or self._cluster.paused:
                    continue
                try:
                    await self._refresh()
                except NoPredictionError as problem:
                    _log.info("%s", problem)
                except Exception:
                    _log.exception("no prediction of finishing times")
                self._due = time.monotonic() + EVERY_S
        finally:
            await self._end()

    async def _refresh(self) -> None:
        question = replace(question_of(self._cluster, time.time()), futures=FUTURES, cpu_s=REGULAR_CPU_S)
        self.newest = await self._predict(question)

    async def ask(self, question: Question) -> Predictions:
        """Answer a user's question. Raises `NoPredictionError` if that is not possible now."""
        if self.budget.share <= 0:
            raise NoPredictionError("predictions are switched off: eta.cpu_share is 0")
        if self._cluster.paused:
            raise NoPredictionError("harvesting is paused, so nothing will be done: continue with `bftrainer resume`")
        self.budget = self.budget.later(time.monotonic())
        if (wait_s := self.budget.wait_s(MOST_DEBT_S)) > 0:
            raise NoPredictionError(
                f"predictions have used their share of a core (eta.cpu_share): ask again in {wait_s:.0f} s"
            )
        answering = asyncio.create_task(self._predict(replace(question, futures=FUTURES, cpu_s=ASKED_CPU_S)))
        await asyncio.wait([answering], timeout=ANSWER_S)
        if not answering.done():  # it goes on, since the process cannot be interrupted
            answering.add_done_callback(lambda task: task.exception())
            raise NoPredictionError(f"there was no prediction within {ANSWER_S:.0f} s: ask again later")
        return answering.result()

    async def _predict(self, question: Question) -> Predictions:
        async with self._turn:
            found = await self._answer(question)
        return Predictions(question.now, found["basis"], found["futures"], found["sets"])

    async def _answer(self, question: Question) -> dict[str, Any]:
        """Have the process answer a question, and take the CPU time from the budget. One at a time."""
        began, answer = time.monotonic(), None
        try:
            async with asyncio.timeout(MOST_S):
                process = await self._started()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(question.as_line())
                await process.stdin.drain()
                answer = json.loads(await process.stdout.readline() or "null")
        except (TimeoutError, OSError, ValueError) as problem:
            _log.warning("no prediction of finishing times: %s", str(problem) or type(problem).__name__)
        finally:
            # Without an answer it is not known how much it used: at most all of the time.
            used = time.monotonic() - began if answer is None else answer["cpu_s"] - self._cpu_s
            self.budget = self.budget.later(time.monotonic()).spend(used)
            if answer is None:
                await asyncio.shield(self._end())
            else:
                self._cpu_s = answer["cpu_s"]
        if answer is None:
            raise NoPredictionError("the process that predicts has ended: ask again")
        if "problem" in answer:
            _log.warning("no prediction of finishing times: %s", answer["problem"])
            raise NoPredictionError(f"no prediction: {answer['problem']}")
        return dict(answer)

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._cpu_s = 0.0
            self._process = await asyncio.create_subprocess_exec(
                *dying_with(os.getpid(), self._words),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                env=variables.inherited(os.environ), limit=LONGEST_LINE,
            )  # fmt: skip
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
