from __future__ import annotations

import os
import resource
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from bftrainer.core import Fragment, Trace, Window
from bftrainer.errors import InputError
from bftrainer.traces.files import load_trace, read_node_names, save_trace, writing
from bftrainer.traces.times import time_zone

TRACE = Trace.from_fragments(
    [Fragment("b", 100.5, 200.0), Fragment("a", 100.5, 150.25), Fragment("a", 160.0, 300.0, open=True)],
    nodes=["c", "a", "b"],
    window=Window(50.0, 300.0),
)


def same(one: Trace, other: Trace) -> bool:
    columns = ("node", "start", "end", "open")
    return (one.nodes, one.window, one.nodes_known) == (other.nodes, other.window, other.nodes_known) and all(
        np.array_equal(getattr(one, c), getattr(other, c)) for c in columns
    )


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_saved_trace_comes_back_whole(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{suffix}"
    save_trace(TRACE, path, {"seed": 1})
    assert same(load_trace(path), TRACE)


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_trace_without_fragments_comes_back_whole(suffix: str, tmp_path: Path) -> None:
    full = Trace.from_fragments([], ["a"], Window(0.0, 10.0))
    path = tmp_path / f"t{suffix}"
    save_trace(full, path, {})
    assert same(load_trace(path), full)


def test_the_file_says_where_it_comes_from(tmp_path: Path) -> None:
    save_trace(TRACE, tmp_path / "t.parquet", {"command": "bftrainer trace synth", "seed": 7})
    assert '"seed": 7' in pl.read_parquet_metadata(tmp_path / "t.parquet")["bftrainer"]


def test_the_published_summit_trace_opens_as_it_is(shared_data: Path) -> None:
    trace = load_trace(shared_data / "summit/fragments.parquet")
    assert (len(trace), len(trace.nodes), trace.nodes_known) == (423502, 4734, True)
    assert trace.nodes[:2] == ("c05n06", "a02n02")
    assert int(trace.open.sum()) == 148


def csv(tmp_path: Path, text: str, name: str = "t.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "rows",
    [
        "node,start,end\na,1970-01-01T00:00:10,1970-01-01T00:00:20\n",
        "Node,Start,End,extra\na,10,20,x\n",
        "node,start,end,open\na,1970-01-01 00:00:10,1970-01-01T01:00:20+01:00,0\n",
    ],
)
def test_a_plain_csv_of_fragments_is_a_trace(rows: str, tmp_path: Path) -> None:
    trace = load_trace(csv(tmp_path, rows))
    assert list(trace.fragments()) == [Fragment("a", 10.0, 20.0)]
    assert not trace.nodes_known


def test_naive_times_are_in_the_zone_that_is_said(tmp_path: Path) -> None:
    text = csv(tmp_path, "node,start,end\na,2021-01-01T12:00:00,2021-01-01T13:00:00\n")
    frame = pl.DataFrame({"node": ["a"], "start": [datetime(2021, 1, 1, 12)], "end": [datetime(2021, 1, 1, 13)]})
    frame.write_parquet(tmp_path / "t.parquet")
    for path in (text, tmp_path / "t.parquet"):
        shift = load_trace(path).start[0] - load_trace(path, time_zone("Asia/Tokyo")).start[0]
        assert shift == 9 * 3600


def test_nodes_beside_the_trace_name_the_machine(tmp_path: Path) -> None:
    path = csv(tmp_path, "node,start,end\nn2,10,20\n")
    csv(tmp_path, "# the machine\nn1\nn2\n\nn3\n", "nodes.txt")
    trace = load_trace(path)
    assert trace.nodes == ("n1", "n2", "n3")
    assert trace.nodes_known


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node,start\na,1\n", "is not a trace"),
        ("node,start,end\na,20,10\n", "node a has one from 1970-01-01T00:00:20 to 1970-01-01T00:00:10"),
        ("node,start,end\na,10,20\na,15,30\n", "must not overlap"),
        ("node,start,end\na,ten,20\n", "column start: not a time: 'ten'"),
        ("node,start,end\na,,20\n", "row 1 has no start"),
        ("node,start,end\n,10,20\n", "row 1 has no node"),
        ("node,start,end\na,10,99999999999\n", "not between 1970 and 2200"),
        ("node,start,end\na,-10,20\n", "not between 1970 and 2200"),
        ("node,start,end,open\na,10,20,maybe\n", "column open must hold true or false"),
        ("node,start,end\na,10,20,30,40\n", "unreadable CSV"),
        ("node,start,end\n", "a trace without fragments needs a time window"),
        ("# bftrainer {broken\nnode,start,end\na,10,20\n", "metadata is damaged: not JSON"),
        ('# bftrainer {"window": "x"}\nnode,start,end\na,10,20\n', "window must be two times"),
        ('# bftrainer {"nodes": [1]}\nnode,start,end\na,10,20\n', "nodes must be a list of names"),
        ('# bftrainer {"nodes": ["b"]}\nnode,start,end\na,10,20\n', "'a' has a fragment but is not among the 1 nodes"),
        ('# bftrainer {"nodes": ["a", "b", "a"]}\nnode,start,end\na,10,20\n', "'a' is named twice"),
        ("", "is empty"),
        ("complete nonsense\n", "is not a trace"),
    ],
)
def test_a_broken_csv_is_refused_with_the_reason(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"t\.csv: .*{message}"):
        load_trace(csv(tmp_path, text))


def test_a_parquet_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "t.parquet"
    save_trace(TRACE, whole, {})
    data = whole.read_bytes()
    cut = tmp_path / "cut.parquet"
    for length in range(0, len(data), max(1, len(data) // 60)):
        cut.write_bytes(data[:length])
        with pytest.raises(InputError, match=r"cut\.parquet: "):
            load_trace(cut)


def test_a_parquet_file_of_something_else_is_refused(tmp_path: Path) -> None:
    pl.DataFrame({"x": [1]}).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(InputError, match="columns node, start and end, but node, start, end is missing"):
        load_trace(tmp_path / "t.parquet")


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("old")

    def fail() -> None:
        with writing(path, "w") as out:
            out.write("new")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["t.txt"]


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_disk_that_is_full_is_one_clear_error_and_leaves_nothing(suffix: str, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / f"t{suffix}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(InputError, match=rf"t\{suffix}: could not be written \(.*File too large"):
            save_trace(TRACE, path, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_written_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    save_trace(TRACE, tmp_path / "t.parquet", {})
    assert (tmp_path / "t.parquet").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("text", "message"), [("", "names no node"), ("a b\n", "one node name per line"), ("\0\n", "one node")]
)
def test_a_broken_list_of_nodes_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_node_names(csv(tmp_path, text, "nodes"))


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = csv(tmp_path, "node,start,end\na,10,20\n")
    path.chmod(0)
    uid = os.geteuid()
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    if uid == 0:
        os.seteuid(65534)  # root may read anything
    try:
        with pytest.raises(InputError, match="Permission denied"):
            load_trace(path)
    finally:
        os.seteuid(uid)
