"""Plot of a tuning sweep: efficiency against run time, one line per max parallel, one point per horizon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bftrainer.simulate.tuning import Advice
from bftrainer.traces.files import writing

_RING: dict[str, Any] = {"marker": "o", "fillstyle": "none", "color": "#d9772b", "linestyle": ""}


def plot_advice(advice: Advice, path: Path) -> None:
    """Draw the trade-off with the recommendation marked."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    parallels = sorted({trial.max_parallel for trial in advice.trials})
    shades = colormaps["viridis"]
    for i, parallel in enumerate(parallels):
        some = sorted((t for t in advice.trials if t.max_parallel == parallel), key=lambda t: t.horizon_s)
        colour = shades(0.85 * i / max(len(parallels) - 1, 1))
        times = [t.horizon_s for t in some]
        left.plot(times, [t.efficiency for t in some], marker="o", color=colour, label=f"max parallel {parallel}")
        done = [t for t in some if t.mean_run_hours is not None]
        right.plot([t.mean_run_hours for t in done], [t.efficiency for t in done], marker="o", color=colour)
    chosen = advice.recommended
    horizons = sorted({trial.horizon_s for trial in advice.trials})
    left.set(xscale="log", xlabel="horizon, s", ylabel="efficiency U", title="Efficiency by horizon")
    left.set_xticks(horizons, [f"{h:g}" for h in horizons])
    left.minorticks_off()
    right.set(xlabel="mean run time of a trainer, h", ylabel="efficiency U", title="Efficiency against run time")
    for axes, x in ((left, chosen.horizon_s), (right, chosen.mean_run_hours)):
        if x is not None:
            axes.plot([x], [chosen.efficiency], markersize=13, label="recommended", **_RING)
        axes.grid(alpha=0.25)
    left.legend(loc="best")
    with writing(path, "wb") as out:
        figure.savefig(out, format=path.suffix[1:])
