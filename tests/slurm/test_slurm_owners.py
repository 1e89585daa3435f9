"""Pilots of owners on a real Slurm, with stub agents: submitted by their lenders, or by a controller of root."""

from __future__ import annotations

import asyncio
import signal
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cluster.pools.slurm import commands
from bftrainer.cluster.pools.slurm.pool import SlurmPool
from bftrainer.cluster.pools.slurm.read import JOB_FIELDS
from support.cluster.fake_pool_host import command_lines
from support.cluster.made_pools import STUB, executable, slurm
from support.slurm.lab import Lab, cluster
from support.slurm.lent import LentUser, files_with, users_of
from support.slurm.owned_host import OwnedPoolHost
from support.users.accounts import processes_of, public_python, unix_users
from support.waiting import until, wait_until

pytestmark = pytest.mark.slurm

NODES = ("n01", "n02", "n03")


@dataclass
class SharedSite:
    """A cluster and two users of it."""

    lab: Lab
    ann: LentUser
    bob: LentUser
    agent: str
    """An executable that every user can run: an agent that can do nothing but be there."""
    host: OwnedPoolHost | None = None

    def url(self) -> str:
        assert self.host is not None
        return self.host.agent_environment["BFTRAINER_URL"]


@pytest.fixture(scope="module")
def whole_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedSite]:
    with cluster(len(NODES)) as lab, unix_users("ann", "bob") as accounts, public_python() as python:
        lab.open_to_users()
        shared = accounts[0].home.parent
        agent = executable(shared / "agent", f"#!/bin/sh\nexec {python} {STUB}\n")
        site = SharedSite(lab, None, None, agent)  # type: ignore[arg-type]
        site.ann, site.bob = (LentUser(lab, account, python, site.url, account.name) for account in accounts)
        yield site


@pytest.fixture
def site(whole_site: SharedSite, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedSite]:
    monkeypatch.setenv("SLURM_CONF", str(whole_site.lab.conf))
    yield whole_site
    for user in (whole_site.ann, whole_site.bob):
        if user.process is not None:
            assert user.end() in (0, -signal.SIGTERM)
    whole_site.lab.clear()


@asynccontextmanager
async def opened(
    site: SharedSite,
    folder: Path,
    *,
    lenders: str = "ann bob",
    follows: Any = None,
    drain: bool = True,
    **settings: Any,
) -> AsyncIterator[tuple[OwnedPoolHost, SlurmPool]]:
    """A pool for both owners, and the lenders of those in `lenders`. Node n01 is Ann's, the others are Bob's."""
    names = {user.account.name: user.account.name for user in (site.ann, site.bob)}
    async with OwnedPoolHost(names, follows=follows) as host:
        site.host = host
        host.demand = len(NODES)
        host.wishes = dict(zip(NODES, (ann(site), bob(site), bob(site)), strict=True))
        pool = slurm(folder, warm_pilots=0, python=site.agent, agent=("-m", "unused"), **settings)
        host.pool = pool
        await pool.open(host)
        try:
            for name in lenders.split():
                getattr(site, name).lend("--python", site.agent)
            yield host, pool
        except BaseException:
            for user in (site.ann, site.bob):
                print(user.log.read_text()[-1000:] if user.log.exists() else "")
            drain = True
            raise
        finally:
            await pool.close(drain=drain)


def ann(site: SharedSite) -> str:
    return site.ann.account.name


def bob(site: SharedSite) -> str:
    return site.bob.account.name


@pytest.mark.parametrize("way", ["lend", "run-as"])
def test_pilots_run_as_their_owners_nodes_change_hands_and_no_secret_is_left(
    site: SharedSite, tmp_path: Path, way: str
) -> None:
    lab, uids = site.lab, {ann(site): site.ann.account.uid, bob(site): site.bob.account.uid}

    async def whole() -> list[str]:
        lenders = "ann bob" if way == "lend" else ""
        async with opened(site, tmp_path, submit=way, lenders=lenders) as (host, pool):
            await until(lambda: host.here == set(NODES), lambda: (host.said[-20:], lab.jobs()))
            for owner in (ann(site), bob(site), ann(site), bob(site)):
                before = len(host.joins)
                host.dismiss("n02", f"the node goes to {owner}")
                pool.hand_over("n02", owner)
                await until(
                    lambda before=before: len(host.joins) > before and host.here == set(NODES),
                    lambda: (host.said[-20:], lab.run("squeue", "-o", "%i %u %T %n %r")),
                )
                assert host.owner_here == {"n01": ann(site), "n02": owner, "n03": bob(site)}
                for node, pid in host.pids.items():
                    assert Path(f"/proc/{pid}").stat().st_uid == uids[host.owner_here[node]]
                assert await asyncio.to_thread(users_of, lab) == host.owner_here
            assert host.words("gone") == [], [said for said in host.said if said[0] == "gone"]
            assert not [secret for secret in host.all_secrets if secret in command_lines()]
            homes = [site.ann.account.home, site.bob.account.home]
            for secret in host.all_secrets:
                assert files_with(secret, tmp_path, *homes) == []
            other = site.bob.run("scontrol", "write", "batch_script", running_job(lab, ann(site)), "-")
            assert (other.stdout, "Invalid user id" in other.stderr) == ("", True), (
                "Bob reads the script of Ann's pilot"
            )
            return host.all_secrets

    secrets = asyncio.run(whole())
    assert not lab.jobs()
    assert len(secrets) >= 7
    left = [path for secret in secrets for path in files_with(secret, lab.folder)]
    assert way == "run-as" or left == []
    for path in left:  # Slurm keeps scripts of jobs that have ended for a while (MinJobAge)
        assert Path(path).stat().st_uid == 0
        assert site.bob.run("cat", path).returncode != 0, f"Bob reads {path}"
    for user in (site.ann, site.bob):
        for path in user.account.home.rglob("*"):
            assert path.lstat().st_uid == user.account.uid, path
            if path.name in ("secrets", "bftrainer-lend", "bftrainer-pilots"):
                assert stat.S_IMODE(path.stat().st_mode) == 0o700


