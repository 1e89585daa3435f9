"""Tables of trainers and learned curves for a terminal, from the rows of the API."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bftrainer.cli.common.connection import printable
from bftrainer.cli.live.show_eta import deadline_text, eta_text, short_eta
from bftrainer.cli.live.show_gpus import ranks_text
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.wire.api import CurveView, StatusView, TrainerDetail, TrainerView, WorkerView

STYLES: Mapping[str, str] = {
    "queued": "yellow",
    "starting": "cyan",
    "running": "green",
    "rescaling": "cyan",
    "waiting": "yellow",
    "done": "bold green",
    "failed": "bold red",
    "cancelled": "dim",
}
COLOURS = ("green", "blue", "magenta", "cyan", "yellow", "red", "bright_green", "bright_blue", "bright_magenta")
"""Colours of trainers in the pool's bar, in turn."""
_WIDE = 108
_LEAST_METRICS = 12
"""Columns of the terminal below which metrics are left out."""
_MOST_POINTS = 16
_MOST_SHOWN = 1000

Row = TrainerView


def header(status: StatusView, console: Console) -> Text:
    """One line on the pool and the policy."""
    pool, policy = status.get("pool", {}), status.get("policy", {})
    horizon, parallel = policy.get("horizon_s"), policy.get("max_parallel")
    parts = [
        f"{printable(pool.get('kind', '?'))} pool",
        pool_use(status),
        f"{printable(policy.get('allocator', '?'))} by {printable(policy.get('objective', '?'))}",
        f"horizon {'auto' if horizon in (None, 'auto') else f'{horizon:g} s'}",
        f"{'auto' if parallel is None else parallel} at once",
    ]
    line = Text(" · ".join(parts if console.width >= _WIDE else parts[:3]), style="bold")
    for flag, word in (("paused", "PAUSED"), ("dry_run", "DRY RUN"), ("draining", "DRAINING")):
        if status.get(flag):
            line.append(f" · {word}", style="bold yellow")
    return line


def pool_use(status: StatusView) -> str:
    """How many nodes are used, and how many GPUs if there are any."""
    pool = status.get("pool", {})
    gpus = f" ({pool.get('used_gpus', 0)} of {pool['gpus']} GPUs)" if pool.get("gpus") else ""
    return f"{pool.get('used', 0)} of {pool.get('size', 0)} nodes used{gpus}"


def pool_problem(status: StatusView) -> Text | None:
    """The pool's problem, if there is one: some nodes, or all, may never come."""
    pool = status.get("pool") or {}
    found = pool.get("problem") or pool.get("warning")
    return Text(f"the pool has a problem: {printable(found)[:500]}", style="bold red") if found else None


def trainers_table(rows: Sequence[Row], console: Console, colours: Mapping[str, str] | None = None) -> RenderableType:
    """A table with one line per trainer; below it, the reasons why trainers do not train."""
    if not rows:
        return Text("no trainers; submit one with `bftrainer submit SCRIPT`", style="dim")
    wide, shown, now = console.width >= _WIDE, rows[:_MOST_SHOWN], time.time()
    names = [Text(printable(row["name"]), style=(colours or {}).get(row["name"], "")) for row in shown]
    columns: dict[str, list[str | Text]] = {
        "id": [printable(row["id"]) for row in shown],
        "name": list(names),
        "state": [Text(row["state"], style=STYLES.get(row["state"], "")) for row in shown],
        "nodes": [_sizes(row) for row in shown],
        "ranks": [str(row.get("ranks") or "") for row in shown],
        "progress": [progress(row.get("progress"), row.get("samples", 0), console, 14 if wide else 8) for row in shown],
        "samples/s": [figure(row["rate"]) if row.get("rate") else "" for row in shown],
        "ETA": ["" if row["state"] in FINISHED else _eta(row, now) for row in shown],
    }
    if not any(_has_ranks(row) for row in rows):
        del columns["ranks"]
    # Cut what is least needed: rich would cut all columns, the first ones too.
    for title in ("ETA", "samples/s", "progress"):
        if _width(columns, console, wide) > console.width:
            del columns[title]
    left = console.width - _width(columns, console, wide)
    if wide and left >= _LEAST_METRICS:
        columns["metrics"] = [_cut(metrics(row.get("metrics") or {}), left - 1) for row in shown]
    table = _columns(columns, wide)
    parts: list[RenderableType] = [table]
    if len(rows) > _MOST_SHOWN:
        parts.append(Text(f"… and {len(rows) - _MOST_SHOWN:,} more", style="dim"))
    return Group(*parts, *_reasons(rows[:_MOST_SHOWN]))


