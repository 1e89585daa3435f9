"""`Calls` turns every call of `Client` and `AsyncClient` into steps, so that both clients do the same.

The arguments of a call are checked at once; requests are sent when a client carries the steps out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from bftrainer.client import polling
from bftrainer.client.api import ApiClient
from bftrainer.client.polling import LogEnd, Moment, RetryPolicy, Row, Steps
from bftrainer.client.results import TrainerResults, read_results
from bftrainer.client.session import Ref, better, in_state, seconds, trainer_ref, wait_targets
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.wire.api import BeliefDetail, BeliefView, EtaAnswer, TrainerDetail, TrialView
from bftrainer.errors import BFTrainerError

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


class Calls:
    """Steps of each call. `retry` says how long a controller that is away is waited for."""

    def __init__(self, retry: RetryPolicy) -> None:
        self._retry = retry

    def request(self, question: Callable[[ApiClient], T]) -> Steps[T]:
        """One answer of the controller, to a request that may be sent twice."""
        return polling.patiently(question, self._retry)

    def cancel(self, ref: Ref) -> Steps[Row]:
        """See `Client.cancel`."""
        name = trainer_ref(ref)
        return self.request(lambda api: api.cancel(name))

    def cancel_group(self, group: str) -> Steps[list[Row]]:
        """See `Client.cancel_group`."""
        return polling.cancelling(group, self._retry)

    def prune(
        self, refs: Sequence[Ref], mine: bool, older_than_s: float | None, dry_run: bool
    ) -> Steps[dict[str, Any]]:
        """See `Client.prune`."""
        names = [trainer_ref(ref) for ref in refs]
        return self.request(lambda api: api.prune(names, mine=mine, older_than_s=older_than_s, dry_run=dry_run))

    def trainer(self, ref: Ref) -> Steps[TrainerDetail]:
        """See `Client.trainer`."""
        name = trainer_ref(ref)
        return self.request(lambda api: api.trainer(name))

    def trainers(self, group: str | None, state: str, everything: bool) -> Steps[list[Row]]:
        """See `Client.trainers`."""
        in_state(state)

        def question(api: ApiClient) -> list[Row]:
            rows = api.trainers(state=state, all=everything or group is not None)
            return rows if group is None else [row for row in rows if row.get("group", "") == group]

        return self.request(question)

    def eta(
        self, refs: Sequence[Ref], group: str | None, specs: Sequence[TrainerSpec], nodes: str | int | None
    ) -> Steps[EtaAnswer]:
        """See `Client.eta`."""
        names, wanted = [trainer_ref(ref) for ref in refs], [spec.as_json() for spec in specs]
        sizes = None if nodes is None else str(nodes)
        return self.request(lambda api: api.eta(names, group=group, specs=wanted, nodes=sizes))

    def curves(self) -> Steps[list[BeliefView]]:
        """See `Client.curves`."""
        return self.request(lambda api: api.curves())

    def curve(self, curve: str) -> Steps[BeliefDetail]:
        """See `Client.curve`."""
        return self.request(lambda api: api.curve(curve))

    def forget_curve(self, curve: str) -> Steps[BeliefView]:
        """See `Client.forget_curve`."""
        return self.request(lambda api: api.forget_curve(curve))

    def history(self, ref: Ref) -> Steps[list[Moment]]:
        """See `Client.history`."""
        return polling.remembering(trainer_ref(ref), self._retry)

    def results(self, ref: Ref) -> Steps[TrainerResults]:
        """See `Client.results`."""
        name = trainer_ref(ref)
        return self.request(lambda api: read_results(api.results(name)))

    def best(self, group: str, by: str, direction: str | None, limit: int | None) -> Steps[list[TrialView]]:
        """See `Client.best`."""
        wanted = better(direction)
        return self.request(lambda api: api.best(group, by, direction=wanted, limit=limit)["trainers"])

    def wait_all(
        self,
        refs: Iterable[Ref] | None,
        group: str | None,
        timeout_s: float | None,
        check: bool,
        poll_s: float,
        on_change: Callable[[Row], None] | None,
    ) -> Steps[list[Row]]:
        """See `Client.wait_all`."""
        limit_s = None if timeout_s is None else seconds("timeout_s", timeout_s, least=0.0)
        targets = wait_targets(refs, group)
        waiting = polling.waiting(targets, self._retry, seconds("poll_s", poll_s), limit_s, group, on_change)
        return _checked(waiting) if check else waiting

    def metrics(self, ref: Ref, poll_s: float) -> Steps[None]:
        """See `Client.metrics`."""
        return polling.reporting(trainer_ref(ref), self._retry, seconds("poll_s", poll_s))

    def logs(self, ref: Ref, tail: int | None, follow: bool, worker: str | None, poll_s: float) -> Steps[LogEnd]:
        """See `Client.logs`."""
        return polling.reading(trainer_ref(ref), self._retry, seconds("poll_s", poll_s), tail, follow, worker)

    def events(self, after: int | None, limit: int, trainer: str, kind: str, follow: bool, poll_s: float) -> Steps[int]:
        """See `Client.events`."""

        def page(after: int | None, most: int) -> Steps[dict[str, Any]]:
            return self.request(lambda api: api.events(after=after, limit=most, trainer=trainer, kind=kind))

        return polling.happening(page, seconds("poll_s", poll_s), after, limit, follow)


def _checked(waiting: Steps[list[Row]]) -> Steps[list[Row]]:
    rows = yield from waiting
    for row in rows:
        if row["state"] != "done":
            raise TrainerFailedError(row)
    return rows
