"""Table 3: mean run time by model and max parallel, with throughput (samples per second) as the objective."""

from __future__ import annotations

from bftrainer.paper.experiment import Context, Experiment, ExperimentResult
from bftrainer.paper.runtimes import UNDER_THROUGHPUT, make_table, parallel_runs

_WHY = (
    "the slow models wait longest in both, and what sets the levels apart, the paper's choice of nodes and its "
    "solver's tolerances, is not published"
)


def make(context: Context) -> ExperimentResult:
    """Make Table 3."""
    return make_table(context, "throughput", UNDER_THROUGHPUT, _WHY)


EXPERIMENT = Experiment(
    "runtime-throughput", "Mean run time under throughput", "Table 3", parallel_runs("throughput"), make
)
