"""The vocabulary: nodes, fragments, traces, pools and events. Plain values, no input or output."""

from bftrainer.core.pool import Event, Fragment, Node, Pool
from bftrainer.core.trace import Trace, Window

__all__ = ["Event", "Fragment", "Node", "Pool", "Trace", "Window"]
