from pathlib import Path

import pytest

from bftrainer.errors import InputError
from bftrainer.traces.readers.importing import import_trace
from bftrainer.traces.readers.jobs import Job, ReaderOptions, Skip
from bftrainer.traces.readers.options import ImportOptions
from bftrainer.traces.readers.slurm import SacctReader
from support.traces.logs import DAY, DIALECTS, IDLE, iso

HEADER = "JobID|Start|End|Elapsed|State|NodeList"


def outcome(row: str, header: str = HEADER) -> Job | Skip:
    return list(SacctReader(ReaderOptions()).read([(1, header), (2, row)]))[-1]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (f"7.batch|{iso(0)}|{iso(9)}|00:09|COMPLETED|n1", "job step"),
        (f"7.0|{iso(0)}|{iso(9)}|00:09|COMPLETED|n1", "job step"),
        (f"7_4.extern|{iso(0)}|{iso(9)}|00:09|COMPLETED|n1", "job step"),
        ("7|Unknown|Unknown|00:00|PENDING|None assigned", "pending"),
        ("7_[5-9]|Unknown|Unknown|00:00|PENDING|None assigned", "pending"),
        (f"7|Unknown|{iso(5)}|00:00|CANCELLED by 1001|None assigned", "never started"),
        (f"7|{iso(5)}|{iso(5)}|00:00|CANCELLED by 1001|None assigned", "no node list"),
        (f"7|{iso(5)}|Unknown||NODE_FAIL|n1", "end unknown"),
        (f"7|{iso(5)}|yesterday|00:05|COMPLETED|n1", "malformed: unreadable time"),
        (f"7|{iso(5)}|{iso(9)}|00:05|COMPLETED|n[1-", "malformed: unreadable node list"),
        (f"7|{iso(5)}|{iso(9)}|00:05|COMPLETED", "malformed: wrong number of columns"),
    ],
)
def test_rows_that_hold_no_nodes_are_skipped_for_the_right_reason(row: str, reason: str) -> None:
    result = outcome(row)
    assert isinstance(result, Skip)
    assert result.reason.startswith(reason)


@pytest.mark.parametrize(
    ("row", "end", "nodes"),
    [
        (f"7|{iso(0)}|{iso(9)}|00:09|CANCELLED by 1001|n[1-2]", DAY + 9.0, ("n1", "n2")),
        (f"7_3|{iso(0)}|{iso(9)}|00:09|COMPLETED|n1", DAY + 9.0, ("n1",)),
        (f"7+1|{iso(0)}|{iso(9)}|00:09|TIMEOUT|n1", DAY + 9.0, ("n1",)),
        (f"7|{iso(0)}|Unknown|1-00:00:05|NODE_FAIL|n1", DAY + 86405.0, ("n1",)),
        (f"7|{iso(0)}|Unknown|00:09|RUNNING|n1", None, ("n1",)),
        (f"7|{iso(0)}|{iso(0)}|00:09|RUNNING|n1", None, ("n1",)),
        (f"7|{iso(0)}|Unknown|00:09|SUSPENDED|n1", None, ("n1",)),
        (f"7|{DAY}|{DAY + 9}|00:09|COMPLETED|n1", DAY + 9.0, ("n1",)),
    ],
)
def test_rows_that_hold_nodes_say_how_long(row: str, end: float | None, nodes: tuple[str, ...]) -> None:
    assert outcome(row) == Job(2, float(DAY), end, nodes)


def test_the_trailing_bar_of_sacct_p_is_ignored() -> None:
    result = outcome(f"7|{iso(0)}|{iso(9)}|00:09|COMPLETED|n1|", HEADER + "|")
    assert isinstance(result, Job)


def test_columns_can_be_named_when_there_is_no_header(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("\n".join(DIALECTS["sacct"].text().splitlines()[1:]))
    options = ImportOptions(columns=("JobID", "Start", "End", "State", "NodeList"))
    result = import_trace(path, options, "sacct")
    assert {(f.node, f.start - DAY, f.end - DAY) for f in result.trace.fragments()} == IDLE


def test_a_header_without_the_needed_columns_says_how_to_write_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("JobID|User|Start|End|State\n1|u|a|b|c\n")
    with pytest.raises(InputError, match="nodelist is missing. Write the log with: sacct -aPX"):
        import_trace(path)


def test_a_running_job_holds_its_nodes_until_the_log_ends(tmp_path: Path) -> None:
    path = tmp_path / "log"
    rows = [f"1|{iso(0)}|{iso(100)}|00:00|COMPLETED|n[1-2]", f"2|{iso(200)}|Unknown|00:00|RUNNING|n1",
            f"3|{iso(300)}|{iso(500)}|00:00|COMPLETED|n2"]  # fmt: skip
    path.write_text("\n".join([HEADER, *rows]))
    found = {(f.node, f.start - DAY, f.end - DAY) for f in import_trace(path).trace.fragments()}
    assert found == {("n1", 100, 200), ("n2", 100, 300)}


def test_the_pozidriv_log_reads_as_measured(shared_data: Path) -> None:
    options = ImportOptions(start=1483056000.0, end=1483228800.0)  # 2016-12-30 and 31
    result = import_trace(shared_data / "logs/pozidriv.sacct.log.gz", options)
    report = result.report
    assert (report.format, report.jobs, report.lines, len(result.trace.nodes)) == ("sacct", 11704, 11704, 105)
    assert report.busy_share == pytest.approx(0.86, abs=0.005)
    assert report.used == 11285
    assert {reason: tally.count for reason, tally in report.skipped.items()} == {"no node list: never got a node": 419}


@pytest.mark.parametrize(
    ("name", "format_name", "used", "lines", "nodes"),
    [
        ("fixtures/sacct/accounting-logs.log", "sacct", 4, 4, 41),
        ("fixtures/sacct/accounting-logs-with-job-arrays.log", "sacct", 6, 6, 32),
        ("fixtures/sacct/sacctd-output.txt", "sacct-pairs", 29, 96, 10),
        ("logs/slurm-jobcomp.filetxt.log", "jobcomp", 200, 200, 32),
    ],
)
def test_real_slurm_logs_are_read_line_by_line(
    shared_data: Path, name: str, format_name: str, used: int, lines: int, nodes: int
) -> None:
    result = import_trace(shared_data / name)
    assert (result.report.format, result.report.used, result.report.lines) == (format_name, used, lines)
    assert len(result.trace.nodes) == nodes


def test_a_log_of_one_running_and_one_pending_job_has_no_time_to_look_at(shared_data: Path) -> None:
    with pytest.raises(InputError, match="the window is empty"):
        import_trace(shared_data / "fixtures/sacct/non-ended-job-state.log")
