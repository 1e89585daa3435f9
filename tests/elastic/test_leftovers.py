"""What the soak looks for after each job is found if it is there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from soak import Episode, grown
from support.elastic import leftovers
from support.elastic.churn import Account, leaks
from support.elastic.leftovers import MARK, Leftovers, marked


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Leftovers:
    for name in (MARK, "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.0)
    return Leftovers(tmp_path / "tmp")


@pytest.mark.waits
def test_a_process_that_outlives_its_parent_is_found(watched: Leftovers) -> None:
    program = "import subprocess as s; n = s.DEVNULL; "
    program += "print(s.Popen(['sleep', '60'], stdout=n, stderr=n, start_new_session=True).pid)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    stray = int(done.stdout)
    try:
        assert [line for line in watched.find(set()) if line.startswith(f"process {stray}: sleep")]
        assert marked(watched.mark) == [stray]
    finally:
        os.kill(stray, 9)


def test_a_temporary_file_is_found(watched: Leftovers) -> None:
    assert not [line for line in watched.find(set()) if line.startswith("file")]
    with tempfile.NamedTemporaryFile() as left:
        assert f"file {left.name}" in watched.find(set())


def test_descriptors_that_a_worker_piles_up_are_found(tmp_path: Path) -> None:
    log = tmp_path / "steps-node-1-1.jsonl"
    lines = [f'{{"held": [{10 + 5 * number}, 4], "world": 2, "rank": 1}}' for number in range(9)]
    log.write_text("\n".join(lines[:1] * 9))
    assert leaks(tmp_path) == []
    log.write_text("\n".join(lines))
    assert len(leaks(tmp_path)) == 1


def test_threads_that_a_coordinator_piles_up_are_found() -> None:
    first, last = {"coordinator": {"threads": 3}}, {"coordinator": {"threads": 9}}
    assert grown([Episode(1, pid=7, held=first), Episode(2, pid=8, held=last)]) == []
    assert grown([Episode(1, pid=7, held=first), Episode(2, pid=7, held=last)]) == ["coordinator 7: 3 threads, then 9"]


def test_a_kill_is_not_blamed_for_the_wait_for_a_stopped_worker(tmp_path: Path) -> None:
    commits = [(1.0, 1), (2.5, 2), (9.0, 3)]
    log = "".join(f'{{"commit": [0, 0, 0], "generation": {of}, "at": {at}}}\n' for at, of in commits)
    (tmp_path / "steps-node-1-1.jsonl").write_text(log)
    account = Account(blows=[("kill", 2.0, 1), ("kill", 3.0, 2), ("stop", 4.0, 2)])
    assert account.pauses(tmp_path) == {"kill": [0.5], "stop": [6.0, 5.0]}
