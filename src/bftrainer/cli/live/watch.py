"""`bftrainer watch` shows the pool and the trainers live in a terminal, or at most one line per second elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from bftrainer.cli.common.connection import State, Url, connect, printable, say, say_json, screen
from bftrainer.cli.live.show_groups import folded, group_of, groups, groups_table
from bftrainer.cli.live.show_trainers import COLOURS, header, percent, pool_problem, pool_use, trainers_table
from bftrainer.cluster.spec.states import FINISHED
from bftrainer.cluster.store.events import Decided
from bftrainer.cluster.wire.api import EventView, NodeView, StatusView

if TYPE_CHECKING:
    from bftrainer.client import Client


REFRESH_S = 1.0
"""Time between two looks at the controller."""
_DECISIONS = 5
_BAR_LINES = 4


@dataclass(frozen=True, slots=True)
class Scene:
    """The data shown at one moment."""

    status: StatusView
    nodes: Sequence[NodeView]
    decisions: Sequence[EventView]

    @property
    def finished(self) -> bool:
        """Whether there are trainers and all of them are finished."""
        rows = self.status["trainers"]
        return bool(rows) and all(row["state"] in FINISHED for row in rows)


def watch(
    until_done: Annotated[
        bool, typer.Option("--until-done", help="Exit when all trainers are finished; exit status 1 if one failed.")
    ] = False,
    url: Url = None,
    state: State = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON, one object per line.")] = False,
) -> None:
    """Watch the pool and the trainers until Ctrl-C."""
    console = screen()
    with connect(url, state) as client:
        watched: set[str] = set()
        scene = look(client, watched)
        try:
            if console.is_terminal and not as_json:
                scene = _live(client, watched, scene, console, until_done)
            else:
                scene = _lines(client, watched, scene, until_done, as_json)
        except KeyboardInterrupt:
            return
    rows = [row for row in scene.status["trainers"] if row["id"] in watched]
    if any(row["state"] in ("failed", "cancelled") for row in rows):
        raise typer.Exit(1)


def look(client: Client, watched: set[str]) -> Scene:
    """Read the current state. The ids of trainers that are not finished are added to `watched`."""
    status = client.status()
    nodes = client.nodes()
    watched.update(row["id"] for row in status["trainers"] if row["state"] not in FINISHED)
    return Scene(status, nodes, _decisions(client))


def _decisions(client: Client) -> list[EventView]:
    """Read the newest decisions. Only an admin may see them, because they name the trainers of all owners."""
    from bftrainer.client import RefusedError

    try:
        return list(client.events(kind=Decided.kind, limit=_DECISIONS))
    except RefusedError as problem:
        if problem.status != 403:
            raise
        return []


def _live(client: Client, watched: set[str], scene: Scene, console: Console, until_done: bool) -> Scene:
    with Live(picture(scene, console), console=console, auto_refresh=False, transient=False) as live:
        while not (until_done and scene.finished):
            time.sleep(REFRESH_S)
            scene = look(client, watched)
            live.update(picture(scene, console), refresh=True)
    return scene


def _lines(client: Client, watched: set[str], scene: Scene, until_done: bool, as_json: bool) -> Scene:
    """For logs and pipes: print a line when something changed."""
    last = ""
    while True:
        text = line(scene)
        if as_json:
            say_json(scene.status)
        elif text != last:
            at = datetime.fromtimestamp(scene.status.get("now", time.time()), UTC)
            say(f"{at:%H:%M:%S} {text}")
        last = text
        if until_done and scene.finished:
            return scene
        time.sleep(REFRESH_S)
        scene = look(client, watched)


def picture(scene: Scene, console: Console) -> Group:
    """The whole screen, as high as the terminal allows."""
    rows = sorted(scene.status["trainers"], key=lambda row: row["state"] in FINISHED)
    most = max(3, console.height - _DECISIONS - _BAR_LINES - 10)
    names = [row["name"] for row in rows if row["state"] not in FINISHED]
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    parts: list[Any] = [header(scene.status, console)]
    if (problem := pool_problem(scene.status)) is not None:
        parts.append(problem)
    parts += [Text(), pool_bar(scene.nodes, colours, console), Text()]
    if any(group_of(row) for row in rows):
        parts += [groups_table(rows, console, scene.status.get("groups") or ()), Text()]
        rows = folded(rows)
    parts.append(trainers_table(rows[:most], console, colours))
    if len(rows) > most:
        parts.append(Text(f"… and {len(rows) - most:,} more: see `bftrainer status`", style="dim"))
    if scene.decisions:
        parts += [Text(), Text("Last decisions", style="bold")]
        for event in scene.decisions:
            at = datetime.fromtimestamp(event["time"], UTC)
            reasons = "; ".join(map(printable, (event.get("data") or {}).get("reasons") or ())) or "nothing to change"
            parts.append(Text(f"{at:%H:%M:%S} {reasons}", style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def pool_bar(nodes: Sequence[NodeView], colours: Mapping[str, str], console: Console) -> Text:
    """One mark per node; those of a trainer are side by side and in its colour."""
    utf = "utf" in (console.encoding or "").lower()
    marks = {"assigned": "■" if utf else "#", "leaving": "▨" if utf else "~"}
    places = {name: place for place, name in enumerate(colours)}
    ordered = sorted(nodes, key=lambda row: (places.get(row.get("trainer") or "", len(places)), row["node"]))
    room = _BAR_LINES * console.width - 20
    shown = Text("")
    for row in ordered[:room]:
        style = colours.get(row.get("trainer") or "", "dim")
        shown.append(marks.get(row.get("state", ""), "□" if utf else "."), style=style)
    if len(ordered) > room:
        shown.append(f" and {len(ordered) - room:,} more", style="dim")
    return shown if ordered else Text("the pool has no nodes", style="dim")


def line(scene: Scene) -> str:
    """The scene in one line."""
    parts = [pool_use(scene.status)]
    if scene.status.get("paused"):
        parts[0] += ", paused"
    if (problem := pool_problem(scene.status)) is not None:
        parts.append(problem.plain)
    rows = scene.status["trainers"]
    for name, members in groups(rows).items():
        states = Counter(row["state"] for row in members)
        parts.append(f"{printable(name)}: {', '.join(f'{count} {state}' for state, count in states.items())}")
    for row in rows:
        if group_of(row):
            continue
        text = f"{printable(row['name'])} {row['state']}"
        if row["state"] not in FINISHED:
            text += f" on {len(row.get('nodes') or ())}"
        if row["progress"] is not None and row["state"] != "done":
            text += f" {percent(row['progress'])}"
        parts.append(text)
    return "; ".join(parts)


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("watch")(watch)
