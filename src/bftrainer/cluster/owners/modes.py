"""Modes of users in words, and whether a mode fits the number of owners: for `serve` and the doctor."""

from __future__ import annotations

from collections.abc import Collection

MODE_KEY = "users_mode"
"""Key in the store of the mode in which a controller was started last."""


def mode_in_words(mode: str, owners: Collection[str], account: str) -> str:
    """Return whose account trainers run under. `owners` are those who have a token or an unfinished trainer."""
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
