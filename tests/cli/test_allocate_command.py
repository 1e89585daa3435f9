from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cli.main import run

PROBLEM: dict[str, Any] = {
    "pool": 100,
    "horizon_s": 120,
    "trainers": [
        {"name": "a", "current": 4, "min": 1, "max": 64, "nodes": [0, 1, 2, 4, 64], "values": [0, 10, 19, 35, 300.5],
         "up_s": 18, "down_s": 12},
        {"name": "b", "current": 40, "min": 2, "max": 64, "nodes": [1, 64], "values": [9, 500],
         "up_s": 18, "down_s": 12, "owner": "bob"},
    ],
}  # fmt: skip


def call(tmp_path: Path, capsys: pytest.CaptureFixture[str], problem: object, *options: str) -> tuple[int, str, str]:
    path = tmp_path / "p.json"
    path.write_text(problem if isinstance(problem, str) else json.dumps(problem))
    sys.argv = ["bftrainer", "allocate", str(path), *options]
    status = run(sys.argv[1:])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("allocator", ["exact", "milp", "milp-nodes", "equal"])
def test_the_answer_has_the_keys_others_rely_on(allocator: str, tmp_path: Path, capsys) -> None:
    status, out, _ = call(tmp_path, capsys, PROBLEM, "--json", "--allocator", allocator)
    answer = json.loads(out)
    assert status == 0
    assert {"status", "objective", "solve_ms", "counts"} <= answer.keys()
    assert set(answer["counts"]) == {"a", "b"}
    assert sum(answer["counts"].values()) <= 100
    assert answer["status"] == ("heuristic" if allocator == "equal" else "optimal")


def test_all_optimal_allocators_agree(tmp_path: Path, capsys) -> None:
    objectives = {
        json.loads(call(tmp_path, capsys, PROBLEM, "--json", "--allocator", a)[1])["objective"]
        for a in ("exact", "milp", "milp-nodes")
    }
    assert max(objectives) == pytest.approx(min(objectives), rel=1e-9)


def test_the_table_shows_every_trainer(tmp_path: Path, capsys) -> None:
    status, out, _ = call(tmp_path, capsys, PROBLEM)
    assert status == 0
    assert "optimal: 100 of 100 nodes used" in out


def test_limits_are_read(tmp_path: Path, capsys) -> None:
    problem = {**PROBLEM, "limits": {"owner_caps": {"bob": 10}, "owner_shares": {"": 5}, "exclusive": []}}
    status, out, _ = call(tmp_path, capsys, problem, "--json", "--allocator", "milp")
    assert status == 0
    assert json.loads(out)["counts"]["b"] <= 10


def with_trainer(**fields: object) -> dict[str, Any]:
    problem = copy.deepcopy(PROBLEM)
    problem["trainers"][0].update(fields)
    return problem


def without(key: str) -> dict[str, Any]:
    problem = copy.deepcopy(PROBLEM)
    del problem["trainers"][0][key]
    return problem


MISTAKES: dict[str, tuple[object, str]] = {
    "negative horizon": ({**PROBLEM, "horizon_s": -1}, "horizon_s must be a number of seconds above 0, but got -1"),
    "zero horizon": ({**PROBLEM, "horizon_s": 0}, "horizon_s must be"),
    "a billion nodes": ({**PROBLEM, "pool": 10**9}, "pool must be from 0 to 1000000 nodes"),
    "negative pool": ({**PROBLEM, "pool": -1}, "pool must be"),
    "half a node": ({**PROBLEM, "pool": 1.5}, "pool must be a whole number, but got 1.5"),
    "pool as text": ({**PROBLEM, "pool": "ten"}, "pool must be a whole number"),
    "values shorter than nodes": (with_trainer(values=[0, 1]), "trainer 'a': must have as many values as nodes"),
    "duplicate names": (with_trainer(name="b"), "trainer 'b' is named twice"),
    "NaN": (json.dumps(with_trainer(up_s=float("nan"))), "NaN is not a number"),
    "NaN value": (json.dumps(with_trainer(values=[0, 1, 2, float("nan"), 4])), "NaN is not a number"),
    "infinite": ('{"pool": 5, "horizon_s": 1e999, "trainers": []}', "horizon_s must be a finite number"),
    "min above max": (with_trainer(min=65), "trainer 'a': max must be at least min (65), but got 64"),
    "min 0": (with_trainer(min=0), "trainer 'a': min_nodes must be 1 or more"),
    "negative value": (with_trainer(values=[0, 1, 2, -3, 4]), "trainer 'a': values must be finite numbers, 0 or more"),
    "falling nodes": (with_trainer(nodes=[0, 1, 4, 2, 64]), "trainer 'a': nodes must rise"),
    "negative cost": (with_trainer(down_s=-5), "trainer 'a': down_s must be"),
    "value at 0": (with_trainer(values=[7, 10, 19, 35, 300]), "trainer 'a': the value at 0 nodes must be 0"),
    "negative current": (with_trainer(current=-2), "trainer 'a': current must be"),
    "huge current": (with_trainer(current=10**12), "trainer 'a': current must be"),
    "missing field": (without("up_s"), "trainer 1: up_s is missing"),
    "unknown field": (with_trainer(foo=1), "trainer 1: key must be one of"),
    "values no list": (with_trainer(values=7), "trainer 'a': values must be a list of numbers"),
    "name no text": (with_trainer(name=7), "trainer 1: name must be a text"),
    "true is no number": (with_trainer(current=True), "trainer 'a': current must be a whole number, but got True"),
    "trainers no list": ({**PROBLEM, "trainers": {}}, "trainers must be a list"),
    "a trainer no object": ({**PROBLEM, "trainers": [1]}, "trainer 1 must be a JSON object"),
    "no pool": ({"horizon_s": 1, "trainers": []}, "the problem: pool is missing"),
    "not an object": ([1, 2], "the problem must be a JSON object"),
    "not JSON": ("{pool: 5", "not JSON"),
    "empty": ("", "not JSON"),
    "nested": ("[" * 100_000, "not JSON"),
    "bad caps": ({**PROBLEM, "limits": {"owner_caps": {"x": -1}}}, "the cap of owner 'x' must be 0 nodes or more"),
    "bad groups": ({**PROBLEM, "limits": {"exclusive": ["ab"]}}, "exclusive must be a list of lists"),
    "stranger in a group": ({**PROBLEM, "limits": {"exclusive": [["a", "z"]]}}, "names trainer 'z'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_malformed_problem_gives_one_line_and_exit_status_2(mistake: str, tmp_path: Path, capsys) -> None:
    problem, message = MISTAKES[mistake]
    status, out, err = call(tmp_path, capsys, problem)
    assert (status, out) == (2, "")
    assert err.startswith(f"bftrainer: {tmp_path / 'p.json'}: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--allocator", "guess"], "allocator must be one of"),
        (["--allocator", "milp", "--backend", "abacus"], "backend must be one of highs, gurobi"),
        (["--allocator", "milp", "--time-limit", "-1"], "--time-limit"),
    ],
)
def test_a_wrong_call_gives_one_line_and_exit_status_2(
    options: list[str], message: str, tmp_path: Path, capsys
) -> None:
    status, _, err = call(tmp_path, capsys, PROBLEM, *options)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_binary_noise_is_no_problem_file(tmp_path: Path, capsys) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(bytes(range(256)))
    assert run(["allocate", str(path)]) == 2
    assert "not UTF-8" in capsys.readouterr().err
