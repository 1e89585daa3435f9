from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.cluster.spec.files import check_here, load_curve, load_spec, located
from bftrainer.cluster.spec.names import NAME, default_name
from bftrainer.cluster.spec.trainer import TrainerSpec, parse_spec
from bftrainer.errors import InputError
from bftrainer.util.suggest import unknown


def problem(given: Any) -> str:
    with pytest.raises(InputError) as caught:
        parse_spec(given, "job.toml")
    text = str(caught.value)
    assert text.startswith("job.toml: ")
    assert "\n" not in text
    assert "pydantic" not in text
    return text.removeprefix("job.toml: ")


@pytest.mark.parametrize(
    ("nodes", "least", "most"), [("1-8", 1, 8), (4, 4, 4), ("4", 4, 4), (" 2 - 16 ", 2, 16), ("8-8", 8, 8)]
)
def test_nodes_are_a_number_or_an_inclusive_range(nodes: Any, least: int, most: int) -> None:
    spec = parse_spec({"script": "train.py", "nodes": nodes})
    assert (spec.min_nodes, spec.max_nodes) == (least, most)


def test_least_and_most_nodes_can_be_given_apart() -> None:
    spec = parse_spec({"script": "train.py", "min_nodes": 2, "max_nodes": 6})
    assert (spec.min_nodes, spec.max_nodes) == (2, 6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scrpt": "a.py"}, "unknown key 'scrpt': did you mean 'script'?"),
        ({"script": "a.py", "max-nodes": 4}, "unknown key 'max-nodes': did you mean 'max_nodes'?"),
        ({}, "script is missing"),
        ({"script": "a.py", "min_nodes": 8, "max_nodes": 4}, "max_nodes must be at least min_nodes (8), but got 4"),
        ({"script": "a.py", "nodes": "8-1"}, "nodes must be a range from the least to the most, but got '8-1': 8 > 1"),
        ({"script": "a.py", "nodes": "a-b"}, "nodes must be a number of nodes or a range such as 1-8, but got 'a-b'"),
        ({"script": "a.py", "nodes": 0}, "nodes must be 1 or more and at most 100,000, but got 0"),
        ({"script": "a.py", "nodes": True}, "nodes must be a number of nodes or a range such as 1-8, but got True"),
        ({"script": "a.py", "nodes": 2, "max_nodes": 4}, "nodes and max_nodes set the same thing: give one of them"),
        ({"script": "a.py", "weight": 0}, "weight must be a number above 0, but got 0"),
        ({"script": "a.py", "weight": float("nan")}, "weight must be a number above 0, but got nan"),
        (
            {"script": "a.py", "launcher": "slurm"},
            "launcher must be one of elastic, ddp, torchrun, hosts, but got 'slurm'",
        ),
        ({"script": "a.py", "ranks": 0}, "ranks must be a whole number from 1 to 100,000, but got 0"),
        ({"script": "a.py", "ranks": 2, "launcher": "hosts"}, "ranks is for the launchers elastic and ddp"),
        ({"script": "a.py", "ranks": 2, "env": {"BFTRAINER_RANKS": "3"}}, "set the same thing"),
        ({"script": "a.py", "args": "--x"}, "args must be a list of texts, but got '--x'"),
        ({"script": "a.py", "args": ["a\0b"]}, "args must not hold NUL characters"),
        ({"script": "a.py", "env": {"BFTRAINER_SECRET": "x"}}, "BFTRAINER_SECRET is set by BFTrainer itself"),
        ({"script": "a.py", "env": {"A-B": "x"}}, "env: a name must be a letter or underscore"),
        ({"script": "a.py", "env": {"A": "x" * 100_001}}, "env must be at most 100,000 bytes in all, but is 100,004"),
        ({"script": "-m not a module"}, "script must be `-m` and the name of a module"),
        ({"script": "a.py", "name": "-x"}, "name must be 1 to 64 letters"),
        ({"script": "a\ud800.py"}, "script must be the path of a script"),
        *(
            (
                {"script": "a.py", "ranks_per_node": wrong},
                f"from 1 to 256, or gpu for one per GPU of the node, but got {wrong!r}",
            )
            for wrong in (0, 257, -1, "0", "two", "", "GPU", "1.5", 1.5, True, None, [2], "9" * 50)
        ),
        ({"script": "a.py", "env": {"BFTRAINER_LOCAL_RANK": "0"}}, "BFTRAINER_LOCAL_RANK is set by BFTrainer itself"),
        ({"script": "a.py", "work": 0}, "work must be a whole number of samples above 0, but got 0"),
        ({"script": "a.py", "curve": {"nodes": [1], "rate": [1]}}, "curve: unknown key 'rate': did you mean 'rates'?"),
        ({"script": "a.py", "curve": {"nodes": [2, 1], "rates": [1, 2]}}, "curve: nodes must rise"),
        ({"script": "a.py", "curve": {"nodes": [1, 2], "rates": [0, 2]}}, "the rate at min_nodes (1) must be above 0"),
        ("train.py", "a trainer must be a mapping"),
    ],
)
def test_whatever_is_wrong_is_one_clear_line(given: Any, said: str) -> None:
    assert said in problem(given)


