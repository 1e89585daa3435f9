"""Accounts map owners to Unix accounts, so that trainers can run as their owners.

An owner's account has the owner's name, unless `users.accounts` of the configuration names another one. The controller
asks for accounts when a trainer is submitted; pools and lenders ask again when they start something.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from bftrainer.errors import InputError

UsersMode = Literal["shared", "own"]
"""`shared`: all trainers run as the account of the agents. `own`: each runs as its owner's account."""

_NAME = re.compile(r"[a-z_][a-z0-9_.-]{0,30}\$?", re.IGNORECASE)
ROOT = 0
LEAST_UID = 1000
"""Accounts with a smaller user id are those of the system, such as `daemon`, `munge` and `slurm`."""


@dataclass(frozen=True, slots=True)
class Account:
    """A Unix account."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    """All its groups, `gid` included."""
    home: Path
    shell: str = ""


@dataclass(frozen=True, slots=True)
class Accounts:
    """The accounts of owners."""

    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The account of each owner whose account has another name."""
    root_owners: frozenset[str] = frozenset()
    """Owners whose trainers may run as root, or under another account of the system."""

    @classmethod
    def parse(cls, pairs: tuple[str, ...], root_owners: tuple[str, ...] = ()) -> Accounts:
        """Make the mapping from texts `OWNER=ACCOUNT`. Raises `InputError`."""
        names: dict[str, str] = {}
        for pair in pairs:
            owner, equals, account = (part.strip() for part in pair.partition("="))
            if not (owner and equals and _NAME.fullmatch(account)):
                raise InputError(f"users.accounts must be texts such as ann=ann_hpc, but got {pair!r:.80}")
            if names.setdefault(owner, account) != account:
                raise InputError(f"users.accounts names two accounts for {owner}: {names[owner]} and {account}")
        for account in names.values():
            if len(owners := [owner for owner, named in names.items() if named == account]) > 1:
                raise InputError(
                    f"users.accounts gives the account {account} to {' and '.join(sorted(owners))}: each could read "
                    "what the other has, so give each owner another account"
                )
        return cls(MappingProxyType(names), frozenset(root_owners))

    def name_of(self, owner: str) -> str:
        """Return the name of an owner's account, which may not exist on this machine."""
        return self.names.get(owner, owner)

    def of(self, owner: str) -> Account:
        """Return the account of an owner. Raises `InputError` if there is none, or if trainers may not run under it."""
        name = self.name_of(owner)
        if owner not in self.names and name in self.names.values():
            raise InputError(
                f"owner {owner} has the account {name}, which users.accounts gives to another owner: name another one "
                f"for {owner} there"
            )
        entry = _entry(name)
        if entry is None:
            raise InputError(
                f"owner {owner} has no account {name!r:.80} on this machine, as which their trainers could run: make "
                f"one, or name another in users.accounts, such as {owner!s:.40}=ACCOUNT"
            )
        if entry.pw_uid == ROOT and owner not in self.root_owners:
            raise InputError(
                f"owner {owner} has the account {name}, which is root's: trainers do not run as root. Name another one "
                "in users.accounts, or the owner in users.root_owners"
            )
        if entry.pw_uid < LEAST_UID and owner not in self.root_owners:
            raise InputError(
                f"owner {owner} has the account {name}, which is one of the system (user id {entry.pw_uid} is below "
                f"{LEAST_UID}): name another one in users.accounts, or the owner in users.root_owners"
            )
        if (first := _first_name(entry)) != entry.pw_name:
            raise InputError(
                f"owner {owner} has the account {name}, whose user id {entry.pw_uid} is also that of {first}: trainers "
                f"of both could read each other's files, so name {first} in users.accounts, or give {name} its own id"
            )
        groups = tuple(dict.fromkeys((entry.pw_gid, *os.getgrouplist(entry.pw_name, entry.pw_gid))))
        return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, Path(entry.pw_dir), entry.pw_shell)


def account_warnings(accounts: Accounts, owners: Collection[str], controller: int) -> list[str]:
    """Return what does not keep owners apart, one sentence each. `controller` is the user id of the controller."""
    by_uid: dict[int, list[str]] = {}
    warnings = []
    for owner in sorted(owners):
        if _entry(accounts.name_of(owner)) is None:
            continue  # nothing can run as this owner
        try:
            account = accounts.of(owner)
        except InputError as problem:
            warnings.append(str(problem))
            continue
        by_uid.setdefault(account.uid, []).append(owner)
    for uid, sharing in by_uid.items():
        if len(sharing) > 1:
            warnings.append(f"the owners {', '.join(sharing)} share the account with the user id {uid}")
        if uid == controller and len(owners) > 1:
            warnings.append(
                f"trainers of {', '.join(sharing)} run under the controller's own account, and can read its tokens, "
                "its database and the logs of all owners"
            )
    return warnings


def _entry(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name) if _NAME.fullmatch(name) else None
    except KeyError:
        return None


def _first_name(entry: pwd.struct_passwd) -> str:
    """Return the name of the account that the system finds by the user id of another one: it may be the same."""
    try:
        return pwd.getpwuid(entry.pw_uid).pw_name
    except KeyError:
        return entry.pw_name


def clean_environment(account: Account, path: str = os.defpath) -> dict[str, str]:
    """Return the environment in which a process of an account begins: nothing of the one that starts it."""
    return {
        "HOME": str(account.home),
        "USER": account.name,
        "LOGNAME": account.name,
        "SHELL": account.shell or "/bin/sh",
        "PATH": path,
        "LANG": "C.UTF-8",
    }
