"""Trackers: who writes, which run it is, and that no step comes twice, with packages that only record what they get."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from bftrainer import elastic  # noqa: E402
from bftrainer.elastic.torch.tracking import writers  # noqa: E402
from bftrainer.elastic.torch.tracking.journal import LoggedValues, TrackerJournal  # noqa: E402
from bftrainer.elastic.torch.tracking.tracker import RETRY_S, TrackedRun, Tracker  # noqa: E402
from bftrainer.elastic.torch.tracking.writers import Opening, check_kind  # noqa: E402
from bftrainer.errors import BFTrainerError, InputError  # noqa: E402

OWNER = "BFTRAINER_SNAPSHOT_OWNER"


@dataclass
class Rank:
    """A rank as a tracker sees it, with a tracker of its own. All ranks write down what they do in one list."""

    folder: Path
    told: list[tuple[Any, ...]]
    main: bool = True
    begun: bool = True
    resumed: bool = False
    step: int = 0
    now: float = 1000.0
    fails: Callable[[str], None] = lambda what: None

    def __post_init__(self) -> None:
        run = TrackedRun(
            lambda: self.begun, lambda: self.main, lambda: self.step, lambda: self.folder, lambda: self.resumed
        )
        self.tracker = Tracker("fake", {}, run, self.open, lambda: self.now)

    def open(self, opening: Opening) -> Rank:
        self.tell("open", opening.run)
        return self

    def tell(self, what: str, *words: Any) -> None:
        self.fails(what)
        self.told.append((what, *words))

    def write(self, logged: LoggedValues) -> None:
        self.tell("log", logged.step, dict(logged.values))

    def close(self) -> None:
        self.tell("close")

    def finish(self) -> None:
        self.tell("finish")

    def log(self, step: int | None = None, **values: Any) -> None:
        self.tracker.log(values, step)


@pytest.fixture
def told() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def rank(tmp_path: Path, told: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rank]:
    """Makes ranks of one trainer."""
    monkeypatch.setenv(OWNER, "state/t7")
    monkeypatch.setenv("BFTRAINER_TRAINER", "digits")
    return lambda **more: Rank(tmp_path, told, **more)


def logged(told: list[tuple[Any, ...]]) -> list[tuple[int, dict[str, float]]]:
    return [(step, values) for what, *rest in told if what == "log" for step, values in [rest]]


# Who writes, and to which run.


def test_the_main_rank_writes_and_the_next_one_goes_on_with_the_same_run(
    rank: Callable[..., Rank], told: list[tuple[Any, ...]]
) -> None:
    first, second = rank(), rank(main=False)
    for step in (1, 2):
        for one in (first, second):
            one.step = step
            one.log(loss=1.0 / step)
    assert [what for what, *_ in told] == ["open", "log", "log"]
    second.main, second.step = True, 3  # the first one was killed
    second.log(loss=0.25)
    (_, run), (_, same) = (line for line in told if line[0] == "open")
    assert run == same
    assert run.startswith("digits-")
    assert logged(told) == [(1, {"loss": 1.0}), (2, {"loss": 0.5}), (3, {"loss": 0.25})]


def test_a_step_that_rank_0_made_but_did_not_log_is_logged_by_the_next_one(
    rank: Callable[..., Rank], told: list[tuple[Any, ...]]
) -> None:
    first, second = rank(), rank(main=False)
    for step in (1, 2, 3):
        second.step = step
        second.log(loss=torch.tensor(-float(step), requires_grad=True))
        second.log(100 + step, other=-float(step))
        if step < 3:
            first.step = step
            first.log(loss=float(step))
            first.log(100 + step, other=float(step))
    second.main = True
    second.tracker.finish()  # nothing more is logged
    assert logged(told)[-3:] == [(102, {"other": 2.0}), (3, {"loss": -3.0}), (103, {"other": -3.0})]
    assert told[-1] == ("finish",)
    third = rank(main=False)
    for step in range(4, 1000):
        third.step = step
        third.log(loss=0.5)
    assert len(third.tracker._held) == 2, "no more than may be missing"


def test_a_rank_that_is_no_longer_the_main_one_closes_the_run(
    rank: Callable[..., Rank], told: list[tuple[Any, ...]]
) -> None:
    one = rank()
    one.log(1, loss=1.0)
    one.main = False
    one.log(2, loss=0.5)
    one.log(3, loss=0.5)
    assert [what for what, *_ in told] == ["open", "log", "close"]
    other = rank()
    other.log(2, loss=0.5)
    other.log(3, loss=0.5)
    del told[3:]
    one.main = True
    one.log(4, loss=0.25)
    assert [what for what, *_ in told] == ["open", "log", "close", "open", "log"]
    one.tracker.finish()
    one.tracker.finish()
    assert [what for what, *_ in told][5:] == ["finish"]
    one.log(5, loss=0.125)
    assert [what for what, *_ in told][6:] == ["open", "log"]


def test_the_end_of_the_script_closes_the_run_before_the_package_of_the_tracker_ends(
    rank: Callable[..., Rank], told: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", registered.append)
    one = rank()
    assert registered == []
    one.log(1, loss=1.0)
    (at_exit,) = registered
    monkeypatch.setattr("os.getpid", lambda: -1)  # a process that the script has forked
    at_exit()
    assert [what for what, *_ in told] == ["open", "log"]
    monkeypatch.undo()
    at_exit()
    assert [what for what, *_ in told] == ["open", "log", "close"]


def test_nothing_is_opened_until_there_is_a_value_to_write(
    rank: Callable[..., Rank], told: list[tuple[Any, ...]]
) -> None:
    one = rank()
    one.tracker.finish()
    one.tracker.close()
    assert told == []
    one = rank()
    one.log(5, loss=1.0)
    again = rank()
    again.log(4, loss=1.0)  # the step is made again
    assert [what for what, *_ in told] == ["open", "log"]
    again.tracker.finish()  # the process that logged all of it was killed
    assert [what for what, *_ in told] == ["open", "log", "open", "finish"]


@pytest.mark.parametrize(
    ("owners", "resumed", "is_one_run"),
    [
        (("state/t7", "state/t7"), False, True),  # a restart of the whole trainer, before its first snapshot
        (("state/t7", "state/t8"), False, False),  # two trainers of a sweep whose user gave them one folder
        (("state/t7", "other/t7"), True, False),
        (("", ""), False, False),  # a script that is started by hand again, from the beginning
        (("", ""), True, True),  # … and that resumed from its snapshot
    ],
)
def test_a_training_that_goes_on_goes_on_with_its_run_and_another_one_does_not(
    owners: tuple[str, str],
    resumed: bool,
    is_one_run: bool,
    rank: Callable[..., Rank],
    told: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("BFTRAINER_CHANNEL", raising=False)
    for pid, owner in zip((1001, 1002), owners, strict=True):
        monkeypatch.setenv(OWNER, owner)
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        rank(resumed=resumed and pid == 1002).log(1, loss=1.0)
    runs = [run for what, *rest in told if what == "open" for run in rest]
    assert len(runs) == (1 if is_one_run else 2)
    assert len(logged(told)) == len(runs)
    if resumed and is_one_run:
        rank().log(2, loss=1.0)  # another rank of the resumed training: it did not read the snapshot itself
        assert told[-2] == ("open", runs[0])


# Steps.


def test_steps_that_are_made_again_are_not_written_again(
    rank: Callable[..., Rank], told: list[tuple[Any, ...]]
) -> None:
    one = rank()
    for step in (1, 2, 3, 2, 3, 4):
        one.step = step
        one.log(loss=float(step))
    later = rank()  # all nodes were lost, and training resumed at step 2
    for step in (3, 4, 5):
        later.step = step
        later.log(loss=-1.0)
    assert logged(told) == [(step, {"loss": float(step)}) for step in (1, 2, 3, 4)] + [(5, {"loss": -1.0})]


def test_each_metric_has_steps_of_its_own(rank: Callable[..., Rank], told: list[tuple[Any, ...]]) -> None:
    one = rank(step=60)
    one.log(loss=1.0)
    other = rank(step=60)  # rank 0 was lost while it evaluated
    other.log(accuracy=0.5)
    other.log(loss=2.0, accuracy=0.75, f1=0.5)
    other.log(61, loss=3.0, accuracy=0.875)
    assert logged(told) == [
        (60, {"loss": 1.0}),
        (60, {"accuracy": 0.5}),
        (60, {"f1": 0.5}),
        (61, {"loss": 3.0, "accuracy": 0.875}),
    ]


def test_a_value_that_was_not_written_is_not_in_the_journal(
    rank: Callable[..., Rank], told: list[tuple[Any, ...]]
) -> None:
    one = rank()
    one.log(1, loss=1.0)

    class Killed(BaseException):
        """The process ends here."""

    def kill(what: str) -> None:
        if what == "log":
            raise Killed

    one.fails = kill
    with pytest.raises(Killed):
        one.log(2, loss=0.5)
    rank().log(2, loss=0.5)
    assert logged(told) == [(1, {"loss": 1.0}), (2, {"loss": 0.5})]


# The journal.


def test_a_journal_that_a_kill_or_a_crash_has_damaged_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = TrackerJournal(path)
    whole.append(LoggedValues(1, 10.0, {"loss": 1.0}))
    whole.append(LoggedValues(2, 11.0, {"loss": math.nan, "a": math.inf}))
    whole.close()
    with path.open("ab") as file:
        file.write(b'\0\0\0\n[3, 12.0\n{}\n[4, 13.0, {"loss"')
    journal = TrackerJournal(path)
    assert [(entry.step, sorted(entry.values)) for entry in journal.entries()] == [(1, ["loss"]), (2, ["a", "loss"])]
    assert (journal.last_step("loss"), journal.last_step("a"), journal.last_step("b")) == (2, 2, -1)
    journal.append(LoggedValues(3, 14.0, {"loss": 0.5}))
    journal.close()
    assert [entry.step for entry in TrackerJournal(path).entries()] == [1, 2, 3]


def test_a_file_that_names_no_run_is_replaced(
    rank: Callable[..., Rank], told: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "trackers" / "fake-t7.json"
    path.parent.mkdir()
    path.write_text("nonsense")
    rank().log(1, loss=1.0)
    assert json.loads(path.read_text()) == {"id": told[0][1], "training": "state/t7"}
    assert [entry.name for entry in path.parent.iterdir() if entry.name.startswith(".")] == []


def test_a_folder_that_cannot_be_written_is_named(rank: Callable[..., Rank], tmp_path: Path) -> None:
    (tmp_path / "trackers").touch()
    with pytest.raises(BFTrainerError, match="the tracker's files in .*/trackers cannot be written"):
        rank().log(1, loss=1.0)


# Failures.


def test_a_tracker_that_never_worked_ends_the_script_and_one_that_worked_does_not(
    rank: Callable[..., Rank], told: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(what: str) -> None:
        raise ConnectionError("no route to host")

    one = rank(fails=refuse)
    with pytest.raises(BFTrainerError, match="the tracker fake failed: ConnectionError: no route to host"):
        one.log(1, loss=1.0)
    one.fails = lambda what: None
    one.log(1, loss=1.0)
    one.fails = refuse
    one.log(2, loss=0.5)
    assert "ConnectionError: no route to host; nothing is written to it for 60 s" in capsys.readouterr().err
    one.fails = lambda what: None
    one.log(3, loss=0.25)
    assert [step for step, _ in logged(told)] == [1]
    one.now += RETRY_S
    one.log(4, loss=0.125)
    assert [step for step, _ in logged(told)] == [1, 4]
    one.fails = refuse
    one.tracker.finish()
    assert "the run is not marked as complete" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "step", "says"),
    [
        ({"loss": "low"}, 1, "takes numbers, but 'loss' is of type str: 'low'"),
        ({"loss": "0.5"}, 1, "takes numbers, but 'loss' is of type str: '0.5'"),
        ({"loss": [1.0, 2.0]}, 1, "'loss' is of type list"),
        ({"loss": torch.zeros(2)}, 1, "'loss' is of type Tensor"),
        ({3: 1.0}, 1, "needs numbers by name, such as {'loss': 0.5}"),
        (0.5, 1, "needs numbers by name"),
        ({"loss": 0.5}, -1, "`step` must be a whole number, 0 or more, but got -1"),
        ({"loss": 0.5}, 1.5, "`step` must be a whole number"),
    ],
)
def test_wrong_values_are_refused(rank: Callable[..., Rank], values: Any, step: Any, says: str) -> None:
    with pytest.raises(InputError) as caught:
        rank().tracker.log(values, step)
    assert says in str(caught.value)


def test_before_the_training_every_rank_takes_itself_for_the_main_one_so_nothing_is_logged(
    rank: Callable[..., Rank], told: list[tuple[Any, ...]]
) -> None:
    with pytest.raises(InputError, match="must be called in the training: inside run.epochs or run.steps"):
        rank(begun=False).log(1, loss=1.0)
    rank(begun=False).tracker.finish()
    assert told == []


def test_numbers_may_be_tensors_and_need_not_be_finite(rank: Callable[..., Rank], told: list[tuple[Any, ...]]) -> None:
    rank().log(1, a=torch.tensor(0.5), b=True, c=math.inf, d=torch.ones(1, 1))
    assert logged(told) == [(1, {"a": 0.5, "b": 1.0, "c": math.inf, "d": 1.0})]


# What `run.tracker` takes.


def test_what_cannot_be_had_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs the package wandb, .*: pip install 'bftrainer\[wandb\]'"):
        check_kind("wandb", {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(InputError, match="unknown tracker 'tensorbord': did you mean 'tensorboard'"):
        check_kind("tensorbord", {})
    with pytest.raises(InputError, match="unknown tracker '3': must be one of mlflow, tensorboard, wandb"):
        check_kind(3, {})
    for kind, known in writers.KINDS.items():
        assert check_kind(kind, {}) == kind
        for option in known.reserved:
            with pytest.raises(InputError, match=f"must not be given `{option}`"):
                check_kind(kind, {option: 1})


@pytest.fixture
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_signals")
def test_a_script_tracks_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Callable[..., ModuleType]
) -> None:
    monkeypatch.setenv("BFTRAINER_OUTPUT", str(tmp_path))
    calls: list[tuple[Any, ...]] = []

    class SummaryWriter:
        def __init__(self, **options: Any) -> None:
            calls.append(("open", options))

        def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
            calls.append((name, value, step))

        def flush(self) -> None:
            calls.append(("flush",))

        def close(self) -> None:
            calls.append(("close",))

    fake("tensorboard")
    fake("torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    run = elastic.init()
    model = torch.nn.Linear(1, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    tracker = run.tracker("tensorboard", max_queue=5)
    assert run.tracker("tensorboard", max_queue=5) is tracker
    with pytest.raises(InputError, match="was called before with other options"):
        run.tracker("tensorboard")
    with pytest.raises(InputError, match="must be called in the training"):
        tracker.log({"loss": 1.0})
    data = torch.utils.data.TensorDataset(torch.ones(4, 1))
    for _ in run.epochs(1):
        for (x,) in run.batches(data, batch_size=2):
            loss = model(x).mean()
            loss.backward()
            run.step(loss=loss)
            tracker.log({"loss": loss})
    tracker.log({"accuracy": 0.5})
    tracker.finish()
    (_, options), *rest = calls
    assert (options["max_queue"], options.get("purge_step")) == (5, None)
    assert Path(options["log_dir"]).parent == tmp_path / "tensorboard"
    assert [(name, *more[1:]) for name, *more in rest] == [
        *(("loss", 1), ("flush",), ("loss", 2), ("flush",), ("accuracy", 2), ("flush",), ("close",))
    ]


# The packages.


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Installs a module with these contents, in this process only."""

    def install(name: str, **contents: Any) -> ModuleType:
        module = ModuleType(name)
        module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment] # what find_spec looks at
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    for name in writers.KINDS:  # each is imported by the test that needs it
        monkeypatch.delitem(sys.modules, f"bftrainer.elastic.torch.tracking.{name}_writer", raising=False)
    return install


