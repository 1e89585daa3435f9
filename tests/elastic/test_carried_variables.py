"""Variables that `elastic.prepare(…, carry=…)` names: what is sent, what is received, and what is refused."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from bftrainer import elastic  # noqa: E402
from bftrainer.elastic.torch.meetings.digest import Digest, refuse_drift  # noqa: E402
from bftrainer.elastic.torch.prepare.carried import CarriedVariables  # noqa: E402
from bftrainer.elastic.torch.value import CARRIED  # noqa: E402
from bftrainer.errors import BFTrainerError, InputError  # noqa: E402


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def carried(module: dict[str, Any]) -> CarriedVariables:
    """All variables of a module, carried."""
    made = CarriedVariables()
    made.add(dict.fromkeys(module, module))
    return made


# What is sent and received.


@pytest.mark.parametrize(
    "value", [0.0, 3, "best.pt", None, True, [1, 2.5], (1, ["a"]), {"epoch": 3, "scores": [0.5, None]}, math.inf]
)
@pytest.mark.parametrize("before", [None, 0.0, [], [[5]], {"scores": 1}, (7, [8])], ids=repr)
def test_a_received_value_is_that_of_the_sender(value: Any, before: Any) -> None:
    theirs, ours = {"best": value}, {"best": before, "other": 1}
    receiver = CarriedVariables()
    receiver.add({"best": ours})
    receiver.load_state_dict(carried(theirs).state_dict())
    assert ours == {"best": value, "other": 1}
    assert type(ours["best"]) is type(value)


def test_what_was_sent_and_what_was_received_do_not_change_with_the_original() -> None:
    theirs, ours = {"history": {"loss": [1.0]}}, {"history": {"loss": [9.0]}}
    state = carried(theirs).state_dict()
    carried(ours).load_state_dict(state)
    theirs["history"]["loss"].append(2.0)
    ours["history"]["loss"].append(3.0)
    assert state == {"history": {"loss": [1.0]}}
    assert ours == {"history": {"loss": [1.0, 3.0]}}


def test_received_lists_and_dicts_are_changed_in_place() -> None:
    ours: dict[str, Any] = {"history": {"loss": [9.0, 8.0], "old": 1}, "rows": [[1], [2], [3]]}
    history, losses, rows, row = ours["history"], ours["history"]["loss"], ours["rows"], ours["rows"][0]
    carried(ours).load_state_dict({"history": {"new": 2, "loss": [0.5]}, "rows": [[4, 5]]})
    assert history is ours["history"]
    assert losses is ours["history"]["loss"]
    assert rows is ours["rows"]
    assert row is ours["rows"][0]
    assert ours == {"history": {"new": 2, "loss": [0.5]}, "rows": [[4, 5]]}
    assert list(history) == ["new", "loss"], "the order is that of the sender"


def test_two_received_lists_do_not_become_one() -> None:
    shared = [0]
    ours = {"best": shared, "rows": [shared, shared]}  # as after a step that was lost
    carried(ours).load_state_dict({"best": [1], "rows": [[2], [3]]})
    assert ours == {"best": [1], "rows": [[2], [3]]}
    assert ours["best"] is shared


def test_numbers_of_numpy_become_plain_ones_on_the_sender_too() -> None:
    module: dict[str, Any] = {"best": np.float64(0.5), "steps": np.int16(3), "scores": [np.float32(2)]}
    state = carried(module).state_dict()
    assert state == {"best": 0.5, "steps": 3, "scores": [2.0]}
    assert [type(value) for value in (*state.values(), *state["scores"])] == [float, int, list, float]
    assert [type(module[name]) for name in ("best", "steps")] == [float, int]


def test_a_state_with_other_names_is_refused() -> None:
    with pytest.raises(InputError, match="it has the carried variables best, but this script carries bad, best"):
        carried({"bad": 0, "best": 1}).load_state_dict({"best": 0.0})


def test_a_variable_that_differs_by_rank_is_named() -> None:
    def note(**module: Any) -> bytes:
        return Digest({CARRIED: carried(module)}).written()

    refuse_drift([note(best=0.1, bad=[1]), note(best=0.1 + 1e-12, bad=[1])])
    with pytest.raises(InputError, match='named by `carry="bad"` differs between rank 0 and rank 1'):
        refuse_drift([note(best=0.1, bad=[1]), note(best=0.1, bad=[2])])


# What is refused. Each text is a script's module.

MODULE = """
import torch
from bftrainer import elastic
from bftrainer.errors import InputError
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
best, other = 0.0, 1
"""


def execute(text: str) -> dict[str, Any]:
    """Execute a script after `MODULE`, and return its variables."""
    elastic.init(device="cpu")
    module: dict[str, Any] = {"__name__": "__main__"}
    exec(MODULE + text, module)
    return module


LOCAL = """
def main():
    score = 0.0
    elastic.prepare(model, optimizer, carry="score")
