"""The conformance suite of log readers: the same jobs give the same trace in every format and wrapping."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
from pathlib import Path
from typing import Any

import pytest

from bftrainer.errors import InputError
from bftrainer.traces.readers.importing import Imported, import_trace
from bftrainer.traces.readers.options import ImportOptions
from bftrainer.traces.times import time_zone
from support.traces.logs import DAY, DIALECTS, IDLE, SCHEDULE, Dialect

every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS.keys())


def fragments(imported: Imported) -> set[tuple[str, float, float]]:
    return {(f.node, f.start - DAY, f.end - DAY) for f in imported.trace.fragments()}


def imported(
    tmp_path: Path, data: str | bytes, options: ImportOptions | None = None, name: str | None = None
) -> Imported:
    path = tmp_path / "log"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return import_trace(path, options, name)


@every_dialect
def test_the_format_is_found_and_the_idle_time_is_exact(dialect: Dialect, tmp_path: Path) -> None:
    result = imported(tmp_path, dialect.text())
    assert result.report.format == dialect.format
    assert fragments(result) == IDLE
    assert result.trace.nodes == ("n1", "n2", "n3", "n4", "n9", "n10")
    assert (result.trace.window.start - DAY, result.trace.window.end - DAY) == (600, 3600)


@every_dialect
def test_every_line_is_used_or_skipped_with_a_reason(dialect: Dialect, tmp_path: Path) -> None:
    report = imported(tmp_path, dialect.text() + "\n").report
    assert report.used == len(SCHEDULE) == report.jobs
    assert report.lines == len(dialect.header) + len(SCHEDULE) + 1
    assert sum(t.count for t in report.skipped.values()) == len(dialect.header) + 1


@every_dialect
@pytest.mark.parametrize("wrap", ["gzip", "bzip2", "xz", "byte order mark", "crlf", "no last newline", "blank lines"])
def test_wrapping_changes_nothing(dialect: Dialect, wrap: str, tmp_path: Path) -> None:
    text = dialect.text()
    data = {
        "gzip": gzip.compress(text.encode()),
        "bzip2": bz2.compress(text.encode()),
        "xz": lzma.compress(text.encode()),
        "byte order mark": b"\xef\xbb\xbf" + text.encode(),
        "crlf": text.replace("\n", "\r\n").encode(),
        "no last newline": text.rstrip("\n").encode(),
        "blank lines": text.replace("\n", "\n\n").encode(),
    }[wrap]
    assert fragments(imported(tmp_path, data)) == IDLE


@every_dialect
def test_the_order_of_rows_does_not_matter(dialect: Dialect, tmp_path: Path) -> None:
    runs = list(SCHEDULE)
    random.Random(3).shuffle(runs)
    assert fragments(imported(tmp_path, dialect.text(tuple(runs)))) == IDLE


@every_dialect
def test_broken_lines_are_counted_and_harm_nothing(dialect: Dialect, tmp_path: Path) -> None:
    lines = dialect.text().splitlines()
    broken = lines[-1][: len(lines[-1]) // 4]
    at = len(dialect.header) + 3
    lines[at:at] = ["complete nonsense", broken]
    result = imported(tmp_path, "\n".join(lines))
    assert fragments(result) == IDLE
    assert result.report.malformed == 2
    assert min(t.first_line for r, t in result.report.skipped.items() if r.startswith("malformed")) == at + 1


@every_dialect
def test_a_log_of_mostly_broken_lines_is_refused(dialect: Dialect, tmp_path: Path) -> None:
    text = dialect.text() + "nonsense\n" * 30
    with pytest.raises(InputError, match="30 of 40 lines are broken"):
        imported(tmp_path, text)


@every_dialect
def test_a_log_without_jobs_is_refused(dialect: Dialect, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"log: (is empty|has no job in it)"):
        imported(
            tmp_path, "".join(f"{line}\n" for line in dialect.header), name=dialect.format if dialect.header else None
        )


@every_dialect
@pytest.mark.parametrize("packing", [gzip, bz2, lzma])
def test_a_truncated_packed_file_is_refused(dialect: Dialect, packing: Any, tmp_path: Path) -> None:
    packed = packing.compress(dialect.text().encode())
    with pytest.raises(InputError, match="truncated or damaged gzip, bzip2 or xz data"):
        imported(tmp_path, packed[:-20])


@every_dialect
def test_a_job_that_ends_before_it_starts_is_skipped(dialect: Dialect, tmp_path: Path) -> None:
    backwards = type(SCHEDULE[0])(1000, 990, ("n1",))
    report = imported(tmp_path, dialect.text((*SCHEDULE, backwards))).report
    assert report.used == len(SCHEDULE)
    assert report.malformed == 1


@every_dialect
def test_the_window_cuts_and_the_edges_can_be_kept(dialect: Dialect, tmp_path: Path) -> None:
    options = ImportOptions(start=DAY + 700.0, end=DAY + 1100.0)
    assert fragments(imported(tmp_path, dialect.text(), options)) == {
        ("n1", 700, 1000),
        ("n2", 900, 1100),
        ("n3", 900, 1100),
    }
    kept = imported(tmp_path, dialect.text(), ImportOptions(start=DAY + 700.0, end=DAY + 1100.0, keep_edges=True))
    assert fragments(kept) == {
        ("n1", 700, 1000), ("n2", 900, 1100), ("n3", 900, 1100), ("n4", 700, 1100), ("n10", 700, 1100)
    }  # fmt: skip


@every_dialect
def test_a_window_that_the_log_does_not_cover_is_refused(dialect: Dialect, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing of the window 2010"):
        imported(tmp_path, dialect.text(), ImportOptions(start=1262304000.0, end=1262307600.0))


@every_dialect
def test_nodes_can_be_named_and_excluded(dialect: Dialect, tmp_path: Path) -> None:
    options = ImportOptions(nodes=("n10", "n3", "n2", "n1", "spare"), exclude=("n[1,2]", "sp*"))
    result = imported(tmp_path, dialect.text(), options)
    assert result.trace.nodes == ("n10", "n3")
    assert result.trace.nodes_known
    assert fragments(result) == {row for row in IDLE if row[0] in ("n10", "n3")}
    assert any("2 nodes of the log are not in the nodes file" in note for note in result.report.notes)


@every_dialect
def test_the_busy_share_is_measured_before_trimming(dialect: Dialect, tmp_path: Path) -> None:
    options = ImportOptions(start=float(DAY), end=DAY + 3600.0)
    report = imported(tmp_path, dialect.text(), options).report
    busy = 0
    for node in ("n1", "n2", "n3", "n4", "n9", "n10"):
        busy += sum(any(node in r.nodes and r.start <= s < r.end for r in SCHEDULE) for s in range(3600))
    assert report.busy_share == pytest.approx(busy / (6 * 3600))


@pytest.mark.parametrize("name", ["sacct", "sacct-26", "jobcomp"])
def test_local_times_are_read_in_the_zone_that_is_said(name: str, tmp_path: Path) -> None:
    result = imported(tmp_path, DIALECTS[name].text(), ImportOptions(zone=time_zone("America/New_York")))
    assert {(n, s - 4 * 3600, e - 4 * 3600) for n, s, e in fragments(result)} == IDLE


@pytest.mark.parametrize("name", ["sacct-pairs", "swf", "lsf", "pbs"])
def test_absolute_times_do_not_depend_on_the_zone(name: str, tmp_path: Path) -> None:
    result = imported(tmp_path, DIALECTS[name].text(), ImportOptions(zone=time_zone("America/New_York")))
    assert fragments(result) == IDLE
