"""Values that DDP scripts reduce over their ranks: right on any number of nodes, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.elastic.ddp_scripts import settings
from support.elastic.jobs import on, play, run_alone

pytest.importorskip("torch")

pytestmark = pytest.mark.waits

HEAD = """\
import json, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import helpers

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(48, 4, dtype=torch.float64)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = DDP(nn.Linear(4, 1).double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // n, sampler=sampler)
val = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
said = []
"""
LOOP = """\
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = nn.functional.mse_loss(model(a), b){scaled}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = helpers.reduce_tensor(loss.detach(), n)
    good, t = 0, torch.zeros(1, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for a, b in val:
            right = ((model(a) - b).abs() < 1).sum()
            dist.all_reduce(right)
            good += right.item()
            t += nn.functional.mse_loss(model(a), b) / len(val)
    dist.all_reduce(t)
    t /= n
    model.train()
    said.append([shown.item(), good / len(data), t.item()])
if rank == 0:
    with open(sys.argv[1], "w") as file:
        json.dump([said, model.module.weight.flatten().tolist()], file)
"""
HELPERS = """\
import torch.distributed as dist


def reduce_tensor(tensor, {name}):
    copy = tensor.clone()
    dist.all_reduce(copy, op=dist.ReduceOp.SUM)
    copy /= {name}
    return copy
"""


def written(folder: Path, *, scaled: str = "", name: str = "n") -> list[str]:
    (folder / "train.py").write_text(HEAD + LOOP.replace("{scaled}", scaled))
    (folder / "helpers.py").write_text(HELPERS.replace("{name}", name))
    return ["-m", "bftrainer.elastic.ddp", str(folder / "train.py")]


@pytest.mark.parametrize("nodes", [2, 3])
def test_values_are_the_same_on_more_nodes_than_the_script_sees_ranks(nodes: int, tmp_path: Path) -> None:
    argv = written(tmp_path)
    run_alone(tmp_path, *argv, tmp_path / "alone.json", BFTRAINER_RANKS="1")
    there = [*argv, str(tmp_path / "there.json")]
    outcome = play(on(nodes), tmp_path, there, nodes=(nodes, nodes), settings=settings(tmp_path / "output", 1))
    assert outcome.status == "done", outcome
    alone, found = (json.loads((tmp_path / name).read_text()) for name in ("alone.json", "there.json"))
    for row, expected in zip([*found[0], found[1]], [*alone[0], alone[1]], strict=True):
        assert row == pytest.approx(expected, rel=1e-9)


def test_a_reduction_that_may_go_into_the_gradients_is_refused(tmp_path: Path) -> None:
    argv = written(tmp_path, scaled=" * helpers.reduce_tensor(torch.ones(1).double(), n)")
    told = run_alone(tmp_path, *argv, tmp_path / "alone.json", status=1, BFTRAINER_RANKS="1")
    assert "helpers.py:6: a reduction between a batch and its backward pass" in told


def test_a_divisor_that_may_be_the_number_of_ranks_or_not_is_refused(tmp_path: Path) -> None:
    argv = written(tmp_path, name="scale")
    script = tmp_path / "train.py"
    script.write_text(
        script.read_text().replace("reduce_tensor(loss.detach(), n)", "reduce_tensor(loss.detach(), 1.5)")
    )
    there = [*argv, str(tmp_path / "there.json")]
    outcome = play(on(2), tmp_path, there, nodes=(2, 2), settings=settings(tmp_path / "output", 1))
    assert outcome.status == "failed"
    assert "divides what is reduced here by `scale`, and it is not known whether that is" in outcome.error
