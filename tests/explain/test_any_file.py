"""Any file: an explanation never fails on what Python accepts, and its changes are valid Python."""

from __future__ import annotations

import ast
import shutil
import sysconfig
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bftrainer.errors import InputError
from bftrainer.explain import Explanation, explain
from bftrainer.explain.text import as_text
from support.examples import examples
from support.explained import SCRIPTS, after

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
FILES = sorted(path for folder in (LIBRARY, LIBRARY / "asyncio", LIBRARY / "email") for path in folder.glob("*.py"))


def readable(explanation: Explanation) -> Explanation:
    """The explanation, which has a way, a text and a JSON form."""
    assert as_text(explanation)
    assert explanation.as_json()["way"] == explanation.way
    return explanation


@pytest.mark.parametrize("path", FILES[:: max(1, len(FILES) // 50)], ids=lambda path: path.name)
def test_a_file_of_the_standard_library_has_no_way(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path)
    explanation = readable(explain([path.name], tmp_path))
    assert explanation.changes == ()
    assert explanation.way == "none"


def test_a_file_is_read_with_the_modules_beside_it() -> None:
    assert readable(explain(["argparse.py"], LIBRARY)).way == "none"


@st.composite
def scripts(draw: st.DrawFn) -> str:
    """Scripts that are put together from others, with some of their statements missing."""
    names = sorted(path.name for path in SCRIPTS.glob("*.py"))
    statements = []
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        body = ast.parse((SCRIPTS / name).read_text()).body
        dropped = draw(st.sets(st.sampled_from(range(len(body))), max_size=4))
        statements += [statement for index, statement in enumerate(body) if index not in dropped]
    text = ast.unparse(ast.Module(statements, []))
    header = draw(st.sampled_from(["", "def main():", "while True:", "class Main:\n    def run(self):"]))
    if not header or not statements:
        return text
    return f"{header}\n{textwrap.indent(text, '        ' if 'class' in header else '    ')}\n"


@settings(max_examples=examples(deep=500, usual=60))
@given(scripts())
def test_changes_of_any_script_are_valid_python(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(text)
        try:
            ast.parse(text)
        except SyntaxError:  # of a text in triple quotes that was indented, or an import from the future
            return
        explanation = readable(explain(["train.py"], Path(folder)))
        after(explanation, Path(folder))
        assert not [one for one in explanation.warnings if "valid Python" in one.what]


def test_long_and_deep_files_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    chains = {
        "elif": "if a:\n    pass\n" + "elif b:\n    x = y\n" * 3000,
        "plus": "loss = " + " + ".join(["x"] * 3000) + "\n",
        "names": "".join(f"a{i} = a{i + 1}\n" for i in range(3000))
        + "for x in a0:\n    a0.backward()\n    a0.step()\n",
        "calls": "".join(f"def f{i}():\n    f{i + 1}().step()\n    x.backward()\n" for i in range(400))
        + "while f0():\n    f0()\n",
    }
    for name, text in chains.items():
        (tmp_path / f"{name}.py").write_text(text)
        assert refusal(f"{name}.py", tmp_path) in ("", f"{name}.py: is nested too deeply to be read")


def refusal(name: str, folder: Path) -> str:
    """Why a script cannot be read; empty if it can be."""
    try:
        readable(explain([name], folder))
    except InputError as problem:
        return str(problem)
    return ""
