"""The plain user's way, and the commands of `bftrainer slurm` against programs that print what was recorded."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bftrainer.cli import main
from bftrainer.cluster.config.load import load_config
from bftrainer.cluster.pools.registry import read_settings
from bftrainer.cluster.retention.stored import store_settings
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.errors import BFTrainerError
from bftrainer.slurm.user import places, render
from support.slurm.recorded_site import RECORDED, Changes, program, recorded, site


def test_a_user_is_given_the_partition_that_can_be_preempted() -> None:
    one = site(scavenger={"MaxTime": "00:30:00"})
    (place,) = places(one)
    pool = tomllib.loads(render(one, place))["pool"]
    assert pool == {"kind": "slurm", "partition": "scavenger", "time_limit": "0:30:00"}


def test_a_user_is_given_a_qos_an_account_and_what_limits_allow() -> None:
    one = site(
        qos=recorded("qos"),
        assoc=recorded("assoc"),
        nodes=recorded("nodes").replace("NodeAddr=127.0.0.1", "NodeAddr=10.0.0.2", 1),
    )
    found_places = places(one, "main")
    written = tomllib.loads(render(one, found_places[0]))
    assert written["pool"] == {
        **{"kind": "slurm", "partition": "main", "qos": "scavenger", "account": "lab"},
        **{"time_limit": "1:00:00", "max_pilots": 2},
    }
    assert written["server"] == {}, "the controller itself finds the address that nodes reach"


def test_what_a_user_is_given_can_be_read_by_the_pool_and_says_nothing_of_gpus() -> None:
    for changes in ({}, {"MaxTime": "00:03:00"}):
        one = site(gres="gpu:a100:2(S:0-1),gpu:h100:2,nvme:1|n[01-04]", scavenger=changes)
        settings = tomllib.loads(render(one, places(one)[0]))["pool"]
        assert "options" not in settings
        checked = read_settings(settings.pop("kind"), settings)
        assert (checked.partition, checked.gpus) == ("scavenger", "all")


def test_limits_of_gpus_limit_the_pilots_and_those_of_one_job_do_not() -> None:
    header = "Name|Preempt|PreemptMode|GraceTime|GrpTRES|MaxTRES|MaxTRESPU|MaxWall|UsageFactor"
    rows = f"{header}\nnormal|scavenger|cluster|00:00:00|||||1\nscavenger||cluster|00:00:00|gres/gpu=26|node=1||||1\n"
    given = {"qos": rows, "assoc": recorded("assoc")}
    assert tomllib.loads(render(one := site(gres="gpu:8|n[01-04]", **given), places(one)[0]))["pool"]["max_pilots"] == 3
    mixed = site(gres="gpu:8|n[01-03]\n(null)|n04", **given)
    assert "max_pilots" not in tomllib.loads(render(mixed, places(mixed)[0]))["pool"]


def test_cancel_is_preferred_to_requeue_and_many_nodes_to_few() -> None:
    line = recorded("partitions").splitlines()[1]
    small = line.replace("=scavenger", "=small").replace("Nodes=n[01-04]", "Nodes=n01")
    again = line.replace("=scavenger", "=again").replace("PreemptMode=CANCEL", "PreemptMode=REQUEUE")
    one = site(partition=f"{small}\n{again}", main={"PriorityTier": "30"})
    assert [place.partition.name for place in places(one)] == ["scavenger", "small", "again"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config": {"PreemptType": "preempt/none"}}, "PreemptType is none"),
        ({"scavenger": {"PreemptMode": "OFF"}}, "not cancelled"),
        ({"scavenger": {"PriorityTier": "10"}}, "no partition of a higher tier"),
        ({"scavenger": {"State": "DOWN"}}, "its state is DOWN"),
        ({"scavenger": {"ReqResv": "YES"}}, "reservation"),
        ({"scavenger": {"MaxTime": "00:01:00"}}, "end within 120 s"),
    ],
)
def test_a_user_who_can_harvest_nothing_is_told_why(changes: dict[str, Changes], said: str) -> None:
    with pytest.raises(BFTrainerError, match="ask your administrators") as problem:
        places(site(**changes), "scavenger")  # type: ignore[arg-type]
    assert said in str(problem.value)


Call = Callable[..., SimpleNamespace]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command in a home of its own; its exit status and what it printed."""
    monkeypatch.delenv("BFTRAINER_CONFIG", raising=False)
    monkeypatch.setenv("BFTRAINER_STATE", str(tmp_path / "state"))
    monkeypatch.setitem(main.COMMANDS, "slurm", "admin.slurm")
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> SimpleNamespace:
        status = main.run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return SimpleNamespace(status=status, out=out, err=err)

    return call


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm that prints what was recorded, from a folder of its own at the head of the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program(
        folder,
        "scontrol",
        f'case "$2" in config) date -u "+Configuration data as of %FT%T"; tail -n +2 {RECORDED}/config.txt ;; '
        f"partition) cat {RECORDED}/partitions.txt ;; node) cat {RECORDED}/nodes.txt ;; *) exit 1 ;; esac",
    )
    program(folder, "sinfo", "echo '(null)|n[01-04]'")
    program(folder, "sbatch", "echo 'sbatch: Job 1 to start' >&2")
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


