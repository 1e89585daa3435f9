"""Odd logs as sites have them: comments, extra columns, packed and cut files. Read right, or refused with advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from bftrainer.errors import InputError
from bftrainer.traces.readers.importing import Imported, import_trace
from bftrainer.traces.readers.options import ImportOptions
from bftrainer.traces.times import time_zone
from support.traces.logs import DAY, DIALECTS, IDLE, SCHEDULE, Dialect, Run

every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS.keys())
SWF_HEADER = f"; Version: 2.2\n; UnixStartTime: {DAY}\n; MaxNodes: 4\n; MaxProcs: 8\n"
NUMBERS = "1 0 0 {run} 2 -1 -1 2 900 -1 1 1 1 1 1 -1 -1 -1"


def imported(tmp_path: Path, data: str | bytes) -> Imported:
    path = tmp_path / "log"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return import_trace(path)


def fragments(result: Imported) -> set[tuple[str, float, float]]:
    return {(f.node, f.start - DAY, f.end - DAY) for f in result.trace.fragments()}


def counts(result: Imported) -> dict[str, int]:
    return {reason: tally.count for reason, tally in result.report.skipped.items()}


@pytest.mark.parametrize("more", ["0", "8 16gb x86_64", "{4} -1", "-1 {cl_x,cl_y} {a}"])
def test_columns_after_the_nodes_of_an_swf_row_are_ignored(more: str, tmp_path: Path) -> None:
    text = "".join(
        line if line.startswith(";") else f"{line.rstrip()} {more}\n"
        for line in DIALECTS["swf"].text().splitlines(keepends=True)
    )
    result = imported(tmp_path, text)
    assert fragments(result) == IDLE
    assert result.report.used == len(SCHEDULE)


def test_an_swf_node_list_may_have_blanks_and_a_comma_at_its_end(tmp_path: Path) -> None:
    rows = [f"{NUMBERS.format(run=100)} {{ a, b, }} 7", f"{NUMBERS.format(run=9).replace('1 0', '1 150', 1)} {{a,b}}"]
    assert fragments(imported(tmp_path, SWF_HEADER + "\n".join(rows))) == {("a", 100, 150), ("b", 100, 150)}


def test_swf_rows_with_more_numbers_and_no_nodes_are_laid_out(tmp_path: Path) -> None:
    result = imported(tmp_path, SWF_HEADER + f"{NUMBERS.format(run=100)} 5 6.5\n")
    assert result.report.used == 1
    assert any("laid onto 4 nodes first-fit" in note for note in result.report.notes)


def test_an_swf_node_list_that_is_not_closed_is_skipped_and_counted(tmp_path: Path) -> None:
    text = SWF_HEADER + f"{NUMBERS.format(run=100)} {{a,b}} 7\n" * 3 + f"{NUMBERS.format(run=100)} {{a,b"
    assert counts(imported(tmp_path, text))["malformed: unreadable node list"] == 1


@pytest.mark.parametrize("run", [-2, -3600, -99999999])
def test_negative_run_times_are_skipped_and_counted(run: int, tmp_path: Path) -> None:
    text = SWF_HEADER + f"{NUMBERS.format(run=100)}\n" * 3 + f"{NUMBERS.format(run=run)}\n" * 2
    result = imported(tmp_path, text)
    assert counts(result)["malformed: negative run time"] == 2
    assert result.report.used == 3


def test_negative_wait_times_are_skipped_and_counted(tmp_path: Path) -> None:
    text = SWF_HEADER + f"{NUMBERS.format(run=100)}\n" * 3 + "1 0 -60 100 2 -1 -1 2 900 -1 1 1 1 1 1 -1 -1 -1\n"
    assert counts(imported(tmp_path, text))["malformed: negative wait time"] == 1


@every_dialect
def test_comments_that_look_like_an_swf_header_do_not_make_a_log_swf(dialect: Dialect, tmp_path: Path) -> None:
    comments = "; Version: 19.1\n; Computer: cluster\n; MaxNodes: 6\n;\n# exported\n" + "; more\n" * 30
    result = imported(tmp_path, comments + dialect.text())
    assert result.report.format == dialect.format
    assert fragments(result) == IDLE
    assert result.report.malformed == 0
    assert result.report.skipped["comment or blank line"].first_line == 1


@every_dialect
def test_a_log_cut_within_its_last_line_is_still_read(dialect: Dialect, tmp_path: Path) -> None:
    last = Run(1900, 1950, ("n3", "n4"))
    text = dialect.text((*SCHEDULE, last)).rstrip("\n")
    length = len(text.rpartition("\n")[2])
    for cut in range(1, length, 5):
        report = imported(tmp_path, text[:-cut]).report
        assert report.lines == len(dialect.header) + len(SCHEDULE) + 1
        assert report.used >= len(SCHEDULE)


@every_dialect
def test_jobs_without_nodes_are_counted_and_hold_none(dialect: Dialect, tmp_path: Path) -> None:
    lines = dialect.text((*SCHEDULE, Run(1900, 1950, ("NODE",)))).replace("{NODE}", "{}").splitlines()
    lines[-1] = lines[-1].replace("NODE/0*16+NODE/1", "").replace('1 "16*NODE"', "0").replace("NODE", "")
    result = imported(tmp_path, "\n".join(lines))
    assert fragments(result) == IDLE
    assert sum(count for reason, count in counts(result).items() if reason.startswith("no node list")) == 1


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (b"\x28\xb5\x2f\xfd" + bytes(50), "is packed with zstd: unpack it first"),
        (b"PK\x03\x04" + bytes(50), "is a zip archive: unpack it first"),
        (DIALECTS["sacct"].text().encode("utf-16"), "is UTF-16 text: convert it first, with iconv"),
    ],
    ids=["zstd", "zip", "utf-16"],
)
def test_files_that_must_be_unpacked_or_converted_first_say_so(data: bytes, advice: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=advice):
        imported(tmp_path, data)


def sacct(*runs: tuple[int, int]) -> str:
    rows = [DIALECTS["sacct"].write(Run(start, end, ("n1",)), job) for job, (start, end) in enumerate(runs, 1)]
    return "\n".join([*DIALECTS["sacct"].header, *rows])


@pytest.mark.parametrize("zone", ["UTC", "America/Chicago", "Asia/Tokyo"])
def test_a_slurm_job_that_starts_in_1970_never_started(zone: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(sacct((0, 100), (200, 300), (-DAY + 12 * 3600, 400)))
    result = import_trace(path, ImportOptions(zone=time_zone(zone)))
    assert counts(result)["never started"] == 1
    assert result.report.used == 2


def test_a_few_jobs_with_a_wrong_year_are_pointed_out(tmp_path: Path) -> None:
    runs = [(100 * i, 100 * i + 50) for i in range(400)]
    assert not any("wrong times" in note for note in imported(tmp_path, sacct(*runs)).report.notes)
    (note,) = [n for n in imported(tmp_path, sacct(*runs, (9_000_000, 9_000_010))).report.notes if "wrong times" in n]
    assert "cut the log with --from and --to" in note
    assert "2020-12-26" in note
