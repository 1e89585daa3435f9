"""A study's trials as trainers, on a fake controller whose clock is the number of times it was asked."""

from __future__ import annotations

import builtins
import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bftrainer.client import Client, UnreachableError
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.hpo import optimize
from bftrainer.hpo.plan import SearchRules
from bftrainer.hpo.watch import TrialWatch
from support.cluster.fake_api import TOKEN, FakeState, make_app, serving

optuna = pytest.importorskip("optuna")

EPOCHS = 3


def value(lr: float) -> float:
    """What training makes of a learning rate."""
    return 1.0 - (lr - 0.5) ** 2


class World:
    """A controller with trainers that make an epoch whenever somebody asks for the status."""

    def __init__(self, fake: FakeState, url: str) -> None:
        self.fake, self.url = fake, url
        self.most_at_once = 0
        self.state = "done"
        self.reason = ""
        self.metric = "score"
        fake.on_ask = self.on_ask

    def on_ask(self, path: str) -> None:
        if path != "/v1/status":
            return
        rows = [row for row in self.fake.trainers.values() if row["state"] in ("queued", "running")]
        self.most_at_once = max(self.most_at_once, len(rows))
        for row in rows:
            spec = next(spec for spec in self.fake.specs if spec["name"] == row["name"])
            lr = float(spec["args"][spec["args"].index("--lr") + 1])
            row["state"] = "running"
            row["epoch"] += 1
            row["step"] += 10
            row["metrics"] = {self.metric: value(lr) * row["epoch"] / EPOCHS}
            row["node_seconds"] += 100.0
            if row["epoch"] == EPOCHS:
                row["state"], row["reason"] = self.state, self.reason

    def client(self) -> Client:
        return Client(self.url, TOKEN)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeState, str]]:
    fake = FakeState()
    with serving(make_app(fake)) as url:
        yield fake, url


@pytest.fixture
def world(server: tuple[FakeState, str]) -> World:
    fake, url = server
    fresh = FakeState()
    for name, initial in vars(fresh).items():
        setattr(fake, name, initial)
    return World(fake, url)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


def space(trial: Any) -> list[object]:
    return ["--lr", trial.suggest_float("lr", 0.0, 1.0)]


def search(world: World, study: Any, script: Path, **more: Any) -> Any:
    with world.client() as client:
        given = {"n_trials": 6, "metric": "score", "nodes": "1-2", "poll_s": 0.001, "client": client, **more}
        return optimize(study, script, given.pop("space", space), **given)


def new_study(**more: Any) -> Any:
    more = {"direction": "maximize", "sampler": optuna.samplers.RandomSampler(seed=0), **more}
    return optuna.create_study(**more)


def names(trials: list[Any]) -> list[str]:
    return [trial.state.name for trial in trials]


def test_trials_are_trained_and_told(world: World, script: Path) -> None:
    study = new_study(study_name="my study!", pruner=optuna.pruners.NopPruner())
    summary = search(world, study, script, n_trials=7, max_parallel=3, args=["--epochs", 3], weight=2, ranks_per_node=2)
    assert names(study.trials) == ["COMPLETE"] * 7
    assert world.most_at_once == 3
    for trial in study.trials:
        spec = world.fake.find(trial.user_attrs["bftrainer:name"])
        assert trial.value == pytest.approx(value(trial.params["lr"]))
        assert trial.user_attrs["bftrainer:trainer"] == spec["id"]
        assert trial.intermediate_values.keys() == {1, 2, 3}
        assert "bftrainer:value_of_epoch" not in trial.user_attrs
    first = world.fake.specs[0]
    assert first["group"] == "my-study"
    assert first["args"] == ["--epochs", "3", "--lr", str(study.trials[0].params["lr"])]
    assert first["params"] == {"lr": str(study.trials[0].params["lr"])}
    assert (first["script"], first["weight"], first["max_nodes"]) == (str(script), 2, 2)
    assert {spec["ranks_per_node"] for spec in world.fake.specs} == {2}
    assert (summary.complete, summary.pruned, summary.failed) == (7, 0, 0)
    assert summary.node_seconds == 7 * 300
    assert "7 trials complete" in str(summary)


