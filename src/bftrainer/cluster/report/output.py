"""Output functions write a usage report as JSON, CSV for billing, or one HTML page.

`bftrainer report` writes them. Node time is exact in all of them: seconds with six digits, which add up to the pool's.
"""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Mapping
from typing import Any

from bftrainer.cluster.report.efficiency import Efficiency
from bftrainer.cluster.report.usage import OwnerUsage, Usage, UsageReport, hours
from bftrainer.core.trace import utc

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
        "eq_nodes": hours(account.pool_us) / account.window.hours,
        "most_nodes": account.most_nodes,
        "nodes_joined": account.joined,
        "nodes_left": account.left,
        "decisions": account.decisions,
        "samples": account.samples,
        "efficiency": efficiency.efficiency,
        "bound": efficiency.bound,
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
    """Return one row per trainer and one for unused nodes; their node-seconds add up to those of the pool."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in account.trainers:
        times = (exact(one.used_us), exact(one.computing_us), f"{hours(one.used_us):.6f}")
        counts = (f"{one.samples:.0f}", one.rescales, one.preemptions, int(one.finished))
        writer.writerow([_cell(text) for text in (one.owner, one.trainer, one.name, one.state)] + [*times, *counts])
    unused = (exact(account.unused_us), exact(0), f"{hours(account.unused_us):.6f}")
    writer.writerow(["", "", "(unused)", "", *unused, 0, 0, 0, 0])
    return out.getvalue()


def as_page(account: UsageReport, efficiency: Efficiency) -> str:
    """Return the report as a single HTML file without external resources."""
    pool = max(account.pool_us, 1)
    numbers = [
        ("node-hours harvested", f"{hours(account.pool_us):,.1f}"),
        ("given to trainers", f"{account.used_us / pool:.1%}"),
        ("computing", f"{account.computing_us / pool:.1%}"),
        ("nodes on average", f"{hours(account.pool_us) / account.window.hours:,.1f}"),
        ("samples", f"{account.samples:,.0f}"),
        ("efficiency U", _share(efficiency.efficiency)),
        ("bound", _share(efficiency.bound)),
    ]
    tiles = "".join(f"<div><b>{text}</b><span>{name}</span></div>" for name, text in numbers)
    notes = [*account.notes, *([f"efficiency: {efficiency.why}"] if efficiency.why else [])]
    said = "".join(f"<p class=note>{html.escape(note)}</p>" for note in notes)
    owners = _table(
        ("owner", "trainers", "node-hours", "of the pool", "computing", "samples", "rescales", "preemptions"),
        [
            *((share.owner, str(share.trainers), *_cells(share, pool)) for share in account.owners()),
            ("(unused)", "", f"{hours(account.unused_us):,.2f}", _bar(account.unused_us / pool), "", "", "", ""),
            ("the pool", "", f"{hours(account.pool_us):,.2f}", "", "", "", "", ""),
        ],
    )
    trainers = _table(
        ("trainer", "owner", "state", "node-hours", "of the pool", "computing", "samples", "rescales", "preemptions"),
        [
            (f"{one.trainer} {one.name}", one.owner, one.state, *_cells(one, pool))
            for one in sorted(account.trainers, key=lambda one: -one.used_us)
        ],
    )
    return _PAGE.format(window=html.escape(str(account.window)), tiles=tiles, notes=said, owners=owners, rows=trainers)


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
        "samples": one.samples,
        "rescales": one.rescales,
        "preemptions": one.preemptions,
        "finished": one.finished,
    }


def _cells(one: Usage | OwnerUsage, pool_us: int) -> tuple[str, ...]:
    computing = f"{one.computing_us / one.used_us:.0%}" if one.used_us else ""
    figures = (f"{one.samples:,.0f}", f"{one.rescales:,}", f"{one.preemptions:,}")
    return (f"{hours(one.used_us):,.2f}", _bar(one.used_us / pool_us), computing, *figures)


def _cell(text: str) -> str:
    """Return a text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


class _Html(str):
    """Text that is HTML already and must not be escaped."""

    __slots__ = ()


def _bar(share: float) -> str:
    return _Html(f'<i style="width:{max(0.0, min(1.0, share)) * 100:.1f}px"></i> {share:.1%}')


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    def cell(text: str) -> str:
        return text if isinstance(text, _Html) else html.escape(text)

    first = "".join(f"<th scope=col>{html.escape(name)}</th>" for name in head)
    lines = ("".join(f"<td>{cell(text)}</td>" for text in row) for row in rows)
    return (
        f"<table><thead><tr>{first}</tr></thead><tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table>"
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>BFTrainer: what was harvested</title><style>
:root {{ color-scheme: light dark; --line: #8884; --bar: #3b7dd8; }}
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; margin: 0; }} h2 {{ font-size: 1.05rem; margin: 2rem 0 .5rem; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0; }}
.tiles div {{ border: 1px solid var(--line); border-radius: 8px; padding: .6rem .9rem; min-width: 7.5rem; }}
.tiles b {{ display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }}
.tiles span, .note {{ opacity: .75; font-size: .85rem; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }}
td {{ font-variant-numeric: tabular-nums; }}
i {{ display: inline-block; height: .7em; background: var(--bar); border-radius: 2px; }}
</style></head><body><h1>What was harvested</h1><p>{window} UTC</p>
<div class="tiles">{tiles}</div>{notes}
<h2>Owners</h2><div class="wide">{owners}</div>
<h2>Trainers</h2><div class="wide">{rows}</div>
</body></html>
"""
