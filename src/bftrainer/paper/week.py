"""Figure 6: pool of the replayed nodes over a week, one bar per six hours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bftrainer.core.trace import Floats, Window
from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult, no_runs
from bftrainer.paper.figures import GREEN, OURS, tidy
from bftrainer.paper.windows import six_hours
from bftrainer.traces.stats import binned_pool

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make(context: Context) -> ExperimentResult:
    """Mean pool and number of events in each window."""
    trace = context.setting.trace()
    edges = six_hours(trace.window)
    _, pool = binned_pool(trace, Window(float(edges[0]), float(edges[-1])), len(edges) - 1)
    times = np.unique(np.concatenate((trace.start, trace.end[~trace.open])))
    events = np.histogram(times, edges)[0]
    share = pool / len(trace.nodes)
    hours = (edges[:-1] - edges[0]) / 3600
    rows = tuple(
        (h, p, s, int(e))
        for h, p, s, e in zip(hours.tolist(), pool.tolist(), share.tolist(), events.tolist(), strict=True)
    )
    compared = (
        Compared("mean idle share over the week", None, float(share.mean()), ".1%"),
        Compared("lowest six hours", None, float(share.min()), ".1%"),
        Compared("highest six hours", None, float(share.max()), ".1%"),
        Compared("events per hour", None, float(events.sum() / (edges[-1] - edges[0]) * 3600), ".1f"),
    )
    difference = (
        "The paper took 1024 nodes “arbitrarily chosen” and prints its percentages above the bars only; ours are the "
        "first 1024 of the published list, so single bars need not agree."
    )
    columns = ("hour", "mean idle nodes", "share of nodes", "events")
    return ExperimentResult(
        columns, rows, compared, difference, lambda f: _draw(f, hours, pool, share, events), (9.5, 4.8)
    )


def _draw(
    figure: Figure, hours: Floats, pool: Floats, share: Floats, events: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> None:
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    bars = above.bar(hours + 3, pool, 4.8, color=OURS)
    above.bar_label(bars, [f"{s:.0%}" for s in share], fontsize=8)
    above.margins(y=0.15)
    tidy(above, "", "idle nodes, mean\n(% of all nodes above)", grid="y", legend=False)
    below.bar(hours + 3, events, 4.8, color=GREEN)
    below.set_xticks(np.append(hours, hours[-1] + 6)[::4])
    tidy(below, "hours since the start", "events in six hours", grid="y", legend=False)


EXPERIMENT = Experiment("week", "Idle nodes over a week", "Figure 6", no_runs, make)
