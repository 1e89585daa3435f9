"""Modes of users in words, and whether a mode fits the number of owners: for `serve` and the doctor."""

from __future__ import annotations

from collections.abc import Collection

from bftrainer.cluster.owners.accounts import Accounts
from bftrainer.errors import InputError

MODE_KEY = "users_mode"
"""Key in the store of the mode in which a controller was started last."""

ACCOUNT_KEY = "account"
"""Key in the store of the name and the user id of the account that started a controller last."""
ROOT_ADVICE = 'set users.mode to "own" (docs/security.md), or run the controller as an account without rights'
_MOST_NAMES = 5


def mode_in_words(mode: str, owners: Collection[str], account: str) -> str:
    """Return whose account trainers run under. `owners` are those with an unfinished trainer or a token.

    The token of `client.json` does not count: its owner may have no trainer.
    """
    if mode == "own":
        return "users as themselves: each trainer runs under its owner's account"
    if len(owners) < 2:
        return f"single user: all trainers run as {account}"
    return f"shared account: trainers of {len(owners)} owners run as {account}, and can read each other's files"


def misfit(mode: str, owners: Collection[str]) -> str:
    """Return why a mode does not fit the owners who have trainers; empty if it does."""
    if mode == "own" or len(owners) < 2:
        return ""
    return f"trainers of {len(owners)} owners run under one account, so each can read what the others have"


def root_risk(mode: str, owners: Collection[str], account: str, uid: int) -> str:
    """Return that other owners than the controller's account become root by their trainers; empty if none does.

    `account` is the user who runs the controller, and `uid` the id of this user; `owners` are as above.
    """
    others = sorted(set(owners) - {account})
    if mode == "own" or uid != 0 or not others:
        return ""
    names = ", ".join(others[:_MOST_NAMES]) + (" and others" if len(others) > _MOST_NAMES else "")
    return f"trainers of all owners run as root, so {names} can do anything on these machines"


def missing_accounts(accounts: Accounts) -> list[str]:
    """Return what is wrong with the accounts that `users.accounts` names, in one sentence per owner."""
    problems = []
    for owner in accounts.names:
        try:
            accounts.of(owner)
        except InputError as problem:
            problems.append(str(problem))
    return problems
