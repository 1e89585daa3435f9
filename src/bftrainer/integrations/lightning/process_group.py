"""Process group and signals: keeps Lightning from using those of BFTrainer.

While ranks train together, torch has a process group, which Lightning and torchmetrics would use without asking the
strategy. Its members and its collectives belong to BFTrainer. So do signals: BFTrainer saves the training and leaves at
the end of a step when its node is taken.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

from bftrainer.integrations.lightning.package import lookup, package_of


def keep_to_itself(trainer: Any) -> None:
    """Have a Trainer send nothing to other processes by itself, and handle no signals."""
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    lookup(package_of(trainer), "trainer.connectors.data_connector")._InfiniteBarrier = contextlib.nullcontext
    # Values are over all ranks anyway.
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True")
