"""`left_running` tells the operator of a controller that stops which agents, pilots and workers it leaves.

`serve` prints it at a plain SIGTERM: they go on, so that the next controller finds them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bftrainer.cluster.controller.reconciler import Reconciler
from bftrainer.cluster.launchers.base import HEAD
from bftrainer.util.text import natural

_SHOWN = 8


def left_running(cluster: Reconciler, pool: Mapping[str, Any], give_up_s: float) -> str:
    """Return what stays, for how long, and how to end it; empty if nothing stays. `pool` is its own description."""
    nodes = sorted((name for name, node in cluster.nodes.items() if node.here and name != HEAD), key=natural)
    busy = [live for live in cluster.trainers.values() if live.job.workers]
    workers = sum(len(live.job.workers) for live in busy)
    waiting = int(pool.get("pending") or 0)
    if cluster.settings.dry_run or not (nodes or workers or waiting):
        return ""
    parts = [f"{_count(len(nodes), 'agent')} on {_listed(nodes)}"] if nodes else []
    parts += [f"{_count(workers, 'worker')} of {_count(len(busy), 'trainer')}"] if workers else []
    parts += [f"{_count(waiting, 'pilot')} in Slurm's queue"] if waiting else []
    name = pool.get("job_name")
    end = f"To end them now: `scancel --name={name}`." if name else "To end one now: SIGTERM to its agent."
    return (
        f"left running: {', '.join(parts)}. They wait {give_up_s:g} s for the next `bftrainer serve` on this state "
        f"folder, then end. {end} To give all nodes back when a controller stops: `bftrainer drain`, or `bftrainer "
        "serve --drain`."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _listed(nodes: list[str]) -> str:
    more = f" and {len(nodes) - _SHOWN} more nodes" if len(nodes) > _SHOWN else ""
    return ", ".join(nodes[:_SHOWN]) + more
