"""`Client` lets Python programs submit trainers, follow their reports and end them. It blocks.

Trainers are named by id, by name, or by the row that describes one. If the controller is away for a while, for instance
during a restart, the client waits for it. The commands use it too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from bftrainer.client.api import ApiClient
from bftrainer.client.calls import PATIENCE_S, POLL_S, Calls
from bftrainer.client.polling import Emit, LogEnd, LogLine, Moment, Point, Request, Row, Sleep, Steps
from bftrainer.client.results import TrainerResults
from bftrainer.client.session import Ref, Session
from bftrainer.cluster.spec.files import check_here, located
from bftrainer.cluster.spec.trainer import TrainerSpec, parse_spec
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
from bftrainer.errors import BFTrainerError, InputError

T = TypeVar("T")


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

    `options` are the other keys of a description in a file: weight, env, cwd, python, launcher,
    ranks_per_node, ranks, curve, work, …
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
        self._calls = Calls(self._session.patience)

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
        return self._run(self._calls.cancel(ref))

    def prune(
        self,
        *refs: Ref,
        mine: bool = False,
        older_than_s: float | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Remove all files of finished trainers: of those named, or of all of yours that ended so long ago."""
        return self._run(self._calls.prune(refs, mine, older_than_s, dry_run))

    def cancel_group(self, group: str) -> list[Row]:
        """End all unfinished trainers of a group and return their rows."""
        return self._run(self._calls.cancel_group(group))

    def trainer(self, ref: Ref) -> TrainerDetail:
        """Details of a trainer."""
        return self._run(self._calls.trainer(ref))

    def trainers(self, *, group: str | None = None, state: str = "", all: bool = False) -> list[Row]:  # noqa: A002
        """Trainers that are unfinished or finished within the last hour; with `all`, all. Or all of a group."""
        return self._run(self._calls.trainers(group, state, all))

    def eta(
        self,
        *refs: Ref,
        group: str | None = None,
        specs: Sequence[TrainerSpec] = (),
        nodes: str | int | None = None,
    ) -> EtaAnswer:
        """When trainers will be done: each, and all of them, as times with an interval of 80 % probability.

        They are named, or those of a `group`, or `specs` (see `describe`) that are not submitted. With `nodes`, such as
        "1-16": if they had this number of nodes. Raises `RefusedError` if nothing can be said now.
        """
        return self._run(self._calls.eta(refs, group, specs, nodes))

    def curves(self) -> list[BeliefView]:
        """What was learned of your scripts, or of all for an admin; those that were learned about last come first."""
        return self._run(self._calls.curves())

    def curve(self, curve: str) -> BeliefDetail:
        """What was learned of one script, with its curve: `curve` is the id in its row of `curves()`, such as "c3"."""
        return self._run(self._calls.curve(curve))

    def forget_curve(self, curve: str) -> BeliefView:
        """Forget what was learned of a script, and return its row. Its trainers begin to measure anew."""
        return self._run(self._calls.forget_curve(curve))

    def history(self, ref: Ref) -> list[Moment]:
        """A trainer's reports over time: a few hundred moments, however long it trains."""
        return self._run(self._calls.history(ref))

    def results(self, ref: Ref) -> TrainerResults:
        """A trainer's last metrics and its output files, with `copy` to copy them and `path` to open one."""
        return self._run(self._calls.results(ref))

    def best(self, group: str, *, by: str, direction: str | None = None, limit: int | None = None) -> list[TrialView]:
        """The trainers of a group, the best by a metric first: each with its last and its best value and its folder.

        `direction` is `max` or `min`. Default: `min` for a metric with loss, error, perplexity, mae or mse in its name,
        else `max`.
        """
        return self._run(self._calls.best(group, by, direction, limit))

    def status(self) -> StatusView:
        """The pool, the policy, the trainers and the totals."""
        return self._run(self._calls.request(ApiClient.status))

    def nodes(self) -> list[NodeView]:
        """The nodes in the pool."""
        return self._run(self._calls.request(ApiClient.nodes))

    def me(self) -> dict[str, Any]:
        """The caller's identity, limits and current use."""
        return self._run(self._calls.request(ApiClient.me))

    def pause(self) -> dict[str, Any]:
        """Stop harvesting: all nodes are given back at once."""
        return self._run(self._calls.request(ApiClient.pause))

    def resume(self) -> dict[str, Any]:
        """Resume harvesting after `pause`."""
        return self._run(self._calls.request(ApiClient.resume))

    def drain(self) -> dict[str, Any]:
        """Give all nodes back and end the controller."""
        return self._run(self._calls.request(ApiClient.drain))

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
        on_change: Callable[[Row], None] | None = None,
    ) -> list[Row]:
        """Wait until trainers, or all of a group, are finished and return their last rows.

        Raises `TimeoutError` after `timeout_s`, and with `check` `TrainerFailedError` if a trainer is not done.
        `on_change` is called with the row of each trainer at first, and whenever its state has changed.
        """
        return self._run(self._calls.wait_all(refs, group, timeout_s, check, poll_s, on_change))

    def metrics(self, ref: Ref, *, poll_s: float = POLL_S) -> Iterator[Point]:
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
    ) -> Generator[LogLine, None, LogEnd]:
        """Yield the output of a trainer's workers: all or the last lines, of all or one; `follow`: until it ends.

        Returns, as the value of a `yield from`, where the log ended.
        """
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
    ) -> Generator[EventView, None, int]:
        """Yield what happened: the newest events, or those after a sequence number; with `follow`, without end.

        Returns, as the value of a `yield from`, the last sequence number of the controller.
        """
        return self._iterate(self._calls.events(after, limit, trainer, kind, follow, poll_s))

    def _run(self, steps: Steps[T]) -> T:
        """Carry out steps that emit nothing and return their result."""
        emitted = self._iterate(steps)
        try:
            while True:
                next(emitted)
        except StopIteration as end:
            return cast(T, end.value)

    def _iterate(self, steps: Steps[T]) -> Generator[Any, None, T]:
        """Carry out steps, yield what they emit and return their result."""
        with contextlib.closing(steps):
            try:
                step = next(steps)
                while True:
                    if isinstance(step, Emit):
                        yield step.value
                    step = self._take(steps, step)
            except StopIteration as end:
                return cast(T, end.value)

    def _take(self, steps: Steps[Any], step: Request | Sleep | Emit) -> Request | Sleep | Emit:
        """Carry out one step and return the next one."""
        if isinstance(step, Request):
            try:
                answer = self._session.answer(step.question)
            except BFTrainerError as problem:
                return steps.throw(problem)
            return steps.send(answer)
        if isinstance(step, Sleep):
            time.sleep(step.seconds)
        return next(steps)
