from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import random
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bftrainer.core.curve import Curve
from bftrainer.core.models import PAPER_CURVES
from bftrainer.errors import InputError
from bftrainer.simulate import workload, workload_yaml
from bftrainer.simulate.workload import find_curve, load_curves, load_workload
from bftrainer.traces.times import time_zone

HEADER = "name,model,submit,min_nodes,max_nodes,scale_up_s,scale_down_s,samples\n"
ROW = "a,shufflenet,+0,1,64,18,12,130e6\n"
DEFAULTS = "defaults: {min_nodes: 1, max_nodes: 64, scale_up_s: 18, scale_down_s: 12, samples: 130e6}\n"
START = datetime(2021, 2, 10, 20, 21, 15, tzinfo=UTC).timestamp()
FULL = """
curves:
  mynet: {nodes: [1, 2, 4, 8], samples_per_s: [100, 190, 350, 600]}
  other: {amdahl: 0.99, one_node: 120, max_nodes: 64}
  third: {csv: third.csv}
defaults: {min_nodes: 1, max_nodes: 64, scale_up_s: 18, scale_down_s: 12, samples: 130e6}
trainers:
  - {hpo: 3, model: ShuffleNet, every_s: 36}
  - {diverse: 9, every_s: 10}
  - {diverse: 3, models: [AlexNet, VGG-16], name: mix}
  - {poisson: 5, rate_per_hour: 30, model: mynet, seed: 7}
  - {name: big, model: third, submit: "+3600", min_nodes: 4, samples: 1e9, owner: ann, weight: 2}
  - {name: no, model: other, submit: 2021-02-11T00:00:00}
"""


def load(tmp_path: Path, text: str, name: str = "w.yaml", start: float | None = START) -> workload.Workload:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return load_workload(path, start=start)


def trouble(tmp_path: Path, text: str, name: str = "w.yaml", start: float | None = START) -> str:
    with pytest.raises(InputError) as caught:
        load(tmp_path, text, name, start)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / name}: ")
    assert "\n" not in message
    return message.removeprefix(f"{tmp_path / name}: ")


def test_the_published_hpo_trials_are_a_thousand_alike_in_ten_hours(shared_data: Path) -> None:
    found = load_workload(shared_data / "summit/hpo-shufflenet-1000.csv")
    assert (found.name, len(found.trainers)) == ("hpo-shufflenet-1000", 1000)
    assert found.trainers[0].submit == START
    # A thousand in ten hours: 36.036 s apart, in whole seconds.
    assert {b.submit - a.submit for a, b in itertools.pairwise(found.trainers)} == {36.0, 37.0}
    last = found.trainers[-1]
    assert last.submit == START + 36000
    assert (last.min_nodes, last.max_nodes, last.up_s, last.down_s, last.work) == (1, 64, 18.0, 12.0, 130e6)
    assert last.curve.rate(64) == 145081.5
    assert last.curve is found.trainers[0].curve


def test_the_published_diverse_trainers_cycle_through_seven_models(shared_data: Path) -> None:
    found = load_workload(shared_data / "summit/diverse-1001.csv")
    assert len(found.trainers) == 1001
    assert [t.model for t in found.trainers[:7]] == [t.model for t in found.trainers[7:14]]
    assert len({t.model for t in found.trainers}) == 7
    assert {b.submit - a.submit for a, b in itertools.pairwise(found.trainers)} == {36.0}
    assert {t.curve for t in found.trainers if t.model == "shufflenet"} == {
        load_curves(shared_data / "summit/curves.json")["shufflenet"]
    }


def test_given_curves_replace_those_beside_the_file(shared_data: Path) -> None:
    found = load_workload(shared_data / "summit/hpo-shufflenet-1000.csv", curves={})
    assert found.trainers[0].curve == PAPER_CURVES["ShuffleNet"]