def opening(folder: Path, options: Mapping[str, Any], *entries: tuple[int, dict[str, float]]) -> Opening:
    journal = TrackerJournal(folder / "journal.jsonl")
    for step, values in entries:
        journal.append(LoggedValues(step, 100.0 + step, values))
    return Opening("digits-1", "digits", folder, journal, options)


def test_tensorboard_drops_what_a_killed_process_wrote_and_did_not_note(
    tmp_path: Path, fake: Callable[..., ModuleType]
) -> None:
    calls: list[dict[str, Any]] = []
    fake("torch.utils.tensorboard", SummaryWriter=lambda **options: calls.append(options))
    from bftrainer.elastic.torch.tracking.tensorboard_writer import TensorBoardWriter

    TensorBoardWriter(opening(tmp_path, {"log_dir": "mine"}, (5, {"loss": 0.5}), (4, {"accuracy": 0.5})))
    assert calls == [{"log_dir": "mine", "purge_step": 6}]


@pytest.mark.parametrize(
    ("known_before", "replayed"),
    [
        (0, [(5, 0.5), (6, 0.25), (7, 0.125)]),  # offline: a new folder, with all values
        (7, [(7, 0.125)]),  # online: what the server does not have
        (8, []),
    ],
)
def test_a_run_of_wandb_is_resumed_with_what_it_lacks(
    known_before: int, replayed: list[tuple[int, float]], tmp_path: Path, fake: Callable[..., ModuleType]
) -> None:
    calls: list[tuple[Any, ...]] = []

    def init(**options: Any) -> Any:
        calls.append(("init", options))
        return SimpleNamespace(
            step=known_before,
            log=lambda values, step: calls.append((step, values)),
            finish=lambda: calls.append(("finish",)),
        )

    fake("wandb", init=init)
    from bftrainer.elastic.torch.tracking.wandb_writer import WandbWriter

    entries = [(step, {"loss": value}) for step, value in ((5, 0.5), (6, 0.25), (7, 0.125))]
    writer = WandbWriter(opening(tmp_path, {"project": "p", "mode": "offline"}, *entries))
    (_, options), *rest = calls
    assert options == {
        **{"id": "digits-1", "resume": "allow", "dir": str(tmp_path), "name": "digits"},
        **{"project": "p", "mode": "offline"},
    }
    assert rest == [(step, {"loss": value, "_timestamp": 100.0 + step}) for step, value in replayed]
    calls.clear()
    writer.write(LoggedValues(7, 200.0, {"accuracy": 0.5}))  # rank 0 was lost before it had evaluated
    assert calls == [(max(7, known_before), {"accuracy": 0.5, "_timestamp": 200.0})]
    writer.close()
    writer.finish()
    assert calls[1:] == [("finish",), ("finish",)]


