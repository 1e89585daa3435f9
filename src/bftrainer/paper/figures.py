"""Figures: the style that all figures share, and saving one as a PNG file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bftrainer.paper.setting import Setting
from bftrainer.traces.files import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bftrainer.paper.experiment import ExperimentResult

OURS, BASELINE, PAPER, GREEN, GREY = "#2563a8", "#8a8f98", "#d9772b", "#3b9b6d", "#5b6168"
RED, YELLOW, PURPLE = "#c03535", "#b08a1e", "#b5427a"
MODEL_COLOURS = {
    "AlexNet": OURS,
    "ResNet18": "#2aa5b8",
    "MnasNet": GREEN,
    "MobileNets": PURPLE,
    "ShuffleNet": "#7a5bb0",
    "VGG-16": BASELINE,
    "DenseNet": YELLOW,
}


def write_png(finding: ExperimentResult, title: str, setting: Setting, path: Path) -> None:
    """Draw a result. A synthetic trace is named on the figure itself, which may be shown without its page."""
    # Matplotlib takes a second to import, and its default backend may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=finding.size, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    finding.draw(figure)
    note = f"\n{setting.describe()}" if setting.synthetic else ""
    figure.suptitle(title + note, fontsize=11)
    with writing(path, "wb") as out:
        figure.savefig(out, format="png")


def tidy(axes: Axes, xlabel: str, ylabel: str, legend: bool = True, grid: str = "both") -> None:
    """Set labels, grid and legend."""
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(visible=True, axis="y" if grid == "y" else "both", alpha=0.25)
    axes.set_axisbelow(True)
    if legend:
        axes.legend(fontsize=8, framealpha=0.9)


def mark_paper(axes: Axes, x: float, y: float, label: str) -> None:
    """Mark a value that the paper gives."""
    axes.plot([x], [y], marker="*", markersize=13, color=PAPER, linestyle="", label=label, zorder=5)


def horizon_axis(axes: Axes, horizons_s: tuple[float, ...]) -> None:
    """Set up a logarithmic axis for horizons, which spread over more than a decade."""
    axes.set_xscale("log")
    axes.set_xticks(list(horizons_s), [f"{h:g}" for h in horizons_s])
    axes.minorticks_off()
