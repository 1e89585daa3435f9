"""Whatever workers and agents say, the controller goes on, answers, and can be started again."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.cluster.config.keys import Config, Server
from bftrainer.cluster.controller import controller, decision_timer
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.controller.output.logbook import Logbook
from bftrainer.cluster.http import app, views
from bftrainer.cluster.store.events import NodeLeft
from bftrainer.cluster.wire import messages
from bftrainer.elastic import protocol
from support.cluster.api import NoPool, by
from support.cluster.api import play as play_api
from support.cluster.bench import Bench

pytestmark = pytest.mark.waits  # asking for the daily figures starts a process

WORKER_KINDS = (
    *(protocol.Hello, protocol.Ready, protocol.Arrived, protocol.Formed, protocol.Broken, protocol.Report),
    *(protocol.Leaving, protocol.Left, protocol.Done, protocol.Failed, protocol.Generation, protocol.Go),
)
AGENT_KINDS = (
    messages.Join,
    messages.Beat,
    messages.Heard,
    messages.Started,
    messages.Ended,
    messages.Log,
    messages.Going,
    messages.Start,
)
LONE = "\ud800"
PATHS = (
    *("status", "trainers?all=true", "trainers/t1", "trainers/t2", "events", "nodes", "owners", "decisions", "insight"),
    *("trainers/t1/history", "trainers/t1/logs", "history/pool", "history/nodes"),
)

numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 1 << 63, 1e308, -1, 0, 1, 2])
texts = st.text(max_size=5) | st.sampled_from([LONE, "", "nan", "x" * 5000, "\0", "\n\t", "9" * 30, "t1-1", "t2-1"])
plain = st.none() | st.booleans() | numbers | texts
anything = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
deep = json.loads("[" * 800 + "]" * 800)
workers = st.sampled_from(["t1-1"] * 4 + ["t2-1", "t1-2", "t9-1", "t1", "", LONE, "../x-1", "t1-\t"])
whole = st.integers(0, 3)
likely = {
    **dict.fromkeys(("generation", "world", "step", "samples", "epoch", "pid", "offset", "size", "formed"), whole),
    **dict.fromkeys(("newest", "arrived", "redone", "total", "epochs"), whole),
    **dict.fromkeys(("pause_s", "form_s", "sync_s"), st.floats(0, 1)),
    **dict.fromkeys(("rates", "metrics"), st.dictionaries(texts | st.just("1"), numbers, max_size=3)),
    **dict.fromkeys(("error", "traceback", "address", "tail", "reason", "failed", "text"), texts),
    **dict.fromkeys(("ready", "holds_state", "over", "done", "speaks"), st.booleans()),
    "status": st.sampled_from([None, 0, 1, -9, 75]),
    "worker": workers,
    "trainer": st.just("t1"),
    "node": st.sampled_from(["n1", "n1", "n1", "n2", "n3", "(head)", LONE, ""]),
    "agent": st.just("agent-1"),
    "host": st.just("n1"),
}


def fuzzed(kind: type[Any], **better: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Messages of a kind: mostly as they should be, with something else here and there."""
    known = {**likely, **better}
    values = {field.name: known.get(field.name, anything) for field in fields(kind)}
    odd = {name: st.one_of(*[good] * 5, anything, st.just(deep)) for name, good in values.items()}
    return st.fixed_dictionaries({"type": st.just(kind.__name__.lower())}, optional=odd) | st.fixed_dictionaries(
        {"type": st.just(kind.__name__.lower()), **odd}
    )


said = st.one_of(*(fuzzed(kind) for kind in WORKER_KINDS), st.dictionaries(texts, anything, max_size=3))
statuses = fuzzed(messages.WorkerStatus, report=st.none() | fuzzed(protocol.Report))
parts = {
    "message": said,
    "reports": st.dictionaries(workers, fuzzed(protocol.Report), max_size=2),
    "workers": st.lists(statuses, max_size=2),
}
frames = st.one_of(*(fuzzed(kind, **parts) for kind in AGENT_KINDS), anything)