@pytest.mark.parametrize(("given", "ranks"), [(1, 1), ("2", 2), (" 8 ", 8), (256, 256), ("gpu", "gpu")])
def test_ranks_per_node_are_a_number_also_as_text_or_gpu(given: Any, ranks: int | str) -> None:
    spec = parse_spec({"script": "a.py", "ranks_per_node": given})
    assert spec.ranks_per_node == ranks
    assert parse_spec(spec.as_json()) == spec
    assert spec.ranks_on(4) == (4 if ranks == "gpu" else ranks)


def test_a_controller_that_knows_no_ranks_takes_a_spec_that_names_none() -> None:
    assert "ranks_per_node" not in parse_spec({"script": "a.py", "ranks_per_node": "gpu"}).as_json()


def test_ranks_per_node_stand_in_files_of_both_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "defaults: {ranks_per_node: 4}\ntrainers:\n  - script: a.py\n  - {script: b.py, ranks_per_node: gpu}\n"
    )
    assert [spec.ranks_per_node for spec in load_spec(tmp_path / "a.yaml")] == [4, "gpu"]
    (tmp_path / "b.toml").write_text('script = "a.py"\nranks_per_node = 2\n')
    assert [spec.ranks_per_node for spec in load_spec(tmp_path / "b.toml")] == [2]


def test_a_spec_survives_its_way_to_the_controller_unchanged() -> None:
    spec = parse_spec(
        {
            "script": "-m pkg.train", "args": ["--lr", 1e-4, "ü"], "nodes": "2-4", "env": {"A": 1}, "weight": 2,
            "curve": {"nodes": [1, 2], "rates": [10, 19]}, "up_s": 0.5, "launcher": "torchrun",
        }
    )  # fmt: skip
    assert parse_spec(json.loads(json.dumps(spec.as_json()))) == spec
    assert spec.argv == ("-m", "pkg.train", "--lr", "0.0001", "ü")
    assert spec.env == {"A": "1"}
    curve = spec.prior_curve()
    assert curve is not None
    assert curve.rate(2) == 19


@given(st.text())
def test_a_name_made_of_a_script_is_always_a_good_one(script: str) -> None:
    assert NAME.fullmatch(default_name(script))
    assert TrainerSpec(script="x", name=default_name(script)).name == default_name(script)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("/a/train.py", "train"),
        ("-m pkg.fit", "fit"),
        ("-m pkg.__main__", "pkg"),
        ("été 2.py", "ete-2"),
        ("/", "trainer"),
    ],
)
def test_a_name_is_made_of_the_scripts(script: str, name: str) -> None:
    assert default_name(script) == name


_KEYS = st.text() | st.sampled_from(["script", "nodes", "env", "args", "curve", "rates"])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(_KEYS, inner),
)


@given(_JSON)
def test_any_json_is_a_spec_or_an_input_error(found: Any) -> None:
    try:
        said = repr(parse_spec(found))
    except InputError as told:
        said = str(told)
    assert "\n" not in said


