"""Table 1: idle nodes that cannot be backfilled, on three machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bftrainer.paper.experiment import Compared, Context, Experiment, ExperimentResult, no_runs
from bftrainer.paper.figures import OURS, PAPER, tidy
from bftrainer.traces.stats import IdleStats, idle_stats
from bftrainer.traces.synthetic.synth import synthesise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRINTED = {
    "Summit": (41.7, 28.6, 0.111, 524.0),
    "Theta": (6.3, 6.2, 0.125, 547.0),
    "Mira": (2.8, 2.4, 0.103, 5071.0),
}
"""INC/h, DEC/h, ratio and eq-nodes of the paper's Table 1: two months of Summit, a year of Theta and Mira."""
TWO_WEEKS = {
    "events": (22_883.0, "events"),
    "inc_events": (14_049.0, "events with a join"),
    "dec_events": (10_573.0, "events with a leave"),
    "node_hours": (137_639.0, "idle node-hours"),
}
"""Values of §2.1 for the two published weeks of Summit."""
COLUMNS = ("system", "trace", "hours", "nodes", "INC/h", "DEC/h", "ratio", "eq-nodes", "events", "node-hours")


def make(context: Context) -> ExperimentResult:
    """Measure Summit's log, and synthetic traces of the machines whose logs are not public."""
    setting = context.setting
    hours = setting.hours or 336.0
    size = setting.machine_nodes
    measured = {
        "Summit": idle_stats(setting.machine()),
        "Theta": idle_stats(synthesise("theta", nodes=size, hours=hours, seed=setting.seed)),
        "Mira": idle_stats(synthesise("mira", nodes=size, hours=hours, seed=setting.seed)),
    }
    kind = {name: "log" if name == "Summit" and not setting.synthetic else "synthetic" for name in measured}
    rows = tuple(_row(name, kind[name], stats) for name, stats in measured.items())
    compared = []
    for name, stats in measured.items():
        label = name if kind[name] == "log" else f"{name} (synthetic)"
        for what, paper, ours in zip(("INC/h", "DEC/h"), PRINTED[name], _four(stats), strict=False):
            compared.append(Compared(f"{label} {what}", paper, ours, ".1f"))
        compared.append(Compared(f"{label} idle share", PRINTED[name][2], stats.ratio, ".1%"))
        compared.append(Compared(f"{label} eq-nodes", PRINTED[name][3], stats.eq_nodes, ",.0f"))
    summit = measured["Summit"]
    for key, (paper, words) in TWO_WEEKS.items():
        compared.append(Compared(f"Summit, two weeks of §2.1: {words}", paper, float(getattr(summit, key)), ",.0f"))
    compared.append(Compared("Summit, two weeks of §2.1: eq-nodes", 407.0, summit.eq_nodes, ",.0f"))
    compared.append(Compared("Summit, two weeks of §2.1: idle share", 0.086, summit.ratio, ".1%"))
    difference = (
        "Table 1 covers two months of Summit, of which only the two weeks of §2.1 are published; Theta's and Mira's "
        "logs are not public, so their rows measure synthetic traces made to be like the table and prove nothing."
    )
    return ExperimentResult(
        COLUMNS, rows, tuple(compared), difference, lambda figure: _draw(figure, measured, kind), size=(8.5, 3.8)
    )


def _four(stats: IdleStats) -> tuple[float, float, float, float]:
    return stats.inc_per_hour, stats.dec_per_hour, stats.ratio, stats.eq_nodes


def _row(name: str, kind: str, stats: IdleStats) -> tuple[str | float | int, ...]:
    rest = (stats.events, round(stats.node_hours, 1))
    inc, dec, ratio, eq = _four(stats)
    return (name, kind, round(stats.hours, 1), stats.nodes, inc, dec, ratio, eq, *rest)


def _draw(figure: Figure, measured: dict[str, IdleStats], kind: dict[str, str]) -> None:
    places = range(len(measured))
    names = [name if kind[name] == "log" else f"{name}\n(synthetic)" for name in measured]
    panels = figure.subplots(1, 3)
    for axes, which, label, scale in zip(
        panels, (0, 1, 2), ("joins per hour", "leaves per hour", "idle share, %"), (1, 1, 100), strict=True
    ):
        paper = [PRINTED[name][which] * scale for name in measured]
        ours = [_four(stats)[which] * scale for stats in measured.values()]
        left = axes.bar([p - 0.2 for p in places], paper, 0.4, color=PAPER, label="paper, Table 1")
        right = axes.bar([p + 0.2 for p in places], ours, 0.4, color=OURS, label="ours")
        for bars in (left, right):
            axes.bar_label(bars, fmt="%.1f", fontsize=7)
        axes.set_xticks(list(places), names, fontsize=8)
        axes.margins(y=0.15)
        tidy(axes, "", label, legend=which == 0, grid="y")


EXPERIMENT = Experiment("idle-stats", "Idle nodes that cannot be backfilled", "Table 1, §2.1", no_runs, make)
