"""Carried values: which variables a node that joins later would have to know."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.explained import explain_text

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
    """The names of the carried values, each with what is said about it."""
    text = SCRIPT.format(before=before, body=body.replace("\n", "\n    "), later=later)
    warnings = explain_text(folder, text).warnings
    return {one.what.split("`")[1]: one.remedy for one in warnings if "does not know it" in one.what}


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


def test_the_remedy_is_the_line_to_write_with_the_lines_of_its_uses(tmp_path: Path) -> None:
    remedy = carried(tmp_path, "best = float('inf')", "if total < best:\n    best = total")["best"]
    assert "`best = elastic.Value(float('inf'))`" in remedy
    assert "`best.value` in lines 15, 16" in remedy


def test_a_value_that_is_one_already_is_not_told_again(tmp_path: Path) -> None:
    assert carried(tmp_path, "best = elastic.Value(0.0)", "best.value = max(best.value, total)") == {}
