"""What a trainer's launcher has to do with it: which kind of job it has, who needs the head, who is told of its nodes.

The cluster asks, and passes in what it knows of nodes. Nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bftrainer.cluster import facts
from bftrainer.cluster.job import Job
from bftrainer.cluster.launchers.base import HEAD, Launcher, Place
from bftrainer.cluster.learning import Learned, Prior
from bftrainer.cluster.live import ClusterSettings, Live
from bftrainer.cluster.quiet_job import QuietJob
from bftrainer.cluster.spec import TrainerSpec
from bftrainer.cluster.wire import FromController


class Launching:
    """The launchers there are, and what becomes of a trainer by its own."""

    def __init__(
        self, launchers: Mapping[str, Launcher], settings: ClusterSettings, host_of: Callable[[str], str]
    ) -> None:
        """`host_of` says the address of a node."""
        self._launchers = launchers
        self._settings = settings
        self._host_of = host_of

    def make(self, trainer: str, name: str, owner: str, submitted: float, spec: TrainerSpec, learned: Any) -> Live:
        """A trainer with its job; `learned` is what the store has of what was learned."""
        prior = Prior(spec.prior_curve(), spec.up_s, spec.down_s)
        launcher = self._launchers[spec.launcher]
        usual_s = launcher.traits.rescale_s
        costs = (self._settings.default_up_s, self._settings.default_down_s) if usual_s is None else (usual_s, usual_s)
        settings = facts.job_settings(self._settings.job, spec)

        def start(worker: str, node: str, background: bool) -> FromController:
            head = live.job.worker_on(HEAD)
            settled = isinstance(live.job, QuietJob) and live.job.settled
            place = Place(worker, node, self._host_of(node), head.id if head is not None else "", background, settled)
            return launcher.start(live, place)

        job: Job | QuietJob
        if launcher.traits.speaks:
            job = Job(trainer, spec.min_nodes, start, settings)
        else:
            job = QuietJob(trainer, spec.min_nodes, start, settings, launcher, spec.work)
        known = Learned.from_json(learned, prior, *costs) if learned else Learned(prior, *costs)
        live = Live(trainer, name, owner, submitted, spec, job, known)
        return live

    def needs_head(self, live: Live) -> bool:
        """Whether a trainer needs something beside the controller."""
        return self._launchers[live.spec.launcher].traits.on_head

    def give(self, live: Live, nodes: Sequence[str]) -> None:
        """Tell a trainer's launcher which nodes it has; it fails where that cannot be written down."""
        try:
            self._launchers[live.spec.launcher].given(live, [self._host_of(node) for node in nodes])
        except OSError as problem:
            live.job.fail(f"cannot write {problem.filename}: {problem.strerror}")
