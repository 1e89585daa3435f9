"""Carried values: which variables a node that joins later would have to know."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bftrainer.explain import Explanation
from support.explained import after, explain_text

SCRIPT = """\
import copy, time, torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data)
{before}
for epoch in range(9):
    total = 0.0
    for x in loader:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        total += loss.item()
    {body}
{later}
"""


def carried(folder: Path, before: str, body: str, later: str = "") -> dict[str, str]:
    """The names of the carried values, each with what is said about it: nothing if the changed lines carry it."""
    explanation = explain_text(folder, script(before, body, later))
    return {**dict.fromkeys(in_prepare(explanation, folder), ""), **told(explanation)}


def script(before: str, body: str, later: str = "") -> str:
    return SCRIPT.format(before=before, body=body.replace("\n", "\n    "), later=later)


def told(explanation: Explanation) -> dict[str, str]:
    """The remedies of the notices about carried values."""
    return {one.what.split("`")[1]: one.remedy for one in explanation.warnings if "does not know it" in one.what}


def in_prepare(explanation: Explanation, folder: Path) -> list[str]:
    """The names in `carry=` of the changed script."""
    text = "\n".join(after(explanation, folder).get("train.py", []))
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    given = [ast.literal_eval(word.value) for call in calls for word in call.keywords if word.arg == "carry"]
    return [name for names in given for name in ([names] if isinstance(names, str) else names)]


@pytest.mark.parametrize(
    ("before", "body", "names"),
    [
        ("best = 0.0", "if total > best:\n    best = total", {"best"}),
        ("best = 0.0", "best = max(best, total)", {"best"}),
        (
            "best, bad = None, 0",
            "if best is None or total < best:\n    best, bad = total, 0\nelse:\n    bad += 1",
            {"best", "bad"},
        ),
        ("steps = 0", "steps += 1", {"steps"}),
        ("losses = []", "losses.append(total)", {"losses"}),
        ("seen = dict(a=[])", "seen['a'].append(total)", {"seen"}),
        ("last = float('inf')", "print(total - last)\nlast = total", {"last"}),
        ("done = False", "if total < 1:\n    done = True\nif done:\n    break", {"done"}),
    ],
)
def test_values_that_are_read_before_they_are_set_are_carried(
    tmp_path: Path, before: str, body: str, names: set[str]
) -> None:
    assert set(carried(tmp_path, before, body)) == names


@pytest.mark.parametrize(
    ("before", "body"),
    [
        ("mean = 0.0", "mean = total / 10\nprint(mean)"),  # set in every epoch before it is read
        ("start = time.time()", "print(time.time() - start)\nstart = time.time()"),
        ("limit = 3.0", "if total < limit:\n    break"),  # never changes
        ("batch = next(iter(loader))", "print(batch)\nbatch = next(iter(loader))"),
        ("total = 0", "print([total for total in range(3)])"),
        ("best = 0.0", "try:\n    best = f()\nexcept ValueError:\n    continue\nprint(best)"),
        ("best = 0.0", "with open('x') as f:\n    best = f.read()\nprint(best)"),
    ],
)
def test_other_values_are_not(tmp_path: Path, before: str, body: str) -> None:
    assert carried(tmp_path, before, body) == {}


def test_a_value_that_is_only_sometimes_set_and_read_after_the_loop_is_carried(tmp_path: Path) -> None:
    body = "if total < 1:\n    best_epoch = epoch"
    assert set(carried(tmp_path, "best_epoch = 0", body, "print(best_epoch)")) == {"best_epoch"}
    assert carried(tmp_path, "best_epoch = 0", body) == {}


def test_weights_do_not_fit_into_a_value(tmp_path: Path) -> None:
    body = "if total < 1:\n    best = copy.deepcopy(model.state_dict())"
    assert "torch.save" in carried(tmp_path, "best = None", body, "model.load_state_dict(best)")["best"]


EVALUATED = "score = evaluate(model)\n"


@pytest.mark.parametrize(
    ("before", "body", "names"),
    [
        ("best = 0.0", EVALUATED + "best = max(best, score)", ["best"]),
        (
            "best, bad = None, 0",
            EVALUATED + "if best is None or score < best:\n    best, bad = score, 0\nelse:\n    bad += 1",
            ["best", "bad"],
        ),
        ("history = {'val': []}", EVALUATED + "history['val'].append(score)", ["history"]),
        ("best = 0.0", "right = 0\nfor x in val_loader:\n    right += f(x)\nbest = max(best, right)", ["best"]),
        ("best = 0.0", "score = sum(f(x).item() for x in val_loader)\nbest = max(best, score)", ["best"]),
    ],
)
def test_a_variable_of_the_module_goes_into_the_prepare_line(
    tmp_path: Path, before: str, body: str, names: list[str]
) -> None:
    explanation = explain_text(tmp_path, script(before, body))
    assert in_prepare(explanation, tmp_path) == names
    assert told(explanation) == {}


@pytest.mark.parametrize(
    ("before", "body"),
    [
        ("best = 0.0", "best = max(best, total)"),
        ("best = 0.0", "if total > 3:\n    best = best + 1"),
        ("best = 0.0", "match total > 3:\n    case True:\n        best = best + 1"),
        ("best = 0.0", "match 3:\n    case 3:\n        best = best + total"),
        ("losses = []", "losses.append(loss.item())"),
        ("losses = []", "mean = total / 9\nlosses.append(mean)"),
        ("rate, t0 = 0.0, time.time()", "t1 = time.time()\nrate = 0.9 * rate + 0.1 * (t1 - t0)\nt0 = t1"),
    ],
)
def test_what_may_differ_by_rank_is_told_and_not_carried(tmp_path: Path, before: str, body: str) -> None:
    explanation = explain_text(tmp_path, script(before, body))
    assert in_prepare(explanation, tmp_path) == []
    (remedy,) = told(explanation).values()
    assert "it seems to differ by rank" in remedy
    assert '`carry="' in remedy


FUNCTION = """\
import torch
from torch.utils.data import DataLoader

