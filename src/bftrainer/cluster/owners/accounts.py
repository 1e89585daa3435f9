"""Accounts map owners to Unix accounts, so that trainers can run as their owners.

An owner's account has the owner's name, unless `users.accounts` of the configuration names another one. The controller
asks for accounts when a trainer is submitted; pools and lenders ask again when they start something.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from bftrainer.errors import InputError

UsersMode = Literal["shared", "own"]
"""`shared`: all trainers run as the account of the agents. `own`: each runs as its owner's account."""

_NAME = re.compile(r"[a-z_][a-z0-9_.-]{0,30}\$?", re.IGNORECASE)
ROOT = 0


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
    """Owners whose trainers may run as root."""

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
        return cls(MappingProxyType(names), frozenset(root_owners))

    def name_of(self, owner: str) -> str:
        """Return the name of an owner's account, which may not exist on this machine."""
        return self.names.get(owner, owner)

    def of(self, owner: str) -> Account:
        """Return the account of an owner. Raises `InputError` if there is none, or if it is root's and may not be."""
        name = self.name_of(owner)
        try:
            entry = pwd.getpwnam(name) if _NAME.fullmatch(name) else None
        except KeyError:
            entry = None
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
        groups = tuple(dict.fromkeys((entry.pw_gid, *os.getgrouplist(entry.pw_name, entry.pw_gid))))
        return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, Path(entry.pw_dir), entry.pw_shell)


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