def test_a_controller_without_a_limit_gets_so_few_trials_at_once_that_samplers_learn() -> None:
    given = {"n_trials": 200, "prune_by": "epoch", "prune_every": 1, "max_failures": 1, "poll_s": 1, "timeout_s": None}
    status = {"policy": {"max_parallel": None}, "pool": {"size": 500}}
    for wanted, parallel in ((None, 10), (40, 40)):
        rules = SearchRules.checked(metric="loss", objectives=1, max_parallel=wanted, **given)
        assert rules.parallel(status) == parallel


def test_as_many_at_once_as_the_controller_considers(world: World, script: Path) -> None:
    search(world, new_study(), script, n_trials=14)
    assert world.most_at_once == 10


def test_n_trials_counts_those_of_earlier_runs(world: World, script: Path) -> None:
    study = new_study()
    search(world, study, script, n_trials=3)
    search(world, study, script, n_trials=3)
    assert len(world.fake.specs) == 3
    study.enqueue_trial({"lr": 0.25})
    search(world, study, script, n_trials=5)
    assert study.trials[3].params == {"lr": 0.25}
    assert names(study.trials) == ["COMPLETE"] * 5


class Strict(optuna.pruners.BasePruner):  # type: ignore[misc]
    """Ends whatever is not good enough."""

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.params["lr"] < 0.5


def test_a_pruned_trials_trainer_is_cancelled(world: World, script: Path) -> None:
    study = new_study(pruner=Strict())
    summary = search(world, study, script)
    for trial in study.trials:
        row = world.fake.find(trial.user_attrs["bftrainer:name"])
        bad = trial.params["lr"] < 0.5
        assert row["state"] == ("cancelled" if bad else "done")
        assert trial.state.name == ("PRUNED" if bad else "COMPLETE")
        assert not bad or trial.value == pytest.approx(value(trial.params["lr"]) / EPOCHS)
    assert 0 < summary.pruned < 6


def test_trials_are_compared_at_the_unit_that_was_asked_for(world: World, script: Path) -> None:
    study = new_study(pruner=optuna.pruners.NopPruner())
    search(world, study, script, n_trials=1, prune_by="step", prune_every=20)
    assert study.trials[0].intermediate_values.keys() == {20}


def test_a_value_is_given_to_the_pruner_under_the_epoch_that_it_was_reported_in(world: World, script: Path) -> None:
    def on_ask(path: str) -> None:
        world.on_ask(path)
        for row in world.fake.trainers.values():  # the script evaluates every second epoch, and training is further
            done = row["epoch"] // 2 * 2
            row["metrics"] = {"score": done / 10} if done else {}
            row["metrics_at"] = {"score": {"epoch": done, "step": 10 * done, "samples": 0}} if done else {}

    world.fake.on_ask = on_ask
    study = new_study(pruner=optuna.pruners.NopPruner())
    search(world, study, script, n_trials=1)
    (trial,) = study.trials
    assert trial.intermediate_values == {2: 0.2}
    assert (trial.value, trial.user_attrs["bftrainer:value_of_epoch"]) == (0.2, 2)


def test_a_failed_trainer_is_a_failed_trial_with_its_reason(world: World, script: Path) -> None:
    world.state, world.reason = "failed", "no data in ./data"
    study = new_study()
    with pytest.raises(BFTrainerError, match="2 trials in a row failed; the last one: no data in ./data"):
        search(world, study, script, max_failures=2, max_parallel=1)
    assert names(study.trials) == ["FAIL", "FAIL"]
    assert study.trials[0].user_attrs["bftrainer:reason"] == "no data in ./data"


def test_a_metric_that_is_not_reported_fails_the_trial_and_says_what_was(world: World, script: Path) -> None:
    world.metric = "acuracy"
    study = new_study()
    search(world, study, script, n_trials=2, metric="accuracy")
    assert study.trials[0].user_attrs["bftrainer:reason"] == "the script did not report accuracy, but acuracy"