class FakeMlflow:
    """A tracking server."""

    def __init__(self, tracking_uri: str) -> None:
        self.uri = tracking_uri

    experiments: ClassVar[dict[str, str]] = {}
    runs: ClassVar[dict[str, dict[str, Any]]] = {}

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> list[Any]:
        tag = filter_string.removeprefix("tags.`bftrainer.run` = '").removesuffix("'")
        found = [run for run, facts in self.runs.items() if facts["tags"]["bftrainer.run"] == tag]
        return [SimpleNamespace(info=SimpleNamespace(run_id=run)) for run in found]

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str | None) -> Any:
        run = f"run{len(self.runs)}"
        self.runs[run] = {"experiment": experiment, "tags": tags, "name": run_name, "uri": self.uri}
        self.runs[run] |= {"params": [], "metrics": [], "status": "RUNNING"}
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def update_run(self, run: str, status: str) -> None:
        self.runs[run]["status"] = status

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        self.runs[run]["metrics"] += metrics
        self.runs[run]["params"] += params

    def get_metric_history(self, run: str, name: str) -> list[Any]:
        return [SimpleNamespace(step=step) for metric, _, _, step in self.runs[run]["metrics"] if metric == name]

    def set_terminated(self, run: str) -> None:
        self.runs[run]["status"] = "FINISHED"


