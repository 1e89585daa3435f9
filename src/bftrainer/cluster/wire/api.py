"""Types of the HTTP API's JSON. The controller builds it (`http.views`); clients and commands read it.

The keys are a contract: they stay, and new ones may be added.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class PositionView(TypedDict):
    """Position in the training that a metric belongs to."""

    epoch: int
    step: int
    samples: int


class EtaView(TypedDict):
    """When a trainer, or the last one of a group, will be done. Times are in seconds since 1970."""

    point: float | None
    """The time before which it is done in half of the futures; None: none is known, see `why`."""
    low: float | None
    high: float | None
    """It is done between `low` and `high` in 80 % of the futures; None: later than they reach."""
    why: str
    """Why there is no estimate; empty if there is one."""
    deadline: float | None
    likely: float | None
    """Probability of being done by the deadline."""
    basis: str
    """What the futures were taken from."""
    computed: float
    futures: int


class TrainerView(TypedDict):
    """A trainer in short."""

    id: str
    name: str
    owner: str
    group: str
    params: dict[str, Any]
    state: str
    reason: str
    script: str
    launcher: str
    min_nodes: int
    max_nodes: int
    weight: float
    submitted: float
    started: float | None
    ended: float | None
    nodes: list[str]
    samples: int
    total: int | None
    progress: float | None
    """Share of the work that is done, 0 to 1."""
    rate: float
    """Samples per second."""
    eta_s: float | None
    """Seconds that it would take at its present rate."""
    eta: EtaView | None
    """When it will be done; None: not computed yet, or it is finished."""
    deadline: float | None
    metrics: dict[str, Any]
    """Numbers; None for one that is not finite."""
    metrics_at: dict[str, PositionView]
    epoch: int
    step: int
    rescales: int
    preemptions: int
    failures: int
    samples_redone: int
    node_seconds: float
    gpu_seconds: float
    ranks: int
    """How many processes it has on its nodes: one per node and GPU, unless its user or the pool says otherwise."""


class PointsView(TypedDict):
    """A scaling curve as points."""

    nodes: list[int]
    rates: list[float]


class CurveView(PointsView):
    """The curve that the scheduler uses, with the rates that were measured and the curve that the user gave."""

    measured: dict[str, float]
    prior: PointsView | None
    low: NotRequired[list[float]]
    """The lower ends of the band in which each rate lies with a probability of 80 %; missing if nothing is known."""
    high: NotRequired[list[float]]
    stays: NotRequired[dict[str, float]]
    """How many stays of all trainers of the script are known, by size."""


class BeliefView(TypedDict):
    """What is known of a script, by all its trainers together."""

    id: str
    owner: str
    script: str
    python: str
    """Its interpreter."""
    model: str
    changed: float
    sizes: list[int]
    """The node counts at which its rate was measured."""
    stays: float
    """How many stays of its trainers are known."""
    is_given: bool
    """Whether a user gave a curve."""
    rescales: int
    up_s: float | None
    """Seconds that its trainers lose when they grow; None: not measured."""
    down_s: float | None
    start_s: float | None


class BeliefDetail(BeliefView):
    """What is known of a script, with its curve."""

    noise: float
    """Relative standard deviation of the rate that is measured in about a second."""
    curve: CurveView


class SnapshotsView(TypedDict):
    """How often snapshots are taken, and their cost."""

    step: int | None
    every_s: float
    stall_s: float | None


class RankView(TypedDict):
    """One process of a worker."""

    pid: int
    device: str
    """The id of its GPU; empty: the CPU."""


class WorkerView(TypedDict):
    """A worker of a trainer."""

    worker: str
    node: str
    state: str
    pid: int | None
    ranks: list[RankView]
    """Empty until the agent has reported them; agents of version 0.1.0 do not."""


class TrainerDetail(TrainerView):
    """A trainer with everything that is known of it."""

    spec: dict[str, Any]
    curve: CurveView
    up_s: float
    down_s: float
    pauses: dict[str, Any]
    pause_parts: dict[str, float]
    """Median seconds of the parts of a rescale's pause, in order; empty if the workers do not say them."""
    start_parts: dict[str, float]
    """Median seconds of the parts of a worker's start, in order; empty before the first step."""
    snapshots: SnapshotsView | None
    workers: list[WorkerView]
    error: str
    traceback: str
    log_tail: list[str]
    output: str