def test_several_objectives(world: World, script: Path) -> None:
    study = optuna.create_study(directions=["maximize", "minimize"])
    search(world, study, script, n_trials=2, metric=["score", "score"])
    assert len(study.best_trials) >= 1


def test_a_callback_may_end_the_search_and_a_space_may_prune(world: World, script: Path) -> None:
    def picky(trial: Any) -> list[object]:
        if trial.suggest_int("kind", 0, 1) == trial.number % 2:
            raise optuna.TrialPruned
        return ["--lr", 0.5]

    study = new_study()
    seen: list[int] = []

    def enough(study: Any, trial: Any) -> bool:
        seen.append(trial.number)
        return trial.value is not None

    search(world, study, script, n_trials=40, space=picky, max_parallel=1, callbacks=[enough])
    assert len(study.trials) == len(seen) < 40
    assert names(study.trials)[-1] == "COMPLETE"


def test_a_space_that_raises_fails_its_trial_and_the_call(world: World, script: Path) -> None:
    study = new_study()
    with pytest.raises(ZeroDivisionError):
        search(world, study, script, space=lambda trial: [1 / 0])
    assert names(study.trials) == ["FAIL"]
    with pytest.raises(InputError, match="space must return a list"):
        search(world, study, script, space=lambda trial: "--lr 3")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"n_trials": 0}, "n_trials must be a whole number from 1"),
        ({"metric": ""}, "metric must be the name"),
        ({"metric": ["a", "b"]}, "metric must be one name"),
        ({"prune_by": "hour"}, "prune_by must be one of epoch, step, samples"),
        ({"poll_s": 0}, "poll_s must be"),
        ({"nodes": "4-2"}, "nodes must be"),
        ({"wieght": 2}, "weight"),
        ({"name": "x"}, "name is set"),
        ({"group": "a b"}, "group must be"),
    ],
)
def test_what_is_wrong_is_said_before_a_trial_is_asked_for(
    world: World, script: Path, given: dict[str, Any], says: str
) -> None:
    study = new_study()
    with pytest.raises(InputError, match=says):
        search(world, study, script, **given)
    with pytest.raises(InputError, match="script must be a file"):
        search(world, study, script.with_name("none.py"))
    assert study.trials == []
    assert world.fake.specs == []


