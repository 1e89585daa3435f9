"""Readers of node states: only truly free nodes are idle, and nothing but an InputError comes out of garbage."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from bftrainer.errors import InputError
from bftrainer.traces.recorder.states import (
    FORMS,
    NodeStates,
    read_lent,
    read_names,
    read_pbs_json,
    read_sinfo,
    read_slurm_json,
    read_states,
)

SINFO = "n1 idle\nn2 allocated\nn3 mixed-\nn4 idle~\nn5 planned\n"
SINFO_WIDE = "NODELIST   NODES PARTITION STATE\nn1   1   main*  idle\nn1   1  low  idle\nn2   1  main*  alloc\n"
SLURM_21 = json.dumps(
    {
        "errors": [],
        "nodes": [
            {"name": "n1", "state": "idle", "state_flags": []},
            {"name": "n2", "state": "idle", "state_flags": ["DRAIN"]},
            {"name": "n3", "state": "down", "state_flags": []},
        ],
    }
)
SLURM_23 = json.dumps(
    {
        "sinfo": [
            {"node": {"state": ["IDLE"]}, "nodes": {"nodes": ["n1", "n2"]}, "partition": {"name": "main"}},
            {"node": {"state": ["IDLE", "PLANNED"]}, "nodes": {"nodes": ["n3"]}},
            {"node": {"state": ["IDLE"]}, "nodes": {"nodes": ["n2"]}, "reservation": "course"},
            {"node": {"state": []}, "nodes": {"nodes": []}},
        ],
        "errors": [],
    }
)
SLURM_REST = json.dumps(
    {
        "nodes": [
            {"name": "c1", "state": ["IDLE"], "reservation": ""},
            {"name": "c2", "state": ["IDLE", "CLOUD"], "reservation": ""},
            {"name": "c3", "state": ["IDLE", "CLOUD", "POWERED_DOWN"]},
            {"name": "c4", "state": ["IDLE"], "reservation": "maintenance"},
            {"name": "c5", "state": ["MIXED"]},
        ]
    }
)
PBS = json.dumps(
    {
        "pbs_version": "23.06",
        "nodes": {
            "p1": {"state": "free", "resources_assigned": {}},
            "p2": {"state": "free", "resources_assigned": {"ncpus": 0, "mem": "0kb"}},
            "p3": {"state": "free", "resources_assigned": {"ncpus": 4}},
            "p4": {"state": "free", "jobs": ["1.pbs"]},
            "p5": {"state": "free", "resv": "R1.pbs"},
            "p6": {"state": "job-exclusive"},
            "p7": {"state": "free,offline"},
            "p8[0]": {"state": "free"},
        },
    }
)
NAMES = "# idle now\nh1\n\nh2:4\n  h3   # slow disk\nh4:0\n"
SAMPLES = (SINFO, SINFO_WIDE, SLURM_21, SLURM_23, SLURM_REST, PBS, NAMES)


def idle(text: str, form: str = "auto") -> list[str]:
    return sorted(read_states(text, form).idle)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "nodes", "idle_nodes"),
    [
        (SINFO, ["n1", "n2", "n3", "n4", "n5"], ["n1"]),
        (SINFO_WIDE, ["n1", "n2"], ["n1"]),
        (SLURM_21, ["n1", "n2", "n3"], ["n1"]),
        (SLURM_23, ["n1", "n2", "n3"], ["n1"]),
        (SLURM_REST, ["c1", "c2", "c3", "c4", "c5"], ["c1", "c2"]),
        (PBS, ["p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8[0]"], ["p1", "p2", "p8[0]"]),
        (NAMES, ["h1", "h2", "h3", "h4"], ["h1", "h2", "h3"]),
    ],
)
def test_the_form_is_told_from_the_content(text: str, nodes: list[str], idle_nodes: list[str]) -> None:
    states = read_states(text)
    assert list(states.nodes) == nodes
    assert sorted(states.idle) == idle_nodes


@pytest.mark.parametrize(
    ("form", "reader", "text"),
    [
        ("sinfo", read_sinfo, SINFO),
        ("slurm-json", read_slurm_json, SLURM_23),
        ("pbs-json", read_pbs_json, PBS),
        ("names", read_names, NAMES),
    ],
)
def test_a_given_form_has_its_own_reader(form, reader, text) -> None:
    assert read_states(text, form) == reader(text) == read_states(text)


@pytest.mark.parametrize("suffix", list("*~#!%$@^-"))
def test_any_suffix_makes_an_idle_node_unusable(suffix: str) -> None:
    assert idle(f"n1 idle{suffix}\nn2 IDLE\n") == ["n2"]


@pytest.mark.parametrize(
    "word",
    [
        "planned",
        "plnd",
        "draining",
        "drng",
        "drained",
        "drain",
        "completing",
        "comp",
        "mixed",
        "mix",
        "allocated",
        "alloc",
        "down",
        "reserved",
        "resv",
        "maint",
        "powered_down",
        "pow_dn",
        "powering_up",
        "pow_up",
        "reboot",
        "no_respond",
        "future",
        "futr",
        "unknown",
        "unk",
        "blocked",
        "block",
        "fail",
        "failing",
        "inval",
        "idle+planned",
        "idle+drain",
        "some_word_of_slurm_31",
    ],
)
def test_every_other_state_word_is_not_idle(word: str) -> None:
    assert idle(f"n0 idle\nn1 {word}\n", "sinfo") == ["n0"]


@pytest.mark.parametrize("flag", ["CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE"])
def test_flags_about_a_nodes_origin_are_harmless(flag: str) -> None:
    assert idle(json.dumps({"nodes": [{"name": "n", "state": ["IDLE", flag]}]})) == ["n"]
    assert idle(json.dumps({"nodes": [{"name": "n", "state": "idle", "state_flags": [flag]}]})) == ["n"]
    assert idle(f"n idle+{flag.lower()}\n") == ["n"]


@pytest.mark.parametrize(
    "flag",
    [
        "DRAIN",
        "COMPLETING",
        "NOT_RESPONDING",
        "POWERED_DOWN",
        "POWERING_UP",
        "POWERING_DOWN",
        "POWER_DOWN",
        "POWER_UP",
        "PLANNED",
        "RESERVED",
        "FAIL",
        "MAINTENANCE",
        "REBOOT_REQUESTED",
        "REBOOT_ISSUED",
        "INVALID_REG",
        "BLOCKED",
        "EXTERNAL",
        "SOMETHING_NEW",
    ],
)
def test_any_other_flag_makes_a_node_not_idle_wherever_it_stands(flag: str) -> None:
    assert idle(json.dumps({"nodes": [{"name": "n", "state": ["IDLE", flag]}]})) == []
    assert idle(json.dumps({"nodes": [{"name": "n", "state": "idle", "state_flags": [flag]}]})) == []


def test_a_flag_alone_is_not_idle() -> None:
    assert idle(json.dumps({"nodes": [{"name": "n", "state": ["CLOUD"]}, {"name": "m", "state": []}]})) == []


def test_a_node_in_two_partitions_is_idle_only_if_both_rows_say_so() -> None:
    states = read_sinfo("n1 idle\nn2 idle\nn1 planned\nn2 idle\n")
    assert states == NodeStates(("n1", "n2"), frozenset({"n2"}))


def test_a_partition_without_nodes_is_passed_over() -> None:
    assert idle("n1 idle\n   n/a\n", "sinfo") == ["n1"]


def test_names_may_be_none_but_sinfo_may_not() -> None:
    assert read_states("", "names") == read_states("") == NodeStates((), frozenset())
    with pytest.raises(InputError, match="sinfo printed no node"):
        read_states("", "sinfo")
    with pytest.raises(InputError, match="sinfo printed no node"):
        read_states("NODELIST STATE\n", "sinfo")


@pytest.mark.parametrize("form", ["slurm-json", "pbs-json"])
@pytest.mark.parametrize("text", ["", "{}", "[]", "7", '{"nodes": []}', '{"nodes": {}}', '{"jobs": []}', "\0\1\2"])
def test_json_without_nodes_is_an_error(form, text: str) -> None:
    with pytest.raises(InputError):
        read_states(text, form)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SLURM_REST[:-20], "cut short"),
        (PBS[: len(PBS) // 2], "cut short"),
        ("<html><body>\n<h1>502 Bad Gateway</h1>\n", "line 1"),
        ("<html>\n", "one node name"),
        ("Service Unavailable\ntry later\n", "ends with a node state"),
        ("n[1-4] idle\n", "sinfo -N"),
        ("n1 idle\nn2\n", "line 2"),
        ("\x89PNG\r\n\x1a\n\0\0", "line 1"),
        ('{"a": ' + "[" * 100_000, "nested too deep"),
        ('{"a": ' + "9" * 10_000 + "}", "number too long"),
        ('{"nodes": [{"name": "n"}]}', "state"),
        ('{"nodes": [{"state": ["IDLE"]}]}', "name"),
        ('{"nodes": [{"name": "n", "state": [1]}]}', "state"),
        ('{"nodes": ["n"]}', "must be an object"),
        ('{"sinfo": [{"node": {"state": ["IDLE"]}, "nodes": {"nodes": 3}}]}', "list its nodes"),
        ('{"nodes": {"p": 3}}', "must be an object"),
        ('{"nodes": {"p q": {"state": "free"}}}', "name"),
        ('{"nodes": {"p": {"state": "free", "resources_assigned": 3}}}', "resources_assigned"),
    ],
)
def test_garbage_gives_one_clear_line(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        read_states(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_slurms_own_error_is_passed_on() -> None:
    reply = {"nodes": [], "errors": [{"description": "Unable to contact slurm controller", "error_number": 1}]}
    with pytest.raises(InputError, match="Unable to contact slurm controller"):
        read_states(json.dumps(reply))
    with pytest.raises(InputError, match="odd"):
        read_states(json.dumps({"errors": ["odd"]}))


def test_an_unknown_form_is_named() -> None:
    with pytest.raises(InputError, match="'lsf'"):
        read_states("n1", "lsf")  # type: ignore[arg-type]


def test_two_thousand_mutated_texts_raise_nothing_but_input_errors() -> None:
    rng = random.Random(20210210)
    messages = []
    for round_ in range(2000):
        data = bytearray(SAMPLES[round_ % len(SAMPLES)].encode())
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randint(1, 40)]
            elif kind == 2:
                data[at:at] = data[rng.randrange(len(data)) :][: rng.randint(1, 40)]
            else:
                data[at:at] = rng.choice([b"null", b"[]", b"{}", b"1e999", b'"', b"\n", b"\\ud800", b"\0", b" # "])
            if not data:
                break
        text = data.decode(errors="replace")
        for form in FORMS:
            try:
                states = read_states(text, form)
            except InputError as error:
                messages.append(str(error))
            else:
                assert states.idle <= set(states.nodes)
                assert len(set(states.nodes)) == len(states.nodes)
    assert messages
    assert not [message for message in messages if "\n" in message or len(message) > 400]


def test_the_real_sinfo_has_fourteen_idle_nodes(shared_data: Path) -> None:
    text = gzip.decompress((shared_data / "fixtures/sinfo/sinfo_gres.txt.gz").read_bytes()).decode()
    states = read_states(text)
    rows = [line.split() for line in text.splitlines()]
    assert len(states.nodes) == 298
    assert states.idle == {r[0] for r in rows if r[-1] == "idle"} - {r[0] for r in rows if r[-1] != "idle"}
    assert len(states.idle) == 14


@pytest.mark.parametrize(
    ("file", "nodes", "idle_nodes"),
    [("sinfo-21.08", 4, 1), ("slurmrestd-24.05-0.0.41-nodes", 100, 100), ("slurmrestd-25.11-0.0.44-nodes", 8, 4)],
)
def test_the_real_slurm_json_is_read(shared_data: Path, file: str, nodes: int, idle_nodes: int) -> None:
    states = read_states((shared_data / f"fixtures/slurm-json/{file}.json").read_text())
    assert (len(states.nodes), len(states.idle)) == (nodes, idle_nodes)


def test_a_real_reply_about_jobs_is_refused(shared_data: Path) -> None:
    with pytest.raises(InputError, match="no nodes"):
        read_states((shared_data / "fixtures/slurm-json/squeue-21.08.json").read_text())


def test_the_real_pbsnodes_output_is_read(shared_data: Path) -> None:
    output = json.loads((shared_data / "fixtures/pbs/pbsnodes.json").read_text())["stdout"]
    assert read_states(output) == NodeStates(("pbs",), frozenset({"pbs"}))


def test_nodes_that_are_lent_count_as_idle_while_they_are_in_use() -> None:
    sinfo = "n1 idle\nn2 allocated\nn3 mixed\nn4 allocated+\nn5 draining\nn6 allocated\n"
    lent = read_lent("low|n[2-5]\nmain|n6\n", "low")
    assert lent == {"n2", "n3", "n4", "n5"}
    assert read_sinfo(sinfo, lent).idle == {"n1", "n2", "n3"}
    assert read_sinfo(sinfo).idle == {"n1"}


def test_a_node_with_jobs_of_other_partitions_too_is_not_lent() -> None:
    assert read_lent("low|n[1-3]\nmain|n[2,7]\nlow|(null)\nmain|\n", "low") == {"n1", "n3"}
    assert read_lent("", "low") == frozenset()
    with pytest.raises(InputError, match="partition"):
        read_lent("slurm_load_jobs error\n", "low")
