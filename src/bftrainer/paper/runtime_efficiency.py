"""Table 4: mean run time by model and max parallel, with scaling efficiency as the objective."""

from __future__ import annotations

from bftrainer.paper.experiment import Context, Experiment, ExperimentResult
from bftrainer.paper.runtimes import UNDER_EFFICIENCY, make_table, parallel_runs

_WHY = (
    "models lie closer together than under throughput in both, and what sets the levels apart, the paper's choice of "
    "nodes and its solver's tolerances, is not published"
)


def make(context: Context) -> ExperimentResult:
    """Make Table 4."""
    return make_table(context, "efficiency", UNDER_EFFICIENCY, _WHY)


EXPERIMENT = Experiment(
    "runtime-efficiency", "Mean run time under scaling efficiency", "Table 4", parallel_runs("efficiency"), make
)