def running_job(lab: Lab, user: str) -> str:
    return lab.run("squeue", "-h", "-t", "R", "-u", user, "-o", "%i").split()[0]


def test_without_a_lender_an_owner_waits_and_a_lender_that_is_killed_or_stopped_costs_nobody_a_node(
    site: SharedSite, tmp_path: Path
) -> None:
    lab = site.lab

    async def whole() -> None:
        async with opened(site, tmp_path, lenders="ann") as (host, pool):
            await until(lambda: host.here == {"n01"}, lambda: host.said[-20:])
            assert "runs `bftrainer lend` on a login node" in pool.why_not(bob(site))
            assert pool.why_not(ann(site)) == ""
            site.bob.lend("--python", site.agent)
            await until(lambda: host.here == set(NODES), lambda: host.said[-20:])
            joins = list(host.joins)
            await asyncio.to_thread(site.bob.end, signal.SIGKILL)
            await until(lambda: pool.why_not(bob(site)), "the end of the lender is noticed")
            assert await asyncio.to_thread(site.ann.end) == 0
            assert "the lender was stopped" in await until(lambda: pool.why_not(ann(site)))
            jobs = await asyncio.to_thread(lab.jobs)
            site.ann.lend("--python", site.agent)
            site.bob.lend("--python", site.agent)
            await until(lambda: not pool.why_not(ann(site)) and not pool.why_not(bob(site)), "both are back")
            assert (host.here, host.joins, await asyncio.to_thread(lab.jobs)) == (set(NODES), joins, jobs)
            before = len(host.joins)
            host.dismiss("n02", "to Ann")  # the pilot that the killed lender has submitted is cancelled by the next one
            pool.hand_over("n02", ann(site))
            await until(lambda: len(host.joins) > before, lambda: host.said[-20:])

    asyncio.run(whole())
    assert not lab.jobs()


def test_the_pilots_of_a_killed_controller_are_taken_up_by_the_next_one(site: SharedSite, tmp_path: Path) -> None:
    async def whole() -> None:
        async with opened(site, tmp_path, drain=False) as (before, _):
            await until(lambda: before.here == set(NODES), lambda: before.said[-20:])
            pids = dict(before.pids)
        async with opened(site, tmp_path, lenders="", follows=before) as (after, pool):
            await until(lambda: after.here == set(NODES), lambda: after.said[-20:])
            await until(lambda: pool.describe()["pilots"] == 3, pool.describe)
            await until(lambda: len(pool.describe()["lenders"]) == 2, "the lenders connect again")
            assert after.pids == pids
            before_n02 = len(after.joins)
            after.dismiss("n02", "to Ann")
            pool.hand_over("n02", ann(site))
            await until(lambda: len(after.joins) > before_n02, lambda: after.said[-20:])

    asyncio.run(whole())
    assert not site.lab.jobs()


def test_pilots_with_a_python_that_users_cannot_run_are_told_of_and_paused(site: SharedSite, tmp_path: Path) -> None:
    refused = executable(tmp_path / "python", "#!/bin/sh\n")
    Path(refused).chmod(0o700)

    async def whole() -> None:
        async with opened(site, tmp_path, submit="run-as", lenders="") as (host, pool):
            assert pool._owners is not None
            pool._owners.submitters._python = (refused,)  # type: ignore[attr-defined]
            host.wishes = dict.fromkeys(NODES, ann(site))
            why = await until(lambda: pool.why_not(ann(site)), lambda: host.said[-20:])
            assert why.startswith(f"pilots of {ann(site)} end before their agents join: see ~{ann(site)}/.local/state/")
            named = site.ann.account.home / why.partition(f"~{ann(site)}/")[2]
            assert "Permission denied" in named.read_text()
            assert pool.describe()["warning"] == why
            assert ("note", "pilots_failed", ann(site), why) in host.said
            assert pool.why_not(bob(site)) == ""
            pool._owners.submitters._python = (site.agent,)  # type: ignore[attr-defined]
            host.wishes = dict.fromkeys(NODES, bob(site))
            await until(lambda: host.here == set(NODES), lambda: host.said[-20:])
            assert pool.describe()["warning"] == why
            await pool.resume()
            await until(lambda: not pool.describe()["warning"], pool.describe)

    asyncio.run(whole())
    assert not site.lab.jobs()