{made}
best = 0.0


def train_epoch(model, loader, optimizer):
    total = 0.0
    for x in loader:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total


def main():
    {first}
    for epoch in range(9):
        score = {score}
        if score > best:
            best = score


main()
"""
MADE = (
    "model = torch.nn.Linear(1, 1)",
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    "loader = DataLoader(data)",
)


@pytest.mark.parametrize("inside", [True, False], ids=["made in main", "made in the module"])
def test_a_global_variable_of_a_function_is_carried(inside: bool, tmp_path: Path) -> None:
    first = "\n    ".join(["global best", *(MADE if inside else ())])
    score = "evaluate()\n        train_epoch(model, loader, optimizer)"
    text = FUNCTION.format(made="" if inside else "\n".join(MADE), first=first, score=score)
    explanation = explain_text(tmp_path, text)
    assert in_prepare(explanation, tmp_path) == ["best"]
    lines = after(explanation, tmp_path)["train.py"]
    (prepared,) = (number for number, line in enumerate(lines) if "elastic.prepare(" in line)
    assert lines.index("best = 0.0") < prepared


def test_what_a_function_that_trains_returns_differs_by_rank(tmp_path: Path) -> None:
    first = "\n    ".join(["global best", *MADE])
    text = FUNCTION.format(made="", first=first, score="train_epoch(model, loader, optimizer)")
    explanation = explain_text(tmp_path, text)
    assert in_prepare(explanation, tmp_path) == []
    assert "it seems to differ by rank" in told(explanation)["best"]


def test_a_local_variable_of_a_function_becomes_a_value(tmp_path: Path) -> None:
    first = "\n    ".join(["best = 1.5", *MADE])
    text = FUNCTION.format(made="", first=first, score="train_epoch(model, loader, optimizer)")
    explanation = explain_text(tmp_path, text)
    assert in_prepare(explanation, tmp_path) == []
    remedy = told(explanation)["best"]
    assert "`best = elastic.Value(1.5)`" in remedy
    assert "`best.value` in lines 25, 26" in remedy


def test_a_set_is_not_carried(tmp_path: Path) -> None:
    explanation = explain_text(tmp_path, script("seen = set()", "seen.add(epoch)\nprint(seen)"))
    assert in_prepare(explanation, tmp_path) == []
    assert "use a list or a dict" in told(explanation)["seen"]


@pytest.mark.parametrize(
    ("given", "remedies"),
    [
        ("", {"best": 'give `carry="best"` to elastic.prepare: the variable stays as it is'}),
        (', carry="best"', {}),
        (', carry=("other", "best")', {}),
    ],
)
def test_an_elastic_script_is_told_of_a_name_that_is_missing(
    given: str, remedies: dict[str, str], tmp_path: Path
) -> None:
    prepared = f"model, optimizer, loader = elastic.prepare(model, optimizer, loader{given})"
    text = script(f"best = 0.0\n{prepared}", EVALUATED + "best = max(best, score)")
    assert told(explain_text(tmp_path, "from bftrainer import elastic\n" + text)) == remedies


def test_a_value_that_is_one_already_is_not_told_again(tmp_path: Path) -> None:
    assert carried(tmp_path, "best = elastic.Value(0.0)", "best.value = max(best.value, total)") == {}


IN_FUNCTION = """\
def update(score):
    global best
    best = max(best, score)