class FileView(TypedDict):
    """A file in a trainer's output folder."""

    name: str
    """Its path from the folder."""
    bytes: int
    time: float
    """When it was written last, in seconds since 1970."""


class ResultsView(TypedDict):
    """What a trainer has to show so far: its last metrics, and the files in its output folder."""

    id: str
    name: str
    state: str
    reason: str
    started: float | None
    ended: float | None
    epoch: int
    step: int
    samples: int
    metrics: dict[str, Any]
    metrics_at: dict[str, PositionView]
    host: str
    """The controller's machine, on which `folder` was looked at."""
    folder: str
    exists: bool
    """Whether the folder exists on that machine and can be read there."""
    files: list[FileView]
    complete: bool
    """Whether `files` has all of them; very many are not listed."""
    problem: str
    """Why the folder cannot be read there; empty if it can, or if there is none."""


class TrialView(TypedDict):
    """A trainer of a group, judged by one metric."""

    id: str
    name: str
    owner: str
    params: dict[str, Any]
    state: str
    reason: str
    value: float | None
    """The last value; None: not reported, or not finite."""
    at: PositionView | None
    best: float | None
    best_at: PositionView | None
    epoch: int
    step: int
    run_s: float
    """Seconds from the first step to the end, or to now. Waiting for nodes counts."""
    node_seconds: float
    """Time of the nodes that were assigned to it, added up."""
    folder: str


class BestView(TypedDict):
    """The trainers of a group, the best by one metric first. Those that did not report it come last."""

    group: str
    by: str
    direction: str
    """`min` or `max`: which values are better."""
    metrics: list[str]
    """Names of all metrics that the group's trainers reported."""
    count: int
    """Number of the group's trainers; `trainers` may have fewer."""
    trainers: list[TrialView]


class GpuView(TypedDict):
    """A GPU of a node."""

    id: str
    kind: str
    name: str
    memory_mb: int | None
    percent: int | None
    """How busy it is. This and `used_mb` are None if they are not known."""
    used_mb: int | None


class NodeView(TypedDict):
    """A node in the pool."""

    node: str
    host: str
    state: str
    trainer: str | None
    owner: str | None
    worker: str | None
    since: float
    agent_pid: int
    heard_s: float
    gpus: list[GpuView]
    slots: int
    """How many ranks a worker has there, unless its trainer says otherwise."""
    ranks: list[RankView]
    """The processes of the worker there."""
    serves: NotRequired[str]
    """The owner whose trainers it runs, where trainers run as their owners."""


class EventView(TypedDict):
    """An event of the log."""

    seq: int
    time: float
    kind: str
    trainer: str
    node: str
    data: dict[str, Any]


class PolicyView(TypedDict):
    """How nodes are assigned."""

    allocator: str
    decided_by: str
    objective: str
    horizon_s: float | str | None
    max_parallel: int | None


class TotalsView(TypedDict):
    """Sums over all trainers since the beginning, of one owner or of all."""

    samples: int
    node_seconds: float
    used_node_seconds: float
    gpu_seconds: float
    used_gpu_seconds: float
    rescales: int
    decisions: int
    owner: str | None


class DecisionView(TypedDict):
    """The last decision."""

    time: float
    reasons: list[str]


class GroupEtaView(TypedDict):
    """When all trainers of a group will be done."""

    group: str
    owner: str
    eta: EtaView


class EtaAnswer(TypedDict):
    """Answer to a question about finishing times."""

    eta: EtaView
    """When all trainers that were asked about are done."""
    trainers: dict[str, EtaView]
    """Each of them, by id; those of a specification by name, or by their place in it."""


class StatusView(TypedDict):
    """The status of the controller."""

    version: str
    now: float
    started: float
    paused: bool
    dry_run: bool
    pool: dict[str, Any]
    """`size` and `used` in nodes, `gpus` and `used_gpus`, and what the kind of pool adds."""
    policy: PolicyView
    trainers: list[TrainerView]
    groups: list[GroupEtaView]
    """Groups with unfinished trainers; those without an estimate yet are left out."""
    totals: TotalsView
    last_decision: DecisionView | None
