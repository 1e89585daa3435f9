"""Ranks of a few small groups that hand over a state. `test_hand_over.py` runs this file once, with all scenarios.

Each scenario forks its ranks, which form a real gloo group and call `TrainingState.sync`. Each rank prints a line of
JSON with what it has afterwards, and with the bytes it has sent.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bftrainer.elastic.membership import Assignment
from bftrainer.elastic.metrics import ReportedMetrics
from bftrainer.elastic.torch.gradients.optimizers import Stepper
from bftrainer.elastic.torch.group.group import GroupBroken
from bftrainer.elastic.torch.group.peers import Peers
from bftrainer.elastic.torch.state import transfer
from bftrainer.elastic.torch.state.training_state import TrainingState
from bftrainer.elastic.torch.state.transfer import Registry

CPU = torch.device("cpu")
LIMIT_S = 60
SURVIVORS = "survivors/"


class Extra:
    """A registered object with tensors of many types."""

    def __init__(self, step: int, names: tuple[str, ...] = ()) -> None:
        values = torch.arange(1200).view(30, 40) + step
        self.tensors = {
            "half": values.to(torch.bfloat16),
            "complex": torch.complex(values.float(), -values.float()),
            "turned": values.to(torch.int16).t(),
            "none": values[:0],
            "flag": torch.tensor(step > 3),
            "byte": values[:7].to(torch.uint8),
            **dict.fromkeys(names, values),
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tensors = dict(state)


def training_state(step: int | None, oddity: str) -> TrainingState:
    """A state with weights that depend on the step, or the state of a newcomer."""
    torch.manual_seed(1000 if step is None else step)
    model = nn.Sequential(nn.Linear(33, 70), nn.BatchNorm1d(70), nn.Linear(70, 5))
    optimizer = torch.optim.Adam(model.parameters())
    registry, stepper = Registry(), Stepper()
    if step is not None:
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    objects = {"model": model, "optimizer": optimizer, "extra": Extra(step or 0, ("more",) if oddity == "more" else ())}
    registry.add(objects)
    stepper.add(list(objects.values()))
    state = TrainingState(registry, stepper, ReportedMetrics(), None)
    state.hidden.add(objects)
    if step is not None:
        state.has_state, state.progress.step, state.progress.cursor = True, step, step
    if oddity == "repair":
        state.repair = lambda: None
        model[0].weight.data.fill_(-1.0)  # changed by code that is to be undone
    return state


def digest(state: TrainingState) -> str:
    _, tensors = transfer.take_apart(state._registry.capture())
    return hashlib.sha256(b"".join(transfer.bytes_of(tensor).numpy().tobytes() for tensor in tensors)).hexdigest()


def size(state: TrainingState) -> int:
    return sum(tensor.nbytes for tensor in transfer.take_apart(state._capture())[1])


def rank_of(scenario: dict[str, Any], rank: int, address: str, peers: Peers) -> dict[str, Any]:
    ranks = tuple(scenario["ranks"])
    names = tuple(f"node-{n}" for n in range(len(ranks)))
    addresses = (address, *["127.0.0.1:0"] * (sum(ranks) - 1))
    assignment = Assignment(1, names, rank, addresses, "secret", ranks if max(ranks) > 1 else ())
    group = peers._group
    group.form(assignment)
    store = group.store
    assert store is not None
    state = training_state(scenario["steps"][rank], scenario.get("odd", {}).get(str(rank), ""))
    sent: dict[int, int] = {}
    broadcasts: list[int] = []
    exchange, send = group.exchange, transfer.send
    exchanges = 0

    def counted(sends: Any, receives: Any) -> None:
        nonlocal exchanges
        exchanges += 1
        if scenario.get("killed") == [rank, exchanges]:
            os.kill(os.getpid(), signal.SIGKILL)
        if scenario.get("survivors first") and exchanges > 1:  # in the first one, ranks 0 and 1 compare their tensors
            store.wait([f"{SURVIVORS}{number}" for number in scenario["survivors first"]])
        exchange(sends, receives)
        for tensor, peer, _ in sends:
            sent[peer] = sent.get(peer, 0) + tensor.nbytes

    def counted_send(tensor: Any, source: int, link: Any) -> None:
        send(tensor, source, link)
        broadcasts.append(tensor.nbytes)

    group.exchange = counted  # type: ignore[method-assign]
    transfer.send = counted_send
    before, error = digest(state), ""
    try:
        state.sync(assignment, peers)
        if rank in scenario.get("survivors first", ()):
            store.set(f"{SURVIVORS}{rank}", b"")
    except GroupBroken as problem:
        error = f"{type(problem).__name__}: {problem}"
        group.cut()
    result = {
        "rank": rank,
        "digest": digest(state),
        "changed": digest(state) != before,
        "step": state.progress.step,
        "loads": state.loads,
        "size": size(state),
        "sent": sent,
        "broadcasts": broadcasts,
        "exchanges": exchanges,
        "error": error,
    }
    if not error:
        peers.meet_with(range(sum(ranks)), "end").part()  # rank 0 has the store
    return result


def run(name: str, scenario: dict[str, Any]) -> None:
    """Fork the ranks of a scenario and wait for their ends."""
    transfer.PIECE_BYTES = scenario.get("piece", 4096)
    host = Peers(None, "gloo", CPU)
    pipes = []
    reader, writer = os.pipe()  # rank 0 tells the others its address
    world = sum(scenario["ranks"])
    for rank in range(world):
        results, own = os.pipe()
        if (pid := os.fork()) == 0:
            signal.alarm(LIMIT_S)
            status = 1
            try:
                if rank == 0:
                    address = host._group.open_store("127.0.0.1")
                    os.write(writer, f"{address:>64}".encode() * (world - 1))
                else:
                    address = os.read(reader, 64).decode().strip()
                os.write(own, json.dumps(rank_of(scenario, rank, address, host)).encode())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(own)
        pipes.append((pid, results))
    os.close(reader)
    os.close(writer)
    found = {}
    for rank, (pid, results) in enumerate(pipes):
        with os.fdopen(results) as file:
            text = file.read()
        os.waitpid(pid, 0)
        found[rank] = json.loads(text) if text else None
    print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    training_state(1, "")  # the first optimizer of a process imports much: once here, not in each rank
    for name, scenario in json.loads(sys.argv[1]).items():
        run(name, scenario)