"""


@pytest.mark.parametrize(
    ("before", "call", "names"),
    [
        (f"best = 0.0\n{IN_FUNCTION}", "update(total)", {"best"}),
        ("history = []\ndef record(v):\n    history.append(v)", "record(total)", {"history"}),
        (
            "seen = {}\ndef note(e, v):\n    inner(e, v)\ndef inner(e, v):\n    seen[e] = v",
            "note(epoch, total)",
            {"seen"},
        ),
        ("history = []\ndef record(history, v):\n    history.append(v)", "record([], total)", set()),  # its own
        ("history = []\ndef record(v):\n    history = []\n    history.append(v)", "record(total)", set()),
        (f"best = 0.0\n{IN_FUNCTION}", "print(total)", set()),  # is not called
        ("tic = 0.0\ndef start():\n    global tic\n    tic = time.time()", "start()\nprint(tic)", set()),
    ],
)
def test_what_functions_change_is_told(tmp_path: Path, before: str, call: str, names: set[str]) -> None:
    explanation = explain_text(tmp_path, script(before, call))
    assert in_prepare(explanation, tmp_path) == []
    remedies = told(explanation)
    assert set(remedies) == names
    assert all(f'`carry="{name}"`' in remedies[name] and "()." in remedies[name] for name in names)


def test_what_a_nested_function_changes_of_the_function_around_it_becomes_a_value(tmp_path: Path) -> None:
    body = "def update(v):\n    nonlocal best\n    best = max(best, v)\nfor epoch in range(3):\n    for x in loader:\n"
    body += "        model(x).mean().backward()\n        optimizer.step()\n    update(evaluate(model))"
    text = (
        SCRIPT.partition("{before}")[0]
        + "def main():\n    best = 0.0\n    "
        + body.replace("\n", "\n    ")
        + "\nmain()\n"
    )
    assert "`best = elastic.Value(0.0)`" in told(explain_text(tmp_path, text))["best"]


@pytest.mark.parametrize(
    ("before", "body", "remedy"),
    [
        ("best, weights = 0.0, None", "weights = copy.deepcopy(model.state_dict())\nif weights:\n    f(weights)", ""),
        ("weights = None", "if weights is None:\n    weights = copy.deepcopy(model.state_dict())", "torch.save"),
        ("best = torch.tensor(9.0)", "best = torch.minimum(best, f())", "plain number"),
        ("best = 9.0", "if f() < best:\n    best = f().detach()", "plain number"),
        ("ema = np.zeros(3)", "ema += f()", "plain number"),
        ("last = deque(maxlen=3)", "last.append(f())", "a list or a dict"),
    ],
)
def test_what_a_joining_node_cannot_receive_is_told_and_not_carried(
    tmp_path: Path, before: str, body: str, remedy: str
) -> None:
    explanation = explain_text(tmp_path, script(before, body))
    assert in_prepare(explanation, tmp_path) == []
    remedies = list(told(explanation).values())
    assert remedies == [] if not remedy else remedy in remedies[0]


def test_numbers_of_numpy_and_torch_are_carried(tmp_path: Path) -> None:
    for change in ("np.minimum(best, f())", "min(best, torch.mean(f()).item())", "float(torch.ones(1))"):
        explanation = explain_text(tmp_path, script("best = 9.0", f"if best > 1:\n    best = {change}"))
        assert in_prepare(explanation, tmp_path) == ["best"]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("v = f()\nif epoch == 0 or v < best:\n    best = v", {"best"}),
        ("if epoch == 0:\n    first = f()\nprint(first)", {"first"}),
        ("for x in loader:\n    last = f(x)\nprint(last)", set()),  # in every epoch
        ("v = f()\nif v < 1:\n    best = v\nelse:\n    best = 2\nprint(best)", set()),
    ],
)
def test_a_value_that_only_an_early_epoch_sets_is_told(tmp_path: Path, body: str, names: set[str]) -> None:
    explanation = explain_text(tmp_path, script("", body))
    found = {one.what.split("`")[1] for one in explanation.warnings if "from an early pass" in one.what}
    assert found == names
    assert in_prepare(explanation, tmp_path) == []


@pytest.mark.parametrize(
    ("before", "body", "names"),
    [
        ("s = SimpleNamespace(best=9.0)", "if total < s.best:\n    s.best = total", {"s.best"}),
        ("class S:\n    best = 9.0", "S.best = min(S.best, total)", {"S.best"}),
        ("import cfg", "cfg.steps += 1", {"cfg.steps"}),
        ("s = SimpleNamespace(best=elastic.Value(9.0))", "s.best.value = min(s.best.value, total)", set()),
        ("s = SimpleNamespace(last=9.0)", "s.last = total", set()),  # nobody reads it
        ("", "s = SimpleNamespace(best=9.0)\ns.best += total", set()),  # made in each epoch
        ("", "for p in model.parameters():\n    p.grad = p.grad * 2", set()),
        ("t = SimpleNamespace(start=0)", "t.start = time.time()\nprint(t.start)", set()),
        ("from cfg import best, hist", "if total < best:\n    best = total\nhist.append(total)", {"best", "hist"}),
        ("from cfg import best\nbest = 0.0", "best = 1.0\nprint(best)", set()),
    ],
)
def test_what_is_kept_in_objects_and_in_other_modules_is_told(
    tmp_path: Path, before: str, body: str, names: set[str]
) -> None:
    explanation = explain_text(tmp_path, script(before, body))
    assert set(told(explanation)) == names
    assert in_prepare(explanation, tmp_path) == []
