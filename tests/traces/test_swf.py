from pathlib import Path

import pytest

from bftrainer.errors import InputError
from bftrainer.traces.readers.importing import Imported, import_trace
from bftrainer.traces.readers.options import ImportOptions
from support.traces.logs import DAY


def row(job: int, submit: int, wait: int, run: int, got: int, asked: int = -1, status: int = 1, more: str = "") -> str:
    return f"{job} {submit} {wait} {run} {got} -1 -1 {asked} -1 -1 {status} 1 1 1 1 -1 -1 -1 {more}".rstrip()


def read(tmp_path: Path, *rows: str, nodes: int | None = 4, processors: int | None = 8, **options: object) -> Imported:
    header = [f"; UnixStartTime: {DAY}"]
    header += [f"; MaxNodes: {nodes}"] if nodes else []
    header += [f"; MaxProcs: {processors}"] if processors else []
    path = tmp_path / "log.swf"
    path.write_text("\n".join([*header, *rows]))
    return import_trace(path, ImportOptions(**options))  # type: ignore[arg-type]


def idle(result: Imported) -> set[tuple[str, float, float, bool]]:
    return {(f.node, f.start - DAY, f.end - DAY, f.open) for f in result.trace.fragments()}


def test_jobs_without_node_lists_are_laid_first_fit_and_the_report_says_so(tmp_path: Path) -> None:
    # Two processors a node: 3 processors take node1 whole and half of node2; the next job gets the other half.
    result = read(tmp_path, row(1, 0, 0, 100, 3), row(2, 10, 0, 50, 1), row(3, 20, 0, 100, 2))
    assert result.trace.nodes == ("node1", "node2", "node3", "node4")
    assert idle(result) == {
        ("node1", 100, 120, True), ("node2", 100, 120, True), ("node3", 0, 20, False), ("node4", 0, 120, True)
    }  # fmt: skip
    assert any("laid onto 4 nodes first-fit" in note for note in result.report.notes)


def test_more_processors_than_exist_are_counted_and_clipped(tmp_path: Path) -> None:
    result = read(tmp_path, row(1, 0, 0, 100, 6), row(2, 0, 0, 100, 6))
    assert idle(result) == set()
    (note,) = [n for n in result.report.notes if "clipped" in n]
    assert "1 jobs (50.0%)" in note
    assert "33.33% of all processor-time" in note


def test_rows_out_of_submit_order_are_laid_in_order_of_start(tmp_path: Path) -> None:
    forward = read(tmp_path, row(1, 0, 0, 100, 4), row(2, 10, 0, 50, 2), row(3, 20, 5, 100, 2))
    backward = read(tmp_path, row(3, 20, 5, 100, 2), row(2, 10, 0, 50, 2), row(1, 0, 0, 100, 4))
    assert idle(forward) == idle(backward)


def test_jobs_that_never_ran_are_skipped(tmp_path: Path) -> None:
    result = read(tmp_path, row(1, 0, 0, 100, 4), row(2, 5, -1, -1, -1, 4, 5), row(3, 5, 7, 0, 0, 4, 5))
    assert result.report.skipped["never started"].count == 2
    assert result.report.used == 1


def test_processors_asked_for_stand_in_for_unknown_ones_and_the_report_says_so(tmp_path: Path) -> None:
    result = read(tmp_path, row(1, 0, 0, 100, -1, 8), row(2, 100, 0, 100, 2))
    assert ("node1", 0, 100, False) not in idle(result)
    assert any("1 jobs do not say how many processors they got" in n for n in result.report.notes)


def test_a_log_that_does_not_know_its_starts_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"2 of 3 jobs have no wait time \(-1\)"):
        read(tmp_path, row(1, 0, 0, 100, 4), row(2, 5, -1, 50, 4), row(3, 5, -1, 50, 4))


def test_a_few_unknown_starts_are_skipped_and_counted(tmp_path: Path) -> None:
    rows = [row(i, i * 10, 0, 100, 1) for i in range(40)] + [row(99, 5, -1, 50, 4)]
    assert read(tmp_path, *rows).report.skipped["start unknown (wait time is -1)"].count == 1


def test_a_machine_of_unknown_size_is_refused_unless_its_nodes_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Name its nodes with --nodes-file"):
        read(tmp_path, row(1, 0, 0, 100, 1), nodes=None, processors=None)
    path = tmp_path / "log.swf"
    assert import_trace(path, ImportOptions(nodes=("a", "b"))).trace.nodes == ("a", "b")


def test_rows_without_a_node_list_are_skipped_when_others_have_one(tmp_path: Path) -> None:
    result = read(tmp_path, row(1, 0, 0, 100, 1, more="{3}"), row(2, 150, 0, 100, 1, more="{3}"), row(3, 0, 0, 50, 1))
    assert idle(result) == {("3", 100, 150, False)}
    assert result.report.skipped["no node list"].count == 1
    assert result.report.used == 2


def test_the_nasa_log_is_refused(shared_data: Path) -> None:
    with pytest.raises(InputError, match="18239 of 18239 jobs have no wait time"):
        import_trace(shared_data / "logs/NASA-iPSC-1993-3.1-cln.swf.gz")
