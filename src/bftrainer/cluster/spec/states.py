"""Trainer states are the stages that a trainer goes through, from `queued` to a finished one."""

from __future__ import annotations

from typing import Literal, get_args

TrainerState = Literal["queued", "starting", "running", "rescaling", "waiting", "done", "failed", "cancelled"]
STATES: tuple[str, ...] = get_args(TrainerState)
FINISHED: tuple[str, ...] = ("done", "failed", "cancelled")
