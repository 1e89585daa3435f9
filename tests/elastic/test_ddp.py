"""Unchanged scripts for torchrun that train in place while nodes come and go; and what is refused."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bftrainer.elastic.local.coordinator import Coordinator
from support.elastic.ddp_scripts import (
    check_same,
    check_samples,
    command,
    disturbed,
    loaded,
    settings,
    under_torchrun,
)
from support.elastic.jobs import on, play, run_alone, script
from support.waiting import until

pytest.importorskip("torch")

pytestmark = pytest.mark.waits


def test_an_unchanged_script_computes_under_joins_and_kills_what_it_does_under_torchrun(tmp_path: Path) -> None:
    expected = under_torchrun(tmp_path / "torchrun", 2, "imagenet_like.py", 6)
    found = disturbed(tmp_path / "disturbed", 2, ["join", "kill"], "imagenet_like.py", 6)
    check_samples(tmp_path / "disturbed", 6, 600)
    check_same(found, expected)
    lines = (tmp_path / "disturbed" / "log.txt").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(6))
    assert lines == (tmp_path / "torchrun" / "log.txt").read_text().splitlines()


def test_a_reduction_that_a_kill_breaks_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "go").touch()
    run_alone(tmp_path, *command(tmp_path / "alone", 0, "slow_validation.py", 4), BFTRAINER_RANKS="2")
    folder = tmp_path / "job"
    folder.mkdir()

    async def scenario(job: Coordinator) -> None:
        await job.add(3)
        await until(lambda: len(list(folder.glob("validates-*"))) == 3, "all ranks validate")
        job.signal(job.members[0], signal.SIGKILL)
        (folder / "go").touch()
        await job.add(1)

    argv = command(folder, 0, "slow_validation.py", 4)
    outcome = play(scenario, folder, argv, nodes=(2, 4), settings=settings(tmp_path / "output", 2))
    assert outcome.status == "done", outcome
    check_same(loaded(folder), loaded(tmp_path / "alone"))
    assert loaded(folder)["totals"] == [96.0] * 4
    check_samples(folder, 4, 96)


def test_nodes_with_two_ranks_join_and_are_lost_whole(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    run_alone(tmp_path, *command(tmp_path / "alone", 0, "imagenet_like.py", 3), BFTRAINER_RANKS="2")
    folder = tmp_path / "job"
    folder.mkdir()

    async def scenario(job: Coordinator) -> None:
        await job.add(2)
        await until(lambda: len(job.members) == 2 and len(list(folder.glob("steps-*"))) == 4, "four ranks train")
        job.signal(job.members[0], signal.SIGKILL)
        await job.add(1)

    argv = command(folder, 0.05, "imagenet_like.py", 3)
    two = replace(settings(tmp_path / "output", 2), ranks_per_node=2)
    outcome = play(scenario, folder, argv, nodes=(1, 3), settings=two)
    assert outcome.status == "done", outcome
    check_same(loaded(folder), loaded(tmp_path / "alone"))
    check_samples(folder, 3, 600)


def test_newcomers_begin_where_the_others_began_also_after_the_checkpoint_was_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    run_alone(tmp_path, *command(folder, 0, "imagenet_like.py", 2), BFTRAINER_RANKS="2")
    for log in folder.glob("steps-*"):
        log.unlink()
    (tmp_path / "alone").mkdir()
    run_alone(tmp_path, *command(tmp_path / "alone", 0, "imagenet_like.py", 2), BFTRAINER_RANKS="2")
    run_alone(tmp_path, *command(tmp_path / "alone", 0, "imagenet_like.py", 6, "--resume"), BFTRAINER_RANKS="2")

    async def scenario(job: Coordinator) -> None:
        await job.add(2)
        before = (folder / "checkpoint.pt").stat().st_mtime_ns
        await until(lambda: (folder / "checkpoint.pt").stat().st_mtime_ns != before, "a checkpoint is overwritten")
        (folder / "slow").touch()
        await job.add(1)
        await until(lambda: len(job.members) == 3, "the newcomer joins")
        job.signal(job.members[0], signal.SIGKILL)
        (folder / "slow").unlink()

    argv = command(folder, 0.05, "imagenet_like.py", 6, "--resume")
    outcome = play(scenario, folder, argv, nodes=(2, 4), settings=settings(tmp_path / "output", 2))
    assert outcome.status == "done", outcome
    check_same(loaded(folder), loaded(tmp_path / "alone"))
    check_samples(folder, 4, 600)


HEAD = """\
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
assert (dist.get_rank(), dist.get_world_size(), dist.is_initialized()) == (0, 2, True)
assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == ("0", "0", "2")
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
best = 0.0
"""
LOOP = """\
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("getattr(dist, 'new_' + 'group')([0])", "", "train.py:20: torch.distributed.new_group: it names single ranks"),
        ("getattr(mp, 'spa' + 'wn')(print)", "", "the script starts its processes itself"),
        ("model.__getattr__('module'); dist.broadcast(torch.ones(1), src=1)", "", "a rank other than 0"),
        ("DistributedSampler(data, num_replicas=8, rank=3)", "", "these are not all ranks of the job"),
        ("", "    torch.optim.SGD(model.parameters(), lr=1.0)", "a SGD is made after training began"),
        ("", "    dist.all_gather([torch.ones(1)] * 2, torch.ones(1))", "all_gather in a training"),
        (
            "",
            "    model.eval()\n"
            "    best = max(best, sum(model(x).mean().item() for x, y in DataLoader(data)))\n"
            "    model.train()",
            "evaluates without a reduction over the ranks, and `best` keeps a value",
        ),
        (
            "def total(x): dist.all_reduce(x); return x\ndef mean(x): return total(x) / dist.get_world_size()",
            "    model.eval()\n    list(DataLoader(data))\n    mean(torch.ones(1))",
            "it is not known whether that makes a mean",
        ),
    ],
)
def test_what_cannot_be_stood_in_for_is_refused_with_its_line(
    before: str, after: str, said: str, tmp_path: Path
) -> None:
    text = f"{HEAD}{before}\n{LOOP}{after}\n"
    (tmp_path / "train.py").write_text(text)
    told = run_alone(tmp_path, "-m", "bftrainer.elastic.ddp", "train.py", status=1, BFTRAINER_RANKS="2")
    assert "cannot train in place: train.py:" in told
    assert said in told
    assert "--launcher torchrun" in told


