"""A default exists once: what the parts of the live system assume is what the configuration says."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from bftrainer.cluster.config.keys import DEFAULTS
from bftrainer.cluster.config.policy import policy_of
from bftrainer.cluster.controller.active import ControllerSettings
from bftrainer.cluster.launchers.base import StateLayout
from bftrainer.cluster.wire.messages import Welcome
from bftrainer.elastic.local.coordinator import CoordinatorSettings
from bftrainer.scheduler import Policy
from bftrainer.simulate.study import SNAPSHOT_EVERY_S, Study


def test_the_controller_assumes_what_the_configuration_says() -> None:
    agents, trainers, settings = DEFAULTS.agents, DEFAULTS.trainers, ControllerSettings()
    assert (settings.reattach_s, settings.silence_s) == (agents.reattach_s, agents.silence_s)
    assert (settings.default_up_s, settings.default_down_s) == (trainers.default_up_s, trainers.default_down_s)
    assert settings.max_weight == DEFAULTS.policy.max_weight
    assert settings.job.leave_grace_s == agents.leave_grace_s
    assert settings.job.finish_grace_s == trainers.finish_grace_s
    assert settings.job.stuck_after_s == trainers.stuck_after_s
    assert settings.job.most_breaks == trainers.max_broken_groups
    assert settings.job.restart_backoff_s == trainers.restart_backoff_s


def test_agents_and_workers_assume_what_the_configuration_says() -> None:
    agents, welcome = DEFAULTS.agents, Welcome()
    assert (welcome.beat_s, welcome.silence_s) == (agents.beat_s, agents.worker_silence_s)
    assert welcome.give_up_s == agents.give_up_s
    assert StateLayout(Path(), "").snapshot_every_s == DEFAULTS.trainers.snapshot_every_s


def test_a_run_on_one_machine_has_the_limits_of_the_live_system() -> None:
    local = CoordinatorSettings()
    assert (local.silence_s, local.grace_s) == (DEFAULTS.agents.worker_silence_s, DEFAULTS.agents.leave_grace_s)
    assert local.finish_grace_s == DEFAULTS.trainers.finish_grace_s
    assert local.most_breaks == DEFAULTS.trainers.max_broken_groups


def test_simulations_decide_as_the_live_system_does() -> None:
    policy = DEFAULTS.policy
    study = {field.name: field.default for field in fields(Study)}
    assert Policy().horizon_s == study["horizon_s"] == policy.horizon_s
    assert DEFAULTS.trainers.snapshot_every_s == SNAPSHOT_EVERY_S


def test_max_parallel_is_automatic_in_the_live_system_and_the_papers_in_simulations() -> None:
    study = {field.name: field.default for field in fields(Study)}
    assert Policy().max_parallel == study["max_parallel"] == 10
    assert policy_of(DEFAULTS).max_parallel is None
