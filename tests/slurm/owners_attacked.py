"""A hostile trainer and a burst of churn between two owners on a real Slurm: `make owners` runs it, in both ways.

The attacks are those of `support/users/attacks.py`, and what Slurm itself offers to a user. It is not part of `make
test`, which runs the attacks on the `local` pool: its trainers import PyTorch on every node that changes its owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cluster.wire.lender_messages import LENDER_PATH
from support.slurm.lent import users_of
from support.slurm.owned_site import OwnedSite, owned_site
from support.users.attacks import Attacked, AttackTests, attacked_system, churn
from support.waiting import wait_until

pytest.importorskip("torch")

pytestmark = pytest.mark.slurm

NODES = 4


@pytest.fixture(scope="module", params=["lend", "run-as"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnedSite]:
    with owned_site(tmp_path_factory.mktemp("attacked"), NODES, request.param, "policy.horizon_s=20") as site:
        yield site


@pytest.fixture(scope="module")
def attacked(site: OwnedSite) -> Attacked:
    return attacked_system(site.system, lambda: targets_in_slurm(site))


def pilots_of(site: OwnedSite, user: str) -> dict[str, str]:
    """The nodes of the pilots of a user that run, by their ids."""
    lines = site.lab.run("squeue", "-h", "-t", "R", "-u", user, "-o", "%i %N").splitlines()
    return dict(line.split() for line in lines)


def targets_in_slurm(site: OwnedSite) -> dict[str, Any]:
    """What a user of the cluster can try on another user's jobs, and the files that Slurm keeps of them."""
    ann = site.ann.account.name
    pilots = pilots_of(site, ann)
    job, node = next(iter(pilots.items()))
    kept = [path for path in site.lab.folder.rglob("job*/*") if path.is_file() and _number(path.parent) in pilots]
    assert {path.name for path in kept} >= {"script", "slurm_script"}, kept
    commands = (
        *(f"scancel {job}", f"scancel --signal=USR1 {job}", f"scancel --full --signal=KILL {job}"),
        *(f"scancel --user={ann}", f"scancel --partition=scavenger --nodelist={node}"),
        *(f"scontrol update JobId={job} TimeLimit=1", f"scontrol update JobId={job} Comment=x"),
        *(f"scontrol requeue {job}", f"scontrol suspend {job}", f"scontrol write batch_script {job} -"),
        f"scontrol update NodeName={node} State=DRAIN Reason=x",
        *(f"srun --overlap --jobid={job} id", f"sattach {job}.batch", f"sbatch --uid={ann} --wrap=true"),
    )
    return {
        "files": [str(path) for path in kept],
        "commands": [words.split() for words in commands],
        "environment": {"SLURM_CONF": str(site.lab.conf), "PATH": site.lab.environment["PATH"]},
        "lenders": LENDER_PATH,
    }


def _number(folder: Path) -> str:
    return folder.name.removeprefix("job").lstrip(".0")


class TestOnSlurm(AttackTests):
    def test_every_pilot_is_a_job_of_the_owner_whom_its_node_serves(self, site: OwnedSite, attacked: Attacked) -> None:
        def served() -> tuple[dict[str, str], dict[str, str]]:
            here = {node["node"]: node["serves"] for node in attacked.system.live.nodes() if node["agent_pid"]}
            return here, {node: user for node, user in users_of(site.lab).items() if node in here}

        def agree() -> bool:
            here, users = served()
            return len(here) >= 3 and here == users

        wait_until(agree, served)
        for user in (site.ann, site.bob):
            for path in (user.account.home, *user.account.home.rglob("*")):
                assert path.lstat().st_uid == user.account.uid, path

    def test_no_command_of_slurm_reaches_another_owners_pilots(self, site: OwnedSite, attacked: Attacked) -> None:
        got = attacked.loot["run_commands"]
        assert len(got) == len(targets_in_slurm(site)["commands"])
        assert {said.partition(" ")[2] for said in got.values()} == {""}
        # With a filter `scancel` leaves others' jobs out; two commands say on standard error that they may not.
        quiet = ("scancel --user", "scancel --partition", "scontrol write", "sattach")
        assert [words for words, said in got.items() if said[0] == "0" and not words.startswith(quiet)] == []
        trainer = attacked.system.live.trainer("t1")
        assert (trainer["state"], trainer["failures"]) == ("running", attacked.before["failures"])
        assert trainer["nodes"] == attacked.before["nodes"]
        assert set(trainer["nodes"]) <= set(pilots_of(site, site.ann.account.name).values())

    def test_nobody_lends_for_another_owner(self, site: OwnedSite, attacked: Attacked) -> None:
        got = attacked.loot["lend_for_another"]
        why = "this controller takes no lenders" if site.ann.process is None else "this lender is run by"
        assert why in got["with its own token"]
        assert got["with the secret of its own agent"] == got["without a token"] == "status 403"
        wait_until(lambda: site.ann.process is None or site.ann.lent == "connected", lambda: site.ann.lent)

    def test_in_a_burst_of_churn_nothing_is_lost_and_no_node_is_idle_that_somebody_could_use(
        self, site: OwnedSite, attacked: Attacked
    ) -> None:
        live = attacked.system.live
        churn(attacked.system, NODES, lambda: [node["agent_pid"] for node in live.nodes() if node["trainer"]])
