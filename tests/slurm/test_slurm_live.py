"""End to end on a real Slurm: main jobs come and go, two trainers live on what is left, and nothing stays behind."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from bftrainer.cluster.config.keys import Config, PolicySettings
from bftrainer.cluster.config.policy import policy_of
from bftrainer.cluster.report.efficiency import judge
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.traces.files import load_trace
from support.cluster.live import Live, gone
from support.elastic.jobs import run_alone
from support.elastic.ledger import committed, same_as_alone
from support.slurm.lab import Lab, cluster
from support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "elastic" / "chaos_worker.py"
NODES, JOBS, SPAN_S, LOAD, SEED = 4, 6, 20.0, 0.3, 8
SAMPLES, EPOCHS, PACE_S = 600, 12, "0.3"
HORIZON_S = 20.0


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The schedule of main jobs, shared with `benchmarks/slurm_impact.py`."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("slurm_schedule")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with cluster(NODES) as one:
        yield one


@pytest.mark.slurm
def test_trainers_finish_on_what_main_jobs_leave_and_nothing_is_left_of_them(
    lab: Lab, benchmark: ModuleType, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    jobs = benchmark.schedule(SEED, JOBS, NODES, SPAN_S, LOAD)
    homes = [tmp_path / name for name in ("one", "two")]
    pool = {"partition": "scavenger", "interval_s": "1", "python": str(benchmark.gentle_python(tmp_path))}
    pool["warm_pilots"] = str(NODES)  # more nodes than the trainers can use
    settings = [word for name, value in pool.items() for word in ("--set", f"pool.{name}={value}")]
    settings += ["--set", f"policy.horizon_s={HORIZON_S:g}", "--set", "trainers.snapshot_every_s=1"]
    here = {"SLURM_CONF": str(lab.conf)}
    with (
        Live(tmp_path / "state", "--pool", "slurm", "--drain", *settings, env=here) as live,
        recording(tmp_path / "idle.parquet", here),
    ):
        for home in homes:
            home.mkdir()
            live.submit(WORKER, str(home), str(EPOCHS), PACE_S, nodes="1-3", name=home.name)
        # A pilot that is still starting would be taken back without having been a node.
        wait_until(lambda: len(live.nodes()) == NODES, "an agent on every node", 240)
        begin = benchmark.play(lab, jobs, tmp_path / "jobs", live.nodes)
        wait_until(lambda: not lab.jobs("-p", "main"), "the end of all main jobs", 120)
        end = time.time()
        # All nodes import torch on the cores that other tests use too: 20 s alone, minutes beside them.
        rows = [live.until_state(home.name, "done", "failed", "cancelled", timeout_s=400) for home in homes]
        left = [event for event in live.api.events(limit=1000, kind="node.left")["events"] if event["time"] < end]
        totals = live.api.status()["totals"]
        live.nodes()
        assert live.stop(timeout_s=60) == 0
        # It has ended in good order, so Slurm knows of no pilot, and no process of one is left.
        assert lab.jobs() == {}
        gone(live.pids)
        assert live.problems() == []

    for row in rows:
        assert row["state"] == "done", (row["reason"], row["traceback"], row["log_tail"])
        assert row["samples"] == row["total"] == SAMPLES * EPOCHS, row
    alone = tmp_path / "alone"
    alone.mkdir()
    run_alone(tmp_path, WORKER, alone, EPOCHS, 0)
    for home in homes:
        assert committed(home) == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}
        same_as_alone(alone, home)

    log = lab.folder / "log" / "jobcomp.log"
    assert all(one.ended is not None for one in benchmark.played(jobs, tmp_path / "jobs"))
    assert benchmark.failed(log) == 0
    assert set(lab.states().values()) == {"idle"}
    assert left, "no node was taken back: the schedule disturbed nobody"
    busy = benchmark.held(log, benchmark.NAME)
    spells = benchmark.idle_spells(busy, lab.states(), begin, end)
    occupied = benchmark.share(spells, benchmark.held(log, benchmark.PILOT))
    used = totals["used_node_seconds"] / totals["node_seconds"]
    print(
        f"occupied_share {occupied:.3f}; of that {used:.3f} with a worker; {len(left)} nodes taken back"
    )  # benchmarks/slurm_impact.py has a goal
    assert 0 < occupied <= 1

    # What was recorded meanwhile agrees with Slurm's own log of the main jobs. While a node changes hands it is neither
    # idle nor in use (completing, planned), for a fraction of a second each time, longer on a busy machine.
    trace = load_trace(tmp_path / "idle.parquet")
    assert sorted(trace.nodes) == sorted(lab.states())
    changes = sum(len(spans) for spans in busy.values())
    main_s = sum(min(last, end) - max(first, begin) for spans in busy.values() for first, last in spans)
    idle_s = float(np.maximum(np.minimum(trace.end, end) - np.maximum(trace.start, begin), 0.0).sum())
    expected_s = NODES * (end - begin) - main_s
    print(f"idle {idle_s:.0f} node-s were recorded, {expected_s:.0f} by Slurm's log with {changes} changes")
    # A node that is taken counts as idle until the recorder looks again, each 0.5 s.
    assert 0.8 * expected_s - 2.0 * changes < idle_s < 1.03 * expected_s + 0.5 * changes
    # The simulator, given that trace and what was measured of the trainers, makes as many samples of it. How well it
    # predicts the time is the matter of benchmarks/live_prediction.py.
    with Store.open(tmp_path / "state" / FILE, read_only=True) as store:
        found = judge(store, policy_of(Config(policy=PolicySettings(horizon_s=HORIZON_S))), trace)
    predicted_s = found.simulated_s * found.outcome_samples / found.simulated_samples
    print(f"took {found.seconds:.1f} s, predicted {predicted_s:.1f} s ({predicted_s / found.seconds:.3f})")
    assert found.outcome_samples == len(homes) * SAMPLES * EPOCHS
    assert found.simulated_samples > 0


@contextmanager
def recording(path: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """`bftrainer trace record` beside a run."""
    words = ["trace", "record", "--source", "slurm", "--idle-partition", "scavenger", "--interval", "0.5", "-o", path]
    with subprocess.Popen([sys.executable, "-m", "bftrainer", *words], env={**os.environ, **environment}) as recorder:
        try:
            yield
        finally:
            recorder.terminate()
    assert recorder.returncode == 0


def test_a_schedule_has_the_jobs_the_widths_and_the_load_that_it_was_asked_for(benchmark: ModuleType) -> None:
    for seed in range(20):
        jobs = benchmark.schedule(seed, 40, 12, 240.0, 0.3)
        assert jobs == benchmark.schedule(seed, 40, 12, 240.0, 0.3)
        assert len(jobs) == 40
        assert [job.at_s for job in jobs] == sorted(job.at_s for job in jobs)
        assert (min(job.nodes for job in jobs), max(job.nodes for job in jobs)) == (1, 10)
        assert 0.2 < sum(job.nodes * job.run_s for job in jobs) / (12 * 240) < 0.35
        assert min(job.run_s for job in jobs) >= 1


def test_only_long_idle_spells_count_and_what_was_held_in_them(benchmark: ModuleType) -> None:
    busy = {"a": [(30.0, 32.0), (10.0, 20.0)], "b": [(-5.0, 96.0), (96.0, 110.0)]}
    spells = benchmark.idle_spells(busy, ["a", "b", "c"], 0.0, 100.0, 10.0)
    assert spells == {"a": [(0.0, 10.0), (20.0, 30.0), (32.0, 100.0)], "b": [], "c": [(0.0, 100.0)]}
    pilots = {"a": [(1.0, 10.0), (21.0, 30.0), (32.0, 90.0)], "b": [(0.0, 100.0)], "c": [(-20.0, 50.0), (60.0, 200.0)]}
    assert benchmark.share(spells, pilots) == pytest.approx((9 + 9 + 58 + 50 + 40) / 188)
    assert benchmark.joined({"a": [3.0, 1.0, 2.0, 9.0, 10.0]}, 1.5) == {"a": [(1.0, 3.0), (9.0, 10.0)]}


def test_slurms_log_says_who_held_which_node(benchmark: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "jobcomp.log"
    line = "JobId={} UserId=root(0) Name={} JobState={} Partition=main StartTime={} EndTime={} NodeList={} NodeCnt=2\n"
    one, two = "2026-01-02T03:04:05", "2026-01-02T03:04:15"
    log.write_text(
        line.format(1, "main-0", "COMPLETED", one, two, "n[01-02]")
        + line.format(2, "main-1", "CANCELLED", two, two, "(null)")
        + line.format(3, "bftrainer-ab", "FAILED", one, two, "n03")
    )
    held = benchmark.held(log, benchmark.NAME)
    assert sorted(held) == ["n01", "n02"]
    assert [end - begin for spans in held.values() for begin, end in spans] == [10.0, 10.0]
    assert sorted(benchmark.held(log, benchmark.PILOT)) == ["n03"]
    assert benchmark.failed(log) == 1
