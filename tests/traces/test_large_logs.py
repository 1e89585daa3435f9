"""Large machines: nodes are laid out and written by ranges, with the same result as one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bftrainer.core.trace import Trace
from bftrainer.traces.files import load_trace, save_trace
from bftrainer.traces.ranges import NodeSpans
from bftrainer.traces.readers.first_fit import lay_first_fit
from bftrainer.traces.readers.idle import BusyTimes
from bftrainer.traces.readers.importing import import_trace
from bftrainer.traces.stats import QUANTILES, idle_stats
from support.traces.large import LONG, WIDE, Shape, write_swf

SHAPES = {"wide": WIDE.shorter(300), "long": LONG.shorter(1000)}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def jobs_of(path: Path) -> tuple[np.ndarray, np.ndarray, list[int]]:
    rows = np.loadtxt(path, comments=";")
    start = rows[:, 1] + rows[:, 2]
    return start, start + rows[:, 3], rows[:, 4].astype(int).tolist()


def laid_node_by_node(path: Path, shape: Shape) -> NodeSpans:
    """First-fit in its plainest form, which looks at every node for every job."""
    start, end, need = jobs_of(path)
    free = np.diff(np.arange(shape.nodes + 1) * shape.processors // shape.nodes)
    running: list[tuple[float, np.ndarray]] = []
    busy = BusyTimes()
    for job in np.lexsort((end, start)):
        for ended in [row for row in running if row[0] <= start[job]]:
            free += ended[1]
        running = [row for row in running if row[0] > start[job]]
        taken = np.diff(np.minimum(np.cumsum(free), need[job]), prepend=0)
        free -= taken
        running.append((end[job], taken))
        busy.add(np.flatnonzero(taken).astype(np.int32).tobytes(), start[job], end[job])
    times = busy.idle_times(np.arange(shape.nodes, dtype=np.int32), shape.nodes)
    idle = NodeSpans.joined([times.between, times.edges()])
    return idle.rows(idle.start < idle.end)


@every_shape
def test_whole_ranges_are_laid_out_as_nodes_are_one_by_one(shape: Shape, tmp_path: Path) -> None:
    write_swf(tmp_path / "log", shape)
    layout = lay_first_fit(*jobs_of(tmp_path / "log"), shape.nodes, shape.processors)
    assert layout.clipped_jobs == 0
    columns = []
    for spans in (layout.idle, laid_node_by_node(tmp_path / "log", shape)):
        node, start, end = spans.expanded()
        order = np.lexsort((start, node))
        columns.append((node[order], start[order], end[order]))
    for ours, expected in zip(*columns, strict=True):
        assert np.array_equal(ours, expected)


def test_a_wide_machine_needs_far_fewer_rows_than_fragments(tmp_path: Path) -> None:
    write_swf(tmp_path / "log", SHAPES["wide"])
    ranges = import_trace(tmp_path / "log").ranges
    assert ranges.fragments > 50 * len(ranges.idle)


@every_shape
@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_trace_written_piece_by_piece_reads_back_as_it_was(
    shape: Shape, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_swf(tmp_path / "log", shape.shorter(100))
    ranges = import_trace(tmp_path / "log").ranges
    monkeypatch.setattr("bftrainer.traces.ranges.PIECE_ROWS", 1000)
    monkeypatch.setattr("bftrainer.traces.tables._ROWS_AT_ONCE", 7000)
    monkeypatch.setattr("bftrainer.core.trace._ROWS_AT_ONCE", 5000)
    save_trace(ranges, tmp_path / f"t{suffix}", {})
    read, made = load_trace(tmp_path / f"t{suffix}"), ranges.trace()
    assert (read.nodes, read.window, read.nodes_known) == (made.nodes, made.window, made.nodes_known)
    for column in ("node", "start", "end", "open"):
        assert np.array_equal(getattr(read, column), getattr(made, column))
    assert len(made) > 20_000 or shape.nodes < 10_000


@every_shape
def test_figures_of_groups_are_those_of_single_fragments(shape: Shape, tmp_path: Path) -> None:
    write_swf(tmp_path / "log", shape)
    trace = import_trace(tmp_path / "log").trace
    stats = idle_stats(trace)
    shuffled = np.random.default_rng(1).permutation(len(trace.nodes))
    mixed = Trace.build(
        trace.nodes, shuffled[trace.node], trace.start, trace.end, trace.open, trace.window
    )  # neighbours no longer, so hardly any groups
    assert idle_stats(mixed) == stats
    length = trace.lengths
    assert stats.fragments == len(trace)
    assert stats.node_hours == length.sum() / 3600
    assert list(stats.fragment_quantiles_s.values()) == np.quantile(length, QUANTILES).tolist()
