"""Local runs: an elastic training on this machine, started by `python -m bftrainer.elastic.run`."""
