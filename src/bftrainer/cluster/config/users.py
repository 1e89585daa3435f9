"""Settings of whose account trainers run under: the section `[users]` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PlainValidator
from typing_extensions import Doc

from bftrainer.cluster.config.rules import texts
from bftrainer.cluster.owners.accounts import Accounts, UsersMode

Texts = Annotated[tuple[str, ...], PlainValidator(texts)]


@dataclass(frozen=True, slots=True)
class UsersSettings:
    """Whose account trainers run under."""

    mode: Annotated[
        UsersMode,
        Doc("shared: all trainers run as the account of the agents; own: each runs as its owner's account"),
    ] = "shared"
    accounts: Annotated[
        Texts,
        Field(description='a list of texts such as ["ann=ann_hpc"]'),
        Doc("with own: accounts of owners whose account has another name than they, such as ann=ann_hpc"),
    ] = ()
    root_owners: Annotated[
        Texts,
        Field(description="a list of names of owners"),
        Doc("with own: owners whose trainers may run as root, or under another account with a user id below 1000"),
    ] = ()

    @property
    def own(self) -> bool:
        """Whether trainers run as their owners."""
        return self.mode == "own"

    def as_accounts(self) -> Accounts:
        """Return the accounts of owners. Raises `InputError` if `accounts` cannot be understood."""
        return Accounts.parse(self.accounts, self.root_owners)