def test_a_hostile_user_gets_nothing_from_the_others_lender_and_blocks_no_node(
    site: SharedSite, tmp_path: Path
) -> None:
    lab = site.lab

    async def whole() -> None:
        async with opened(site, tmp_path, lenders="ann") as (host, pool):
            host.wishes = dict.fromkeys(NODES, ann(site))
            await until(lambda: host.here == set(NODES), lambda: host.said[-20:])
            comment = lab.run("squeue", "-h", "-u", ann(site), "-w", "n01", "-o", "%k").strip()
            name = str(pool.describe()["job_name"])
            run = site.bob.run
            # A copy of the name and the comment of Ann's pilot, on each node: jobs like any other.
            for node in NODES:
                options = (f"--job-name={name}", f"--comment={comment.replace('n01', node)}", f"--nodelist={node}")
                quiet = ("--output=/dev/null", "--chdir=/", "-p", "scavenger", "--exclusive")
                assert run("sbatch", *options, *quiet, "--wrap=sleep 600").returncode == 0
            # What belongs to Ann's lender.
            pilot = running_job(lab, ann(site))
            assert run("scancel", pilot).returncode != 0
            for path in ("status.json", "pilots.json", "secrets", "pilot.sh", "logs/n01.log"):
                assert run("cat", str(site.ann.folder / path)).returncode != 0
            forged = f"{site.ann.folder}/secrets/0123456789abcdef"
            assert run("sh", "-c", f"echo evil > {forged}").returncode != 0
            assert run("sh", "-c", f"echo evil > {site.ann.folder}/pilot.sh").returncode != 0
            # A lender of Bob's that claims to be Ann's, or to have Ann's token without her account.
            claim = await asyncio.to_thread(run, site.bob.python, "-m", "bftrainer", "lend", "--partition", "scavenger")
            assert claim.returncode == 2 or "has the account" in claim.stderr, claim.stderr
            await until(lambda: pool.describe()["pilots"] == 3 and pool.describe()["pending"] == 0, pool.describe)
            assert host.here == set(NODES)
            assert "gone" not in {said[0] for said in host.said}

    environment = dict(site.bob._own)
    try:
        site.bob._own["BFTRAINER_TOKEN"] = ann(site)  # Ann's token, as if it had leaked
        asyncio.run(whole())
    finally:
        site.bob._own.update(environment)
    wait_until(lambda: not processes_of(site.ann.account.uid) or site.ann.process, "the end of Ann's pilots")


def test_a_row_in_the_comment_of_a_job_ends_no_pilot_even_if_its_writer_knows_the_separator(
    site: SharedSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, separator = site.lab, "\x1f0a1b2c3d"
    monkeypatch.setattr(commands, "new_separator", lambda: separator)

    async def whole() -> None:
        async with opened(site, tmp_path, lenders="ann") as (host, pool):
            host.wishes = dict.fromkeys(NODES, ann(site))
            await until(lambda: host.here == set(NODES), lambda: host.said[-20:])
            comment, pilot = lab.run("squeue", "-h", "-u", ann(site), "-w", "n01", "-o", "%k %i").split()
            fields = {
                **dict.fromkeys(JOB_FIELDS, "N/A"),
                **{"JobArrayID": pilot, "JobID": pilot, "UserID": str(site.ann.account.uid), "State": "COMPLETED"},
                **{"ReqNodes": "n01", "NodeList": "n01", "Name": pool.describe()["job_name"], "Comment": comment},
            }
            forged = f"x{separator}\n" + separator.join(fields[name] for name in JOB_FIELDS)
            words = ("--begin=now+1hour", "--output=/dev/null", "--chdir=/", "--wrap=true")
            job = site.bob.run("sbatch", "--parsable", "-p", "main", f"--comment={forged}", *words).stdout.strip()
            assert lab.run("squeue", "-h", "-j", job, "-O", "Comment:2000").rstrip() == forged
            cut = f"--comment=x{chr(233) * 300}"  # squeue cuts it in the middle of a character
            assert site.bob.run("sbatch", "-p", "main", cut, f"--job-name={chr(233)}", *words).returncode == 0
            rounds = pool._ledger.counters.rounds
            await until(lambda: pool._ledger.counters.rounds > rounds + 5, lambda: host.said[-20:])
            assert (pool.describe()["pilots"], pool.describe()["problem"]) == (3, "")
            assert not {"gone", "leaving"} & {said[0] for said in host.said}
            assert running_job(lab, ann(site))

    asyncio.run(whole())