def test_a_script_is_refused_by_its_text_before_it_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"print('begun')\n{HEAD}group = dist.new_group([0])\n{LOOP}")
    told = run_alone(tmp_path, "-m", "bftrainer.elastic.ddp", "train.py", status=1, BFTRAINER_RANKS="2")
    assert "cannot train in place: train.py:21: dist.new_group: it names ranks that are fixed" in told
    assert "begun" not in told


def test_the_functions_of_torch_distributed_behave_as_on_the_ranks_that_the_script_sees(tmp_path: Path) -> None:
    argv = ["-m", "bftrainer.elastic.ddp", script("ddp/calls.py")]
    assert "all calls are right" in run_alone(tmp_path, *argv, 1, BFTRAINER_RANKS="3")
    outcome = play(on(3), tmp_path, [*argv, "2"], nodes=(3, 3), settings=settings(tmp_path / "output", 3))
    assert outcome.status == "done", outcome
    told = run_alone(tmp_path, *argv, 2, status=1, BFTRAINER_RANKS="3")
    assert "adds up the gradients of several batches, while fewer ranks train than it sees" in told


def test_three_nodes_train_where_the_script_sees_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "go").touch()
    run_alone(tmp_path, *command(tmp_path / "alone", 0, "slow_validation.py", 3), BFTRAINER_RANKS="2")
    argv = command(tmp_path, 0, "slow_validation.py", 3)
    outcome = play(on(3), tmp_path, argv, nodes=(3, 3), settings=settings(tmp_path / "output", 2))
    assert outcome.status == "done", outcome
    check_same(loaded(tmp_path), loaded(tmp_path / "alone"))


def test_the_script_of_the_page_trains_unchanged(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "launchers.md").read_text()
    (tmp_path / "train.py").write_text(page.split('```python title="train_ddp.py"\n')[1].split("```")[0])
    argv = ["--launcher", "ddp", "--nodes", "2", "--quiet", "--folder", str(tmp_path / "job"), "train.py"]
    words = [sys.executable, "-m", "bftrainer.elastic.run", *argv]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "best.pt").exists()
    text = (tmp_path / "train.py").read_text().replace("best = float", "group = dist.new_group([0])\nbest = float")
    (tmp_path / "train.py").write_text(text)
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert "train.py:17: dist.new_group: it names ranks that are fixed" in done.stderr
    assert "--launcher torchrun" in done.stderr
