"""A script that trains without `elastic.init` under a launcher is refused at its first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from bftrainer.processes.unguided import with_advice
from support.elastic.jobs import on, play, run_alone

pytest.importorskip("torch")

pytestmark = pytest.mark.waits

TRAINING = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{connect}
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained to the end", flush=True)
"""


def test_the_first_optimizer_step_of_a_script_that_never_calls_init_fails_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAINING.format(connect=""))
    outcome = play(on(1), tmp_path, [str(path)])
    assert outcome.status == "failed"
    assert "without having called `bftrainer.elastic.init` or `prepare`" in outcome.traceback
    for way in ("submit --explain", "docs/prepare.md", "--launcher ddp", "--launcher torchrun"):
        assert way in outcome.traceback
    assert "trained to the end" not in outcome.traceback


def test_a_worker_that_has_connected_may_step_as_it_likes(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    connect = "from bftrainer.elastic.membership import Membership\nmembership = Membership.connect()"
    path.write_text(TRAINING.format(connect=connect))
    outcome = play(on(1), tmp_path, [str(path)])
    assert outcome.status == "done"
    assert "trained to the end" in (tmp_path / "logs" / "node-1.log").read_text()


def test_a_script_that_torchrun_would_start_is_told_of_the_ddp_launcher(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\ntorch.distributed.init_process_group('gloo')\n")
    outcome = play(on(1), tmp_path, [str(path)])
    assert outcome.status == "failed"
    assert "submit it with `--launcher ddp`" in outcome.error


def test_an_elastic_script_that_torchrun_starts_several_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("from bftrainer import elastic\nelastic.init()\n")
    said = run_alone(tmp_path, path, status=1, WORLD_SIZE="2", TORCHELASTIC_RUN_ID="none")
    assert "start the script by `bftrainer submit` without `--launcher`, and not by `torchrun`" in said
    run_alone(tmp_path, path, WORLD_SIZE="1", TORCHELASTIC_RUN_ID="none")


@pytest.mark.parametrize("name", ["LOCAL_RANK", "WORLD_SIZE"])
def test_a_missing_variable_of_torchrun_is_explained_and_another_is_not(name: str) -> None:
    assert "`--launcher ddp`" in with_advice(f"KeyError: '{name}'")
    assert with_advice(f"KeyError: '{name}S'") == f"KeyError: '{name}S'"
