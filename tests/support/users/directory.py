"""A directory of accounts for tests that only look accounts up: `known_accounts` puts it in place of the machine's."""

from __future__ import annotations

import os
import pwd

import pytest


def known_accounts(monkeypatch: pytest.MonkeyPatch, **uids: int) -> dict[str, int]:
    """Have these accounts and root on the machine: user ids by name, which may be changed later.

    The first name of a user id is what the system finds by the id.
    """
    known = {"root": 0, **uids}

    def by_name(name: str) -> pwd.struct_passwd:
        return pwd.struct_passwd((name, "x", known[name], known[name], "", f"/home/{name}", "/bin/sh"))

    def by_uid(uid: int) -> pwd.struct_passwd:
        return next(by_name(name) for name, known_uid in known.items() if known_uid == uid)

    monkeypatch.setattr(pwd, "getpwnam", by_name)
    monkeypatch.setattr(pwd, "getpwuid", by_uid)
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid])
    return known
