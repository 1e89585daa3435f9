from pathlib import Path

import pytest

from bftrainer.traces.readers.importing import import_trace
from bftrainer.traces.readers.jobs import Job, ReaderOptions, Skip
from bftrainer.traces.readers.lsf import LsfReader
from bftrainer.traces.readers.pbs import PbsReader
from support.traces.logs import DAY, DIALECTS, Run


def lsf(*lines: str) -> list[Job | Skip]:
    return list(LsfReader(ReaderOptions()).read(enumerate(lines, 1)))


def pbs(*lines: str) -> list[Job | Skip]:
    return sorted(PbsReader(ReaderOptions()).read(enumerate(lines, 1)), key=lambda outcome: outcome.line)


def started(job: str, start: int, hosts: str) -> str:
    return f"09/13/2020 12:26:40;S;{job};user=u queue=q start={DAY + start} exec_host={hosts}"


def test_lsf_slots_on_one_host_are_one_node() -> None:
    (job,) = lsf(DIALECTS["lsf"].write(Run(0, 9, ("a", "b")), 1))
    assert job == Job(1, float(DAY), DAY + 9.0, ("a", "b"))


def test_lsf_jobs_that_never_started_and_other_records_are_skipped() -> None:
    never = DIALECTS["lsf"].write(Run(-DAY, 9, ("a",)), 1)
    reasons = [o.reason for o in lsf(never, '"EVENT_ADRSV_FINISH" "9.11" 1389683139 1', "junk") if isinstance(o, Skip)]
    assert reasons == ["never started", "other record: EVENT_ADRSV_FINISH", "malformed: no LSF record"]


def test_a_cut_lsf_record_is_malformed() -> None:
    (outcome,) = lsf(DIALECTS["lsf"].write(Run(0, 9, ("a", "b")), 1)[:150])
    assert outcome == Skip(1, "malformed: wrong number of columns")


@pytest.mark.parametrize(
    "hosts",
    ["a/0+a/1+b/0", "a/0*13+b/0*13", "a/0-3+b/0-7", "(a:ncpus=13)+(b:ncpus=13)", "(a:mem=1kb:ncpus=2+b:ncpus=2)"],
)
def test_pbs_host_forms_name_each_node_once(hosts: str) -> None:
    (job,) = pbs(f"09/13/2020 12:26:40;E;1;start={DAY} end={DAY + 9} exec_host={hosts} Exit_status=0")
    assert job == Job(1, float(DAY), DAY + 9.0, ("a", "b"))


def test_a_pbs_start_without_an_end_is_a_job_still_running() -> None:
    ended = DIALECTS["pbs"].write(Run(0, 9, ("a",)), 1)
    outcomes = pbs(started("1.server", 0, "a/0"), started("2", 5, "b/0"), ended, "09/13/2020 12:26:40;Q;3;queue=q")
    assert outcomes == [
        Skip(1, "start record, its end record is used"),
        Job(2, DAY + 5.0, None, ("b",)),
        Job(3, float(DAY), DAY + 9.0, ("a",)),
        Skip(4, "other record: Q"),
    ]


def test_a_pbs_job_that_is_started_twice_counts_from_the_last_start() -> None:
    outcomes = pbs(started("2", 5, "b/0"), started("2", 50, "c/0"))
    assert outcomes == [Skip(1, "start record, followed by another"), Job(2, DAY + 50.0, None, ("c",))]


def test_real_lsf_and_pbs_records_are_read(shared_data: Path) -> None:
    lsf_log = import_trace(shared_data / "fixtures/lsf/lsb.acct.log")
    assert (lsf_log.report.format, lsf_log.report.used, len(lsf_log.trace.nodes)) == ("lsf", 2, 12)
    pbs_log = import_trace(shared_data / "fixtures/pbs/accounting.log")
    assert (pbs_log.report.format, pbs_log.report.used, len(pbs_log.trace.nodes)) == ("pbs", 8, 12)
    assert {reason: t.count for reason, t in pbs_log.report.skipped.items()} == {"no node list": 1}