async def unsent(frame: str) -> None:
    """An agent that does not listen."""


@dataclasses.dataclass
class Life:
    """One life of a controller on a bench, with what looks at it from outside."""

    bench: Bench
    folder: Path
    agents: list[asyncio.Task[None]] = dataclasses.field(default_factory=list)
    over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Life:
        self.bench.crash()
        self.bench.open()
        config = dataclasses.replace(Config(), server=Server(state=self.folder))
        self.controller = Controller(
            self.bench.cluster, NoPool(), config, lambda trainer: Logbook(self.folder / trainer, 1 << 20), {}
        )
        await self.controller.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.controller.stop(drain=False)
        self.over.set()
        await asyncio.gather(*self.agents, return_exceptions=True)

    async def _say(self, found: Sequence[Any], all_said: asyncio.Event) -> AsyncIterator[str]:
        for frame in found:
            yield frame if isinstance(frame, str) else json.dumps(frame)
        all_said.set()
        await self.over.wait()

    async def hear(self, found: Sequence[Any]) -> None:
        """An agent comes, says all this, and stays unless it is shown out."""
        all_said, on = asyncio.Event(), self.controller
        agent = asyncio.create_task(on.agents.serve(self._say(found, all_said), unsent))
        self.agents.append(agent)
        async with asyncio.timeout(20):
            await asyncio.wait([agent, asyncio.create_task(all_said.wait())], return_when=asyncio.FIRST_COMPLETED)
            while not on.failed.done() and (on.agents.busy or on.decisions.pending):
                await asyncio.sleep(0.0005)
        all_said.set()
        if on.failed.done():
            on.failed.result()

    def can_answer(self) -> None:
        """What the API would answer is JSON of characters. To ask it hundreds of times would take too long."""
        cluster, store = self.bench.cluster, self.bench.store
        found = [
            *(views.trainer_in_detail(row, cluster.trainers.get(row.id), 1.0, []) for row in store.trainers()),
            *(views.node(node, cluster, 1.0) for node in cluster.nodes.values()),
            *(event.data for event in store.all_events()),
        ]
        json.dumps(found, ensure_ascii=False).encode()

    async def answers(self, token: str) -> None:
        """Everything that can be asked for is answered."""
        transport = httpx.ASGITransport(app.build(self.controller, "a secret of agents"), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path in (*(f"/v1/{path}" for path in PATHS), "/metrics"):
                answer = await client.get(path, headers={"Authorization": f"Bearer {token}"})
                assert answer.status_code == 200, (path, answer.text[:200])
                answer.text.encode()


def join(node: str, *rows: dict[str, Any]) -> dict[str, Any]:
    agent = {"n1": "agent-1", "n2": "agent-2"}[node]
    return {"type": "join", "node": node, "host": node, "agent": agent, "workers": list(rows), "pid": 1}


def status_of(worker: str, **more: Any) -> dict[str, Any]:
    trained = {"ready": True, "holds_state": True, "newest": 1, "formed": 1, "pid": 1}
    return {"worker": worker, "trainer": worker[:2], **trained, **more}


def play(lives: Sequence[Sequence[Sequence[Any]]], *, ask: bool = False) -> dict[str, str]:
    """Two trainers on a node each, and what agents say in each of a controller's lives. Gives the states at the end."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "TICK_S", 0.001)
        patch.setattr(decision_timer, "COALESCE_S", 0.0)
        patch.setattr(decision_timer, "LEARN_S", 0.0)
        folder = Path(name)
        bench = Bench(folder)
        token = bench.store.tokens.create(name="root", owner="root", role="admin", time=1.0)
        bench.submit("1-1")
        bench.submit("1-1")
        bench.join("n1", "n2")

        async def run() -> None:
            for life in (*lives, [HERE]):
                async with Life(bench, folder) as on:
                    for one in life:
                        await on.hear(one)
                    on.can_answer()
                    if ask:
                        await on.answers(token)

        try:
            asyncio.run(run())
            return {row.id: row.state for row in bench.store.trainers()}
        finally:
            bench.store.close()


HERE = [join("n2", status_of("t2-1"))]


@given(st.lists(said, min_size=1, max_size=4), st.lists(fuzzed(protocol.Report), max_size=3), statuses)
@settings(max_examples=60, deadline=None)
def test_what_a_script_says_fails_its_own_trainer_at_most(
    messages: list[Any], reports: list[Any], status: dict[str, Any]
) -> None:
    words = [{"type": "heard", "worker": "t1-1", "message": message} for message in messages]
    beats = [{"type": "beat", "reports": {"t1-1": report}} for report in reports]
    own = {
        name: status[name] for name in status.keys() & {"formed", "arrived", "newest", "failed", "report", "address"}
    }
    first = [HERE, [join("n1", status_of("t1-1")), *words, *beats]]
    again = [HERE, [join("n1", status_of("t1-1", **own)), *beats]]
    assert play([first, again])["t2"] == "running"


@given(st.lists(frames, min_size=1, max_size=6), st.lists(frames, max_size=4))
@settings(max_examples=60, deadline=None)
def test_what_an_agent_says_ends_its_connection_at_most(first: list[Any], again: list[Any]) -> None:
    assert play([[HERE, [join("n1", status_of("t1-1")), *first]], [again, HERE]])["t2"] == "running"


@pytest.mark.parametrize(
    "report",
    [
        {"generation": 1, "metrics": {"loss": 10**400}},
        {"generation": 1, "metrics": {LONE: 1.0}},
        {"generation": 1, "samples": 1, "rates": {str(n): 1.0 for n in range(5000)}},
        {"generation": 1, "metrics": {"loss": deep}},
    ],
)
def test_a_report_that_no_column_holds_stops_nobody(report: dict[str, Any]) -> None:
    beat = {"type": "beat", "reports": {"t1-1": report}}
    row = status_of("t1-1", report=report)
    states = play([[HERE, [join("n1", status_of("t1-1")), beat]], [HERE, [join("n1", row)]]], ask=True)
    assert states["t2"] == "running"


@pytest.mark.parametrize(
    "message",
    [
        {"type": "formed", "generation": float("inf"), "world": 1, "pause_s": 0, "form_s": 0, "sync_s": 0},
        {"type": "failed", "error": LONE, "traceback": LONE},
        {"type": "arrived", "generation": 1, "address": deep},
    ],
)
def test_a_message_that_makes_no_sense_stops_nobody(message: dict[str, Any]) -> None:
    heard = {"type": "heard", "worker": "t1-1", "message": message}
    states = play([[HERE, [join("n1", status_of("t1-1")), heard]], [HERE, [join("n1")]]], ask=True)
    assert states == {"t1": "failed", "t2": "running"}


def test_new_names_of_metrics_in_every_report_do_not_pile_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    trainer = bench.submit("1-1")
    bench.join("n1")
    for step in range(5):
        bench.report(trainer, step=step, samples=step, metrics={f"{step}-{n}": 1.0 for n in range(60)})
    assert len(bench.cluster.trainers[trainer].job.progress.metrics) == 100
    bench.store.close()


def test_halves_of_characters_that_an_older_version_stored_are_answered(tmp_path: Path) -> None:
    async def scene(client: httpx.AsyncClient, bench: Bench, tokens: dict[str, str]) -> None:
        spec = {"script": "/train.py", "min_nodes": 1, "max_nodes": 1}
        trainer = bench.store.add_trainer(name="a", owner="ann", spec=spec, time=1.0).id
        bench.store.update_trainer(trainer, state="failed", metrics={LONE: 1.0}, ended=2.0)
        bench.store.log(1.0, NodeLeft("n1", LONE))
        for path in (f"/v1/trainers/{trainer}", "/v1/trainers?all=true", "/v1/events"):
            answer = await client.get(path, headers=by(tokens, "root"))
            assert answer.status_code == 200, path
            assert "\\\\ud800" in answer.text

    play_api(tmp_path, scene)
