"""The factory builds the job that matches a trainer's launcher.

It also tells which trainers need the head agent, and forwards a trainer's node list to its launcher. The `Reconciler`
calls it and passes in what it knows of nodes. The factory keeps no state about trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bftrainer.cluster.controller.active import ActiveTrainer, ControllerSettings, job_settings
from bftrainer.cluster.jobs.elastic import ElasticJob
from bftrainer.cluster.jobs.learning import Learned, Prior
from bftrainer.cluster.jobs.opaque import OpaqueJob
from bftrainer.cluster.launchers.base import HEAD, Launcher, WorkerSlot
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.wire.messages import FromController


class Launching:
    """The launchers by name, and the operations on a trainer that depend on its launcher."""

    def __init__(
        self, launchers: Mapping[str, Launcher], settings: ControllerSettings, host_of: Callable[[str], str]
    ) -> None:
        """`host_of` returns the address of a node."""
        self._launchers = launchers
        self._settings = settings
        self._host_of = host_of

    def make(
        self, trainer: str, name: str, owner: str, submitted: float, spec: TrainerSpec, learned: Any
    ) -> ActiveTrainer:
        """Return a trainer with its job. `learned` is its stored measurements, if any (`Learned.as_json`)."""
        prior = Prior(spec.prior_curve(), spec.up_s, spec.down_s)
        launcher = self._launchers[spec.launcher]
        usual_s = launcher.traits.rescale_s
        costs = (self._settings.default_up_s, self._settings.default_down_s) if usual_s is None else (usual_s, usual_s)
        settings = job_settings(self._settings.job, spec)

        def start(worker: str, node: str, background: bool) -> FromController:
            head = live.job.worker_on(HEAD)
            settled = isinstance(live.job, OpaqueJob) and live.job.settled
            place = WorkerSlot(
                worker, node, self._host_of(node), head.id if head is not None else "", background, settled
            )
            return launcher.start(live.launch, place)

        job: ElasticJob | OpaqueJob
        if launcher.traits.speaks:
            job = ElasticJob(trainer, spec.min_nodes, start, settings)
        else:
            job = OpaqueJob(trainer, spec.min_nodes, start, settings, launcher, spec.work)
        known = Learned.from_json(learned, prior, *costs) if learned else Learned(prior, *costs)
        live = ActiveTrainer(trainer, name, owner, submitted, spec, job, known)
        return live

    def needs_head(self, live: ActiveTrainer) -> bool:
        """Whether a trainer needs a worker on the head."""
        return self._launchers[live.spec.launcher].traits.on_head

    def give(self, live: ActiveTrainer, nodes: Sequence[str]) -> None:
        """Pass a trainer's nodes to its launcher. The trainer fails if the launcher cannot write its files."""
        try:
            self._launchers[live.spec.launcher].given(live.launch, [self._host_of(node) for node in nodes])
        except OSError as problem:
            live.job.fail(f"cannot write {problem.filename}: {problem.strerror}")