def test_without_optuna_it_says_what_to_install(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "optuna":
            raise ModuleNotFoundError(name="optuna")
        return real(name, *rest)

    study = new_study()
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(BFTrainerError, match=r"pip install 'bftrainer\[optuna\]'"):
        optimize(study, script, space, n_trials=1, metric="score")


# Restarts


class Killed(BaseException):
    """The driver is killed."""


class Fuse:
    """Kills right after so many of the driver's acts, which is right before the next one."""

    def __init__(self, patch: pytest.MonkeyPatch, after: int) -> None:
        self.left, self.blown = after, False
        for owner, name in (
            (optuna.Study, "ask"),
            (optuna.Study, "tell"),
            (optuna.Study, "set_user_attr"),
            (optuna.Trial, "set_user_attr"),
            (optuna.Trial, "suggest_float"),
            (Client, "submit_spec"),
            (Client, "cancel"),
        ):
            patch.setattr(owner, name, self.guarded(getattr(owner, name)))

    def guarded(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            found = act(*args, **kwargs)
            self.left -= 1
            if self.left == 0:
                self.blown = True
                raise Killed
            return found

        return guarded


def test_a_driver_killed_at_any_act_goes_on_and_trains_nothing_twice(world: World, script: Path) -> None:
    for after in range(1, 200):
        world.fake.trainers.clear()
        world.fake.specs.clear()
        storage = optuna.storages.InMemoryStorage()
        study = new_study(study_name="s", storage=storage, pruner=Strict())
        with pytest.MonkeyPatch.context() as patch:
            fuse = Fuse(patch, after)
            with contextlib.suppress(Killed):
                search(world, study, script, n_trials=3, max_parallel=2)
        again = new_study(study_name="s", storage=storage, load_if_exists=True, pruner=Strict())
        summary = search(world, again, script, n_trials=3, max_parallel=2)
        submitted = [spec["name"] for spec in world.fake.specs]
        assert len(submitted) == len(set(submitted)) == 3, after
        assert (summary.failed, len(again.trials)) == (0, 3), after
        for trial in again.trials:
            assert trial.state.name == ("PRUNED" if trial.params["lr"] < 0.5 else "COMPLETE"), after
        if not fuse.blown:
            assert after > 20
            return
    raise AssertionError("the search has no end")


def test_a_submission_whose_answer_was_lost_is_not_repeated(
    world: World, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = Client.submit_spec, []

    def losing(self: Client, spec: Any) -> Any:
        row = real(self, spec)
        if len(lost) < 2:
            lost.append(row)
            raise UnreachableError("no controller answers")
        return row

    monkeypatch.setattr(Client, "submit_spec", losing)
    study = new_study()
    search(world, study, script, n_trials=4)
    assert names(study.trials) == ["COMPLETE"] * 4
    assert len(world.fake.specs) == 4


def begin_and_interrupt(world: World, study: optuna.Study, script: Path, n_trials: int) -> None:
    """Ctrl-C once the first trials are submitted."""

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            search(world, study, script, n_trials=n_trials)


def test_another_controller_does_not_get_the_trials_of_the_first(world: World, script: Path) -> None:
    study = new_study(study_name="s")
    begin_and_interrupt(world, study, script, n_trials=2)
    assert len(world.fake.specs) == 2
    world.fake.trainers.clear()
    search(world, study, script, n_trials=3)
    assert names(study.trials) == ["FAIL", "FAIL", "COMPLETE"]
    assert "not known to the controller" in study.trials[0].user_attrs["bftrainer:reason"]


def test_no_room_for_more_trainers_is_waited_out(world: World, script: Path) -> None:
    asked = []

    def on_ask(path: str) -> None:
        world.on_ask(path)
        if path == "/v1/trainers":
            asked.append(path)
        world.fake.refuse = (
            (409, "you have 1 trainer that is not finished already") if asked and len(asked) < 4 else None
        )
        if path != "/v1/trainers":
            world.fake.refuse = None

    world.fake.on_ask = on_ask
    study = new_study()
    search(world, study, script, n_trials=2)
    assert names(study.trials) == ["COMPLETE"] * 2


def test_a_controller_that_never_answered_is_an_error_at_once(script: Path, tmp_path: Path) -> None:
    study = new_study()
    with Client(state=tmp_path / "none") as client, pytest.raises(UnreachableError, match="bftrainer serve"):
        optimize(study, script, space, n_trials=1, metric="score", client=client)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "client.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "token": "x"}))
    with Client(state=tmp_path / "none") as client, pytest.raises(UnreachableError, match="no controller answers"):
        optimize(study, script, space, n_trials=1, metric="score", client=client)
    assert study.trials == []


# The end of a search, and other drivers


def choice(trial: Any) -> list[object]:
    return ["--lr", trial.suggest_categorical("lr", [0.25, 0.5, 0.75])]


@pytest.mark.filterwarnings("ignore:BruteForceSampler is experimental")
@pytest.mark.parametrize("brute", [False, True])
def test_a_sampler_that_has_tried_everything_ends_the_search(world: World, script: Path, brute: bool) -> None:
    samplers = optuna.samplers
    sampler = samplers.BruteForceSampler() if brute else samplers.GridSampler({"lr": [0.25, 0.5, 0.75]})
    study = new_study(sampler=sampler)
    search(world, study, script, n_trials=20, space=choice, max_parallel=1)
    assert sorted(trial.params["lr"] for trial in study.trials) == [0.25, 0.5, 0.75]


def test_optunas_own_callback_ends_the_search_and_leaves_the_study_as_it_was(world: World, script: Path) -> None:
    study = new_study()
    search(world, study, script, n_trials=20, max_parallel=2, callbacks=[optuna.study.MaxTrialsCallback(2)])
    assert 2 <= len(study.trials) <= 4
    assert "RUNNING" not in names(study.trials)
    with pytest.raises(RuntimeError, match="supposed to be invoked inside"):  # the names we use are Optuna's still
        study.stop()


def test_another_optuna_without_these_names_goes_on_to_n_trials(
    world: World, script: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = new_study()
    del study._stop_flag
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    optuna.logging.enable_propagation()
    try:
        search(world, study, script, n_trials=2)
    finally:
        optuna.logging.disable_propagation()
    assert len(study.trials) == 2
    assert "study.stop() cannot end this search" in caplog.text


def test_the_pools_time_counts_while_a_search_has_trials_under_way(world: World, script: Path) -> None:
    given = world.fake.totals = {"node_seconds": 1000.0}

    def on_ask(path: str) -> None:
        world.on_ask(path)
        if path == "/v1/status":
            given["node_seconds"] += 100.0

    world.fake.on_ask = on_ask
    study = new_study()
    first = search(world, study, script, n_trials=1)
    assert (first.pool_node_seconds, first.node_seconds) == (100.0 * EPOCHS, 100.0 * EPOCHS)
    given["node_seconds"] += 1e6  # nobody searches
    assert search(world, study, script, n_trials=2).share == 1.0
    given["node_seconds"] = 0.0  # another controller
    assert search(world, study, script, n_trials=2).share == 1.0


def test_what_the_pool_gives_while_trials_go_on_without_a_driver_counts() -> None:
    study, now = new_study(), iter(range(0, 1000, 20))
    first = TrialWatch(study, lambda: next(now))
    first.look(100.0, under_way=False)
    first.look(150.0, under_way=True)  # and it is killed
    second = TrialWatch(study, lambda: next(now))
    second.look(400.0, under_way=True)
    assert second.pool_given == 300.0
    second.close()
    third = TrialWatch(study, lambda: next(now))
    third.look(900.0, under_way=False)  # nothing was under way
    third.look(1000.0, under_way=True)
    assert third.pool_given == 400.0


@pytest.mark.waits
def test_a_second_driver_is_refused_unless_the_first_is_gone(world: World, script: Path) -> None:
    study = new_study(study_name="s")
    there = {"host": "elsewhere", "pid": 1, "at": time.time() - 30}
    study.set_user_attr("bftrainer:driver", there)
    with pytest.raises(BFTrainerError, match=r"another driver already works on study 's' \(process 1 on elsewhere\)"):
        search(world, study, script, n_trials=1)
    assert study.trials == []
    ended = subprocess.Popen(["true"])
    ended.wait(30)
    for gone in ({**there, "at": time.time() - 90}, {**there, "host": socket.gethostname(), "pid": ended.pid}):
        study.set_user_attr("bftrainer:driver", gone)
        search(world, study, script, n_trials=len(study.trials) + 1)
    assert names(study.trials) == ["COMPLETE"] * 2
    assert study.user_attrs["bftrainer:driver"] is None


def test_another_search_space_tells_nothing_of_trials_that_are_under_way(world: World, script: Path) -> None:
    study = new_study(study_name="s")
    begin_and_interrupt(world, study, script, n_trials=1)
    with pytest.raises(BFTrainerError, match="restore the search space"):
        search(world, study, script, n_trials=1, space=choice)
    assert names(study.trials) == ["RUNNING"]
    search(world, study, script, n_trials=1)
    assert names(study.trials) == ["COMPLETE"]


def test_the_trainers_of_a_study_without_a_name_carry_its_tag_once(world: World, script: Path) -> None:
    study = new_study()
    search(world, study, script, n_trials=1)
    tag = study.user_attrs["bftrainer:tag"]
    assert [spec["name"] for spec in world.fake.specs] == [f"train-{tag}-0"]
    assert world.fake.specs[0]["group"] == f"train-{tag}"
