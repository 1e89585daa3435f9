"""`bftrainer demo` runs everything on this machine, with virtual nodes that come and go and real PyTorch training."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from bftrainer.cli.common.connection import connect, live_packages, say, say_json, screen
from bftrainer.cli.live.watch import REFRESH_S, line, look, picture

if TYPE_CHECKING:
    from bftrainer.cluster.demo import DemoSummary


def demo(
    nodes: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="Number of virtual nodes.")] = 8,
    speed: Annotated[float, typer.Option(metavar="X", help="Speed of node changes, as a multiple of Summit's.")] = 90.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed of the node changes.")] = 19,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=1, help="End after this many seconds, finished or not.")
    ] = 600.0,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the state, logs and snapshots here; must not exist.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Show BFTrainer on this machine: three trainings on virtual nodes that come and go, in about two minutes."""
    with live_packages():
        from bftrainer.cluster import demo as running
    running.check_packages()
    own = folder is None
    state = Path(tempfile.mkdtemp(prefix="bftrainer-demo-")) if folder is None else folder
    if folder is not None:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise typer.BadParameter(f"{folder} exists already", param_hint="--folder") from None
    console = screen()
    try:
        if not as_json:
            say(f"{nodes} virtual nodes come and go as on Summit, {speed:g} times as fast; three models train on them.")
        with running.controller(state, nodes, speed, seed) as process:
            running.await_client(state, process)
            if not as_json:
                say(f"watch it in a browser: {running.page(state)}")
            _watch(state, running.specs(state), console, seconds, quiet=as_json)
        summary = running.summarise(state)
        if as_json:
            say_json(asdict(summary))
        else:
            show(summary, console)
            if not own:
                say(f"the state is in {state}: bftrainer doctor --state {state}")
        if any(row["state"] != "done" for row in summary.trainers):
            raise typer.Exit(1)
    finally:
        if own:
            shutil.rmtree(state, ignore_errors=True)


def _watch(state: Path, specs: list[dict[str, Any]], console: Console, seconds: float, *, quiet: bool) -> None:
    """Submit the trainers, and show what happens until all are done or the time is up."""
    from bftrainer.cluster.spec.trainer import parse_spec

    deadline = time.monotonic() + seconds
    with connect(None, state) as client:
        for spec in specs:
            client.submit_spec(parse_spec(spec))
        watched: set[str] = set()
        scene = look(client, watched)
        if console.is_terminal and not quiet:
            with Live(picture(scene, console), console=console, auto_refresh=False) as live:
                while not scene.finished and time.monotonic() < deadline:
                    time.sleep(REFRESH_S)
                    scene = look(client, watched)
                    live.update(picture(scene, console), refresh=True)
            return
        last = 0.0
        while not scene.finished and time.monotonic() < deadline:
            if not quiet and time.monotonic() - last >= 5:
                last = time.monotonic()
                say(line(scene))
            time.sleep(REFRESH_S)
            scene = look(client, watched)


def show(summary: DemoSummary, console: Console) -> None:
    """Print the tables at the end."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in (("trainer", "left"), ("result", "left"), ("samples", "right"), ("time", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("rescales", "preempted", "median pause", "samples lost", "node-s"):
        table.add_column(name, justify="right")
    for row in summary.trainers:
        pause = row["median_pause_s"]
        table.add_row(
            row["name"],
            result(row),
            f"{row['samples']:,}" + (f" of {row['total']:,}" if row["total"] not in (None, row["samples"]) else ""),
            "" if row["seconds"] is None else f"{row['seconds']:.0f} s",
            str(row["rescales"]),
            str(row["preemptions"]),
            "" if pause is None else f"{pause * 1000:.0f} ms",
            f"{row['samples_redone']:,}",
            f"{row['node_seconds']:,.0f}",
        )
    console.print()
    console.print(table)
    found = summary.judgement
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="bold")
    facts.add_column(justify="right")
    facts.add_column(style="dim")
    facts.add_row(
        "nodes", f"{found.eq_nodes:.1f}", f"on average, over {found.seconds:.0f} s: {summary.joins} joins, "
        f"{summary.leaves} leaves, {summary.decisions} decisions"
    )  # fmt: skip
    facts.add_row("held", f"{summary.used_share:.1%}", "of their time, by trainers")
    facts.add_row(
        "start of a node", f"{found.start_s:.1f} s", "from when a trainer gets it to its first step, on average"
    )
    facts.add_section()
    busy = summary.busy
    best = f"of the best possible at no cost, in the {summary.busy_s:.0f} s in which all trainers had work"
    facts.add_row("work done", f"{busy.live:.3f}", best)
    facts.add_row("  simulated", f"{busy.simulated:.3f}", "the same events replayed with the measured curves and costs")
    facts.add_row("  equal shares", f"{busy.equal:.3f}", "the same events replayed with the `equal` allocator")
    facts.add_section()
    constant = "time that a constant pool of as many nodes needs for all of the work, as a share of the time it took"
    facts.add_row("makespan ratio U", f"{found.efficiency:.3f}", constant)
    facts.add_row("  bound", f"{found.bound:.3f}", "if rescaling, starting and preemption cost nothing")
    facts.add_row("  simulated", f"{found.simulated:.3f}", "")
    facts.add_row("  equal shares", f"{found.equal:.3f}", "")
    console.print()
    console.print(facts)


def result(row: Any) -> str:
    """The quality of the model."""
    metrics = row["metrics"]
    if "accuracy" in metrics:
        shown = f"accuracy {metrics['accuracy']:.1%}"
    elif "loss" in metrics:
        shown = f"loss {metrics['loss']:.3f}"
    else:
        shown = ""
    return shown if row["state"] == "done" else f"{row['state']} {shown}".strip()


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("demo")(demo)
