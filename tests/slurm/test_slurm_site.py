"""What Slurm's commands print is read right, and no command of Slurm can hold anybody up."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.errors import InputError
from bftrainer.slurm.ask import find_file_system, run, try_pilot
from bftrainer.slurm.site import (
    FileSystem,
    NoAnswerError,
    SlurmError,
    read_config,
    read_partitions,
    read_qos,
    read_skew,
    read_switches,
    seconds,
)
from support.slurm.recorded_site import NOW, found, judged, program, recorded, site
from support.waiting import wait_until


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("5 sec", 5),
        ("60 min", 3600),
        ("30", 30),
        ("01:00:00", 3600),
        ("2-12:00:00", 216000),
        ("05:30", 330),
        ("UNLIMITED", float("inf")),
    ],
)
def test_lengths_of_time_are_read_as_slurm_writes_them(text: str, length: float) -> None:
    assert seconds(text) == length


def test_clocks_are_compared_in_utc() -> None:
    assert abs(read_skew(recorded("config"), NOW) or 9) <= 0.5
    assert found(judged(site()), "clock").level == "ok"
    late = re.sub("as of 2026-11-15T15:58", "as of 2026-11-15T15:56", recorded("config"))
    assert round(read_skew(late, NOW) or 0) == -120
    assert read_skew("Configuration data as of 15:58", NOW) is None


def test_a_tree_of_switches_can_be_used_for_placement() -> None:
    tree = site({"TopologyPlugin": "topology/tree"}, topology=recorded("topology"))
    assert 'policy.placement = "compact"' in found(judged(tree), "topology").what
    switches = read_switches(tree.topology)
    assert switches.distance("n01", "n02") < switches.distance("n01", "n04")
    for nothing in ("", "slurm_load_topo error: no topology"):
        with pytest.raises(InputError, match="knows no tree"):
            read_switches(nothing)


def test_the_state_folder_must_be_where_nodes_see_it(tmp_path: Path) -> None:
    many = recorded("nodes").replace("n02 Arch", "n02 NodeAddr=10.0.0.2 Arch")
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\nfs /the\\040lab fuse.juicefs rw 0 0\n")
    assert find_file_system(Path("/home/ada/state"), mounts) == FileSystem("/home/ada/state", "nfs4", "/home")
    assert find_file_system(Path("/homes"), mounts) == FileSystem("/homes", "ext4", "/")
    elsewhere = find_file_system(Path("/the lab/state"), mounts)
    assert elsewhere is not None
    assert elsewhere.shared
    assert found(judged(site(nodes=many, state=Path("/proc/state"))), "file-system").level == "warning"
    assert found(judged(site(state=Path("/proc/state"))), "file-system").level == "ok"  # all nodes are one machine


@given(st.text(alphabet=st.sampled_from("ab=|,[]0-9\n (PartitionName=Nodes=GraceTime=Name|Preempt|"), max_size=300))
def test_garbage_is_never_a_traceback(text: str) -> None:
    for read in (read_config, read_partitions, read_qos):
        for head in ("", "PartitionName=x ", "Name|GraceTime|Preempt\nx|"):
            try:
                answer: object = read(head + text)
            except SlurmError as problem:
                answer = str(problem).strip() or None  # an error says something
            assert answer is not None


@pytest.mark.waits
def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    hanging = program(tmp_path, "scontrol", f"sleep 600 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(NoAnswerError, match="no answer within 0.5 s"):
        run((str(hanging),), timeout_s=0.5)
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text())


@pytest.mark.waits
def test_a_child_that_keeps_the_output_open_delays_nobody(tmp_path: Path) -> None:
    leaving = program(tmp_path, "scontrol", f"sleep 600 & echo $! > {tmp_path}/child; echo done")
    assert run((str(leaving),)) == "done\n"
    os.kill(int((tmp_path / "child").read_text()), 9)


def test_why_a_pilot_is_refused_is_told(tmp_path: Path) -> None:
    def refusing(argv: Sequence[str]) -> str:
        assert "--partition=p" in argv
        raise SlurmError("sbatch --test-only -N1: allocation failure: Invalid account")

    def silent(argv: Sequence[str]) -> str:
        raise NoAnswerError("sbatch: no answer")

    assert try_pilot("p", ask=refusing) == "allocation failure: Invalid account"
    assert try_pilot("p", ask=silent) is None
    assert try_pilot("p", ask=lambda argv: "Job 1 to start") == ""
