"""Hugging Face Accelerate: makes a script that uses an `Accelerator` elastic.

    from bftrainer.integrations.accelerate import ElasticAccelerator as Accelerator

The rest of the script stays as it is. Loop over `elastic.epochs(n)` in place of `range(n)`, so that nodes that join
later begin in the epoch that is in progress.
"""

from bftrainer.integrations.accelerate.accelerator import ElasticAccelerator

__all__ = ["ElasticAccelerator"]
