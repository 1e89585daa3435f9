"""BFTrainer: train neural networks on the nodes that a supercomputer's batch scheduler cannot fill."""

__version__ = "0.1.0"