def test_a_run_of_mlflow_is_found_again_by_its_tag(
    tmp_path: Path, fake: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeMlflow, "runs", {})
    monkeypatch.setattr(FakeMlflow, "experiments", {})
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    fake("mlflow")
    fake("mlflow.entities", Metric=lambda *values: values, Param=lambda *values: values)
    fake("mlflow.tracking", MlflowClient=FakeMlflow)
    from bftrainer.elastic.torch.tracking.mlflow_writer import MlflowWriter

    given = {"experiment": "tries", "params": {"lr": 0.1}, "tags": {"a": 1}}
    first = MlflowWriter(opening(tmp_path, given))
    first.write(LoggedValues(1, 1.5, {"loss": 0.5}))
    first.finish()
    assert FakeMlflow.runs["run0"]["status"] == "FINISHED"
    second = MlflowWriter(opening(tmp_path, given))
    assert FakeMlflow.runs["run0"]["status"] == "RUNNING"
    second.write(LoggedValues(1, 2.0, {"loss": 0.75}))  # the first one was killed before it had noted it
    second.write(LoggedValues(2, 2.5, {"loss": 0.25}))
    second.close()
    (run,) = FakeMlflow.runs.values()
    assert run["metrics"] == [("loss", 0.5, 1500, 1), ("loss", 0.25, 2500, 2)]
    assert (run["params"], run["tags"]) == ([("lr", "0.1")], {"a": "1", "bftrainer.run": "digits-1"})
    assert (run["name"], run["uri"]) == ("digits", (tmp_path / "mlruns").as_uri())
    with pytest.raises(InputError, match="takes tracking_uri, experiment, name, params, tags, but got 'nmae'"):
        MlflowWriter(opening(tmp_path, {"nmae": "x"}))