def _columns(columns: Mapping[str, Sequence[str | Text]], wide: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", expand=False)
    for title in columns:
        right = title in ("nodes", "ranks", "samples/s", "ETA")
        width = (30 if wide else 18) if title == "name" else None
        table.add_column(
            title, no_wrap=True, overflow="ellipsis", justify="right" if right else "left", max_width=width
        )
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _width(columns: Mapping[str, Sequence[str | Text]], console: Console, wide: bool) -> int:
    """The width of a table that is not cut."""
    unlimited = console.options.update(width=10_000)
    return console.measure(_columns(columns, wide), options=unlimited).maximum


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _reasons(rows: Sequence[Row]) -> list[Text]:
    """Why trainers do not train, or have no node. A reason that many trainers share is printed once."""
    sharing: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.get("reason") and row["state"] != "done":
            sharing.setdefault((row["state"], row["reason"]), []).append(row)
    told = []
    for (state, reason), (first, *others) in sharing.items():
        more = f" and {len(others)} more" if others else ""
        what = f"{printable(first['name'])} ({printable(first['id'])}){more} {state}: {printable(reason)}"
        told.append(Text(what, style=STYLES.get(state, "")))
    return told


def _eta(row: Row, now: float) -> str:
    """The interval in which it will be done; before there is one, how long it takes at the present rate."""
    at_rate = "" if row["eta_s"] is None else duration(row["eta_s"])
    return short_eta(row.get("eta"), now) or at_rate


def _sizes(row: Row) -> str:
    least, most = row["min_nodes"], row["max_nodes"]
    asked = str(least) if least == most else f"{least}-{most}"
    return asked if row["state"] in FINISHED else f"{len(row.get('nodes') or ())}/{asked}"


def _has_ranks(row: Row) -> bool:
    """Whether a trainer has more than one rank on some node."""
    return row.get("ranks", 0) > len(row.get("nodes") or ())


def progress(share: float | None, samples: int, console: Console, width: int) -> Text:
    """A bar and per cent; if the total is not known, the samples so far."""
    if share is None:
        return Text(f"{figure(samples)} samples" if samples else "")
    return Text(f"{bar(share, width, console)} {percent(share):>4}")


def percent(share: float) -> str:
    """Per cent, 100 only when the share is complete."""
    return f"{min(99, math.floor(share * 100)) if share < 1 else 100}%"


def bar(share: float, width: int, console: Console) -> str:
    """A bar of a share, 0 to 1."""
    full, empty = ("█", "░") if "utf" in (console.encoding or "").lower() else ("#", "-")
    done = min(width, max(0, math.floor(share * width + 1e-9)))
    return full * done + empty * (width - done)


def metrics(found: Mapping[str, Any]) -> str:
    """The metrics that the script reports, in one line."""
    return ", ".join(f"{printable(k)} {_metric(v)}" for k, v in found.items())


def _metric(value: object) -> str:
    finite = isinstance(value, int | float) and math.isfinite(value)
    return f"{value:.4g}" if finite else "not finite"  # JSON has no such number


def detail(row: TrainerDetail, console: Console) -> RenderableType:
    """All details of one trainer."""
    head = Text.assemble(
        (f"{printable(row['name'])} ({printable(row['id'])})", "bold"),
        "  ",
        (row["state"], STYLES.get(row["state"], "")),
        f": {printable(row['reason'])}" if row.get("reason") else "",
    )
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(row, console):
        table.add_row(name, Text(value))
    parts: list[RenderableType] = [head, table]
    curve = row["curve"]
    if curve["nodes"]:
        parts += [Text(), chart(curve, len(row.get("nodes") or ()), console)]
    if row.get("workers"):
        parts += [Text(), _workers(row["workers"])]
    for title, text in (("Error", row.get("error")), ("Traceback", row.get("traceback"))):
        if text and text != row.get("reason"):
            parts += [Text(), Text(title, style="bold"), *(Text(f"  {printable(t)}") for t in text.splitlines()[-30:])]
    if row.get("log_tail"):
        parts += [Text(), Text("Last lines of its log", style="bold")]
        parts += [Text(f"  {printable(line)}", style="dim") for line in row["log_tail"][-10:]]
    return Group(*parts)


def _facts(row: TrainerDetail, console: Console) -> list[tuple[str, str]]:
    spec = row.get("spec") or {}
    command = " ".join(map(printable, [row.get("script") or spec.get("script", ""), *spec.get("args", ())]))
    of = "" if row.get("total") is None else f" of {row['total']:,}"
    where = f"epoch {row.get('epoch', 0)}, step {row.get('step', 0):,}"
    share = "" if row["progress"] is None else f"{bar(row['progress'], 20, console)} {percent(row['progress'])}  "
    times = f"submitted {moment(row['submitted'])}"
    if row["started"] is not None:
        times += f", started {moment(row['started'])}"
    if row["ended"] is not None:
        times += f", ended {moment(row['ended'])}"
    facts = [
        ("script", command),
        ("launcher", f"{row.get('launcher', 'elastic')}, owner {printable(row.get('owner') or '-')}"),
        ("times", f"{times} (UTC)"),
        ("nodes", f"{_sizes(row)}  {' '.join(map(printable, row.get('nodes') or ()))}".rstrip()),
        ("progress", f"{share}{row.get('samples', 0):,}{of} samples, {where}"),
    ]
    if _has_ranks(row):
        facts.insert(4, ("ranks", f"{row['ranks']} on {len(row['nodes'])} node{'s' * (len(row['nodes']) != 1)}"))
    if row.get("output"):
        facts.append(("output", printable(row["output"])))
    if row.get("rate"):
        eta = "" if row["eta_s"] is None else f", {duration(row['eta_s'])} left at this rate"
        facts.append(("rate", f"{figure(row['rate'])} samples/s{eta}"))
    if (found := row.get("eta")) is not None:
        said = "; ".join(part for part in (eta_text(found, time.time()), deadline_text(found)) if part)
        basis = f" ({printable(found['basis'])})" if found["futures"] else ""
        facts.append(("done", said + basis))
    elif (deadline := row.get("deadline")) is not None:
        facts.append(("deadline", f"{moment(deadline)} (UTC)"))
    if row.get("metrics"):
        facts.append(("metrics", metrics(row["metrics"])))
    if row.get("weight", 1) != 1:
        facts.append(("weight", f"{row['weight']:g}"))
    if spec.get("env"):
        facts.append(("env", ", ".join(map(printable, spec["env"]))))  # names only: values may be secret
    pauses = row.get("pauses") or {}
    said = f"{row.get('rescales', 0)}; nodes lost: {row.get('preemptions', 0)}"
    if pauses.get("count"):
        said += f"; median pause {_seconds(pauses.get('median_s'))}"
        known: Mapping[str, float | None] = row.get("pause_parts") or {
            "form": pauses.get("form_s"),
            "sync": pauses.get("sync_s"),
        }
        said += f" ({_in_parts(known)})"
    facts.append(("rescales", said))
    if parts := row.get("start_parts"):
        facts.append(("start", f"{_seconds(sum(parts.values()))} to the first step: {_in_parts(parts)}"))
    snapshots = row.get("snapshots")
    if snapshots:
        said = (
            f"every {_seconds(snapshots.get('every_s'))}, each stops training for {_seconds(snapshots.get('stall_s'))}"
        )
        last = "" if snapshots.get("step") is None else f"; the last is of step {snapshots['step']:,}"
        facts.append(("snapshots", said + last))
    facts.append(("costs", f"up {_seconds(row.get('up_s'))}, down {_seconds(row.get('down_s'))}"))
    facts.append(("failures", f"{row.get('failures', 0)}; samples computed twice: {row.get('samples_redone', 0):,}"))
    gpu_hours = f", {row['gpu_seconds'] / 3600:,.2f} GPU-hours" if row.get("gpu_seconds") else ""
    facts.append(("used", f"{row.get('node_seconds', 0) / 3600:,.2f} node-hours{gpu_hours}"))
    return facts


def _in_parts(parts: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_seconds(seconds)}" for name, seconds in parts.items())


def chart(curve: CurveView, now: int, console: Console) -> RenderableType:
    """The learned curve as bars, with its band, and how many stays at each size are known of the script.

    Sizes that were measured are marked. Where a band is known, the rate is the expected one, which the measurements at
    all sizes decide. The mean of those at this size is said beside it if it differs.
    """
    stays = curve.get("stays") or {}
    measured = {int(size): rate for size, rate in (curve.get("measured") or {}).items()}
    points = {int(n): float(r) for n, r in zip(curve["nodes"], curve["rates"], strict=False) if n > 0}
    ends = zip(curve.get("low") or (), curve.get("high") or (), strict=False)
    bands = dict(zip(curve["nodes"], ends, strict=False))
    points |= {size: rate for size, rate in measured.items() if size not in bands}
    sizes = _thinned(sorted(points), {*measured, now})
    most = max((points[size] for size in sizes), default=0.0) or 1.0
    utf = "utf" in (console.encoding or "").lower()
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", title_justify="left")
    for title, justify in (("nodes", "right"), ("samples/s", "right"), ("", "left"), ("", "left")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for size in sizes:
        mark = ("●" if utf else "*") if size in measured else ("○" if utf else "o")
        shown = figure(points[size])
        note = f"{mark} {'measured' if size in measured else 'expected'}"
        if size in measured and figure(measured[size]) != shown:
            note += f" {figure(measured[size])}"
        note += ", now" if size == now else ""
        if str(size) in stays:
            note += f", {stays[str(size)]:.3g} stays"
        if size in bands:
            note += f", 80 %: {figure(bands[size][0])} to {figure(bands[size][1])}"
        length = max(1, round(points[size] / most * 24)) if points[size] > 0 else 0
        table.add_row(str(size), shown, ("█" if utf else "#") * length, note)
    return Group(Text("Scaling curve", style="bold"), table)


def _thinned(sizes: Sequence[int], keep: set[int]) -> list[int]:
    """At most as many points as fit a screen: the ones to keep, the ends, and some between."""
    if len(sizes) <= _MOST_POINTS:
        return list(sizes)
    step = math.ceil(len(sizes) / _MOST_POINTS)
    return [n for i, n in enumerate(sizes) if n in keep or i % step == 0 or i == len(sizes) - 1]


def _workers(rows: Sequence[WorkerView]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    with_ranks = any(row.get("ranks") for row in rows)
    for title in ("worker", "node", "state", "pid", *(("ranks and devices",) * with_ranks)):
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    for row in rows[:_MOST_SHOWN]:
        texts = [Text(printable(row.get(key) or "")) for key in ("worker", "node", "state", "pid")]
        table.add_row(*texts, *([Text(ranks_text(row.get("ranks") or ()))] * with_ranks))
    return table


def duration(seconds: float) -> str:
    """A duration such as 45s, 3m20s, 5h07m or 12d3h."""
    if not math.isfinite(seconds):
        return "?"
    left = max(0, round(seconds))
    if left < 60:
        return f"{left}s"
    if left < 3600:
        return f"{left // 60}m{left % 60:02d}s"
    if left < 86400:
        return f"{left // 3600}h{left % 3600 // 60:02d}m"
    return f"{left // 86400:,}d{left % 86400 // 3600}h"


def figure(number: float) -> str:
    """A number in about six characters at most."""
    if not math.isfinite(number):
        return "?"
    for limit, scale, unit in ((1e4, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (math.inf, 1e9, "G")):
        if abs(number) < limit:
            value = number / scale
            return f"{value:,.0f}{unit}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}{unit}"
    raise AssertionError


def moment(seconds: float) -> str:
    """A time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g} s"