def test_every_name_of_the_published_curves_has_one_in_the_paper(shared_data: Path) -> None:
    for name, measured in load_curves(shared_data / "summit/curves.json").items():
        assert find_curve(name).rate(64) == pytest.approx(measured.rate(64), rel=0.01)


def test_a_table_may_have_comments_quotes_owners_and_fields_in_any_order(tmp_path: Path) -> None:
    text = (
        "\ufeff# mine\r\nModel,name,submit,min_nodes,max_nodes,scale_up_s,scale_down_s,samples,owner,weight\r\n\r\n"
        'vgg16,"a,b",2021-02-10T20:21:16,2,8.0,1.5,0,1e6,ann,2.5\r\nVGG_16,c,1612988475,1,8,1,1,5,,\r\n'
    )
    one, two = load(tmp_path, text, "w.csv", None).trainers
    assert (one.name, one.owner, one.weight, one.submit) == ("c", "", 1.0, START)
    assert (two.name, two.owner, two.weight, two.submit) == ("a,b", "ann", 2.5, START + 1)
    assert (two.min_nodes, two.max_nodes, two.up_s, two.down_s, two.work) == (2, 8, 1.5, 0.0, 1e6)
    assert one.curve is two.curve is PAPER_CURVES["VGG-16"]


def test_trainers_come_in_order_of_submission_and_of_the_file_when_submitted_together(tmp_path: Path) -> None:
    rows = "".join(
        ROW.replace("a,", f"{name},").replace("+0", when)
        for name, when in zip("abcd", ("+5", "+0", "+5", "+0"), strict=True)
    )
    assert [t.name for t in load(tmp_path, HEADER + rows, "w.csv").trainers] == ["b", "d", "a", "c"]