@pytest.mark.waits
def test_the_command_prints_findings_and_json_for_programs(call: Call, fake_slurm: Path) -> None:
    text = call("slurm", "check")
    assert text.status == 0
    assert "PreemptMode of partition scavenger is CANCEL" in text.out
    assert "lab, partition scavenger: 0 errors" in text.out
    report = json.loads(call("slurm", "check", "--json").out)
    assert (report["partition"], report["errors"], report["slurm"]) == ("scavenger", 0, "22.05.8")
    assert {"check", "level", "what", "why", "fix"} == report["findings"][0].keys()


@pytest.mark.waits
def test_the_check_uses_the_configuration_that_the_controller_was_started_with(
    call: Call, fake_slurm: Path, tmp_path: Path
) -> None:
    state, file, other = tmp_path / "state", tmp_path / "own.toml", tmp_path / "other.toml"
    pool = '[pool]\nkind = "slurm"\npartition = "scavenger"\n'
    file.write_text(f'[users]\nmode = "own"\n{pool}submit = "lend"\n')
    other.write_text(pool.replace("scavenger", "main"))
    state.mkdir()

    def checked(*options: str) -> tuple[str, str]:
        report = json.loads(call("slurm", "check", "--json", "--state", str(state), *options).out)
        return report["partition"], next(one["what"] for one in report["findings"] if one["check"] == "users")

    with Store.open(state / FILE) as store:
        for owner in ("ann", "bob"):
            store.add_trainer(name=owner, owner=owner, spec={"script": "/train.py"}, time=1.0)
        assert 'users.mode is "shared"' in checked()[1], "no controller has run here"
        store_settings(store, load_config(file, {}, {"pool.partition": "main"}), 2.0)
        assert checked() == ("main", "trainers run as their owners; users' lenders submit pilots")
        assert checked("--config", str(file))[0] == "scavenger"
        assert checked("--config", str(other)) == (
            "main",
            'trainers of 2 owners run as one account (users.mode is "shared")',
        )
        store_settings(store, load_config(other, {}, {}), 3.0)
        assert checked()[0] == "main"
        assert 'users.mode is "shared"' in checked()[1]


@pytest.mark.waits
def test_the_command_fails_where_there_are_errors_and_names_a_wrong_partition(call: Call, fake_slurm: Path) -> None:
    wrong = call("slurm", "check", "--partition", "main")
    assert wrong.status == 1
    assert "PartitionName=main PriorityTier=0 PreemptMode=CANCEL" in wrong.out
    unknown = call("slurm", "check", "--partition", "mian")
    assert (unknown.status, unknown.err) == (2, "bftrainer: lab: unknown partition 'mian': did you mean 'main'?\n")


@pytest.mark.waits
def test_without_slurm_there_is_one_clear_line(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for command in ("check", "setup-user"):
        answer = call("slurm", command)
        assert (answer.status, answer.err.count("\n")) == (1, 1)
        assert "cannot run scontrol" in answer.err


@pytest.mark.waits
def test_a_slurm_that_fails_or_prints_garbage_is_one_clear_line(call: Call, fake_slurm: Path) -> None:
    program(fake_slurm, "scontrol", "echo slurm_load_ctl_conf error: Unable to contact slurm controller >&2; exit 1")
    failed = call("slurm", "check")
    assert (failed.status, failed.err.count("\n")) == (1, 1)
    assert "Unable to contact slurm controller" in failed.err
    program(fake_slurm, "scontrol", "head -c 100000 /dev/urandom")
    garbage = call("slurm", "check")
    assert (garbage.status, garbage.err.count("\n")) == (1, 1)


@pytest.mark.waits
def test_a_users_configuration_is_printed_or_written_to_a_new_file(
    call: Call, fake_slurm: Path, tmp_path: Path
) -> None:
    shown = call("slurm", "setup-user")
    assert shown.status == 0
    file = tmp_path / "bftrainer.toml"
    assert call("slurm", "setup-user", "-o", file).status == 0
    assert file.read_text() == shown.out
    config = load_config(file)
    assert (config.pool.kind, config.pool.settings["partition"]) == ("slurm", "scavenger")
    assert call("slurm", "setup-user", "-o", file).status == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bftrainer.toml", "bin"]


@pytest.mark.waits
def test_a_user_whose_pilots_slurm_refuses_is_told_so(call: Call, fake_slurm: Path) -> None:
    program(fake_slurm, "sbatch", "echo 'allocation failure: Invalid account' >&2; exit 1")
    answer = call("slurm", "setup-user")
    assert (answer.status, "Invalid account" in answer.err) == (1, True)
    assert "Invalid account" in call("slurm", "check").out
