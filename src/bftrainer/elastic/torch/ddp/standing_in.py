"""Standing in: puts all stand-ins for torch.distributed in place, before a ddp script is imported."""

from __future__ import annotations

import os

import torch.nn.parallel
import torch.nn.parallel.distributed

from bftrainer.elastic.start_files import StartFiles
from bftrainer.elastic.torch.ddp import refused, wrapper
from bftrainer.elastic.torch.ddp.collectives import Collectives
from bftrainer.elastic.torch.ddp.loaders import stand_in_for_loaders
from bftrainer.elastic.torch.ddp.session import DdpSession
from bftrainer.elastic.torch.ddp.writing import ScriptFiles
from bftrainer.elastic.torch.refusals import DDP_RUN_ID, allow_stand_ins


def stand_in() -> DdpSession:
    """Put the stand-ins in place, and return the session behind them."""
    start = StartFiles()
    session = DdpSession(start.is_first())
    files = ScriptFiles(session, start)
    session.on_begin = files.training_begins
    allow_stand_ins()
    os.environ.update(_variables(session.ranks))
    session.found.watch()
    wrapper.tell_of_models(session.found.add_model)
    for module in (torch.nn.parallel, torch.nn.parallel.distributed):
        module.__dict__["DistributedDataParallel"] = wrapper.StandInDataParallel
    refused.refuse_calls()
    Collectives(session).put_in_place()
    stand_in_for_loaders(session)
    files.put_in_place()
    return session


def _variables(ranks: int) -> dict[str, str]:
    """Return the variables that torchrun sets. Each rank sees only its own GPU, as device 0."""
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "ROLE_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": 1}
    others = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": DDP_RUN_ID}
    return {name: str(number) for name, number in numbers.items()} | others