main()
"""
SHADOWED = LOCAL.replace("score", "best")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('elastic.prepare(model, optimizer, carry="bset")', "`carry` names `bset`, but the module .* set it before"),
        (LOCAL, r"`score` is a local variable of main\(\), .* write score = elastic.Value\(…\), .* use score.value"),
        (SHADOWED, r"`best` is a local variable of main\(\)"),
        ('elastic.prepare(model, optimizer, carry=("best", "best"))', "`best` was given to `carry` twice"),
        (
            'elastic.prepare(model, optimizer, carry="best"); elastic.prepare(carry=["other", "best"])',
            "`best` was given to `carry` twice",
        ),
        ('elastic.prepare(model, carry="best, other")', "must be the names of variables .* but got 'best, other'"),
        ('elastic.prepare(model, carry="")', "must be the names of variables .* but got ''"),
        ('elastic.prepare(model, carry="self.best")', "an attribute or an item becomes an elastic.Value"),
        ('elastic.prepare(model, carry="class")', "but got 'class'"),
        ('elastic.prepare(model, carry="__name__")', "but got '__name__'"),
        ("elastic.prepare(model, carry=best)", "and not their values, but got float"),
        ("elastic.prepare(model, carry=[best])", "but got 0.0"),
        ("elastic.prepare(model, carry={'best': best})", "and not their values, but got dict"),
        ('elastic.prepare(optimizer, carry="model")', r"give it to elastic.prepare\(\) itself: elastic.prepare\(model"),
        (
            'best = elastic.Value(0.0); elastic.prepare(model, optimizer, carry="best")',
            r"give it to elastic.prepare\(\) itself: elastic.prepare\(best",
        ),
        (
            'best = torch.ones(()); elastic.prepare(model, optimizer, carry="best")',
            "`best`, which `carry` names, must be a number, .* but got Tensor; call .item",
        ),
        ('best = {1}; elastic.prepare(model, optimizer, carry="best")', "`best`, .* but got set"),
        ('elastic.prepare(model, optimizer, carry="torch")', "`torch`, .* but got module"),
        (
            'best = other = []; elastic.prepare(model, optimizer, carry=("best", "other"))',
            "`other`, .* is or holds a list that is also in `best`, .* make a copy",
        ),
        (
            'best = [[0]] * 2; elastic.prepare(model, optimizer, carry="best")',
            "`best`, .* is or holds a list that is also in another place of it",
        ),
        (
            "import enum; best = enum.IntEnum('Phase', 'WARM').WARM; elastic.prepare(optimizer, carry='best')",
            "`best`, which `carry` names, must be a plain value, but got the Phase WARM; keep its .value",
        ),
        ("elastic.prepare(model, optimizer, best)", 'give the name of its variable, carry="name"'),
    ],
)
def test_what_cannot_be_carried_is_refused_with_a_remedy(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        execute(text)


@pytest.mark.parametrize("both", [True, False])
def test_a_variable_that_the_script_and_another_module_have_is_refused_there(both: bool) -> None:
    helper: dict[str, Any] = {"__name__": "helper", "elastic": elastic, "best": 7.0, "score": 7.0}
    exec("def wrap(*objects, carry):\n    return elastic.prepare(*objects, carry=carry)", helper)
    name = "best" if both else "score"
    elastic.init(device="cpu")
    module = {"__name__": "__main__", "wrap": helper["wrap"]}
    text = f"{MODULE}wrap(model, optimizer, carry='{name}')"
    if both:
        with pytest.raises(
            InputError, match="`best`, which both the script and the module helper, .* have: call it in"
        ):
            exec(text, module)
    else:
        exec(text, module)


def test_a_call_that_is_refused_leaves_no_trace_and_later_calls_add_names() -> None:
    text = """
