"""Plot of a trace: how long nodes stay idle, how many are idle over time, and how soon they leave."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bftrainer.core.trace import Trace, Window, utc
from bftrainer.errors import InputError
from bftrainer.traces.files import check_writable, writing
from bftrainer.traces.stats import HAZARD_AHEAD_S, SHORT_S, IdleStats, binned_pool, pool_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
_BLUE, _ORANGE, _GREY = "#2563a8", "#d9772b", "#8a8f98"
_SHADES = ("#9ec5e8", "#4a90c9", "#1b4f86")
_BINS = 800


def check_picture(path: Path) -> None:
    """Refuse early a figure that could not be drawn later."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: a picture must end in one of {', '.join(SUFFIXES)}")
    check_writable(path)


def plot_stats(trace: Trace, window: Window, stats: IdleStats, path: Path) -> None:
    """Draw the statistics of `trace` in `window` to an image file."""
    check_picture(path)
    # Matplotlib takes a second to import, and its default backend may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"Idle nodes, {utc(window.start)} to {utc(window.end)} UTC: {stats.eq_nodes:,.0f} of {stats.nodes:,} nodes "
        f"({stats.ratio:.1%}), {stats.node_hours:,.0f} node-hours",
        fontsize=13,
    )
    above, below_left, below_right = figure.subplot_mosaic([["pool", "pool"], ["length", "hazard"]]).values()
    _draw_pool(above, trace, window, stats)
    _draw_lengths(below_left, trace, window)
    _draw_hazard(below_right, stats)
    with writing(path, "wb") as out:
        figure.savefig(out, format=path.suffix[1:])


def _draw_pool(axes: Axes, trace: Trace, window: Window, stats: IdleStats) -> None:
    from matplotlib import dates

    edges, mean = binned_pool(trace, window, _BINS)
    times, size = pool_steps(trace, window)
    # The highest and lowest value in each bin: a mean alone hides the bursts.
    which = np.clip(np.searchsorted(edges, times, "right") - 1, 0, _BINS - 1)
    high, low = mean.copy(), mean.copy()
    np.maximum.at(high, which, size)
    np.minimum.at(low, which, size)
    days = edges / 86400  # matplotlib counts time in days since 1970
    axes.stairs(high, days, baseline=low, fill=True, color=_SHADES[0], alpha=0.6, label="lowest to highest")
    axes.stairs(mean, days, color=_BLUE, linewidth=1.0, label="mean")
    axes.axhline(stats.eq_nodes, color=_ORANGE, linewidth=1.2, linestyle="--", label=f"eq-nodes {stats.eq_nodes:,.0f}")
    locator = dates.AutoDateLocator()  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    axes.set(title="Pool size", ylabel="idle nodes", xlim=(days[0], days[-1]))
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", ncols=3, framealpha=0.9)
    axes.grid(alpha=0.25)


def _draw_lengths(axes: Axes, trace: Trace, window: Window) -> None:
    clipped = trace.clip(window)
    axes.set(title="Fragment length", xlabel="fragment length", ylabel="cumulative share")
    if not len(clipped):
        axes.text(0.5, 0.5, "no fragment", ha="center", transform=axes.transAxes)
        return
    length = np.sort(clipped.lengths)
    # A thousand points draw the same curve as half a million.
    pick = np.unique(np.linspace(0, len(length) - 1, 1000).astype(int))
    axes.plot(length[pick], (pick + 1) / len(length), color=_BLUE, label="of fragments")
    axes.plot(length[pick], np.cumsum(length)[pick] / length.sum(), color=_ORANGE, label="of idle node-time")
    axes.axvline(SHORT_S, color=_GREY, linewidth=1, linestyle=":")
    axes.set_xscale("log")
    marks = [(1, "1 s"), (10, "10 s"), (60, "1 min"), (600, "10 min"), (3600, "1 h"), (36000, "10 h"), (864000, "10 d")]
    low, high = max(length[0] * 0.8, 0.5), length[-1] * 1.25
    shown = [(at, label) for at, label in marks if low <= at <= high]
    axes.set_xticks([at for at, _ in shown], [label for _, label in shown])
    axes.minorticks_off()
    axes.set(xlim=(low, high), ylim=(0, 1.02))
    axes.legend(loc="upper left")
    axes.grid(alpha=0.25)


def _draw_hazard(axes: Axes, stats: IdleStats) -> None:
    rows = [row for row in stats.hazard if any(v is not None for v in row.leave_within.values())]
    axes.set(title="Chance that an idle node leaves", xlabel="idle since", ylabel="share that leaves in time")
    if not rows:
        axes.text(0.5, 0.5, "too little idle time to say", ha="center", transform=axes.transAxes)
        return
    places = np.arange(len(rows))
    for i, (ahead, shade) in enumerate(zip(HAZARD_AHEAD_S, _SHADES, strict=True)):
        heights = [row.leave_within[f"{ahead:.0f}"] or 0.0 for row in rows]
        axes.bar(places + (i - 1) * 0.27, heights, width=0.27, color=shade, label=f"within {ahead:.0f} s")
    axes.set_xticks(places, [age_label(row.age_from_s, row.age_to_s) for row in rows], rotation=35, ha="right")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    axes.grid(alpha=0.25, axis="y")


def age_label(low: float, high: float | None) -> str:
    """A span of ages in readable form, such as `2–5 min`."""
    unit, name = (1, "s") if (high or low) <= 60 else (60, "min") if (high or low) <= 3600 else (3600, "h")
    if high is None:
        return f"over {low / unit:g} {name}"
    if low and low < unit:
        return f"{low:g} s – {high / unit:g} {name}"
    return f"{low / unit:g}–{high / unit:g} {name}"
