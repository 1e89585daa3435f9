"""Output functions write a usage report as JSON, CSV for billing, or one HTML page.

`bftrainer report` writes them. Node time is exact in all of them: seconds with six digits, which add up to the pool's.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from bftrainer.cluster.report.efficiency import Efficiency
from bftrainer.cluster.report.usage import OwnerUsage, Usage, UsageReport, hours
from bftrainer.core.trace import utc
from bftrainer.dashboard import html

COLUMNS = (
    "owner",
    "trainer",
    "name",
    "state",
    "node_seconds",
    "computing_node_seconds",
    "node_hours",
    "samples",
    "rescales",
    "preemptions",
    "finished",
    "gpu_seconds",
    "gpu_hours",
)


def as_json(account: UsageReport, efficiency: Efficiency, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole report as a JSON object."""
    return {
        "from": account.window.start,
        "to": account.window.end,
        "hours": account.window.hours,
        "node_hours": hours(account.pool_us),
        "used_node_hours": hours(account.used_us),
        "computing_node_hours": hours(account.computing_us),
        "unused_node_hours": hours(account.unused_us),
        "node_seconds": exact(account.pool_us),
        "unused_node_seconds": exact(account.unused_us),
        "gpu_hours": hours(account.pool_gpu_us),
        "used_gpu_hours": hours(account.gpu_us),
        "unused_gpu_hours": hours(account.unused_gpu_us),
        "gpu_seconds": exact(account.pool_gpu_us),
        "unused_gpu_seconds": exact(account.unused_gpu_us),
        "eq_nodes": hours(account.pool_us) / account.window.hours,
        "most_nodes": account.most_nodes,
        "nodes_joined": account.joined,
        "nodes_left": account.left,
        "decisions": account.decisions,
        "samples": account.samples,
        "efficiency": efficiency.efficiency,
        "bound": efficiency.bound,
        "work_done": efficiency.work,
        "equal_work_done": efficiency.equal_work,
        "efficiency_why": efficiency.why,
        "owners": [{"owner": share.owner, "trainers": share.trainers, **_figures(share)} for share in account.owners()],
        "trainers": [
            {"trainer": one.trainer, "name": one.name, "owner": one.owner, "state": one.state, **_figures(one)}
            for one in account.trainers
        ],
        "notes": list(account.notes),
        "provenance": dict(origin),
    }


def as_csv(account: UsageReport) -> str:
    """Return one row per trainer and one for unused nodes; their node- and GPU-seconds add up to those of the pool."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in account.trainers:
        times = (exact(one.used_us), exact(one.computing_us), f"{hours(one.used_us):.6f}")
        counts = (f"{one.samples:.0f}", one.rescales, one.preemptions, int(one.finished))
        texts = [_cell(text) for text in (one.owner, one.trainer, one.name, one.state)]
        writer.writerow([*texts, *times, *counts, *_gpu_times(one.gpu_us)])
    unused = (exact(account.unused_us), exact(0), f"{hours(account.unused_us):.6f}")
    writer.writerow(["", "", "(unused)", "", *unused, 0, 0, 0, 0, *_gpu_times(account.unused_gpu_us)])
    return out.getvalue()


def as_page(account: UsageReport, efficiency: Efficiency) -> str:
    """Return the report as a single HTML file without external resources."""
    pool = max(account.pool_us, 1)
    figures = [
        ("node-hours harvested", f"{hours(account.pool_us):,.1f}", ""),
        ("given to trainers", f"{account.used_us / pool:.1%}", ""),
        ("computing", f"{account.computing_us / pool:.1%}", ""),
        ("nodes on average", f"{hours(account.pool_us) / account.window.hours:,.1f}", ""),
        ("samples", html.amount(account.samples), ""),
        ("makespan ratio U", _share(efficiency.efficiency), ""),
        ("bound of U", _share(efficiency.bound), ""),
        ("work done, of the best possible", _share(efficiency.work), ""),
        ("the same with equal shares", _share(efficiency.equal_work), ""),
    ]
    notes = [*account.notes, *([f"efficiency: {efficiency.why}"] if efficiency.why else [])]
    said = "".join(f'<p class="note">{html.escape(note)}</p>\n' for note in notes)
    columns = ["node-hours", "of the pool", "computing", "samples", "rescales", "preemptions"]
    unused = ["(unused)", "", f"{hours(account.unused_us):,.2f}", _bar(account.unused_us / pool), "", "", "", ""]
    total = ["the pool", "", f"{hours(account.pool_us):,.2f}", "", "", "", "", ""]
    with_gpus = account.pool_gpu_us > 0
    if with_gpus:
        figures.insert(1, ("GPU-hours harvested", f"{hours(account.pool_gpu_us):,.1f}", ""))
        columns.append("GPU-hours")
        unused.append(f"{hours(account.unused_gpu_us):,.2f}")
        total.append(f"{hours(account.pool_gpu_us):,.2f}")
    owners = html.table(
        ("owner", "trainers", *columns),
        [*((share.owner, str(share.trainers), *_cells(share, pool, with_gpus)) for share in account.owners()), unused],
        numbers=(1, 2, *range(4, 2 + len(columns))),
        total=total,
    )
    trainers = html.table(
        ("trainer", "owner", "state", *columns),
        [
            (f"{one.trainer} {one.name}", one.owner, one.state, *_cells(one, pool, with_gpus))
            for one in sorted(account.trainers, key=lambda one: -one.used_us)
        ],
        numbers=(3, *range(5, 3 + len(columns))),
    )
    sections = (
        html.section("figures", "Figures", html.tiles(figures)),
        html.section("owners", "Owners", owners),
        html.section("trainers", "Trainers", trainers),
    )
    return html.page("What was harvested", f"<p>{html.escape(account.window)} UTC</p>\n{said}", sections)


def exact(micro: int) -> str:
    """Return seconds with all six digits of the microseconds."""
    return f"{micro // 1_000_000}.{micro % 1_000_000:06d}"


def shown_window(account: UsageReport) -> str:
    """Return the window as text."""
    return f"{utc(account.window.start)} to {utc(account.window.end)} UTC"


def _figures(one: Usage | OwnerUsage) -> dict[str, Any]:
    return {
        "node_hours": hours(one.used_us),
        "computing_node_hours": hours(one.computing_us),
        "node_seconds": exact(one.used_us),
        "gpu_hours": hours(one.gpu_us),
        "gpu_seconds": exact(one.gpu_us),
        "samples": one.samples,
        "rescales": one.rescales,
        "preemptions": one.preemptions,
        "finished": one.finished,
    }


def _cells(one: Usage | OwnerUsage, pool_us: int, with_gpus: bool) -> tuple[str, ...]:
    computing = f"{one.computing_us / one.used_us:.0%}" if one.used_us else ""
    figures = (f"{one.samples:,.0f}", f"{one.rescales:,}", f"{one.preemptions:,}")
    gpus = (f"{hours(one.gpu_us):,.2f}",) if with_gpus else ()
    return (f"{hours(one.used_us):,.2f}", _bar(one.used_us / pool_us), computing, *figures, *gpus)


def _gpu_times(micro: int) -> tuple[str, str]:
    return exact(micro), f"{hours(micro):.6f}"


def _cell(text: str) -> str:
    """Return a text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _bar(share: float) -> str:
    return html.Markup(f'<i class="share" style="width:{max(0.0, min(1.0, share)) * 100:.1f}px"></i>{share:.1%}')