try:
    elastic.prepare(carry=("best", "missing"))
except InputError:
    pass
elastic.prepare(carry="best")
model, optimizer = elastic.prepare(model, optimizer, carry=("other",))
"""
    execute(text)
    assert elastic._current()._member.registry.objects[CARRIED].state_dict() == {"best": 0.0, "other": 1}


def test_names_are_taken_before_training_begins_only() -> None:
    text = """
elastic.prepare(model, optimizer)
for _ in elastic.steps(2):
    model(torch.ones(1, 1)).mean().backward()
    elastic.prepare(carry="best")
"""
    with pytest.raises(InputError, match="must be called before the first epoch"):
        execute(text)


LOOP = """
model, optimizer = elastic.prepare(model, optimizer, carry=("best", "history"))
def main({parameters}):
    {first}
    for step in elastic.steps(3):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).mean().backward()
        optimizer.step()
        {last}
main({arguments})
"""


def loop(**parts: str) -> str:
    empty = {"parameters": "", "arguments": "", "first": "pass", "last": "pass"}
    return "history = []" + LOOP.format(**{**empty, **parts})


@pytest.mark.parametrize(
    "parts",
    [
        {"first": "best = 5", "last": "best = best + 1"},
        {"last": "best = step"},
        {"parameters": "best", "arguments": "best"},
        {"parameters": "history", "arguments": "list(history)"},
    ],
    ids=str,
)
def test_a_training_loop_with_a_local_variable_of_a_carried_name_is_refused(parts: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"but main\(\), in which the training loop runs, has a local variable"):
        execute(loop(**parts))


@pytest.mark.parametrize(
    ("folder", "refused"),
    [(".", True), ("engines", True), ("venv/site-packages", False), ("lib/python3.11", False), ("../other", False)],
)
def test_a_loop_in_another_module_of_the_script_with_such_a_local_variable_is_refused(
    folder: str, refused: bool, tmp_path: Path
) -> None:
    engine: dict[str, Any] = {"__name__": "engine"}
    path = (tmp_path / "scripts" / folder).resolve() / "engine.py"
    exec(compile("def fit(steps, best=0):\n    for _ in steps:\n        best += 1", path, "exec"), engine)
    module = execute(f"__file__ = {str(tmp_path / 'scripts' / 'train.py')!r}\nelastic.prepare(optimizer, carry='best')")
    if refused:
        with pytest.raises(InputError, match=r"but fit\(\), in which the training loop runs, has a local variable"):
            engine["fit"](elastic.steps(1))
    else:
        with pytest.raises(InputError, match=r"optimizer.step\(\) must be called in each"):
            engine["fit"](elastic.steps(1))
    assert module["best"] == 0.0


def test_a_loop_in_a_module_that_is_found_by_another_path_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    engine: dict[str, Any] = {"__name__": "engine"}
    text = "def fit(steps):\n    best = 0\n    for _ in steps:\n        best += 1"
    exec(compile(text, tmp_path / "real" / "engine.py", "exec"), engine)
    execute(f"__file__ = {str(tmp_path / 'link' / 'train.py')!r}\nelastic.prepare(optimizer, carry='best')")
    with pytest.raises(InputError, match=r"but fit\(\), in which the training loop runs, has a local variable"):
        engine["fit"](elastic.steps(1))


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("best = 0.0\ndef fit(steps):\n    global best\n    for _ in steps:\n        best += 1", True),
        ("best = []\ndef fit(steps):\n    for _ in steps:\n        best.append(1)", True),
        ("best = 0.0\ndef fit(steps):\n    for _ in steps:\n        print(best)", False),
        ("best = []\ndef fit(steps):\n    for _ in steps:\n        pass", False),
    ],
)
def test_a_loop_in_another_module_that_changes_its_own_variable_of_the_name_is_refused(
    text: str, refused: bool, tmp_path: Path
) -> None:
    engine: dict[str, Any] = {"__name__": "engine"}
    exec(compile(text, tmp_path / "engine.py", "exec"), engine)
    execute(f"__file__ = {str(tmp_path / 'train.py')!r}\nelastic.prepare(optimizer, carry='best')")
    message = "uses that of the module engine, which would be lost" if refused else "must be called in each"
    with pytest.raises(InputError, match=message):
        engine["fit"](elastic.steps(1))


@pytest.mark.parametrize(
    "parts",
    [
        {"first": "global best", "last": "best += 1; history.append(best)"},
        {
            "parameters": "history",
            "arguments": "history",
            "last": "history.append(step + 1.0); globals().update(best=best + 1)",
        },
    ],
    ids=str,
)
def test_a_training_loop_that_changes_the_variables_of_the_module_runs(parts: dict[str, str]) -> None:
    module = execute(loop(**parts))
    assert (module["best"], module["history"]) == (3.0, [1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("globals().update(best=torch.ones(()))", "`best`, which `carry` names, must be a number"),
        ("globals().pop('best')", "`best`, which `carry` names, was deleted"),
        ("globals().update(best=history)", "`history`, .* is or holds a list that is also in `best`"),
    ],
)
def test_a_value_that_cannot_be_sent_ends_a_training_by_hand_too(last: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        execute(loop(last=last))


# Snapshots.


class _KilledError(Exception):
    pass


best = 0.0
history: dict[str, list[int]] = {"steps": []}


def train(folder: Path | None, dies_at: int | None = None, carry: Any = ("best", "history")) -> list[int]:
    """Train for three epochs of five steps, as a script that is started anew; what `history` lists then."""
    global best
    run = elastic.init(snapshots=folder, snapshot_every_s=1e-6, device="cpu")
    best, history["steps"] = 0.0, []
    steps = history["steps"]
    x = torch.ones(40, 3)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(x), batch_size=8)
    model, optimizer, loader = run.prepare(model, optimizer, loader, carry=carry)
    for _epoch in run.epochs(3):
        for (inputs,) in loader:
            if run.progress.step == dies_at:
                run._member.state.save()
                raise _KilledError
            model(inputs).mean().backward()
            optimizer.step()
            best += 0.5
            steps.append(run.progress.step)
    run.finish()
    assert elastic.is_main()
    return history["steps"]


def test_a_snapshot_resumes_the_variables(tmp_path: Path) -> None:
    with pytest.raises(_KilledError):
        train(tmp_path, dies_at=8)
    assert elastic.load_snapshot(tmp_path)[CARRIED] == {"best": 4.0, "history": {"steps": list(range(1, 9))}}
    assert train(tmp_path) == list(range(1, 16))
    assert best == 7.5


@pytest.mark.parametrize(("carry", "message"), [("best", "this script carries best"), ((), "holds bftrainer_carry")])
def test_a_snapshot_with_other_names_is_refused(carry: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(_KilledError):
        train(tmp_path, dies_at=3)
    with pytest.raises(BFTrainerError, match=message):
        train(tmp_path, carry=carry)


# The main rank.


def test_the_main_rank_is_known_after_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_run", None)
    with pytest.raises(InputError, match=r"call elastic.prepare\("):
        elastic.is_main()
    run = elastic.init(device="cpu")
    answers: list[Callable[[], bool]] = [elastic.is_main, lambda: run.is_main]
    assert [answer() for answer in answers] == [True, True]
    monkeypatch.setattr(type(run), "rank", 1)
    assert [answer() for answer in answers] == [False, False]
