"""The recorder: asks on schedule, survives sources that fail or hang, and loses at most one poll to a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bftrainer.errors import InputError
from bftrainer.traces.recorder.journal import Entry, Journal
from bftrainer.traces.recorder.record import (
    PollError,
    Recorder,
    RecordingSummary,
    StateSource,
    default_source,
    poll,
    record,
    steady_clock,
)
from bftrainer.traces.recorder.recording import read_journal
from bftrainer.traces.recorder.states import NodeStates
from support.processes import is_alive
from support.waiting import wait_until

DEADLINE_S = 60


@dataclass
class FakeTime:
    """A clock and a stop in one: waiting moves the clock, and past `stop_at` it is time to stop."""

    now: float = 1000.0
    stop_at: float = float("inf")

    def clock(self) -> float:
        return self.now

    def is_set(self) -> bool:
        return self.now >= self.stop_at

    def wait(self, timeout: float) -> bool:
        self.now += timeout
        return self.is_set()

    def takes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def fake() -> FakeTime:
    return FakeTime()


@pytest.fixture
def journal(tmp_path: Path):
    with Journal.open(tmp_path / "T.journal", {"form": "sinfo"}, 10) as journal:
        yield journal


def run(fake: FakeTime, journal: Journal, ask: Callable[[], NodeStates], duration_s: float | None = None):
    entries: list[Entry] = []
    tally = Recorder(ask, journal, fake, fake.clock, entries.append).run(duration_s)
    return tally, entries


def all_idle() -> NodeStates:
    return NodeStates(("a", "b"), frozenset({"a", "b"}))


def test_polls_keep_to_the_schedule_however_long_they_take(fake: FakeTime, journal: Journal) -> None:
    def ask() -> NodeStates:
        fake.takes(3.7)
        return all_idle()

    tally, entries = run(fake, journal, ask, duration_s=60)
    assert [entry.t for entry in entries] == [1000, 1010, 1020, 1030, 1040, 1050, 1060]
    assert tally == RecordingSummary(polls=7, missed=0)


def test_a_slow_poll_skips_slots_instead_of_bunching(fake: FakeTime, journal: Journal) -> None:
    durations = iter([25.0, 0.0, 10.0, 0.0])

    def ask() -> NodeStates:
        fake.takes(next(durations))
        return all_idle()

    _, entries = run(fake, journal, ask, duration_s=60)
    assert [entry.t for entry in entries] == [1000, 1030, 1040, 1060]


@pytest.mark.parametrize(("interval", "duration", "polls"), [(0.1, 0.3, 4), (0.1, 0.7, 8), (10, 5, 1), (7, 20, 3)])
def test_a_duration_ends_with_the_last_poll_inside_it(fake, tmp_path: Path, interval, duration, polls) -> None:
    with Journal.open(tmp_path / "J", {}, interval) as journal:
        assert run(fake, journal, all_idle, duration)[0].polls == polls


@pytest.mark.parametrize("duration", [0, -1, float("nan")])
def test_an_impossible_duration_is_refused(fake, journal: Journal, duration: float) -> None:
    with pytest.raises(InputError, match="duration"):
        run(fake, journal, all_idle, duration)


def test_a_stop_ends_the_recording(journal: Journal) -> None:
    tally, entries = run(FakeTime(stop_at=1025), journal, all_idle)
    assert [entry.t for entry in entries] == [1000, 1010, 1020]
    assert tally.polls == 3
    assert run(FakeTime(now=2000, stop_at=2000), journal, all_idle)[0] == RecordingSummary(0, 0)


@pytest.mark.waits
def test_a_stop_interrupts_the_wait(tmp_path: Path) -> None:
    stop, polled = threading.Event(), threading.Event()
    tallies: list[RecordingSummary] = []
    source = StateSource("echo n1")

    def work() -> None:
        tallies.append(record(source, tmp_path / "T", stop, interval_s=3600, watch=lambda entry: polled.set()))

    thread = threading.Thread(target=work)
    thread.start()
    assert polled.wait(DEADLINE_S)
    stop.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert tallies == [RecordingSummary(1, 0)]


def test_failed_polls_are_journalled_and_the_next_slot_is_tried(fake: FakeTime, journal: Journal) -> None:
    answers = iter([all_idle(), PollError("sinfo: no answer"), InputError("odd"), all_idle()])

    def ask() -> NodeStates:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    tally, entries = run(fake, journal, ask, duration_s=30)
    assert tally == RecordingSummary(polls=2, missed=2)
    assert [entry.missed for entry in entries] == [None, "sinfo: no answer", "odd", None]
    recording = read_journal(journal.path)
    assert (recording.polls, recording.missed, len(recording.trace)) == (2, 2, 2)


def test_a_mistake_in_the_program_is_not_taken_for_a_failed_poll(fake: FakeTime, journal: Journal) -> None:
    def ask() -> NodeStates:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(fake, journal, ask)


def test_the_steady_clock_tells_the_time_and_goes_forward() -> None:
    before = time.time()
    clock = steady_clock()
    times = [clock() for _ in range(1000)]
    assert times == sorted(times)
    assert abs(times[0] - before) < DEADLINE_S


@pytest.mark.waits
def test_schedulers_have_their_commands() -> None:
    assert str(default_source("slurm")) == "sinfo -N -h -o '%N %T'"
    assert default_source("slurm").form == "sinfo"
    assert str(default_source("pbs")) == "pbsnodes -a -F json"
    assert default_source("pbs").form == "pbs-json"
    assert default_source("script", "cat idle | sort") == StateSource("cat idle | sort", "auto")
    assert default_source("pbs").identity() == {"command": ["pbsnodes", "-a", "-F", "json"], "form": "pbs-json"}


@pytest.mark.parametrize(
    ("kind", "command", "says"),
    [("script", None, "needs a command"), ("slurm", "x", "use the source `script`"), ("lsf", None, "'lsf'")],
)
def test_sources_that_make_no_sense_are_refused(kind, command, says: str) -> None:
    with pytest.raises(InputError, match=says):
        default_source(kind, command)


@pytest.mark.waits
@pytest.mark.parametrize(("command", "timeout_s"), [("", 1), (" ", 1), ((), 1), ("x", 0), ("x", float("nan"))])
def test_a_source_needs_a_command_and_a_timeout(command, timeout_s: float) -> None:
    with pytest.raises(InputError):
        StateSource(command, timeout_s=timeout_s)


@pytest.mark.waits
def test_a_poll_runs_the_command_and_reads_what_it_prints() -> None:
    assert poll(StateSource(("printf", "n1 idle\\nn2 alloc\\n"), "sinfo")) == NodeStates(
        ("n1", "n2"), frozenset({"n1"})
    )
    assert poll(StateSource("echo n1; echo n2 | cat")).idle == {"n1", "n2"}
    assert poll(StateSource("true")).idle == frozenset()


@pytest.mark.waits
def test_a_command_reads_nothing_from_our_terminal() -> None:
    assert poll(StateSource("cat", timeout_s=DEADLINE_S)).idle == frozenset()


@pytest.mark.waits
@pytest.mark.parametrize(
    ("source", "says"),
    [
        (StateSource("echo first >&2; echo second >&2; exit 3"), "exit status 3: first$"),
        (StateSource("exit 1"), "exit status 1: it printed nothing"),
        (StateSource("kill -9 $$"), "signal 9 ended it"),
        (StateSource(("no-such-command-anywhere", "-x")), "no-such-command-anywhere -x: cannot run it: No such file"),
        (StateSource(("echo", "a\0b")), "cannot run it"),
        (StateSource(("true",), "sinfo"), "true: sinfo printed no node"),
        (StateSource("echo '<html>'"), "echo '<html>': line 1"),
        (StateSource("head -c 4000 /dev/urandom"), "urandom: "),
    ],
)
def test_a_poll_that_fails_names_the_command_and_the_reason(source: StateSource, says: str) -> None:
    with pytest.raises(PollError, match=says) as caught:
        poll(source)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


@pytest.mark.waits
def test_a_command_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    source = StateSource(f"sleep 1000 & echo $! > {pids}; echo $$ >> {pids}; wait", timeout_s=2)
    with pytest.raises(PollError, match="no answer within 2 s"):
        poll(source)
    for pid in map(int, pids.read_text().split()):
        wait_until(lambda pid=pid: not is_alive(pid), f"process {pid} to end")


@pytest.mark.waits
def test_a_child_that_keeps_the_output_open_is_a_timeout_and_no_hang(tmp_path: Path) -> None:
    """The command itself is done, but something it started in a session of its own holds the pipe."""
    pid_file = tmp_path / "pid"
    script = f"import os, time; os.setsid(); open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    try:
        with pytest.raises(PollError, match="no answer"):
            poll(StateSource(f'{sys.executable} -c "{script}" & while [ ! -s {pid_file} ]; do :; done', timeout_s=2))
    finally:
        if pid_file.exists():
            os.kill(int(pid_file.read_text()), signal.SIGKILL)


@pytest.mark.waits
def test_recording_goes_on_with_an_existing_journal(tmp_path: Path) -> None:
    source, path = StateSource("echo n1"), tmp_path / "T"
    for _ in range(2):
        assert record(source, path, threading.Event(), interval_s=0.02, duration_s=0.02).polls >= 1
    assert read_journal(path).trace.nodes == ("n1",)
    with pytest.raises(InputError, match="was recorded from"):
        record(StateSource("echo n2"), path, threading.Event(), interval_s=0.02)


RECORDER = """
import sys, threading
from bftrainer.traces.recorder.record import StateSource, record
record(StateSource(sys.argv[1]), sys.argv[2], threading.Event(), interval_s=0.02)
"""


@pytest.mark.waits
def test_a_killed_recorder_loses_at_most_one_poll_and_can_go_on(tmp_path: Path) -> None:
    path, count = tmp_path / "T.journal", tmp_path / "count"
    script = f"echo >> {count}; echo n1; n=$(wc -l < {count}); [ $((n % 5)) -gt 2 ] && echo n2; true"

    def lines() -> int:
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def record_and_kill(until: int) -> None:
        process = subprocess.Popen([sys.executable, "-c", RECORDER, script, str(path)])
        try:
            wait_until(lambda: lines() >= until or process.poll() is not None, f"{until} lines in the journal")
            assert process.poll() is None
        finally:
            process.kill()
            process.wait()

    record_and_kill(until=8)
    first = path.read_bytes()
    # The polls that were begun are in the journal, but for the one under way.
    assert lines() - 1 >= count.read_bytes().count(b"\n") - 1
    path.write_bytes(first + b'{"t":17e8,"joi')  # what a crash of the whole machine may leave
    recording = read_journal(path)
    assert recording.polls + recording.missed == first.count(b"\n") - 1

    record_and_kill(until=first.count(b"\n") + 8)
    assert path.read_bytes().startswith(first)
    recording = read_journal(path)
    assert recording.polls + recording.missed >= first.count(b"\n") - 1 + 7
    assert set(recording.trace.nodes) == {"n1", "n2"}


@pytest.mark.waits
def test_slurms_jobs_are_asked_for_where_some_of_them_do_not_count(tmp_path: Path, monkeypatch) -> None:
    for name, prints in (("sinfo", "n1 idle\\nn2 allocated\\nn3 allocated"), ("squeue", "low|n2\\nmain|n3")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nprintf '{prints}\\n'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert poll(default_source("slurm")).idle == {"n1"}
    source = default_source("slurm", idle_partition="low")
    assert poll(source).idle == {"n1", "n2"}
    assert source.identity() != default_source("slurm").identity()
    with pytest.raises(InputError, match="knows no partitions"):
        default_source("pbs", idle_partition="low")
