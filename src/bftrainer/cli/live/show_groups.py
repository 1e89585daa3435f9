"""Tables of groups (sweeps and studies) for a terminal: one line per group, with node time and results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from bftrainer.cli.common.connection import printable
from bftrainer.cli.live.show_eta import short_eta
from bftrainer.cli.live.show_trainers import STYLES, figure, metrics, progress
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.wire.api import GroupEtaView, TrainerView

Row = TrainerView

_MOST_SHOWN = 1000
_UNDER_WAY = ("starting", "running", "rescaling", "waiting")


def group_of(row: Row) -> str:
    """The group of a trainer; empty if it is in none."""
    return str(row.get("group") or "")


def folded(rows: Sequence[Row]) -> list[Row]:
    """The rows without group members that need no line: those that have not begun, or ended well."""
    return [row for row in rows if not group_of(row) or row["state"] in (*_UNDER_WAY, "failed")]


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The members of each group."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if group_of(row):
            found.setdefault(group_of(row), []).append(row)
    return found


def groups_table(rows: Sequence[Row], console: Console, etas: Sequence[GroupEtaView] = ()) -> RenderableType:
    """A table with one line per group. `etas`: when they will be done."""
    ends = {found["group"]: short_eta(found["eta"], time.time()) for found in etas}
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", expand=False)
    table.add_column("group", no_wrap=True, overflow="ellipsis", max_width=30)
    for title in ("trainers", "queued", "running", "done", "cancelled", "failed", "nodes"):
        table.add_column(title, no_wrap=True, justify="right")
    table.add_column("progress", no_wrap=True)
    table.add_column("samples/s", no_wrap=True, justify="right")
    table.add_column("ETA", no_wrap=True, justify="right")
    for name, members in groups(rows).items():
        states = Counter("running" if row["state"] in _UNDER_WAY else row["state"] for row in members)
        shares = [1.0 if row["state"] in FINISHED else row.get("progress") or 0.0 for row in members]
        rate = sum(row.get("rate") or 0.0 for row in members)
        table.add_row(
            printable(name),
            str(len(members)),
            *(str(states[state] or "") for state in ("queued", "running", "done", "cancelled")),
            Text(str(states["failed"] or ""), style=STYLES["failed"]),
            str(sum(len(row.get("nodes") or ()) for row in members)),
            progress(sum(shares) / len(shares), 0, console, 14),
            figure(rate) if rate else "",
            ends.get(name, ""),
        )
    return table


def members_table(rows: Sequence[Row]) -> RenderableType:
    """A table of the trainers of one group: the values chosen for each, and the results."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("params") or ()))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for title in ("id", "name", "state"):
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    for name in names:
        table.add_column(Text(printable(name)), no_wrap=True, overflow="ellipsis", max_width=20)
    table.add_column("metrics", no_wrap=True, overflow="ellipsis")
    for row in rows[:_MOST_SHOWN]:
        chosen = row.get("params") or {}
        table.add_row(
            printable(row["id"]),
            Text(printable(row["name"])),
            Text(row["state"], style=STYLES.get(row["state"], "")),
            *(Text(printable(chosen.get(name, ""))) for name in names),
            Text(metrics(row.get("metrics") or {})),
        )
    if len(rows) > _MOST_SHOWN:
        table.add_row("…", f"and {len(rows) - _MOST_SHOWN:,} more")
    return table
