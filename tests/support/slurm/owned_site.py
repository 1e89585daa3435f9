"""A live system of two owners on a real Slurm: pilots run as their users, submitted by their lenders or by root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.cluster.live import Live
from support.slurm.lab import Lab, cluster
from support.slurm.lent import LentUser, authority_of, new_token, url_of
from support.users.accounts import public_python, unix_users
from support.users.owned import Owned
from support.waiting import wait_until


@dataclass
class OwnedSite:
    """The cluster, the system on it, and its users with their lenders."""

    lab: Lab
    system: Owned
    ann: LentUser
    bob: LentUser


@contextmanager
def owned_site(folder: Path, nodes: int, way: str, *settings: str) -> Iterator[OwnedSite]:
    """Run a controller whose pilots run as their owners: `way` is the value of `pool.submit`."""
    folder.chmod(0o755)
    state = folder / "state"
    with (
        cluster(nodes) as lab,
        unix_users("bft-ann", "bft-bob") as accounts,
        public_python() as python,
        ExitStack() as at_end,
    ):
        lab.open_to_users()
        pool = {"partition": "scavenger", "interval_s": "0.5", "rest_s": "1", "submit": way, "python": python}
        given = ("users.mode=own", *(f"pool.{name}={value}" for name, value in pool.items()), *settings)
        options = ("--pool", "slurm", "--drain", *(word for setting in given for word in ("--set", setting)))
        live = at_end.enter_context(Live(state, *options, env={"SLURM_CONF": str(lab.conf)}))
        tokens = {account.name: new_token(state, account.name) for account in accounts}
        users = [
            LentUser(
                *(lab, account, python, lambda: url_of(state), tokens[account.name]),
                authority=lambda: authority_of(state),
            )
            for account in accounts
        ]
        for user in users if way == "lend" else ():
            user.lend("--python", python)
            at_end.callback(user.end)
            wait_until(lambda user=user: user.lent == "connected", lambda user=user: user.log.read_text())
        yield OwnedSite(lab, Owned(live, python, *accounts, tokens), *users)
