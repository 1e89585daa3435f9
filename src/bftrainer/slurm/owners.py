"""The check of whose account pilots run under: whether the mode of users fits the site, and what it needs of Slurm.

It is part of `check.py`. The command line says how the controller is configured (`PilotOwnersSetup`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bftrainer.slurm.findings import SiteFinding
from bftrainer.slurm.site import Site


@dataclass(frozen=True, slots=True)
class PilotOwnersSetup:
    """How pilots get their account."""

    own: bool = False
    """Whether trainers run as their owners."""
    run_as: bool = False
    """Whether the controller submits pilots as their owners; else lenders of users do."""
    prefix: bool = False
    """Whether it has a prefix for that, other than runuser."""
    owners: int = 0
    """How many owners have trainers; 0: not known."""


def owners_findings(site: Site, setup: PilotOwnersSetup) -> Iterator[SiteFinding]:
    """Check whose account pilots run under."""
    if not setup.own:
        if setup.owners > 1:
            yield SiteFinding(
                "users",
                "warning",
                f'trainers of {setup.owners} owners run as one account (users.mode is "shared")',
                'each can read what the others have, and Slurm charges one account for all: set users.mode = "own"',
            )
        else:
            yield SiteFinding("users", "ok", "all trainers run as the account of the controller")
        return
    root = site.user.name == "root"
    if setup.run_as and not (root or setup.prefix):
        yield SiteFinding(
            "users",
            "error",
            f"pool.submit is run-as, and {site.user.name} may not run commands as other users",
            'start the controller as root, set pool.submit_as to what your site allows, or set pool.submit = "lend"',
        )
    else:
        who = "the controller submits pilots as their owners" if setup.run_as else "users' lenders submit pilots"
        yield SiteFinding("users", "ok", f"trainers run as their owners; {who}")
    hidden = "jobs" in site.config.get("PrivateData", "").replace(" ", "").split(",")
    if hidden and not root:
        yield SiteFinding(
            "pilots-seen",
            "warning",
            f"PrivateData hides jobs of others from {site.user.name}, unless it is an operator",
            "the controller must see pilots of all owners; without that each looks as if it had vanished",
            (f"sacctmgr modify user {site.user.name} set adminlevel=operator",),
        )
