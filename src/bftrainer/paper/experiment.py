"""Experiment: the base of every table and figure, its result, and the files written from it.

An `Experiment` names the replays it needs and makes an `ExperimentResult` from them: a table, the paper's values beside
ours, a sentence on the difference, a figure. `save` writes them as NAME.png, NAME.csv and NAME.json.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bftrainer.paper.runs import PaperRun, RunResult, Runs
from bftrainer.paper.setting import Setting
from bftrainer.traces.files import writing
from bftrainer.util.provenance import provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class Compared:
    """A value of the paper beside ours."""

    what: str
    paper: float | None
    """None: the paper shows it in a figure without a number."""
    ours: float | None
    """None: it cannot be measured in this setting."""
    form: str = ".3g"
    unit: str = ""

    def show(self, value: float | None) -> str:
        """Format a value with its unit."""
        return "–" if value is None else f"{value:{self.form}}{self.unit}"


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """Result of an experiment: table, compared values, a sentence and a figure."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    compared: tuple[Compared, ...]
    difference: str
    """One sentence: where ours differs from the paper's, and why."""
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (7.5, 4.2)
    """Size of the figure, in inches."""


@dataclass(frozen=True, slots=True)
class Context:
    """Inputs of an experiment: the setting and the results of runs."""

    setting: Setting
    runs: Runs

    def result(self, run: PaperRun) -> RunResult:
        """The result of a run."""
        return self.runs.result(run)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A table or figure of the evaluation."""

    name: str
    title: str
    source: str
    """Table, figure or section of the paper."""
    runs: Callable[[Setting], Sequence[PaperRun]]
    """The replays that the experiment needs."""
    make: Callable[[Context], ExperimentResult]
    on_trace: bool = True
    """Whether the experiment's values depend on the trace."""


def no_runs(setting: Setting) -> Sequence[PaperRun]:
    """No runs, for experiments that replay nothing."""
    return ()


def nearest(values: Sequence[float], wanted: float) -> float:
    """The value of a sweep at which the paper gives a number, or the nearest one."""
    return min(values, key=lambda value: abs(value - wanted))


def hpo_run(setting: Setting, **changes: Any) -> PaperRun:
    """The HPO workload at the paper's settings, with changes."""
    return PaperRun(**{"workload": "hpo", **_common(setting), **changes})


def diverse_run(setting: Setting, **changes: Any) -> PaperRun:
    """The diverse workload at the paper's settings, with changes."""
    return PaperRun(**{"workload": "diverse", **_common(setting), **changes})


def baseline_run(setting: Setting) -> PaperRun:
    """HPO under the paper's baseline, equal shares."""
    return hpo_run(setting, allocator="equal")


def horizon_runs(setting: Setting) -> Sequence[PaperRun]:
    """HPO under each horizon."""
    return [hpo_run(setting, horizon_s=horizon) for horizon in setting.horizons_s]


def horizon_and_baseline_runs(setting: Setting) -> Sequence[PaperRun]:
    """HPO under each horizon and under the baseline, which has none."""
    return [*horizon_runs(setting), baseline_run(setting)]


def _common(setting: Setting) -> dict[str, Any]:
    return {"horizon_s": setting.horizon_s, "max_parallel": setting.max_parallel}


def save(experiment: Experiment, finding: ExperimentResult, setting: Setting, folder: Path) -> None:
    """Write the three files of an experiment."""
    from bftrainer.paper.figures import write_png

    write_png(finding, f"{experiment.title} ({experiment.source})", setting, folder / f"{experiment.name}.png")
    with writing(folder / f"{experiment.name}.csv", "w") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(finding.columns)
        table.writerows(finding.rows)
    with writing(folder / f"{experiment.name}.json", "w") as out:
        json.dump(as_json(experiment, finding, setting), out, indent=1, allow_nan=False)


def as_json(experiment: Experiment, finding: ExperimentResult, setting: Setting) -> dict[str, Any]:
    """A result as JSON values, for programs."""
    return {
        "name": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "setting": setting.describe(),
        "synthetic": setting.synthetic,
        "compared": [{"what": c.what, "paper": c.paper, "ours": c.ours, "unit": c.unit} for c in finding.compared],
        "difference": finding.difference,
        "columns": finding.columns,
        "rows": finding.rows,
        "provenance": provenance(setting.inputs(), setting.seed if setting.synthetic else None),
    }