def test_a_file_holds_one_trainer(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('script = "train.py"\nnodes = "1-8"\nargs = ["--epochs", 3]\n')
    (spec,) = load_spec(path)
    assert spec.script == str(tmp_path / "train.py")
    assert spec.cwd == str(tmp_path)
    assert spec.argv[1:] == ("--epochs", "3")


def test_a_file_holds_many_trainers_with_defaults(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "defaults: {script: train.py, nodes: 1-8, env: {A: no}}\n"
        "trainers:\n  - {name: a, args: [--lr, 1e-4]}\n  - {name: b, nodes: 4, env: {B: 010}}\n"
    )
    a, b = load_spec(path)
    assert a.args == ("--lr", "1e-4")  # as it is written
    assert (a.min_nodes, a.max_nodes, b.min_nodes, b.max_nodes) == (1, 8, 4, 4)
    assert b.env == {"A": "no", "B": "010"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("j.toml", 'script = "a.py"\nnodez = 4', "unknown key 'nodez': did you mean 'nodes'?"),
        ("j.yaml", "trainers:\n - {script: a.py}\n - {script: a.py, wieght: 2}", "trainer 2: unknown key 'wieght'"),
        (
            "j.yaml",
            "trainers:\n - {script: a.py, name: x}\n - {script: a.py, name: x}",
            "trainer 2: name must be unique",
        ),
        ("j.yaml", "defaults: {nam: x}\ntrainers: [{script: a}]", "defaults: unknown key 'nam'"),
        ("j.yaml", "nodes: 4\ntrainers: [{script: a}]", "'nodes' belongs into `defaults`"),
        ("j.yaml", "script: a\nscript: b", "a key occurs twice"),
        ("j.yaml", "script: [", ":1: must be YAML"),
        ("j.toml", "script =", "must be TOML"),
        ("j.toml", 'script = "a"\ncurve = "no.csv"', "no.csv: No such file"),
        ("j.yaml", "trainers: 3", "trainers must be a list"),
        ("j.yaml", "[" * 5000, "nested too deep"),
        ("j.json", "{}", "must end in .toml or .yaml"),
        ("j.toml", "\udcff", "must be UTF-8 text"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InputError) as caught:
        load_spec(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing.toml: No such file"):
        load_spec(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.csv", "nodes,samples_per_s\n1,100\n2,190\n"),
        ("c.json", '{"digits": {"nodes": [1, 2], "samples_per_s": [100, 190]}}'),
        ("c.json", '{"nodes": [1, 2], "rates": [100, 190]}'),
        ("c.json", '{"x": {"nodes": [1], "samples_per_s": [1]}, "m": {"nodes": [1, 2], "samples_per_s": [100, 190]}}'),
    ],
)
def test_a_curve_is_read_as_profile_writes_it(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    curve = load_curve(path, "m")
    assert curve.nodes == (0, 1, 2)
    assert curve.rates == (0, 100, 190)


def test_a_choice_among_curves_must_be_made(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"resnet": {"nodes": [1]}, "vgg": {"nodes": [1]}}')
    with pytest.raises(InputError, match="did you mean 'resnet'"):
        load_curve(path, "resnet18")


def here(folder: Path, **more: Any) -> TrainerSpec:
    return located(parse_spec({"script": "train.py", **more}), folder)


def test_what_only_the_submitting_machine_sees_is_checked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('\\d')\n")
    check_here(here(tmp_path, python=sys.executable))
    check_here(here(tmp_path, script="-m some.module"))
    for more, said in (
        ({"script": "trian.py"}, "trian.py: script must be a file, but there is nothing of that name: did you mean"),
        ({"script": "."}, "script must be a file, but it is a folder"),
        ({"cwd": "nowhere"}, "nowhere: cwd must be a folder, but there is nothing of that name"),
        ({"python": "no-such-python"}, "no-such-python: python must be an interpreter"),
        ({"python": "./train.py"}, "train.py: python must be an interpreter that can be run"),
        ({"script": "x" * 300}, "File name too long"),
    ):
        with pytest.raises(InputError, match=said):
            check_here(here(tmp_path, **more))


def test_a_script_with_a_syntax_error_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nfor x in\n")
    with pytest.raises(InputError, match=r"train.py:2: script must be Python, but invalid syntax"):
        check_here(here(tmp_path))


def test_an_interpreter_of_a_virtual_environment_keeps_its_path(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    assert here(tmp_path, python="./python").python == str(tmp_path / "python")


def test_a_word_that_is_near_none_is_answered_with_all() -> None:
    assert unknown("key", "zzz", ["a", "b"]) == "unknown key 'zzz': must be one of a, b"
