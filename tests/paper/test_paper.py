"""The reproduction on a tiny synthetic machine: every experiment, the page, the cache, the command."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer

from bftrainer.cli.machine.paper import paper
from bftrainer.core.models import PAPER_CURVES
from bftrainer.errors import InputError
from bftrainer.paper import runs as runs_module
from bftrainer.paper.experiment import Experiment, baseline_run, hpo_run
from bftrainer.paper.registry import EXPERIMENTS, find_experiments
from bftrainer.paper.reproduce import Reproduced, reproduce
from bftrainer.paper.runs import PaperRun, Runs
from bftrainer.paper.setting import Setting, paper_name
from bftrainer.paper.windows import share_followed, six_hours, spans, steps

TINY = Setting(
    nodes=128,
    hours=24.0,
    machine_nodes=512,
    trials=28,
    samples=4e7,
    horizons_s=(10.0, 120.0),
    diverse_horizons_s=(10.0, 120.0),
    max_parallels=(5, 10),
    cost_factors=(1.0, 10.0),
    scalability_hours=12.0,
    solve_sizes=((3, 20), (4, 40)),
    solve_repetitions=1,
)
NAMES = [experiment.name for experiment in EXPERIMENTS]


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory) -> Reproduced:
    return reproduce(EXPERIMENTS, TINY, tmp_path_factory.mktemp("paper"), workers=1)


@pytest.fixture(scope="session")
def folder(done: Reproduced) -> Path:
    return done.report.parent


def test_every_table_and_figure_of_the_evaluation_is_there() -> None:
    assert len(NAMES) == len(set(NAMES)) == 19
    sources = " ".join(experiment.source for experiment in EXPERIMENTS)
    for number in (1, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16):
        assert f"Figure {number}" in sources
    for number in (1, 3, 4):
        assert f"Table {number}" in sources


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_writes_its_three_files(folder: Path, name: str) -> None:
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["name"] == name
    assert found["synthetic"] is True
    (experiment,) = find_experiments([name])
    assert (found["title"], found["source"]) == (experiment.title, experiment.source)
    assert found["compared"]
    assert all(row["what"] and np.isfinite(row["ours"]) for row in found["compared"])
    assert re.fullmatch(r"[A-Z].{40,}\.", found["difference"], re.DOTALL)
    assert {"version", "command", "seed", "inputs"} <= found["provenance"].keys()
    with (folder / f"{name}.csv").open(newline="") as file:
        head, *rows = list(csv.reader(file))
    assert head == found["columns"]
    assert rows
    assert {len(row) for row in rows} == {len(head)}
    assert rows == [["" if value is None else str(value) for value in row] for row in found["rows"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_is_a_picture_with_something_on_it(folder: Path, name: str) -> None:
    from matplotlib.image import imread

    path = folder / f"{name}.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    picture = imread(path)[:, :, :3]
    assert min(picture.shape[:2]) > 200
    assert len(np.unique((picture * 255).astype(np.int64) @ (1 << 16, 1 << 8, 1))) > 20


def test_efficiencies_lie_between_nothing_and_their_bound(done: Reproduced) -> None:
    findings = {experiment.name: finding for experiment, finding in done.findings}
    columns = findings["efficiency-vs-horizon"].columns
    assert columns[2:] == ("efficiency U", "zero-cost bound")
    for row in findings["efficiency-vs-horizon"].rows[:-1]:
        assert 0 < float(row[2] or 0) <= float(row[3] or 0) + 1e-9 <= 1.2
    for row in findings["efficiency-over-week"].rows:
        assert -0.5 < float(row[1] or 0) < 1.2


def test_a_longer_horizon_invests_more_in_rescaling(done: Reproduced) -> None:
    rows = next(finding.rows for experiment, finding in done.findings if experiment.name == "rescale-cost-vs-horizon")
    assert float(rows[0][1] or 0) < float(rows[1][1] or 0)


def test_the_page_names_every_experiment_and_needs_nothing_from_outside(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert not re.search(r"https?://|//cdn|<script|<link|@import", re.sub(r"base64,[A-Za-z0-9+/=]+", "", page))
    for experiment in EXPERIMENTS:
        assert f'id="{experiment.name}"' in page
        assert f"bftrainer paper {experiment.name}" in page
    assert page.count("data:image/png;base64,") == len(EXPERIMENTS)
    assert "Synthetic data" in page
    assert "93 %" in page
    assert "zero-cost bound" in page


def test_a_second_run_makes_no_replay(done: Reproduced, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a replay was made again")

    before = (folder / "roi.csv").read_text()
    assert done.replayed > 10
    monkeypatch.setattr(runs_module, "replay_to", refuse)
    again = reproduce(find_experiments(["roi", "solve-time"]), TINY, folder, workers=1)
    assert again.replayed == 0
    assert (folder / "roi.csv").read_text() == before


def test_what_was_interrupted_goes_on_where_it_stopped(tmp_path: Path) -> None:
    some = [hpo_run(TINY), baseline_run(TINY)]
    first = Runs(TINY, tmp_path, workers=1)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.complete(some, interrupt)
    second = Runs(TINY, tmp_path, workers=1)
    assert len(second.missing(some)) == 1
    second.complete(some)
    assert second.replayed == 1
    assert not second.missing(some)


def test_two_workers_give_what_one_gives(done: Reproduced, folder: Path, tmp_path: Path) -> None:
    some = [hpo_run(TINY), baseline_run(TINY)]
    alone, together = Runs(TINY, folder / ".cache", workers=1), Runs(TINY, tmp_path, workers=2)
    together.complete(some)
    assert together.replayed == 2
    assert not alone.missing(some)
    for run in some:
        assert together.result(run).number("outcome_samples") == alone.result(run).number("outcome_samples")


def test_another_setting_is_not_taken_for_this_one(done: Reproduced, folder: Path) -> None:
    from dataclasses import replace

    other = Runs(replace(TINY, seed=2), folder / ".cache", workers=1)
    assert other.missing([hpo_run(TINY)])


def test_experiments_share_their_runs() -> None:
    needed = [run for experiment in EXPERIMENTS for run in experiment.runs(Setting())]
    assert len(set(needed)) < len(needed)
    # A float and a whole number that are equal must not be two entries of the cache.
    assert all(isinstance(run.horizon_s, float) and isinstance(run.cost_factor, float) for run in needed)


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(InputError, match="idle-stats, fragment-cdf.*but got 'idle'"):
        find_experiments(["idle"])


def test_names_are_run_in_the_order_of_the_paper() -> None:
    assert [e.name for e in find_experiments(["roi", "week"])] == ["week", "roi"]
    assert find_experiments([]) == find_experiments(["week", "all"]) == EXPERIMENTS


def test_a_folder_without_the_data_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fragments.parquet"):
        reproduce(EXPERIMENTS, Setting(data=tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="must name a folder"):
        reproduce((), TINY, tmp_path / "file")


def test_the_command_writes_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()
    app.command()(paper)
    app(["curve-approximation", "-o", str(tmp_path / "new")], standalone_mode=False)
    assert {path.name for path in (tmp_path / "new").iterdir()} >= {
        "curve-approximation.png",
        "curve-approximation.csv",
        "curve-approximation.json",
        "report.html",
    }
    said = capsys.readouterr()
    assert "report.html" in said.out
    assert "synthetic" in said.err
    app(["--list"], standalone_mode=False)
    assert "runtime-throughput" in capsys.readouterr().out


def test_models_go_by_the_names_of_the_paper() -> None:
    assert [paper_name(name) for name in ("vgg16", "mobilenet", "shufflenet", "mynet")] == [
        "VGG-16",
        "MobileNets",
        "ShuffleNet",
        "mynet",
    ]
    assert list(Setting().curves()) == list(PAPER_CURVES)


def test_windows_add_up_to_the_whole(done: Reproduced, folder: Path) -> None:
    result = Runs(TINY, folder / ".cache", workers=1).result(hpo_run(TINY))
    timeline = result.timeline
    edges = np.linspace(timeline.time[0], timeline.time[-1], 5)
    cut = spans(timeline, edges)
    assert cut.rescale.sum() == pytest.approx(timeline.rescale[-1] - timeline.rescale[0])
    assert cut.outcome.sum() == pytest.approx(result.number("outcome_samples"), rel=1e-6)
    by_event = steps(timeline)
    gross = result.number("outcome_samples") + timeline.preemption[-1] + timeline.rescale[-1]
    assert by_event.gross.sum() == pytest.approx(gross)
    assert by_event.rescale.sum() == pytest.approx(timeline.rescale[-2])


def test_windows_are_six_hours_of_a_week() -> None:
    window = TINY.trace().window
    assert np.diff(six_hours(window)).tolist() == [21600.0] * 4
    assert len(six_hours(window, end=window.start + 3600)) == 2


def test_a_decision_is_overtaken_by_what_follows_it_in_time() -> None:
    times, by = np.array([0.0, 10.0, 20.0, 95.0]), np.array([12.0, 20.0])
    assert share_followed(times, by, 10.0, 100.0) == pytest.approx(1 / 3)
    assert share_followed(times, by, 1000.0, 100.0) is None


def test_the_published_data_gives_the_known_efficiency(shared_data: Path, tmp_path: Path) -> None:
    setting = Setting(data=shared_data / "summit", hours=12.0)
    run: PaperRun = hpo_run(setting)
    experiments: tuple[Experiment, ...] = find_experiments(["week"])
    reproduce(experiments, setting, tmp_path, workers=1)
    found = json.loads((tmp_path / "week.json").read_text())
    assert found["synthetic"] is False
    assert found["provenance"]["inputs"].keys() >= {"fragments.parquet", "hpo-shufflenet-1000.csv"}
    result = Runs(setting, tmp_path / ".cache", workers=1).result(run)
    assert 0.7 < result.number("efficiency") < result.number("bound") < 1
