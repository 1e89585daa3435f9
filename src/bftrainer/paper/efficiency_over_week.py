"""Figure 10: efficiency of HPO over a week in windows of six hours, beside the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bftrainer.core.trace import Floats
from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult, baseline_run, hpo_run
from bftrainer.paper.figures import BASELINE, OURS, PAPER, tidy
from bftrainer.paper.runs import PaperRun
from bftrainer.paper.setting import Setting
from bftrainer.paper.windows import efficiencies, six_hours

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def runs(setting: Setting) -> Sequence[PaperRun]:
    """Ours and the baseline at the paper's settings."""
    return [hpo_run(setting), baseline_run(setting)]


def make(context: Context) -> ExperimentResult:
    """U of every window: its outcome over what the same number of static nodes makes in it."""
    setting = context.setting
    ours, baseline = (context.result(run) for run in runs(setting))
    end = min(float(r.timeline.time[-1]) for r in (ours, baseline))
    edges = six_hours(setting.trace().window, end)
    trials = setting.workload("hpo")
    u, base = efficiencies(ours, trials, edges), efficiencies(baseline, trials, edges)
    hours = (edges[:-1] - edges[0]) / 3600
    gain = np.divide(u, base, out=np.ones_like(u), where=base > 0) - 1
    compared = (
        Compared("mean of the six-hour windows", 0.80, float(u.mean()), ".1%"),
        Compared("U of the whole run", 0.80, ours.number("efficiency"), ".1%"),
        Compared("mean of the baseline's", None, float(base.mean()), ".1%"),
        Compared("third best window (the paper: about 90 % in three)", 0.90, float(np.sort(u)[-3:][0]), ".1%"),
        Compared("best window", None, float(u.max()), ".1%"),
        Compared("most above the baseline, relative", 0.32, float(gain.max()), ".0%"),
    )
    whole = ours.number("efficiency")
    difference = (
        f"All windows have equal weight in our mean of {u.mean():.0%}; the whole run, where windows with many nodes "
        f"weigh more and the time after the week counts too, has {whole:.0%}; {int((u > 0.9).sum())} of {len(u)} "
        "windows lie above 90 %, and the 1024 nodes that the paper replays are not named."
    )
    rows = tuple(zip(hours.tolist(), u.tolist(), base.tolist(), gain.tolist(), strict=True))
    columns = ("hour", "U", "U of the baseline", "relative gain")
    return ExperimentResult(columns, rows, compared, difference, lambda f: _draw(f, hours, u, base), (9.5, 4.2))


def _draw(figure: Figure, hours: Floats, u: Floats, base: Floats) -> None:
    axes = figure.subplots()
    axes.bar(hours + 2, u * 100, 2, color=OURS, label=f"ours, mean {u.mean():.0%}")
    axes.bar(hours + 4, base * 100, 2, color=BASELINE, label=f"baseline of equal shares, mean {base.mean():.0%}")
    axes.axhline(80, color=PAPER, linestyle="--", label="paper: mean 80 %")
    axes.axhline(90, color=PAPER, linestyle=":", label="paper: about 90 % in three windows")
    axes.set_xticks(np.append(hours, hours[-1] + 6)[::4])
    axes.set_ylim(0, 105)
    tidy(axes, "hours since the start", "efficiency U in six hours, %", grid="y", legend=False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)


EXPERIMENT = Experiment("efficiency-over-week", "Efficiency of HPO over a week", "Figure 10, §5.1.2", runs, make)
