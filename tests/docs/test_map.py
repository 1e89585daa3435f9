"""CONTRIBUTING.md leads through the code by names that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "bftrainer"
MAP = re.search(r"<!-- map: begin -->(.*)<!-- map: end -->", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
STATIONS = re.findall(r"^\d+\. `([\w.]+)`", MAP[1], re.MULTILINE) if MAP else []


def defines(body: list[ast.stmt], names: list[str]) -> bool:
    """Whether classes and functions of these names lie one in the other."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[0]:
            return len(names) == 1 or defines(node.body, names[1:])
    return False


@pytest.mark.parametrize("station", sorted(set(STATIONS)))
def test_a_name_on_the_map_exists(station: str) -> None:
    parts = station.split(".")
    for length in range(len(parts) - 1, 0, -1):
        path = SOURCE.joinpath(*parts[:length])
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if file.is_file():
            assert defines(ast.parse(file.read_text()).body, parts[length:]), f"{file} has no {parts[length:]}"
            return
    pytest.fail(f"there is no module of {station}")


def test_an_idle_node_is_at_most_25_functions_from_its_first_step() -> None:
    assert MAP is not None
    first = MAP[1].split("**A gradient.**")[0]
    assert 0 < len(re.findall(r"^\d+\. `", first, re.MULTILINE)) <= 25
    assert "SlurmPool" in first
    assert "Run.step" in first
