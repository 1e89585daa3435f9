"""Edits: changes apply to the lines they name, in any text that Python accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bftrainer.explain import explain
from bftrainer.explain.edits import Edits, add_import, apply_changes
from bftrainer.explain.reading.source import read_source
from bftrainer.explain.report import LineChange
from support.explained import after, explain_text


def test_inserted_replaced_and_removed_lines_are_applied_by_their_numbers() -> None:
    changes = [
        LineChange("f", 1, None, "zero"),
        LineChange("f", 2, "two", "TWO"),
        LineChange("f", 3, "three", None),
        LineChange("f", 4, None, "five"),
    ]
    assert apply_changes(["one", "two", "three"], changes) == ["zero", "one", "TWO", "five"]


def test_several_edits_of_one_line_do_not_disturb_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = f(1) + g(2)\n")
    file, edits = read_source(tmp_path / "a.py", "a.py"), Edits()
    edits.replace(file, 1, 4, 5, "first")
    edits.replace(file, 1, 11, 12, "second")
    assert edits.changes() == (LineChange("a.py", 1, "x = f(1) + g(2)", "x = first(1) + second(2)"),)


def test_changes_that_break_a_file_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    file, edits = read_source(tmp_path / "a.py", "a.py"), Edits()
    edits.replace(file, 1, 2, 3, "(")
    assert edits.changes() == ()
    assert edits.diff() == ""
    assert edits.left_out() == ["a.py"]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("import a\nimport b\nx = 1\n", 3),
        ('"""Doc."""\n\nfrom __future__ import annotations\n\nx = 1\n', 4),
        ('"""Doc."""\nx = 1\n', 2),
        ("from a import (\n    b,\n    c,\n)\nx = 1\n", 5),
        ("@decorated\ndef f():\n    import a\n", 1),
        ("import a\ndef f(): pass\nimport b\n", 2),
        ("", 2),
    ],
)
def test_an_import_goes_after_the_imports_at_the_top(tmp_path: Path, text: str, at: int) -> None:
    (tmp_path / "a.py").write_text(text)
    file, edits = read_source(tmp_path / "a.py", "a.py"), Edits()
    add_import(edits, file, "import new")
    add_import(edits, file, "import new")
    assert edits.changes() == (LineChange("a.py", at, None, "import new"),)


LOOP = """\
import torch
from torch.utils.data import DataLoader
größe = 3; modèle = torch.nn.Linear(1, 1); optimizer = torch.optim.SGD(modèle.parameters(), lr=0.1)
loader = DataLoader(data)
if True:
\tfor é in tqdm(range(größe), desc="épochs é"):
\t\tfor x in loader:
\t\t\tmodèle(x).mean().backward()
\t\t\toptimizer.step()
"""


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_other_letters_tabs_and_line_ends_are_kept(tmp_path: Path, newline: str) -> None:
    (tmp_path / "train.py").write_bytes(LOOP.replace("\n", newline).encode())
    explanation = explain(["train.py"], tmp_path)
    lines = after(explanation, tmp_path)["train.py"]
    assert lines[6] == "\tmodèle, optimizer, loader = elastic.prepare(modèle, optimizer, loader)"
    assert lines[7] == '\tfor é in tqdm(elastic.epochs(größe), desc="épochs é"):'


def test_another_encoding_is_read_as_python_reads_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(b"# -*- coding: latin-1 -*-\n" + LOOP.encode("latin-1"))
    assert explain(["train.py"], tmp_path).way == "prepare"


def test_the_diff_is_that_of_the_changes(tmp_path: Path) -> None:
    explanation = explain_text(tmp_path, LOOP)
    added = [line[1:] for line in explanation.diff.split("\n") if line.startswith("+") and not line.startswith("+++")]
    assert added == [change.after for change in explanation.changes]
