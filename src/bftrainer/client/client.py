"""`Client` and `AsyncClient` let Python programs submit trainers, follow their reports and end them.

`Client` blocks and `AsyncClient` awaits; their methods are the same. Trainers are named by id, by name, or by the row
that describes one. If the controller is away for a while, for instance during a restart, the clients wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from bftrainer.client.api import ApiClient
from bftrainer.client.polling import (
    Emit,
    LogLine,
    Moment,
    Point,
    Polling,
    Request,
    Row,
    Sleep,
    cancelling,
    patiently,
    reading,
    remembering,
    reporting,
    waiting,
)
from bftrainer.client.session import ClosedError, Ref, Session, chosen, in_state, named, of, seconds
from bftrainer.cluster.spec.files import check_here, located
from bftrainer.cluster.spec.trainer import TrainerSpec, parse_spec
from bftrainer.errors import BFTrainerError, InputError

T = TypeVar("T")

PATIENCE_S = 120.0
POLL_S = 1.0
"""Time between polls: workers report about once a second."""


class TrainerFailedError(BFTrainerError):
    """Raised when a trainer that was waited for failed or was cancelled."""

    def __init__(self, row: Row) -> None:
        reason = f": {row['reason']}" if row.get("reason") else ""
        super().__init__(f"trainer {row['name']} ({row['id']}) {row['state']}{reason}")
        self.row = row


def describe(
    script: str | Path,
    args: Sequence[object] = (),
    *,
    nodes: str | int | None = None,
    name: str | None = None,
    group: str = "",
    **options: Any,
) -> TrainerSpec:
    """The checked description of a trainer, with paths made absolute from the current folder. Raises `InputError`.

    `options` are the other keys of a description in a file: weight, env, cwd, python, launcher, curve, work, …
    """
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise InputError(f"args must be a list of texts, but got {args!r:.80}")
    values = {"script": str(script), "args": list(args), "nodes": nodes, "name": name, "group": group, **options}
    spec = located(parse_spec({key: value for key, value in values.items() if value is not None}), Path.cwd())
    check_here(spec)
    return spec


class Client:
    """Client of a controller for blocking programs. Use it in a `with`, or close it; from one thread at a time.

    Without arguments it connects to the controller that the commands find: `BFTRAINER_URL` and `BFTRAINER_TOKEN`, else
    the state folder. `patience_s`: how long a controller that has answered before may be away.
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

    def close(self) -> None:
        """Close the connection permanently."""
        self._session.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
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
        return self.submit_spec(describe(script, args, nodes=nodes, name=name, group=group, **options))

    def submit_spec(self, spec: TrainerSpec) -> Row:
        """Queue a trainer that is described already and return its row."""
        return self._session.answer(lambda c: c.submit(spec.as_json()))

    def cancel(self, ref: Ref) -> Row:
        """End a trainer; one that is finished stays as it is."""
        return self._carry_out(patiently(partial(ApiClient.cancel, ref=named(ref)), self._session.patience))

    def cancel_group(self, group: str) -> list[Row]:
        """End all unfinished trainers of a group and return their rows."""
        return self._carry_out(cancelling(group, self._session.patience))

    def trainer(self, ref: Ref) -> Row:
        """Details of a trainer."""
        return self._carry_out(patiently(partial(ApiClient.trainer, ref=named(ref)), self._session.patience))

    def trainers(self, *, group: str | None = None, state: str = "", all: bool = False) -> list[Row]:  # noqa: A002
        """Trainers that are unfinished or finished within the last hour; with `all`, all. Or all of a group."""
        question = partial(ApiClient.trainers, state=in_state(state), all=all or group is not None)
        rows = self._carry_out(patiently(question, self._session.patience))
        return of(group, rows)

    def history(self, ref: Ref) -> list[Moment]:
        """A trainer's reports over time: a few hundred moments, however long it trains."""
        return self._carry_out(remembering(named(ref), self._session.patience))

    def status(self) -> dict[str, Any]:
        """The pool, the policy, the trainers and the totals."""
        return self._carry_out(patiently(lambda c: c.status(), self._session.patience))

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes in the pool."""
        return self._carry_out(patiently(lambda c: c.nodes(), self._session.patience))

    def wait(self, ref: Ref, *, timeout_s: float | None = None, check: bool = False, poll_s: float = POLL_S) -> Row:
        """Wait until a trainer is finished and return its last row. See `wait_all`."""
        return self.wait_all([ref], timeout_s=timeout_s, check=check, poll_s=poll_s)[0]

    def wait_all(
        self,
        refs: Iterable[Ref] | None = None,
        *,
        group: str | None = None,
        timeout_s: float | None = None,
        check: bool = False,
        poll_s: float = POLL_S,
    ) -> list[Row]:
        """Wait until trainers, or all of a group, are finished and return their last rows.

        Raises `TimeoutError` after `timeout_s`, and with `check` `TrainerFailedError` if a trainer is not done.
        """
        limit_s = None if timeout_s is None else seconds("timeout_s", timeout_s, least=0.0)
        whom = chosen(refs, group)
        talk = waiting(whom, self._session.patience, seconds("poll_s", poll_s), limit_s, group)
        return _checked(self._carry_out(talk), check)

    def metrics(self, ref: Ref, *, poll_s: float = POLL_S) -> Iterator[Point]:
        """Yield a trainer's reports as they come, until it is finished. Changes faster than `poll_s` are skipped."""
        return self._listen(reporting(named(ref), self._session.patience, seconds("poll_s", poll_s)))

    def logs(
        self, ref: Ref, *, tail: int | None = None, follow: bool = False, poll_s: float = POLL_S
    ) -> Iterator[LogLine]:
        """Yield the output of a trainer's workers: all, or the last lines; with `follow`, until it is finished."""
        return self._listen(reading(named(ref), self._session.patience, seconds("poll_s", poll_s), tail, follow))

    def _carry_out(self, talk: Polling[T]) -> T:
        """Run a polling generator that emits nothing in between and return its result."""
        try:
            step = next(talk)
            while True:
                step = self._take(talk, step)
        except StopIteration as end:
            return cast(T, end.value)

    def _listen(self, talk: Polling[None]) -> Iterator[Any]:
        with contextlib.closing(talk), contextlib.suppress(StopIteration):
            step = next(talk)
            while True:
                if isinstance(step, Emit):
                    yield step.value
                step = self._take(talk, step)

    def _take(self, talk: Polling[Any], step: Request | Sleep | Emit) -> Request | Sleep | Emit:
        """Carry out one step and return the next one."""
        if isinstance(step, Request):
            try:
                answer = self._session.answer(step.question)
            except BFTrainerError as problem:
                return talk.throw(problem)
            return talk.send(answer)
        if isinstance(step, Sleep):
            time.sleep(step.seconds)
        return next(talk)


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
        return await self._carry_out(patiently(partial(ApiClient.cancel, ref=named(ref)), self._session.patience))

    async def cancel_group(self, group: str) -> list[Row]:
        """End all unfinished trainers of a group and return their rows."""
        return await self._carry_out(cancelling(group, self._session.patience))

    async def trainer(self, ref: Ref) -> Row:
        """Details of a trainer."""
        return await self._carry_out(patiently(partial(ApiClient.trainer, ref=named(ref)), self._session.patience))

    async def trainers(self, *, group: str | None = None, state: str = "", all: bool = False) -> list[Row]:  # noqa: A002
        """Trainers that are unfinished or finished within the last hour; with `all`, all. Or all of a group."""
        question = partial(ApiClient.trainers, state=in_state(state), all=all or group is not None)
        rows = await self._carry_out(patiently(question, self._session.patience))
        return of(group, rows)

    async def history(self, ref: Ref) -> list[Moment]:
        """A trainer's reports over time: a few hundred moments, however long it trains."""
        return await self._carry_out(remembering(named(ref), self._session.patience))

    async def status(self) -> dict[str, Any]:
        """The pool, the policy, the trainers and the totals."""
        return await self._carry_out(patiently(lambda c: c.status(), self._session.patience))

    async def nodes(self) -> list[dict[str, Any]]:
        """The nodes in the pool."""
        return await self._carry_out(patiently(lambda c: c.nodes(), self._session.patience))

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
    ) -> list[Row]:
        """Wait until trainers are finished and return their last rows. See `Client.wait_all`."""
        limit_s = None if timeout_s is None else seconds("timeout_s", timeout_s, least=0.0)
        whom = chosen(refs, group)
        talk = waiting(whom, self._session.patience, seconds("poll_s", poll_s), limit_s, group)
        return _checked(await self._carry_out(talk), check)

    def metrics(self, ref: Ref, *, poll_s: float = POLL_S) -> AsyncIterator[Point]:
        """Yield a trainer's reports as they come, until it is finished. Changes faster than `poll_s` are skipped."""
        return self._listen(reporting(named(ref), self._session.patience, seconds("poll_s", poll_s)))

    def logs(
        self, ref: Ref, *, tail: int | None = None, follow: bool = False, poll_s: float = POLL_S
    ) -> AsyncIterator[LogLine]:
        """Yield the output of a trainer's workers: all, or the last lines; with `follow`, until it is finished."""
        return self._listen(reading(named(ref), self._session.patience, seconds("poll_s", poll_s), tail, follow))

    async def _carry_out(self, talk: Polling[T]) -> T:
        """Run a polling generator that emits nothing in between and return its result."""
        found: list[T] = []
        async for _ in self._listen(_keeping(talk, found)):
            pass
        return found[0]

    async def _listen(self, talk: Polling[None]) -> AsyncIterator[Any]:
        with contextlib.closing(talk):
            step = next(talk, None)
            while step is not None:
                if isinstance(step, Emit):
                    yield step.value
                step = await self._take(talk, step)

    async def _take(self, talk: Polling[None], step: Request | Sleep | Emit) -> Request | Sleep | Emit | None:
        """Carry out one step and return the next one; None at the end. (A coroutine must not raise StopIteration.)"""
        answer: Any = None
        try:
            if isinstance(step, Request):
                try:
                    answer = await self._answer(step.question)
                except BFTrainerError as problem:
                    return talk.throw(problem)
            elif isinstance(step, Sleep):
                await asyncio.sleep(step.seconds)
            return talk.send(answer)
        except StopIteration:
            return None

    async def _answer(self, question: Callable[[ApiClient], T]) -> T:
        return await self._in_thread(lambda: self._session.answer(question))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._session.closed:
            raise ClosedError
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _keeping(talk: Polling[T], found: list[T]) -> Polling[None]:
    found.append((yield from talk))


def _checked(rows: list[Row], check: bool) -> list[Row]:
    for row in rows:
        if check and row["state"] != "done":
            raise TrainerFailedError(row)
    return rows
