"""Core vocabulary: nodes and traces, trainers, curves and objectives. Plain values, no input or output."""

from bftrainer.core.curve import Curve
from bftrainer.core.objective import OBJECTIVES, Objective, find_objective
from bftrainer.core.pool import Event, Fragment, Node, Pool
from bftrainer.core.topology import Topology
from bftrainer.core.trace import Trace, Window
from bftrainer.core.trainer import Trainer

__all__ = [
    "OBJECTIVES",
    "Curve",
    "Event",
    "Fragment",
    "Node",
    "Objective",
    "Pool",
    "Topology",
    "Trace",
    "Trainer",
    "Window",
    "find_objective",
]
