"""`PrometheusMetrics` writes the controller's figures for Prometheus, which `/metrics` returns.

Current values are read when a request arrives; only durations are recorded as they happen. The number of single
trainers with figures is limited, and they are shown only to callers that may see those trainers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from bftrainer import __version__
from bftrainer.cluster.controller.active import ActiveTrainer
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.controller.nodes.state import NodeState
from bftrainer.cluster.http import views
from bftrainer.cluster.launchers.base import HEAD
from bftrainer.cluster.pools.slurm.figures import SlurmFigures
from bftrainer.cluster.pools.slurm.pool import SlurmPool
from bftrainer.cluster.spec.states import FINISHED, STATES
from bftrainer.cluster.store.rows import Sums
from bftrainer.cluster.store.store import Store
from bftrainer.util.text import natural

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_OWNERS = 100
MOST_NODES = 1000
"""Limit of nodes whose GPUs have figures of their own."""
OTHERS = "(others)"
SUMS_EVERY_S = 5.0
"""Shortest time between two sums over all trainers ever submitted, however many requests arrive."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5)

Scope = MutableMapping[str, Any]


class PrometheusMetrics:
    """Records durations and writes all metrics in the text format of Prometheus."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._limit = controller.config.api.metrics_trainers
        self._sums: list[Sums] = []
        self._sums_at = -SUMS_EVERY_S
        self._summing = asyncio.Lock()
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._decision = Histogram(
            "bftrainer_decision_seconds", "Time the scheduler took.", registry=self._registry, buckets=_SECONDS
        )
        self._reaction = Histogram(
            "bftrainer_event_to_decision_seconds",
            "From taking note of the first of some events to the decision on them, its commands handed on.",
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._requests = Counter(
            "bftrainer_api_requests", "Requests answered.", ("method", "path", "code"), registry=self._registry
        )
        self._answering = Histogram(
            "bftrainer_api_request_seconds",
            "From a request to the beginning of its answer.",
            ("path",),
            registry=self._registry,
            buckets=_REQUEST_SECONDS,
        )
        controller.on_decision = self.decided

    def decided(self, waited_s: float) -> None:
        """Record a decision that was made `waited_s` after the first event it is about."""
        self._reaction.observe(waited_s)
        last = self._controller.cluster.planner.last_decision
        if last is not None:
            self._decision.observe(float(last["ms"]) / 1e3)

    def answered(self, method: str, path: str, code: int, took_s: float) -> None:
        """Record an answered request. `path` is the path of the route, because there are few routes."""
        self._requests.labels(method if method in METHODS else "other", path, str(code)).inc()
        self._answering.labels(path).observe(took_s)

    async def text(self, may_see: Callable[[str], bool], *, with_nodes: bool = True) -> bytes:
        """Return all metrics; trainers and owners only of those owners for which `may_see` is true.

        `with_nodes`: also those of single nodes, with their names.
        """
        await self._look()
        return generate_latest(self._registry) + generate_latest(_Gathered(self._families(may_see, with_nodes)))

    def _families(self, may_see: Callable[[str], bool], with_nodes: bool) -> Iterator[Metric]:
        yield from self._pool()
        if with_nodes:
            nodes = self._controller.cluster.nodes.values()
            yield from gpu_families((node for node in nodes if node.name != HEAD), time.time())
        if isinstance(self._controller.pool, SlurmPool):
            yield from slurm_families(self._controller.pool.figures())
        yield from self._trainers()
        yield from self._owners(may_see)
        yield from self._single_trainers(may_see)

    def _pool(self) -> Iterator[Metric]:
        controller, cluster, now = self._controller, self._controller.cluster, time.time()
        pool = views.pool(cluster)
        info = GaugeMetricFamily("bftrainer_info", "The controller.", labels=("version", "pool"))
        info.add_metric((__version__, str(controller.config.pool.kind)), 1)
        yield info
        yield GaugeMetricFamily("bftrainer_start_time_seconds", "When it began.", controller.began)
        yield GaugeMetricFamily("bftrainer_paused", "1 while harvesting is paused.", float(cluster.paused))
        yield GaugeMetricFamily("bftrainer_pool_nodes", "Nodes in the pool.", pool["size"])
        yield GaugeMetricFamily("bftrainer_pool_nodes_used", "Of these, nodes that a trainer was given.", pool["used"])
        yield GaugeMetricFamily("bftrainer_pool_gpus", "GPUs of the nodes in the pool.", pool["gpus"])
        yield GaugeMetricFamily("bftrainer_pool_gpus_used", "Of these, GPUs of nodes that are used.", pool["used_gpus"])
        agents = GaugeMetricFamily("bftrainer_agents", "Agents of nodes by what they do.", labels=("state",))
        nodes = [node for node in cluster.nodes.values() if node.name != HEAD]
        states = Count(
            "awaited" if not node.here else "leaving" if node.leave_by is not None else "here" for node in nodes
        )
        for state in ("here", "leaving", "awaited"):
            agents.add_metric((state,), states[state])
        yield agents
        times = cluster.planner.pool_time
        yield CounterMetricFamily("bftrainer_pool_node_seconds", "Node time of the pool.", times.node_seconds(now))
        yield CounterMetricFamily("bftrainer_pool_gpu_seconds", "GPU time of the pool.", times.gpu_seconds(now))
        yield CounterMetricFamily("bftrainer_decisions", "Decisions made.", cluster.planner.decisions)
        yield CounterMetricFamily("bftrainer_events", "Events in the log.", _last(controller))
        yield GaugeMetricFamily("bftrainer_store_bytes", "Size of the database.", _size(self._controller))

    def _trainers(self) -> Iterator[Metric]:
        sums = self._sums
        states = GaugeMetricFamily("bftrainer_trainers", "Trainers by state.", labels=("state",))
        now: Count[str] = Count(live.present_state for live in self._controller.cluster.trainers.values())
        for state in STATES:
            stored = sum(one.trainers for one in sums if one.state == state)
            states.add_metric((state,), stored if state in FINISHED else now[state])
        yield states
        for name, about in (
            ("samples", "Samples that trainers made, those made again included."),
            ("node_seconds", "Node time that trainers held."),
            ("gpu_seconds", "GPU time that trainers held."),
            ("rescales", "Changes of trainers' members."),
            ("preemptions", "Times that a trainer lost nodes."),
            ("failures", "Times that a script failed."),
            ("samples_redone", "Samples made again after a loss."),
        ):
            total = sum(_made(one) if name == "samples" else getattr(one, name) for one in sums)
            yield CounterMetricFamily(f"bftrainer_trainer_{name}", about, total)

    def _owners(self, may_see: Callable[[str], bool]) -> Iterator[Metric]:
        held: dict[str, list[float]] = {}
        for one in self._sums:
            if may_see(one.owner):
                owner = one.owner if one.owner in held or len(held) < MOST_OWNERS else OTHERS
                sums = held.setdefault(owner, [0.0, 0.0, 0.0])
                sums[0] += one.node_seconds
                sums[1] += _made(one)
                sums[2] += one.gpu_seconds
        figures = (("node_seconds", "Node time"), ("samples", "Samples"), ("gpu_seconds", "GPU time"))
        for at, (name, about) in enumerate(figures):
            family = CounterMetricFamily(f"bftrainer_owner_{name}", f"{about} by owner.", labels=("owner",))
            for owner, values in held.items():
                family.add_metric((owner,), values[at])
            yield family

    def _single_trainers(self, may_see: Callable[[str], bool]) -> Iterator[Metric]:
        labels = ("trainer", "name", "owner")
        nodes = GaugeMetricFamily("bftrainer_trainer_nodes", "Nodes of an unfinished trainer.", labels=labels)
        rate = GaugeMetricFamily("bftrainer_trainer_rate", "Its samples per second.", labels=labels)
        progress = GaugeMetricFamily("bftrainer_trainer_progress_ratio", "Its share done.", labels=labels)
        start = GaugeMetricFamily(
            "bftrainer_trainer_start_seconds", "Its workers' starts, by part, medians.", labels=(*labels, "part")
        )
        pause = GaugeMetricFamily(
            "bftrainer_trainer_pause_seconds", "Its rescales' pauses, by part, medians.", labels=(*labels, "part")
        )
        seen = [live for live in self._controller.cluster.trainers.values() if may_see(live.owner)]
        for live in seen[: self._limit]:
            key = (live.id, live.name, live.owner)
            nodes.add_metric(key, len(live.job.nodes))
            rate.add_metric(key, _rate(live))
            total = live.job.progress.total
            if total:
                progress.add_metric(key, min(1.0, live.job.progress.samples / total))
            for part, seconds in live.learned.start_parts().items():
                start.add_metric((*key, part), seconds)
            for part, seconds in live.learned.pause_parts().items():
                pause.add_metric((*key, part), seconds)
        yield from (nodes, rate, progress, start, pause)
        left = max(0, len(seen) - self._limit)
        yield GaugeMetricFamily("bftrainer_trainers_without_series", "Beyond api.metrics_trainers.", left)

    async def _look(self) -> None:
        """Update the sums if they are old. A thread does it, because the number of trainers may be large."""
        async with self._summing:
            if time.monotonic() - self._sums_at >= SUMS_EVERY_S:
                self._sums = await asyncio.to_thread(_sums, self._controller.cluster.store.path)
                self._sums_at = time.monotonic()


def gpu_families(nodes: Iterable[NodeState], now: float) -> Iterator[Metric]:
    """Yield the GPUs of single nodes and their use, of at most `MOST_NODES` nodes: one value per node, not per GPU."""
    names = (
        ("gpus", "GPUs of a node."),
        ("gpu_utilization_ratio", "How busy its GPUs are, 0 to 1, the mean of those that are known."),
        ("gpu_memory_used_bytes", "Memory of its GPUs that is in use."),
    )
    counts, busy, memory = (
        GaugeMetricFamily(f"bftrainer_node_{name}", about, labels=("node",)) for name, about in names
    )
    with_gpus = sorted((node for node in nodes if node.gpu_count), key=lambda node: natural(node.name))
    for node in with_gpus[:MOST_NODES]:
        counts.add_metric((node.name,), node.gpu_count)
        uses = node.gpu_uses(now).values()
        if shares := [use.percent / 100 for use in uses if 0 <= use.percent <= 100]:
            busy.add_metric((node.name,), sum(shares) / len(shares))
        if sizes := [use.memory_mb << 20 for use in uses if use.memory_mb >= 0]:
            memory.add_metric((node.name,), sum(sizes))
    yield from (counts, busy, memory)
    left = max(0, len(with_gpus) - MOST_NODES)
    yield GaugeMetricFamily("bftrainer_nodes_without_gpu_series", f"Beyond the first {MOST_NODES:,}.", left)


def slurm_families(figures: SlurmFigures) -> Iterator[Metric]:
    """Yield the metrics of a `slurm` pool: pilots, why they were cancelled or ended, and Slurm's answer times."""
    pilots = GaugeMetricFamily("bftrainer_slurm_pilots", "Pilots by state.", labels=("state",))
    for state, count in figures.pilots.items():
        pilots.add_metric((state,), count)
    yield pilots
    yield GaugeMetricFamily("bftrainer_slurm_pilots_wanted", "Pilots that trainers could use.", figures.wanted)
    yield CounterMetricFamily("bftrainer_slurm_pilots_submitted", "Pilots submitted.", figures.submitted)
    yield CounterMetricFamily("bftrainer_slurm_submissions_refused", "Submissions that failed.", figures.refused)
    for name, about, counts in (
        ("cancelled", "Pilots that the pool cancelled, by reason.", figures.cancelled),
        ("ended", "Pilots that ended, by reason.", figures.ended),
    ):
        family = CounterMetricFamily(f"bftrainer_slurm_pilots_{name}", about, labels=("reason",))
        for reason, count in counts.items():
            family.add_metric((reason,), count)
        yield family
    yield CounterMetricFamily("bftrainer_slurm_rounds", "Times that Slurm was asked for its state.", figures.rounds)
    times = SummaryMetricFamily("bftrainer_slurm_command_seconds", "Answer times by command.", labels=("command",))
    failures = CounterMetricFamily("bftrainer_slurm_command_failures", "Commands that failed.", labels=("command",))
    longest = GaugeMetricFamily(
        "bftrainer_slurm_command_longest_seconds", "Longest answer since the start.", labels=("command",)
    )
    for command, answers in sorted(figures.answers.items()):
        times.add_metric((command,), answers.count, answers.total_s)
        failures.add_metric((command,), answers.failures)
        longest.add_metric((command,), answers.longest_s)
    yield from (times, failures, longest)


