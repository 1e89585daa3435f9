"""Reproduction: runs all replays that the chosen experiments need, then writes their files, then the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bftrainer.errors import InputError
from bftrainer.paper.experiment import Context, Experiment, ExperimentResult, save
from bftrainer.paper.report import write_report
from bftrainer.paper.runs import Runs
from bftrainer.paper.setting import Setting

CACHE = ".cache"

Progress = Callable[[str, int, int], None]
"""Called with a label of the current work, the amount done, and the total amount."""


@dataclass(frozen=True, slots=True)
class Reproduced:
    """Summary of a reproduction."""

    findings: tuple[tuple[Experiment, ExperimentResult], ...]
    replayed: int
    """Number of replays executed, not taken from the cache."""
    report: Path


def reproduce(
    experiments: Sequence[Experiment],
    setting: Setting,
    folder: Path,
    workers: int = 2,
    progress: Progress = lambda what, done, total: None,
) -> Reproduced:
    """Run `experiments` and write their files and `report.html` to `folder`, which is created if missing."""
    setting.check()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; -o must name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    runs = Runs(setting, folder / CACHE, workers)
    needed = [run for experiment in experiments for run in experiment.runs(setting)]
    total = len(runs.missing(needed)) + len(experiments)
    done = 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        progress(what, done, total)

    progress("replaying", done, total)
    runs.complete(needed, lambda: step("replaying"))
    context = Context(setting, runs)
    findings = []
    for experiment in experiments:
        progress(experiment.name, done, total)
        finding = experiment.make(context)
        if setting.synthetic and experiment.on_trace:
            note = "The trace here is synthetic, so numbers need not agree."
            finding = replace(finding, difference=f"{finding.difference} {note}")
        save(experiment, finding, setting, folder)
        findings.append((experiment, finding))
        step(experiment.name)
    report = write_report(findings, context, folder)
    return Reproduced(tuple(findings), runs.replayed, report)
