"""Tables of nodes for a terminal, from the rows of the API: their state, GPUs and ranks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from bftrainer.cli.common.connection import printable
from bftrainer.cli.live.show_gpus import gpus_text, ranks_text, use_text
from bftrainer.cli.live.show_trainers import duration
from bftrainer.cluster.wire.api import NodeView

_STYLES = {"free": "dim", "assigned": "green", "leaving": "yellow"}


def nodes_table(rows: Sequence[NodeView], now: float) -> RenderableType:
    """A table with one line per node. GPUs, ranks and owners have columns where some node has them."""
    if not rows:
        return Text("the pool has no nodes", style="dim")
    with_gpus = any(row.get("gpus") for row in rows)
    with_use = any(use_text(row.get("gpus") or ()) for row in rows)
    with_ranks = any(len(row.get("ranks") or ()) > 1 or row.get("slots", 1) > 1 for row in rows) or with_gpus
    keys = ["node", "host", "state", "trainer", "worker"] + ["serves"] * any(row.get("serves") for row in rows)
    titles = list(keys)
    titles += ["GPUs"] * with_gpus + ["ranks"] * with_ranks + ["GPU use"] * with_use
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in titles:
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    for title in ("here for", "heard"):
        table.add_column(title, no_wrap=True, justify="right")
    for row in rows:
        gpus, ranks = row.get("gpus") or (), row.get("ranks") or ()
        texts = [Text(printable(row.get(key) or "")) for key in keys]
        texts[2].stylize(_STYLES.get(row.get("state", ""), ""))
        texts += [Text(gpus_text(gpus))] * with_gpus + [Text(ranks_text(ranks))] * with_ranks
        texts += [Text(use_text(gpus))] * with_use
        since = duration(now - row["since"]) if row.get("since") else ""
        heard = "" if row.get("heard_s") is None else f"{row['heard_s']:.1f} s ago"
        table.add_row(*texts, since, heard)
    return table