def test_naive_times_are_in_the_zone_given(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(DEFAULTS + "trainers: [{name: a, model: vgg16, submit: 2021-02-10T21:21:15}]")
    assert load_workload(path, zone=time_zone("Europe/Berlin")).trainers[0].submit == START


def test_a_description_gives_all_its_trainers(tmp_path: Path) -> None:
    (tmp_path / "third.csv").write_text("nodes,samples_per_s\n1,10\n4,40\n")
    found = load(tmp_path, FULL)
    by_name = {t.name: t for t in found.trainers}
    assert len(found.trainers) == len(by_name) == 3 + 9 + 3 + 5 + 2
    assert [by_name[f"HPO{i:04d}"].submit - START for i in range(3)] == [0, 36, 72]
    assert [by_name[f"DIV{i:04d}"].model for i in range(9)] == [*PAPER_CURVES, *list(PAPER_CURVES)[:2]]
    assert [by_name[f"mix{i:04d}"].model for i in range(3)] == ["AlexNet", "VGG-16", "AlexNet"]
    big, no = by_name["big"], by_name["no"]
    assert (big.submit, big.min_nodes, big.work, big.owner, big.weight) == (START + 3600, 4, 1e9, "ann", 2.0)
    assert big.curve == Curve.through([1, 4], [10, 40])
    assert no.curve == Curve.amdahl(0.99, 120, 64)
    assert no.submit == datetime(2021, 2, 11, tzinfo=UTC).timestamp()
    assert by_name["POI0000"].curve == Curve.through([1, 2, 4, 8], [100, 190, 350, 600])


def test_random_arrivals_are_those_of_their_seed(tmp_path: Path) -> None:
    text = DEFAULTS + "trainers: [{poisson: 2000, rate_per_hour: 30, model: vgg16, seed: %d}]"
    one, again, other = ([t.submit for t in load(tmp_path, text % seed).trainers] for seed in (7, 7, 8))
    assert one == again != other
    assert (one[-1] - START) / 2000 == pytest.approx(120, rel=0.1)
    assert min(one) > START


def test_generated_names_go_on_from_entry_to_entry_and_make_way_for_chosen_ones(tmp_path: Path) -> None:
    text = DEFAULTS + "trainers: [{hpo: 2, model: vgg16}, {hpo: 2, model: vgg16}, {name: HPO0001, model: vgg16}]"
    assert [t.name for t in load(tmp_path, text).trainers] == ["HPO0000", "HPO0002", "HPO0003", "HPO0004", "HPO0001"]


@pytest.mark.parametrize("submit", ["90", "+90", '"+90"', "9e1", "2021-02-10T20:22:45Z", "2021-02-10 21:22:45+01:00"])
def test_a_description_counts_numbers_from_the_start_and_takes_full_times(submit: str, tmp_path: Path) -> None:
    text = DEFAULTS + f"trainers: [{{name: a, model: vgg16, submit: {submit}}}]"
    assert load(tmp_path, text).trainers[0].submit == START + 90


def test_the_kind_of_a_file_with_another_ending_is_seen_from_its_content(tmp_path: Path) -> None:
    assert load(tmp_path, "# mine\n" + HEADER + ROW, "table").trainers[0].name == "a"
    assert load(tmp_path, DEFAULTS + "trainers: [{name: a, model: vgg16}]", "text").trainers[0].name == "a"


def test_a_gzipped_file_opens_and_is_hashed_as_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv.gz"
    path.write_bytes(gzip.compress((HEADER + ROW).encode()))
    found = load_workload(path, start=0.0)
    assert (found.name, found.sha256) == ("mine", hashlib.sha256(path.read_bytes()).hexdigest())


def test_the_hash_covers_the_curves_that_belong_to_the_file(tmp_path: Path) -> None:
    alone = load(tmp_path, HEADER + ROW, "w.csv")
    hashes = []
    for rate in (1, 2):
        (tmp_path / "curves.json").write_text(json.dumps({"shufflenet": {"nodes": [1], "samples_per_s": [rate]}}))
        found = load(tmp_path, HEADER + ROW, "w.csv")
        assert found.trainers[0].curve.rate(1) == rate
        hashes.append(found.sha256)
    assert alone.sha256 == hashlib.sha256((HEADER + ROW).encode()).hexdigest()
    assert len({alone.sha256, *hashes}) == 3


@pytest.mark.parametrize(
    ("name", "paper"),
    [
        *(("vgg16", "VGG-16"), ("VGG_16", "VGG-16"), ("resnet18", "ResNet18"), ("ResNet-18", "ResNet18")),
        *(("mnasnet1", "MnasNet"), ("MNASNET", "MnasNet"), ("mobilenet", "MobileNets"), ("shufflenet", "ShuffleNet")),
        *(("densenet", "DenseNet"), ("AlexNet", "AlexNet")),
    ],
)
def test_the_models_of_the_paper_go_by_many_spellings(name: str, paper: str) -> None:
    assert find_curve(name) is PAPER_CURVES[paper]


def test_curves_of_ones_own_come_before_those_of_the_paper() -> None:
    mine, exact = Curve.through([1], [1]), Curve.through([1], [2])
    assert find_curve("VGG-16", {"vgg16": mine}) is mine
    assert find_curve("MnasNet", {"mnasnet1": mine}) is mine
    assert find_curve("mnasnet1", {"MnasNet": exact, "mnasnet1": mine}) is mine
    assert find_curve("my-net", {"mynet": mine, "my-net": exact}) is exact


def test_an_unknown_model_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="model must be one of mine, AlexNet, .*DenseNet, but got 'bert'"):
        find_curve("bert", {"mine": Curve.through([1], [1])})


