"""What an experiment is and what it finds; how a finding becomes files.

An `Experiment` says which replays it needs and makes a `Finding` of them: a table, the paper's values beside ours, a
sentence on the difference, a figure. `save` writes them as NAME.png, NAME.csv and NAME.json.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bftrainer.paper.runs import Result, Run, Runs
from bftrainer.paper.setting import Setting
from bftrainer.provenance import provenance
from bftrainer.traces.files import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class Compared:
    """One value of the paper beside ours."""

    what: str
    paper: float | None
    """None: the paper shows it in a figure without a number."""
    ours: float | None
    """None: this setting has nothing to measure it by."""
    form: str = ".3g"
    unit: str = ""

    def show(self, value: float | None) -> str:
        """A value with its unit."""
        return "–" if value is None else f"{value:{self.form}}{self.unit}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What an experiment gave."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    compared: tuple[Compared, ...]
    difference: str
    """One sentence: where ours differs from the paper's, and why."""
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (7.5, 4.2)
    """Of the figure, in inches."""


@dataclass(frozen=True, slots=True)
class Context:
    """What an experiment may use."""

    setting: Setting
    runs: Runs

    def result(self, run: Run) -> Result:
        """What a run gave."""
        return self.runs.result(run)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A table or figure of the evaluation."""

    name: str
    title: str
    source: str
    """Where the paper has it."""
    runs: Callable[[Setting], Sequence[Run]]
    """The replays it needs."""
    make: Callable[[Context], Finding]
    on_trace: bool = True
    """Whether its values depend on the trace."""


def no_runs(setting: Setting) -> Sequence[Run]:
    """For experiments that replay nothing."""
    return ()


def nearest(values: Sequence[float], wanted: float) -> float:
    """The value of a sweep at which the paper gives a number, or the nearest there is."""
    return min(values, key=lambda value: abs(value - wanted))


def hpo_run(setting: Setting, **changes: Any) -> Run:
    """The HPO workload at the paper's settings, with changes."""
    return Run(**{"workload": "hpo", **_common(setting), **changes})


def diverse_run(setting: Setting, **changes: Any) -> Run:
    """The diverse workload at the paper's settings, with changes."""
    return Run(**{"workload": "diverse", **_common(setting), **changes})


def baseline_run(setting: Setting) -> Run:
    """HPO under the paper's baseline, equal shares."""
    return hpo_run(setting, allocator="equal")


def horizon_runs(setting: Setting) -> Sequence[Run]:
    """HPO under each horizon."""
    return [hpo_run(setting, horizon_s=horizon) for horizon in setting.horizons_s]


def horizon_and_baseline_runs(setting: Setting) -> Sequence[Run]:
    """HPO under each horizon and under the baseline, which knows none."""
    return [*horizon_runs(setting), baseline_run(setting)]


def _common(setting: Setting) -> dict[str, Any]:
    return {"horizon_s": setting.horizon_s, "max_parallel": setting.max_parallel}


def save(experiment: Experiment, finding: Finding, setting: Setting, folder: Path) -> None:
    """Write the three files of an experiment."""
    from bftrainer.paper.figures import write_png

    write_png(finding, f"{experiment.title} ({experiment.source})", setting, folder / f"{experiment.name}.png")
    with writing(folder / f"{experiment.name}.csv", "w") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(finding.columns)
        table.writerows(finding.rows)
    with writing(folder / f"{experiment.name}.json", "w") as out:
        json.dump(as_json(experiment, finding, setting), out, indent=1, allow_nan=False)


def as_json(experiment: Experiment, finding: Finding, setting: Setting) -> dict[str, Any]:
    """A finding for programs."""
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
