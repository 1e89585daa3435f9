"""Wrong arguments of `elastic.init` and of a `Run` are refused with a sentence that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")


from bftrainer import elastic  # noqa: E402
from bftrainer.elastic.torch import arguments  # noqa: E402
from bftrainer.errors import InputError  # noqa: E402

pytestmark = pytest.mark.usefixtures("sigterm_restored")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu0"}, "`device` must be a torch device such as 'cuda' or 'cpu', but got 'gpu0'"),
        ({"device": [1]}, r"`device` must be a torch device .* but got \[1\]"),
        ({"device": "meta"}, "`device` must be one that computes, but got 'meta'"),
        ({"device": "cuda:99"}, "`device` is 'cuda:99', but torch finds .* here; omit it"),
        ({"device": "xpu"}, "`device` is 'xpu', which torch cannot use here: "),
        ({"backend": "mpi"}, "`backend` must be gloo or nccl, but got 'mpi'"),
        ({"backend": "nccl", "device": "cpu"}, "`backend` is 'nccl', which needs a GPU, but the device is 'cpu'"),
        ({"seed": -1}, "`seed` must be a whole number, 0 or more, but got -1"),
        ({"seed": 1.5}, "`seed` must be a whole number, 0 or more, but got 1.5"),
        ({"snapshot_every_s": 0}, "`snapshot_every_s` must be a number above 0, but got 0"),
        ({"snapshot_every_s": -3.0}, "`snapshot_every_s` must be a number above 0, but got -3.0"),
        ({"snapshot_every_s": float("nan")}, "`snapshot_every_s` must be a number above 0, but got nan"),
        ({"snapshot_every_s": "60"}, "`snapshot_every_s` must be a number above 0, but got '60'"),
        ({"snapshots_kept": 0}, "`snapshots_kept` must be a whole number, 1 or more, but got 0"),
        ({"snapshots": 7}, "`snapshots` must be the path of a folder, but got 7"),
    ],
)
def test_init_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        elastic.init(**options)


def test_a_file_in_the_place_of_the_snapshots_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "notes.txt"
    file.touch()
    for place in (file, file / "below" / "it"):
        with pytest.raises(InputError, match="`snapshots` must be a folder, but .*notes.txt is not a folder"):
            elastic.init(snapshots=place)
    monkeypatch.setenv("BFTRAINER_SNAPSHOTS", str(file))
    with pytest.raises(InputError, match="`BFTRAINER_SNAPSHOTS` must be a folder"):
        elastic.init()


@pytest.mark.parametrize("word", ["soon", "0", "-1", "nan"])
def test_an_interval_in_the_environment_that_is_none_is_refused(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BFTRAINER_SNAPSHOT_EVERY_S", word)
    with pytest.raises(InputError, match="BFTRAINER_SNAPSHOT_EVERY_S must be a number of seconds above 0, but got"):
        elastic.init()


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    run = elastic.init(seed=np.int64(3), snapshots=tmp_path, snapshot_every_s=np.float32(5), snapshots_kept=np.int8(2))
    assert run.seed == 3


@pytest.mark.parametrize("count", [-1, 2.0, "3", None, True])
def test_a_count_that_is_no_count_is_refused(run: elastic.Run, count: Any) -> None:
    for loop in (run.epochs, run.steps):
        with pytest.raises(InputError, match="`count` must be a whole number, 0 or more, but got "):
            next(loop(count))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": torch.ones(3)}, r"`loss` must be one number, .* of shape \(3,\); give loss.mean\(\)"),
        ({"loss": torch.ones((), dtype=torch.complex64)}, "`loss` must be a real number, but got a complex tensor"),
        ({"loss": "0.1"}, "`loss` must be one number, but got '0.1'"),
        ({"samples": -1}, "`samples` must be a whole number, 0 or more, but got -1"),
        ({"samples": 2.5}, "`samples` must be a whole number, 0 or more, but got 2.5"),
        ({"accuracy": "good"}, "`accuracy` must be one number, but got 'good'"),
        ({"accuracy": torch.ones(2)}, r"`accuracy` must be one number, but got Tensor of shape \(2,\)"),
        ({"accuracy": [0.5]}, r"`accuracy` must be one number, but got \[0.5\]; report a mean, or several"),
        ({"accuracy": None}, "`accuracy` must be one number, but got None"),
        ({"accuracy": np.array(["x"])}, "`accuracy` must be one number, but got "),
    ],
)
def test_a_wrong_argument_of_step_is_refused_and_the_step_can_be_made(
    run: elastic.Run, given: dict[str, Any], message: str
) -> None:
    steps = run.steps(1)
    next(steps)
    run.model(torch.ones(1, 1)).mean().backward()
    with pytest.raises(InputError, match=message):
        run.step(**given)
    assert run.progress.step == 0
    assert run.step(loss=torch.ones(1), samples=2, accuracy=np.float32(0.5), rank=torch.tensor(3))
    assert run.metrics == {"accuracy": 0.5, "rank": 3.0, "loss": 1.0}
    assert list(steps) == []


def test_a_report_of_something_else_than_numbers_is_refused(run: elastic.Run) -> None:
    with pytest.raises(InputError, match="`score` must be one number, but got {'a': 1}"):
        run.report(score={"a": 1})
    run.report(score=torch.tensor([2.0]), other=np.array(3), flag=True)
    assert run.metrics == {"score": 2.0, "other": 3.0, "flag": 1.0}


@pytest.mark.parametrize(
    ("seen", "environment", "device", "expected"),
    [
        (1, {"BFTRAINER_LOCAL_RANK": "2", "BFTRAINER_LOCAL_WORLD": "4"}, None, "cuda"),
        (4, {}, None, "cuda"),
        (4, {"BFTRAINER_LOCAL_RANK": "2", "BFTRAINER_LOCAL_WORLD": "4"}, None, "cuda:2"),
        (4, {"BFTRAINER_LOCAL_RANK": "2", "BFTRAINER_LOCAL_WORLD": "4"}, "cuda", "cuda:2"),
        (4, {"BFTRAINER_LOCAL_RANK": "2", "BFTRAINER_LOCAL_WORLD": "4"}, "cuda:1", "cuda:1"),
        (4, {"BFTRAINER_LOCAL_RANK": "2", "BFTRAINER_LOCAL_WORLD": "4"}, "cpu", "cpu"),
        (2, {"BFTRAINER_LOCAL_RANK": "5", "BFTRAINER_LOCAL_WORLD": "8"}, None, "cuda:1"),
    ],
)
def test_ranks_of_one_node_that_see_several_gpus_take_one_each(
    monkeypatch: pytest.MonkeyPatch, seen: int, environment: dict[str, str], device: str | None, expected: str
) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("BFTRAINER_LOCAL_RANK", "BFTRAINER_LOCAL_WORLD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"BFTRAINER_CHANNEL": "/run/manager", **environment}.items():
        monkeypatch.setenv(name, value)
    assert arguments.existing_device(device) == torch.device(expected)
    taken_by_number = ":" in expected and device != expected
    assert chosen == ([torch.device(expected)] if taken_by_number else [])