ONE = DEFAULTS + "trainers: [{name: a, model: vgg16, %s}]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no trainers"),
        (HEADER, "has no trainers"),
        ("a,b\n", "line 1: columns must be name, model, .*but name is missing"),
        (HEADER.replace("samples", "samples,colour"), "line 1: column must be one of name, .*but got 'colour'"),
        (HEADER.replace("samples", "samples,name"), "line 1: each column must occur once"),
        (HEADER + "a,shufflenet\n", "line 2: must have 8 fields .*but got 2"),
        (HEADER + '"a,shufflenet\n' + ROW, "line 2: must be comma-separated values, but unexpected end"),
        (HEADER + ROW.replace("a,", ",", 1), "line 2: name is missing"),
        (HEADER + ROW.replace("shufflenet", ""), "line 2, trainer 'a': model is missing"),
        (HEADER + ROW.replace("shufflenet", "bert"), "line 2, trainer 'a': model must be one of .*but got 'bert'"),
        (HEADER + ROW + ROW, "line 3, trainer 'a': name must be unique, but line 2, trainer 'a' has it"),
        (HEADER + ROW.replace("+0", ""), "trainer 'a': submit must be a time such as .*but got ''"),
        (HEADER + ROW.replace("+0", "noon"), "trainer 'a': submit must be a time such as .*but got 'noon'"),
        (HEADER + ROW.replace("+0", "+x"), "trainer 'a': submit must be a number of seconds.*but got '\\+x'"),
        (HEADER + ROW.replace("+0", "+-1"), "submit must be a number of seconds.*but got '\\+-1'"),
        (HEADER + ROW.replace(",1,64", ",9,8"), "trainer 'a': max_nodes must be at least min_nodes \\(9\\), but got 8"),
        (HEADER + ROW.replace(",1,64", ",0,8"), "trainer 'a': min_nodes must be a whole number, 1 to .*but got '0'"),
        (HEADER + ROW.replace(",1,64", ",1.5,8"), "min_nodes must be a whole number, .*but got '1.5'"),
        (HEADER + ROW.replace(",1,64", ",1,1e99"), "max_nodes must be a whole number, .*but got '1e99'"),
        (HEADER + ROW.replace(",18,", ",-1,"), "trainer 'a': scale_up_s must be .*0 or more, but got '-1'"),
        (HEADER + ROW.replace(",12,", ",nan,"), "trainer 'a': scale_down_s must be .*but got 'nan'"),
        (HEADER + ROW.replace("130e6", "0"), "trainer 'a': samples must be .*above 0, but got '0'"),
        (HEADER + ROW.replace("130e6", "inf"), "trainer 'a': samples must be .*but got 'inf'"),
        (HEADER + ROW.replace("a,", "a\x07,", 1), "name must be a printable text, but got 'a.x07'"),
    ],
)
def test_a_malformed_table_is_refused_with_line_trainer_and_field(text: str, words: str, tmp_path: Path) -> None:
    assert re.search(words, trouble(tmp_path, text, "w.csv"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file must be a mapping with curves, defaults, trainers, but got None"),
        ("- 1", "the file must be a mapping"),
        ("a: [", "line 1: must be YAML, but"),
        ("a: 1\n\tb: 2", "line 2: must be YAML, but"),
        ('a: "\\UFFFFFFFF"', "must be YAML, but"),
        ("a: \x07", "must be YAML, but"),
        ("trainers: []\n---\n{}", "must be YAML, but"),
        ("trainers: []", "has no trainers"),
        ("curves: {}", "trainers is missing"),
        ("trainers: []\ntrainers: []", "line 1: must be YAML, but a key occurs twice"),
        ("jobs: []", "the file: key must be one of curves, defaults, trainers, but got 'jobs'"),
        ("trainers: 5", "trainers must be a list of entries, but got '5'"),
        ("trainers: [5]", "entry 1 of trainers must be a mapping with name, .*but got '5'"),
        ("trainers: []\ndefaults: [1]", "defaults must be a mapping"),
        ("trainers: []\ndefaults: {samples: few}", "defaults: samples must be a number .*but got 'few'"),
        ("trainers: []\ndefaults: {name: a}", "defaults: key must be one of .*but got 'name'"),
        (ONE % "colour: red", "entry 1 of trainers: key must be one of hpo, .*but got 'colour'"),
        (ONE % "<<: {samples: 5}", "key must be one of .*but got '<<'"),
        (ONE % "samples: 0", "entry 1 of trainers, trainer 'a': samples must be .*above 0, but got '0'"),
        (ONE % "samples: [1]", "samples must be .*but got \\['1'\\]"),
        (ONE % "min_nodes: true", "min_nodes must be a whole number, .*but got 'true'"),
        (ONE % "min_nodes: 65", "trainer 'a': max_nodes must be at least min_nodes \\(65\\), but got 64"),
        (ONE % "scale_up_s: -1", "scale_up_s must be .*but got '-1'"),
        (ONE % "owner: {a: b}", "owner must be a printable text"),
        (ONE % "weight: 0", "weight must be a number above 0, but got '0'"),
        (ONE % "submit: -5", "trainer 'a': submit must be a number of seconds.*but got '-5'"),
        (ONE % "submit: 1612988475", "submit must be a number of seconds.*or a time such as"),
        (ONE % "submit: 2021-02-30", "submit must be a time such as .*but got '2021-02-30'"),
        (ONE % "submit: [1]", "submit must be a time such as"),
        ("trainers: [{name: a, model: vgg16}]", "trainer 'a': min_nodes is missing"),
        (DEFAULTS + "trainers: [{model: vgg16}]", "entry 1 of trainers: name is missing"),
        (DEFAULTS + "trainers: [{name: a}]", "trainer 'a': model is missing"),
        (DEFAULTS + "trainers: [{name: a, model: bert}]", "trainer 'a': model must be one of .*but got 'bert'"),
        (DEFAULTS + "trainers: [{name: a, model: vgg16}, {name: a, model: vgg16}]", "entry 2 .*name must be unique"),
        (DEFAULTS + "trainers: [{hpo: 5}]", "entry 1 of trainers \\(hpo\\): model is missing"),
        (DEFAULTS + "trainers: [{hpo: 0, model: vgg16}]", "hpo must be a whole number, 1 to .*but got '0'"),
        (
            DEFAULTS + "trainers: [{hpo: 1e7, model: vgg16}]",
            "hpo must be a whole number, 1 to 1,000,000, but got '1e7'",
        ),
        (
            DEFAULTS + "trainers: [{hpo: 1, diverse: 2}]",
            "must be one of hpo, diverse, poisson, but got hpo and diverse",
        ),
        (DEFAULTS + "trainers: [{hpo: 1, model: vgg16, every_s: -1}]", "every_s must be .*but got '-1'"),
        (DEFAULTS + "trainers: [{hpo: 9, model: vgg16, every_s: 1e300}]", "submit must be between 1970 and 2200"),
        (DEFAULTS + "trainers: [{hpo: 1, model: vgg16, seed: 1}]", "key must be one of hpo, .*but got 'seed'"),
        (DEFAULTS + "trainers: [{diverse: 3, model: vgg16}]", "key must be one of diverse, .*but got 'model'"),
        (DEFAULTS + "trainers: [{diverse: 3, models: []}]", "models must be a list of names, but got \\[\\]"),
        (DEFAULTS + "trainers: [{diverse: 3, models: [vgg16, bert]}]", "model must be one of .*but got 'bert'"),
        (DEFAULTS + "trainers: [{poisson: 3, model: vgg16}]", "\\(poisson\\): rate_per_hour is missing"),
        (
            DEFAULTS + "trainers: [{poisson: 3, model: vgg16, rate_per_hour: 0}]",
            "rate_per_hour must be a number above 0",
        ),
        (DEFAULTS + "trainers: [{poisson: 3, model: vgg16, rate_per_hour: 1e-320}]", "submit must be between 1970"),
        (
            DEFAULTS + "trainers: [{poisson: 3, model: vgg16, rate_per_hour: 1, seed: -1}]",
            "seed must be a whole number",
        ),
        ("trainers: []\ncurves: [1]", "curves must be a mapping"),
        ("trainers: []\ncurves: {a: 1}", "curve 'a' must be a mapping with nodes"),
        ("trainers: []\ncurves: {a: {}}", "curve 'a': nodes is missing"),
        ("trainers: []\ncurves: {a: {nodes: [1]}}", "curve 'a': samples_per_s is missing"),
        ("trainers: []\ncurves: {a: {nodes: 1, samples_per_s: 1}}", "curve 'a': nodes must be a list of numbers"),
        ("trainers: []\ncurves: {a: {nodes: [1], samples_per_s: [1], b: 1}}", "curve 'a': key must be one of nodes"),
        ("trainers: []\ncurves: {a: {nodes: [2, 1], samples_per_s: [1, 2]}}", "curve 'a': nodes must rise"),
        ("trainers: []\ncurves: {a: {nodes: [1], samples_per_s: [-1]}}", "curve 'a': samples_per_s must be numbers"),
        ("trainers: []\ncurves: {a: {amdahl: 2, one_node: 1, max_nodes: 4}}", "curve 'a': amdahl must be a share"),
        ("trainers: []\ncurves: {a: {amdahl: 1, one_node: 1}}", "curve 'a': max_nodes is missing"),
        ("trainers: []\ncurves: {a: {amdahl: 1, one_node: 1e308, max_nodes: 64}}", "curve 'a': Amdahl curve: values"),
        ("trainers: []\ncurves: {a: {csv: none.csv}}", "curve 'a': .*none.csv: No such file"),
        ('trainers: []\ncurves: {a: {csv: "\\0"}}', "curve 'a': csv must be a printable text"),
        ("trainers: []\ncurves: {a: {csv: bad.csv}}", "curve 'a': .*bad.csv:2: must be `nodes,samples per second`"),
        ("trainers: []\ncurves: {a: {csv: big.csv}}", "curve 'a': .*big.csv: nodes must be at most"),
    ],
)
def test_a_malformed_description_is_refused_with_entry_trainer_and_field(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("1,2\nx,y,z\n")
    (tmp_path / "big.csv").write_text("1e30,5\n")
    assert re.search(words, trouble(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "must be JSON, but"),
        ("[" * 100_000, "must be JSON, but is nested too deep"),
        ("[]", "must be a JSON object of curves by name, but got \\[\\]"),
        ("{}", "must be a JSON object of curves"),
        ('{"a": 1}', "curve 'a' must be an object"),
        ('{"a": {"nodes": [1], "samples_per_s": [NaN]}}', "curve 'a': samples_per_s must be numbers, .*but got 'NaN'"),
        ('{"a": {"nodes": [1%s], "samples_per_s": [1]}}' % ("0" * 5000), "curve 'a': nodes must be a whole number"),
        ('{"a": {"nodes": [true], "samples_per_s": [1]}}', "nodes must be a whole number, .*but got True"),
        ('{"a": {"nodes": [1], "samples_per_s": [1]}, "a": {}}', "'a' occurs twice"),
    ],
)
def test_malformed_curves_are_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        load_curves(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_file_a_folder_and_what_is_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "noise.csv").write_bytes(b"name\n\xff")
    for name, words in (("none.csv", "No such file"), ("", "is a directory"), ("noise.csv", "line 2: must be UTF-8")):
        with pytest.raises(InputError, match=words):
            load_workload(tmp_path / name)