class Counted:
    """ASGI middleware that counts responses. Streams and websockets pass unchanged."""

    def __init__(self, app: Any, metrics: PrometheusMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, told = time.perf_counter(), False

        def count(code: int) -> None:
            nonlocal told
            told = True
            route = getattr(scope.get("route"), "path", None) or "other"
            self._metrics.answered(scope["method"], route, code, time.perf_counter() - began)

        async def sent(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and not told:
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception:
            if not told:
                count(500)
            raise


class _Gathered(CollectorRegistry):
    """Collection of finished metrics in the form that `generate_latest` expects."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        """See `CollectorRegistry`."""
        return self._metrics


def _sums(path: Path) -> list[Sums]:
    with Store.open(path, read_only=True) as store:
        return store.totals.by_state()


def _made(one: Sums) -> int:
    """Return the samples made, including redone ones.

    A Prometheus counter must not decrease, but a trainer that returns to a snapshot has fewer samples than before.
    """
    return one.samples + one.samples_redone


def _rate(live: ActiveTrainer) -> float:
    world = live.job.world
    if live.present_state != "running":
        return 0.0
    return live.job.progress.rates.get(world) or live.learned.measured.get(world) or 0.0


def _last(controller: Controller) -> int:
    return controller.cluster.store.event_log.ends()[1]


def _size(controller: Controller) -> int:
    path = controller.cluster.store.path
    files = (path, path.with_name(path.name + "-wal"))
    return sum(file.stat().st_size for file in files if file.exists())
