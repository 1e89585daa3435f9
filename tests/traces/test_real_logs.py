"""Real logs give the same traces in every version: the figures are those of 0.1.0, to the last bit of every time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from bftrainer.traces.readers.importing import import_trace
from bftrainer.traces.stats import idle_stats

FIGURES = [
    # file, jobs used, fragments, idle node-hours, hash of the trace
    ("fixtures/lsf/lsb.acct.log", 2, 0, 0.0, "8a30f86a25c262d1"),
    ("fixtures/pbs/accounting.log", 8, 0, 0.0, "5b25a5cab5dc89c9"),
    ("fixtures/sacct/accounting-logs-with-job-arrays.log", 6, 0, 0.0, "caeb124297d2e98e"),
    ("fixtures/sacct/accounting-logs.log", 4, 0, 0.0, "12f87334037a1359"),
    ("fixtures/sacct/sacctd-output.txt", 29, 5, 0.069722, "3cb79439e816864c"),
    ("logs/UniLu-Gaia-2014-1.swf.gz", 51860, 10940, 152573.783333, "46eddca62d728062"),
    ("logs/pozidriv.sacct.log.gz", 11285, 10287, 344.415, "4759f47688abd0ac"),
    ("logs/slurm-jobcomp.filetxt.log", 200, 352, 0.426389, "f915b20b26d4328f"),
    ("logs/theta_2023.swf.gz", 8401, 2390968, 2191189.818611, "e2f7604bebd99408"),
]


@pytest.mark.parametrize(
    ("name", "used", "fragments", "node_hours", "digest"), FIGURES, ids=[Path(row[0]).name for row in FIGURES]
)
def test_a_real_log_gives_the_trace_it_always_gave(
    shared_data: Path, name: str, used: int, fragments: int, node_hours: float, digest: str
) -> None:
    result = import_trace(shared_data / name)
    trace = result.trace
    assert (result.report.used, len(trace)) == (used, fragments)
    assert round(idle_stats(trace).node_hours, 6) == node_hours
    content = hashlib.sha256()
    for column in (trace.node, trace.start, trace.end, trace.open):
        content.update(column.tobytes())
    content.update(json.dumps([trace.nodes, [trace.window.start, trace.window.end], trace.nodes_known]).encode())
    assert content.hexdigest().startswith(digest)
