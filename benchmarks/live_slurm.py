"""A real Slurm on this machine as the pool of `live_prediction.py`: main jobs take its nodes and give them back.

The cluster is that of the tests (`tests/support/slurm/lab.py`), and the main jobs are those of `slurm_schedule.py`. It
needs root and Slurm. Pilots import no PyTorch, because `workers/paced_steps.py` needs none: so two cores are enough for
all nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slurm_schedule import PILOT, gentle_python, held, play, schedule

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.slurm.lab import Lab, cluster  # type: ignore[import-not-found]

JOBS, SPAN_S, LOAD = 8, 70.0, 0.3
"""Main jobs of a run, the seconds in which they come, and the share of the nodes that they need."""
PLAIN_AGENT = "-c 'from bftrainer.cluster.agent.agent import main; main(preload=())'"


class _OverError(Exception):
    """The run is over: no more main jobs are needed."""


@dataclass(frozen=True, slots=True)
class SlurmSite:
    """A cluster that is up, and its main jobs."""

    lab: Lab
    folder: Path
    nodes: int
    seed: int

    @property
    def env(self) -> Mapping[str, str]:
        """What the controller needs in its environment."""
        return {"SLURM_CONF": str(self.lab.conf)}

    def options(self, *, torch: bool) -> list[str]:
        """Return the options of `bftrainer serve`. With `torch`, pilots import PyTorch for their workers."""
        pool = {"partition": "scavenger", "interval_s": "1", "warm_pilots": str(self.nodes)}
        pool |= {"python": str(gentle_python(self.folder))} if torch else {"agent": PLAIN_AGENT}
        settings = [word for name, value in pool.items() for word in ("--set", f"pool.{name}={value}")]
        return ["--pool", "slurm", "--drain", *settings]

    def disturb(self, is_over: Callable[[], bool]) -> None:
        """Submit main jobs until all have been submitted or the run is over."""

        def look() -> None:
            if is_over():
                raise _OverError

        with suppress(_OverError):
            play(self.lab, schedule(self.seed + 1, JOBS, self.nodes, SPAN_S, LOAD), self.folder / "jobs", look)

    def pilots(self) -> int:
        """Return how many pilots have ended so far."""
        log = self.lab.folder / "log" / "jobcomp.log"
        return sum(map(len, held(log, PILOT).values())) if log.exists() else 0


@contextmanager
def slurm_site(folder: Path, nodes: int, seed: int) -> Iterator[SlurmSite]:
    """Start a cluster, and end it afterwards. `pytest.skip.Exception`: there can be none here."""
    with cluster(nodes) as lab:
        yield SlurmSite(lab, folder, nodes, seed)
