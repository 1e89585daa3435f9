"""Trackers for real: one run with rising steps, though rank 0 is killed, all nodes go, and the controller is killed.

Values come from a script with `run.tracker`, and from a Hugging Face Trainer with `report_to`.

    pip install 'bftrainer[live,torch,tensorboard,wandb,mlflow,transformers]' pytest
    pytest tests/frameworks/test_trackers.py

Each tracker whose package is not installed is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.cluster.live import Live, gone
from support.elastic.jobs import run_alone
from support.waiting import wait_until

pytest.importorskip("torch")

pytestmark = pytest.mark.waits

HERE = Path(__file__).parent
STEPS = 400
ALL = list(range(1, STEPS + 1))
TENTHS = list(range(10, STEPS + 1, 10))


@dataclass(frozen=True, slots=True)
class Way:
    """A way to log: a script, the trackers that it logs to, the steps of its metrics, and what must be installed."""

    script: str
    kinds: tuple[str, ...]
    metrics: dict[str, list[int]]
    needs: str = "torch"


WAYS = {
    "run.tracker": Way("tracked_worker.py", ("tensorboard", "wandb", "mlflow"), {"loss": ALL, "tenth": TENTHS}),
    "report_to": Way(
        "tracked_trainer.py",
        ("tensorboard", "wandb"),
        {"train/loss": ALL, "train/grad_norm": ALL, "train/train_runtime": [STEPS]},
        "transformers",
    ),
}


@dataclass(frozen=True, slots=True)
class Tracked:
    """A trainer that was disturbed in all ways, and logged to all trackers."""

    output: Path
    way: Way

    def check_steps(self, steps: Callable[[str], list[int]]) -> None:
        """Assert that each step of each metric is there once, in order."""
        for name, expected in self.way.metrics.items():
            assert steps(name) == expected, name


@pytest.fixture(scope="module", params=WAYS)
def tracked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    way = WAYS[request.param]
    pytest.importorskip(way.needs)
    folder = tmp_path_factory.mktemp("tracked")
    kinds = [kind for kind in way.kinds if importlib.util.find_spec(kind) is not None]
    if not kinds:
        pytest.skip("needs tensorboard, wandb or mlflow")
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DISABLE_GIT": "true", "OMP_NUM_THREADS": "1"}
    env |= {"BFTRAINER_SNAPSHOT_EVERY_S": "0.5"}
    with Live(folder / "state", "--nodes", "3") as live:
        script = HERE / way.script
        trainer = live.submit(script, str(folder), str(STEPS), *kinds, nodes="1-3", name="tracked", env=env)
        for _ in range(2):
            _kill_rank_0(live, trainer, folder)
        for worker in live.trainer(trainer)["workers"]:  # training resumes from a snapshot, and makes steps again
            os.kill(worker["pid"], signal.SIGKILL)
        _further(folder, 20)
        live.kill()
        _kill_main(folder)
        live.start()
        _further(folder, 20)
        _kill_rank_0(live, trainer, folder)
        (folder / "hurry").touch()
        assert live.until_state(trainer, "done", "failed", timeout_s=240)["state"] == "done"
        yield Tracked(Path(live.trainer(trainer)["output"]), way)
        live.stop()
    gone(live.pids)


def _main(folder: Path) -> tuple[int, int]:
    """The process that is rank 0, and the step that it made last."""
    pid, step = (folder / "main").read_text().split()
    return int(pid), int(step)


def _further(folder: Path, steps: int, but: int = 0) -> None:
    """Wait until rank 0, but not process `but`, has made more steps than there are now, or it was killed at."""
    has_begun = (folder / "main").exists()
    start = _main(folder)[1] if has_begun else 0

    def there() -> bool:
        if not (folder / "main").exists():
            return False
        pid, step = _main(folder)
        return pid != but and step >= start + steps

    wait_until(there, "more steps", 180)


def _kill_main(folder: Path) -> int:
    pid, _ = _main(folder)
    os.kill(pid, signal.SIGKILL)
    return pid


def _kill_rank_0(live: Live, trainer: str, folder: Path) -> None:
    _further(folder, 20)
    wait_until(lambda: len(live.trainer(trainer)["nodes"]) >= 2, "another node", 60)
    _further(folder, 10, _kill_main(folder))


def test_tensorboard_has_one_run_with_each_step_once(tracked: Tracked) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = (tracked.output / "tensorboard").iterdir()
    assert len(list(run.iterdir())) >= 4, "each process that was rank 0 wrote a file"
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    tracked.check_steps(lambda name: [event.step for event in events.Scalars(name)])


def test_the_newest_offline_folder_of_wandb_has_each_step_once(tracked: Tracked) -> None:
    pytest.importorskip("wandb")
    folders = sorted((tracked.output / "wandb").glob("offline-run-*"))
    assert len(folders) >= 4, "each process that was rank 0 made a folder"
    assert len({folder.name.split("-", 3)[3] for folder in folders}) == 1, "one run"
    rows = list(wandb_history(folders[-1]))
    tracked.check_steps(lambda name: [row["_step"] for row in rows if name in row])
    times = [row["_timestamp"] for row in rows]
    assert times == sorted(times)
    assert times[-1] - times[0] > 10, "values have the times at which they were logged first"


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's logs: blocks of 32 KiB, after a header of seven bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if left < 7 or kind == 0:  # the rest of the block is empty
            at += left
            continue
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def wandb_history(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows that a run has written, as `wandb sync` reads them."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("run-*.wandb")
    for found in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(found)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def test_mlflow_has_one_run_that_is_finished_with_each_step_once(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "mlflow" not in tracked.way.kinds:
        pytest.skip("Transformers has a callback of its own for MLflow")
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient((tracked.output / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    assert (run.info.status, run.data.params, run.info.run_name) == ("FINISHED", {"lr": "0.01"}, "tracked")
    tracked.check_steps(lambda name: [point.step for point in client.get_metric_history(run.info.run_id, name)])


@pytest.mark.parametrize("name", ["WANDB_LOG_MODEL", "WANDB_WATCH"])
def test_a_trainer_refuses_what_wandb_would_not_get(name: str, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("transformers")
    with pytest.raises(AssertionError, match=f"{name}=all cannot be used with an elastic Trainer"):
        run_alone(tmp_path, HERE / "tracked_trainer.py", tmp_path, 3, "wandb", WANDB_MODE="offline", **{name: "all"})
