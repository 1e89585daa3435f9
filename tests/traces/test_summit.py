from __future__ import annotations

import io
import os
import pickle
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from bftrainer.core import Fragment
from bftrainer.errors import InputError
from bftrainer.traces.files import load_trace
from bftrainer.traces.readers.importing import import_trace
from bftrainer.traces.readers.summit import ALLOWED, read_matrix

TIMES = [1_600_000_000, 1_600_000_030, 1_600_000_040, 1_600_000_100]
IDLE = [[1, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]]


class _Stub:
    """Pickles under a name of pandas, so that a frame can be made without pandas."""

    def __init__(self, call: object, args: tuple[object, ...] = (), state: object = None) -> None:
        self.reduced = (call, args, state) if state is not None else (call, args)

    def __reduce__(self) -> tuple[object, ...]:
        return self.reduced


def _stub_class(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> type:
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
    stub = type(name, (), {"__module__": module})
    monkeypatch.setattr(sys.modules[module], name, stub, raising=False)
    return stub


@pytest.fixture
def frame(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The bytes of a frame of four events by three nodes, as pandas 1.x pickles it."""
    made = {name: _stub_class(monkeypatch, module, name) for module, name in ALLOWED if module.startswith("pandas")}
    columns = _Stub(
        made["_new_Index"], (made["Index"], {"data": np.array(["a", "b", "c"], dtype=object), "name": None})
    )
    times = _Stub(made["DatetimeArray"], (), {"_data": np.array(TIMES, "M8[s]").astype("M8[ns]"), "_freq": None})
    index = _Stub(made["_new_DatetimeIndex"], (made["DatetimeIndex"], {"data": times, "tz": None}))
    matrix = np.array(IDLE, dtype=np.int8)
    blocks = {"axes": [columns, index], "blocks": [{"values": matrix, "mgr_locs": slice(0, 3, 1)}]}
    manager = _Stub(made["BlockManager"], (), ([columns, index], [matrix], [columns], {"0.14.1": blocks}))
    return pickle.dumps(_Stub(made["DataFrame"], (), {"_mgr": manager, "_typ": "dataframe"}), protocol=4)


def test_a_node_is_idle_from_the_first_event_that_shows_it_to_the_first_that_does_not(frame: bytes) -> None:
    trace = read_matrix(io.BytesIO(frame))
    assert trace.nodes == ("a", "b", "c")
    assert list(trace.fragments()) == [
        Fragment("a", 1_600_000_000.0, 1_600_000_040.0),
        Fragment("b", 1_600_000_030.0, 1_600_000_100.0, open=True),
    ]
    assert (trace.window.start, trace.window.end) == (TIMES[0], TIMES[-1])


def test_the_archive_and_the_bare_pickle_give_the_same_trace(frame: bytes, tmp_path: Path) -> None:
    bare, archive = tmp_path / "m.pkl", tmp_path / "m.tar.gz"
    bare.write_bytes(frame)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(bare, "m.pkl")
    results = [import_trace(path) for path in (bare, archive)]
    assert [r.report.format for r in results] == ["summit", "summit"]
    assert list(results[0].trace.fragments()) == list(results[1].trace.fragments())


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("false",)


@pytest.mark.waits
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_asks_for_code_is_refused_and_not_run(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(command: str) -> int:
        raise AssertionError(f"ran {command}")

    # Refusal must not depend on which code is asked for.
    data = pickle.dumps(_Evil(), protocol=protocol)
    monkeypatch.setattr(os, "system", never)
    with pytest.raises(InputError, match=r"refused: the pickle asks for \w+\.system"):
        read_matrix(io.BytesIO(data))


@pytest.mark.parametrize("name", ["eval", "getattr", "__import__", "open"])
def test_even_builtins_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"asks for builtins.{name}"):
        read_matrix(io.BytesIO(b"cbuiltins\n" + name.encode() + b"\n."))


def test_allowed_names_load_as_records_that_do_nothing() -> None:
    # numpy.ndarray called with a huge shape would take all memory, were it numpy's.
    data = pickle.dumps(_Stub(np.ndarray, ((10**12,),)), protocol=4)
    with pytest.raises(InputError, match="not a pickled frame"):
        read_matrix(io.BytesIO(data))


def test_every_cut_of_a_frame_is_refused(frame: bytes) -> None:
    for length in range(0, len(frame), 7):
        with pytest.raises(InputError, match=r"not a pickled frame|refused"):
            read_matrix(io.BytesIO(frame[:length]))


def test_an_archive_without_a_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.tar"
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("readme.txt"))
    with pytest.raises(InputError, match=r"has no \.pkl file in it"):
        import_trace(path)


def test_the_authors_archive_gives_the_published_fragments(shared_data: Path) -> None:
    ours = import_trace(shared_data / "summit/ndstat-10sdn6-evt.tar.gz").trace
    theirs = load_trace(shared_data / "summit/fragments.parquet")
    assert ours.nodes == theirs.nodes
    for column in ("node", "start", "end", "open"):
        assert np.array_equal(getattr(ours, column), getattr(theirs, column))
