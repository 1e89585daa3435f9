"""Optimizers and schedulers of an elastic Accelerate script, which know of steps that are held back.

A step is held back if the batch is not complete on this rank, or if a peer was lost and the batch comes again.
Accelerate then treats it as one that mixed precision has skipped, and does not step the scheduler.
"""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from bftrainer.elastic import Run


class ElasticOptimizer(AcceleratedOptimizer):
    """Optimizer as `accelerator.prepare` returns it."""

    def __init__(self, optimizer: Any, run: Run, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self._run = run
        self._held_back = False

    def step(self, closure: Any = None) -> None:
        """Step, if the batch is complete on all ranks."""
        before = self._run.progress.step
        super().step(closure)
        self._held_back = self.gradient_state.sync_gradients and self._run.progress.step == before

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing."""
        return self._held_back or bool(super().step_was_skipped)


class ElasticScheduler(AcceleratedScheduler):
    """Scheduler as `accelerator.prepare` returns it.

    Accelerate steps a scheduler once per process, because each step takes as many batches. Here that is once per rank
    that the script was submitted for: the number of samples of a step does not change with the nodes.
    """

    def __init__(self, scheduler: Any, optimizers: Any, *, ranks: int, **options: Any) -> None:
        super().__init__(scheduler, optimizers, **options)
        self._ranks = ranks

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, if the optimizer did."""
        follows = self.step_with_optimizer and self.gradient_state.sync_gradients
        for _ in range(self._ranks if follows else 1):
            super().step(*args, **kwargs)