@pytest.mark.parametrize("text", [DEFAULTS + "trainers: [{hpo: 2, model: vgg16}]", ONE % "submit: 5", HEADER + ROW])
def test_a_time_after_the_start_needs_a_start(text: str, tmp_path: Path) -> None:
    assert "submit must be a full time where no start is given" in trouble(tmp_path, text, "w", start=None)


def bomb(item: str, levels: int) -> str:
    """Ten times ten times ten … of one thing, in a few hundred bytes."""
    return "".join(f"- &a{i} {item % ', '.join([f'*a{i - 1}'] * 10)}\n" for i in range(1, levels))


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 100_000, "{a: " * 50_000, "- " * 50_000, "trainers: &a [*a]"),
        "trainers:\n- &a0 [x]\n" + bomb("[%s]", 30),
        "trainers:\n- &a0 {x: y}\n" + bomb("{<<: [%s]}", 30),
        "trainers:\n- &a0 {x: y}\n" + bomb("{name: [%s]}", 30),
        "trainers: [{hpo: 1" + ":1" * 50_000 + "}]",
        "trainers: [{hpo: " + "9" * 50_000 + "}]",
    ],
)
def test_a_description_made_to_exhaust_its_reader_is_refused(text: str, tmp_path: Path) -> None:
    assert len(trouble(tmp_path, text)) < 400


