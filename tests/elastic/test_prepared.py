"""Scripts in the shape of well-known examples, made elastic by `elastic.prepare`, while nodes come and go."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bftrainer.elastic import protocol
from bftrainer.elastic.local.coordinator import Coordinator
from bftrainer.elastic.protocol import Leaving, Taken
from support.elastic.churn import disturb
from support.elastic.jobs import SETTINGS, on, play, run_alone, script
from support.elastic.ledger import committed

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.waits

OBSERVED = script("prepared/observed.py")
EVENTS = ["join"] * 3 + ["leave"] * 2 + ["kill"] * 3


def command(folder: Path, pace_s: float, name: str, *arguments: object) -> list[str]:
    return [OBSERVED, str(folder), str(pace_s), script(f"prepared/{name}"), str(folder), *map(str, arguments)]


def undisturbed(folder: Path, name: str, *arguments: object) -> dict[str, Any]:
    folder.mkdir(parents=True)
    assert play(on(1), folder, command(folder, 0, name, *arguments)).status == "done"
    final: dict[str, Any] = torch.load(folder / "model.pt")
    return final


def disturbed(folder: Path, name: str, *arguments: object, seed: int = 3) -> dict[str, Any]:
    argv = command(folder, 0.12, name, *arguments)
    account = disturb(folder, seed, 0, EVENTS, argv=argv)
    assert account.ended == [], account.ended
    assert len(account.worlds) >= 2
    final: dict[str, Any] = torch.load(folder / "model.pt")
    return final


def check_samples(folder: Path, epochs: int, samples: int) -> None:
    counts = committed(folder)
    assert sorted(counts) == list(range(epochs))
    for epoch, counter in counts.items():
        assert counter == Counter(range(samples)), f"epoch {epoch}"


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, weight in found["model"].items():
        assert (weight - expected["model"][name]).abs().max() < 1e-10 * max(1, weight.abs().max()), name
    for name in expected.keys() - {"model"}:
        assert found[name] == pytest.approx(expected[name], rel=1e-10)


@pytest.mark.parametrize(
    ("name", "arguments", "epochs", "samples"),
    [
        ("mnist_like.py", (8,), 8, 600),
        ("imagenet_like.py", (8, 1), 8, 610),
        ("imagenet_like.py", (10, 4), 10, 610),
        ("gan_like.py", (8,), 8, 480),
        ("looks.py", (10,), 10, 96),
    ],
    ids=["mnist", "imagenet", "imagenet, accumulating", "gan", "looks at a batch"],
)
def test_a_script_computes_what_it_does_undisturbed(
    name: str, arguments: tuple[int, ...], epochs: int, samples: int, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path / "alone", name, *arguments)
    found = disturbed(tmp_path / "disturbed", name, *arguments)
    check_samples(tmp_path / "disturbed", epochs, samples)
    check_same(found, expected)


def test_a_script_with_its_own_data_computes_what_it_does_undisturbed(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "alone", "nanogpt_like.py", 60, 0)
    check_same(disturbed(tmp_path / "disturbed", "nanogpt_like.py", 60, 0), expected)


FEATURES = script("prepared/features.py")


def finals(folder: Path, nodes: int, *features: str, ranks: int = 1) -> list[dict[str, Any]]:
    folder.mkdir()
    settings = replace(SETTINGS, environment={"BFTRAINER_RANKS": str(ranks)})
    outcome = play(on(nodes), folder, [FEATURES, str(folder), *features], nodes=(nodes, nodes), settings=settings)
    assert outcome.status == "done", outcome
    return [torch.load(path) for path in sorted(folder.glob("final-*.pt"))]


@pytest.mark.parametrize(
    "features",
    [
        ("accumulate", "clip", "epochs"),
        ("scaler", "clip", "inf"),
        ("sampler", "workers"),
        ("penalty", "clip", "zeros"),
        ("closure",),
        ("by hand", "break"),
    ],
    ids="+".join,
)
def test_three_ranks_compute_what_one_does(features: tuple[str, ...], tmp_path: Path) -> None:
    (expected,) = finals(tmp_path / "one", 1, *features)
    found = finals(tmp_path / "three", 3, *features)
    assert len(found) == 3
    for state in found:
        assert state["loss"] == pytest.approx(expected["loss"], rel=1e-10)
        assert (state["lr"], state["steps"], state["scale"]) == (expected["lr"], expected["steps"], expected["scale"])
        for name, value in state["model"].items():
            assert torch.equal(value, found[0]["model"][name]), name


@pytest.mark.parametrize(
    "features",
    [("accumulate", "clip", "zeros"), ("scaler", "clip", "inf"), ("penalty", "break"), ("closure",)],
    ids="+".join,
)
def test_a_prepared_script_computes_what_plain_pytorch_does(features: tuple[str, ...], tmp_path: Path) -> None:
    found = []
    for way in ("plain", "prepared"):
        (tmp_path / way).mkdir()
        run_alone(tmp_path, FEATURES, tmp_path / way, "ordered", way, *features)
        found.append(torch.load(tmp_path / way / "final-alone.pt"))
    plain, prepared = found
    for name in ("loss", "lr", "steps", "scale"):
        assert prepared[name] == plain[name], name
    for name, value in prepared["model"].items():
        assert torch.equal(value, plain["model"][name]), name


@pytest.mark.parametrize("features", [("clip",), ("accumulate", "declared", "clip", "scaler")], ids="+".join)
def test_fewer_ranks_than_submitted_for_take_the_same_batch_in_parts(features: tuple[str, ...], tmp_path: Path) -> None:
    (expected, *_) = finals(tmp_path / "three", 3, *features, ranks=3)
    for nodes in (1, 2):
        found = finals(tmp_path / f"on {nodes}", nodes, *features, ranks=3)
        for state in found:
            assert state["loss"] == pytest.approx(expected["loss"], rel=1e-10)
            assert state["lr"] == expected["lr"]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("ahead", "fetches batches ahead"),
        ("sum", "the loss is a sum over the batch"),
        ("scaler", "give the GradScaler to elastic.prepare()"),
        ("early", "was called before loss.backward()"),
        ("again", "was called without a batch"),
        ("tail", "was not called after the last 2 batches of the epoch"),
        ("declared", "accumulate=3, but the script called optimizer.step() after 1 batches"),
        ("stream", "a stream has no order"),
        ("number", "but got int"),
        ("twice", "is prepared already"),
        ("scheduler", "the StepLR was not given to elastic.prepare()"),
    ],
)
def test_what_would_train_wrongly_is_refused_with_a_remedy(mistake: str, words: str, tmp_path: Path) -> None:
    outcome = play(on(2), tmp_path, [script("prepared/mistakes.py"), mistake], nodes=(2, 2))
    assert outcome.status == "failed"
    assert words in outcome.error, outcome.error


def test_a_script_with_random_numbers_of_its_own_ends_within_the_range_of_undisturbed_seeds(tmp_path: Path) -> None:
    undisturbed_losses = [undisturbed(tmp_path / str(seed), "vae_like.py", 12, seed)["loss"] for seed in range(5)]
    found = disturbed(tmp_path / "disturbed", "vae_like.py", 12, 0)["loss"]
    check_samples(tmp_path / "disturbed", 12, 400)
    low, high = min(undisturbed_losses), max(undisturbed_losses)
    assert low - (high - low) < found < high + (high - low), (found, undisturbed_losses)


@pytest.mark.parametrize("way", ["range", "epochs", "break"])
def test_the_loss_of_the_main_rank_after_the_loop_loses_no_result_and_a_newcomer_trains_nothing(
    way: str, tmp_path: Path
) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(2)
        await until(lambda: len(list(tmp_path.glob("trained-*"))) == 2)
        await job.add(1)
        newcomer = job.nodes[-1]
        await until(lambda: job.roster.is_ready(newcomer))
        (main,) = (path.name.split("-", 1)[1].removesuffix("-0") for path in tmp_path.glob("trained-*-0"))
        job.signal(main, signal.SIGKILL)
        await until(lambda: len(job.nodes) == 2)
        (tmp_path / "go").touch()

    outcome = play(scenario, tmp_path, [script("prepared/late.py"), str(tmp_path), way], nodes=(2, 8))
    assert outcome.status == "done", outcome
    assert set(torch.load(tmp_path / "model.pt")) == {"weight", "bias"}
    assert len(list(tmp_path.glob("trained-*"))) in (2, 3)


async def lose_one_of_three(job: Coordinator, folder: Path, *, of_main: bool) -> None:
    """Lose the main rank or another one while three nodes evaluate after the last epoch."""
    await job.add(3)
    await until(lambda: len(list(folder.glob("evaluates-*"))) == 3)
    job.signal(job.members[0 if of_main else -1], signal.SIGKILL)
    await until(lambda: len(job.nodes) == 2)


@pytest.mark.parametrize("of_main", [True, False])
def test_a_node_that_is_lost_after_the_last_batch_of_all_has_the_code_after_it_run_again(
    of_main: bool, tmp_path: Path
) -> None:
    async def scenario(job: Coordinator) -> None:
        await lose_one_of_three(job, tmp_path, of_main=of_main)
        (tmp_path / "go").touch()

    outcome = play(scenario, tmp_path, [script("prepared/last_epoch.py"), str(tmp_path)], nodes=(2, 8))
    assert outcome.status == "done", outcome
    # A rank that joined a step later was given other batches, so the first numbers need not be equal.
    times = sorted((path.read_text().split() for path in tmp_path.glob("evaluates-*")), key=len)
    assert [len(each) for each in times] == [1, 2, 2]
    assert [each[1] for each in times if len(each) > 1] == ["0", "0"], "no batch is given again"
    assert set(torch.load(tmp_path / "model.pt")) == {"weight", "bias"}


@pytest.mark.parametrize("of_main", [True, False])
def test_the_code_after_the_last_batch_of_all_counts_once_on_a_node_that_joins_for_its_repetition(
    of_main: bool, tmp_path: Path
) -> None:
    async def scenario(job: Coordinator) -> None:
        await lose_one_of_three(job, tmp_path, of_main=of_main)
        await job.add(1)
        newcomer = job.nodes[-1]
        await until(lambda: job.roster.is_ready(newcomer))
        (tmp_path / "go").touch()

    outcome = play(scenario, tmp_path, [script("prepared/last_epoch.py"), str(tmp_path)], nodes=(2, 8))
    assert outcome.status == "done", outcome
    assert len(list(tmp_path.glob("evaluates-*"))) == 4, "the newcomer evaluates, too"
    found = [json.loads(path.read_text()) for path in tmp_path.glob("found-*.json")]
    assert len(found) == 3
    assert found == [[found[0][0], 0, 3]] * 3


def test_nothing_is_saved_of_code_between_two_steps_that_has_run_in_part(tmp_path: Path) -> None:
    heard: list[bool] = []

    async def scenario(job: Coordinator) -> None:
        await job.add(3)
        await until(lambda: len(list(tmp_path.glob("evaluates-*"))) == 3)
        main, *others = job.members
        for node in others:
            job.signal(node, signal.SIGKILL)
        await until(lambda: len(job.nodes) == 1)
        job._workers.say(main, protocol.as_json(Taken(20.0)))
        await until(lambda: any(heard))  # it has heard of it while it waits
        (tmp_path / "go").touch()
        await until(lambda: not job.nodes)
        await job.stop()

    argv = [script("prepared/last_epoch.py"), str(tmp_path)]
    watch = lambda happening: heard.append(isinstance(happening.message, Leaving))  # noqa: E731
    assert play(scenario, tmp_path, argv, watch=watch).status == "stopped"
    # A run that resumed from the state at the end of that code would run it a second time.
    assert [path.name for path in tmp_path.glob("snapshots/*.bft")] == []


def test_a_newcomer_that_joins_after_the_last_batch_of_the_first_epoch_can_look_at_one(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(1)
        await until(lambda: len(list(tmp_path.glob("waits-*"))) == 1)
        await job.add(1)
        newcomer = job.nodes[-1]
        await until(lambda: job.roster.is_ready(newcomer))
        (tmp_path / "go").touch()

    outcome = play(scenario, tmp_path, [script("prepared/looks_late.py"), str(tmp_path)], nodes=(1, 8))
    assert outcome.status == "done", outcome
    assert len(list(tmp_path.glob("looked-*"))) == 2


def test_a_newcomer_receives_carried_variables_and_a_lost_step_undoes_them(tmp_path: Path) -> None:
    async def scenario(job: Coordinator) -> None:
        await job.add(1)
        await until(lambda: len(list(tmp_path.glob("step-3-*"))) == 1)
        await job.add(1)
        newcomer = job.nodes[-1]
        await until(lambda: len(list(tmp_path.glob("step-6-*"))) == 2)
        job.signal(newcomer, signal.SIGKILL)

    outcome = play(scenario, tmp_path, [script("prepared/carries.py"), str(tmp_path)], nodes=(1, 8))
    assert outcome.status == "done", outcome
    firsts = [json.loads(path.read_text()) for path in tmp_path.glob("first-*.json")]
    assert sorted(firsts) == [[0, []], [3, [1, 2, 3]]]
    (path,) = tmp_path.glob("found-*.json")
    steps = list(range(1, 13))
    assert json.loads(path.read_text()) == {
        "begun": 12,
        "history": {"begun": steps},
        "alias": steps,
        "tries": [*steps[:6], *steps[5:]],
    }


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
