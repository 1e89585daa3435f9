"""`AsyncClient` is the client for asyncio programs: the methods of `Client`, awaited."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from bftrainer.client.api import ApiClient
from bftrainer.client.calls import PATIENCE_S, POLL_S, Calls
from bftrainer.client.client import describe
from bftrainer.client.polling import Emit, LogLine, Moment, Point, Request, Row, Sleep, Steps
from bftrainer.client.results import TrainerResults
from bftrainer.client.session import ClosedError, Ref, Session
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.wire.api import (
    BeliefDetail,
    BeliefView,
    EtaAnswer,
    EventView,
    NodeView,
    StatusView,
    TrainerDetail,
    TrialView,
)
from bftrainer.errors import BFTrainerError

T = TypeVar("T")


class AsyncClient:
    """Client of a controller for asyncio programs. Otherwise the same as `Client`.

    Use it in an `async with`, or `await` its `close`.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        state: str | Path | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._session = Session(url, token, state, patience_s)
        self._calls = Calls(self._session.patience)
        # One thread: requests are short, and the connection serves one request at a time.
        self._thread = ThreadPoolExecutor(1, "bftrainer-client")

    async def close(self) -> None:
        """Close the connection permanently."""
        if not self._session.closed:
            await self._in_thread(self._session.close)
            self._thread.shutdown(wait=False)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def submit(
        self,
        script: str | Path,
        args: Sequence[object] = (),
        *,
        nodes: str | int | None = None,
        name: str | None = None,
        group: str = "",
        **options: Any,
    ) -> Row:
        """Queue a training script (see `describe`) and return its row. Sent once: the script is never queued twice."""
        return await self.submit_spec(describe(script, args, nodes=nodes, name=name, group=group, **options))

    async def submit_spec(self, spec: TrainerSpec) -> Row:
        """Queue a trainer that is described already and return its row."""
        return await self._answer(lambda c: c.submit(spec.as_json()))

    async def cancel(self, ref: Ref) -> Row:
        """End a trainer; one that is finished stays as it is."""
        return await self._run(self._calls.cancel(ref))

    async def prune(
        self,
        *refs: Ref,
        mine: bool = False,
        older_than_s: float | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Remove all files of finished trainers: of those named, or of all of yours that ended so long ago."""
        return await self._run(self._calls.prune(refs, mine, older_than_s, dry_run))

    async def cancel_group(self, group: str) -> list[Row]:
        """End all unfinished trainers of a group and return their rows."""
        return await self._run(self._calls.cancel_group(group))

    async def trainer(self, ref: Ref) -> TrainerDetail:
        """Details of a trainer."""
        return await self._run(self._calls.trainer(ref))

    async def trainers(self, *, group: str | None = None, state: str = "", all: bool = False) -> list[Row]:  # noqa: A002
        """Trainers that are unfinished or finished within the last hour; with `all`, all. Or all of a group."""
        return await self._run(self._calls.trainers(group, state, all))

    async def eta(
        self,
        *refs: Ref,
        group: str | None = None,
        specs: Sequence[TrainerSpec] = (),
        nodes: str | int | None = None,
    ) -> EtaAnswer:
        """When trainers will be done. See `Client.eta`."""
        return await self._run(self._calls.eta(refs, group, specs, nodes))

    async def curves(self) -> list[BeliefView]:
        """What was learned of scripts. See `Client.curves`."""
        return await self._run(self._calls.curves())

    async def curve(self, curve: str) -> BeliefDetail:
        """What was learned of one script. See `Client.curve`."""
        return await self._run(self._calls.curve(curve))

    async def forget_curve(self, curve: str) -> BeliefView:
        """Forget what was learned of a script. See `Client.forget_curve`."""
        return await self._run(self._calls.forget_curve(curve))

    async def history(self, ref: Ref) -> list[Moment]:
        """A trainer's reports over time: a few hundred moments, however long it trains."""
        return await self._run(self._calls.history(ref))

    async def results(self, ref: Ref) -> TrainerResults:
        """A trainer's last metrics and its output files, with `copy` to copy them and `path` to open one."""
        return await self._run(self._calls.results(ref))

    async def best(
        self, group: str, *, by: str, direction: str | None = None, limit: int | None = None
    ) -> list[TrialView]:
        """The trainers of a group, the best by a metric first: each with its last and its best value and its folder.

        `direction` is `max` or `min`. Default: `min` for a metric with loss, error, perplexity, mae or mse in its name,
        else `max`.
        """
        return await self._run(self._calls.best(group, by, direction, limit))

    async def status(self) -> StatusView:
        """The pool, the policy, the trainers and the totals."""
        return await self._run(self._calls.request(ApiClient.status))

    async def nodes(self) -> list[NodeView]:
        """The nodes in the pool."""
        return await self._run(self._calls.request(ApiClient.nodes))

    async def me(self) -> dict[str, Any]:
        """The caller's identity, limits and current use."""
        return await self._run(self._calls.request(ApiClient.me))

    async def pause(self) -> dict[str, Any]:
        """Stop harvesting: all nodes are given back at once."""
        return await self._run(self._calls.request(ApiClient.pause))

    async def resume(self) -> dict[str, Any]:
        """Resume harvesting after `pause`."""
        return await self._run(self._calls.request(ApiClient.resume))

    async def drain(self) -> dict[str, Any]:
        """Give all nodes back and end the controller."""
        return await self._run(self._calls.request(ApiClient.drain))

    async def wait(
        self, ref: Ref, *, timeout_s: float | None = None, check: bool = False, poll_s: float = POLL_S
    ) -> Row:
        """Wait until a trainer is finished and return its last row. See `Client.wait_all`."""
        return (await self.wait_all([ref], timeout_s=timeout_s, check=check, poll_s=poll_s))[0]

    async def wait_all(
        self,
        refs: Iterable[Ref] | None = None,
        *,
        group: str | None = None,
        timeout_s: float | None = None,
        check: bool = False,
        poll_s: float = POLL_S,
        on_change: Callable[[Row], None] | None = None,
    ) -> list[Row]:
        """Wait until trainers are finished and return their last rows. See `Client.wait_all`."""
        return await self._run(self._calls.wait_all(refs, group, timeout_s, check, poll_s, on_change))

    def metrics(self, ref: Ref, *, poll_s: float = POLL_S) -> AsyncIterator[Point]:
        """Yield a trainer's reports as they come, until it is finished. Changes faster than `poll_s` are skipped."""
        return self._iterate(self._calls.metrics(ref, poll_s))

    def logs(
        self,
        ref: Ref,
        *,
        tail: int | None = None,
        follow: bool = False,
        worker: str | None = None,
        poll_s: float = POLL_S,
    ) -> AsyncIterator[LogLine]:
        """Yield the output of a trainer's workers: all or the last lines, of all or one; `follow`: until it ends."""
        return self._iterate(self._calls.logs(ref, tail, follow, worker, poll_s))

    def events(
        self,
        *,
        after: int | None = None,
        limit: int = 100,
        trainer: str = "",
        kind: str = "",
        follow: bool = False,
        poll_s: float = POLL_S,
    ) -> AsyncIterator[EventView]:
        """Yield what happened: the newest events, or those after a sequence number; with `follow`, without end."""
        return self._iterate(self._calls.events(after, limit, trainer, kind, follow, poll_s))

    async def _run(self, steps: Steps[T]) -> T:
        """Carry out steps that emit nothing and return their result."""
        results: list[T] = []

        def kept() -> Steps[None]:
            results.append((yield from steps))

        async for _ in self._iterate(kept()):
            pass
        return results[0]

    async def _iterate(self, steps: Steps[Any]) -> AsyncIterator[Any]:
        with contextlib.closing(steps):
            step = next(steps, None)
            while step is not None:
                if isinstance(step, Emit):
                    yield step.value
                step = await self._take(steps, step)

    async def _take(self, steps: Steps[Any], step: Request | Sleep | Emit) -> Request | Sleep | Emit | None:
        """Carry out one step and return the next one; None at the end. (A coroutine must not raise StopIteration.)"""
        answer: Any = None
        try:
            if isinstance(step, Request):
                try:
                    answer = await self._answer(step.question)
                except BFTrainerError as problem:
                    return steps.throw(problem)
            elif isinstance(step, Sleep):
                await asyncio.sleep(step.seconds)
            return steps.send(answer)
        except StopIteration:
            return None

    async def _answer(self, question: Callable[[ApiClient], T]) -> T:
        return await self._in_thread(lambda: self._session.answer(question))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._session.closed:
            raise ClosedError
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