def test_a_file_too_large_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_bytes(gzip.compress(b"x" * (workload.MOST_BYTES + 5)))
    with pytest.raises(InputError, match="must be at most 64 MiB"):
        load_workload(path)
    assert "must be at most 4 MiB, but is 5.0 MiB" in trouble(tmp_path, "#" * (5 << 20))


def test_too_many_trainers_are_refused_where_they_become_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "MOST_TRAINERS", 10)
    monkeypatch.setattr(workload_yaml, "MOST_TRAINERS", 10)
    text = DEFAULTS + "trainers: [{hpo: 6, model: vgg16}, {hpo: %d, model: vgg16}]"
    assert len(load(tmp_path, text % 4).trainers) == 10
    assert "entry 2 of trainers (hpo): there must be at most 10 trainers" in trouble(tmp_path, text % 5)
    rows = "".join(ROW.replace("a,", f"t{i},", 1) for i in range(11))
    assert "line 12, trainer 't10': there must be at most" in trouble(tmp_path, HEADER + rows, "w.csv")


ODD = (
    *(
        "",
        ",",
        ":",
        "{",
        "}",
        "[",
        "]",
        "&a ",
        "*a",
        "<<: ",
        "- ",
        "? ",
        "| ",
        "> ",
        "!!int ",
        "!x ",
        "%",
        "#",
        '"',
        "'",
    ),
    *("\0", "\t", "\r", "\x85", "\u2028", "é", "\ufeff", "nan", "inf", "1e400", "-1", "+", "9" * 5000, "1:1:1", "~"),
    *("2021-02-30", "9999-12-31T23:59:59+00:00", "0001-01-01", '"\\ud800"', '"\\0"', "hpo: 3", "csv: /", "true"),
)


def mutate(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 2)):
        a, b = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        b = min(b, a + rng.choice((1, 3, 20)))
        text = (
            text[:a] + text[b:],
            text[:a] + rng.choice(ODD) + text[b:],
            text[:b] + text[a:],
            text[:a] + rng.choice(ODD) + text[a:],
        )[rng.randrange(4)]
    return text


@pytest.mark.parametrize("name", ["w.csv", "w.yaml"])
def test_mutated_lines_give_a_workload_or_one_clear_error(name: str, tmp_path: Path) -> None:
    rng = random.Random(name)
    (tmp_path / "third.csv").write_text("1,10\n")
    lines = ([HEADER, *[ROW.replace("a,", f"a{i},", 1) for i in range(4)]], FULL.splitlines(keepends=True))[
        name == "w.yaml"
    ]
    ended = {"workload": 0, "error": 0}
    path = tmp_path / name
    for _ in range(1000):
        hurt = list(lines)
        at = rng.randrange(len(hurt))
        hurt[at] = mutate(hurt[at], rng)
        path.write_bytes("".join(hurt).encode("utf-8", "surrogatepass"))
        message = ""
        try:
            load_workload(path, start=START)
        except InputError as problem:
            message = str(problem)
        ended["error" if message else "workload"] += 1
        if message:
            assert message.startswith(f"{path}: ")
            assert len(message.splitlines()) == 1
    assert min(ended.values()) > 50
