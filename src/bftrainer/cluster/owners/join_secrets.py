"""Join secrets let one agent join for one owner, on one node.

A secret is good only while the owner has the account for which it was issued.

The controller issues a secret when a pool starts an agent, or asks a lender to. It has an HMAC by a key that only the
controller knows, so that a secret need not be stored, and cannot be changed into one for another owner, node or pilot.
Which pilot of a node may join is kept by the controller (`controller/invitations.py`): issuing a secret for a node ends
those issued before, and once an agent has joined, the secret is good for that agent alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from bftrainer.cluster.owners.accounts import Accounts
from bftrainer.errors import InputError
from bftrainer.util.files import replace_file

KEY_FILE = "join-key"
"""The file of the key in the state folder. Only the controller's account may read it."""
FIRST_S = 900.0
"""How long a secret is good for a first join, unless its pool says otherwise: pilots may wait before they start."""
AGAIN_S = 14 * 86400.0
"""How long the secret that an agent gets with its welcome is good for reconnects; every welcome has a new one."""
_PREFIX = "bfj1."
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class JoinRight:
    """What a join secret is good for."""

    owner: str
    node: str
    pilot: str
    """A name of the started agent that no other has: a second agent on the same node is another pilot."""
    expires: float
    agent: str = ""
    """The agent that has joined with it; empty: none has, and the first one that comes may."""


class JoinSecrets:
    """Issues join secrets, and verifies them."""

    def __init__(self, key: bytes, accounts: Accounts | None = None) -> None:
        """`accounts` are those of the owners. A secret ends when the account of its owner becomes another one."""
        if len(key) < 32:
            raise InputError(f"the key of join secrets must have 32 bytes or more, but has {len(key)}")
        self._key = key
        self._accounts = accounts

    @classmethod
    def at(cls, folder: Path, accounts: Accounts | None = None) -> JoinSecrets:
        """Read the key of a state folder, or make it."""
        path = folder / KEY_FILE
        try:
            return cls(bytes.fromhex(path.read_text().strip()), accounts)
        except FileNotFoundError:
            key = secrets.token_bytes(32)
            replace_file(path, key.hex() + "\n")
            return cls(key, accounts)
        except ValueError:
            raise InputError(f"{path} must have 64 hexadecimal digits: remove it, and a new one is made") from None

    def issue(self, right: JoinRight) -> str:
        """Return the secret of a right: one word of ASCII characters."""
        fields = [right.owner, right.node, right.pilot, right.expires, right.agent, self._account_of(right.owner)]
        body = _plain(json.dumps(fields, separators=(",", ":")).encode())
        return f"{_PREFIX}{body}.{_plain(self._mac(body))}"

    def verify(self, secret: str, now: float) -> JoinRight | None:
        """Return what a secret is good for; None if it is not one of ours, has expired, or has ended."""
        if not secret.startswith(_PREFIX) or len(secret) > _MOST_BYTES:
            return None
        body, _, mac = secret.removeprefix(_PREFIX).partition(".")
        try:
            given = base64.urlsafe_b64decode(mac + "=" * (-len(mac) % 4))
        except (ValueError, binascii.Error):
            return None
        if not hmac.compare_digest(given, self._mac(body)):
            return None
        fields = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        owner, node, pilot, expires, agent, *account = fields
        right = JoinRight(owner, node, pilot, float(expires), agent)
        if self._accounts is not None:
            present = self._account_of(owner)
            if not present or account != [present]:
                return None
        return right if now < right.expires else None

    def _account_of(self, owner: str) -> str:
        """Return the account of an owner, name and user id; empty if there is none, or if none are known."""
        if self._accounts is None:
            return ""
        try:
            account = self._accounts.of(owner)
        except InputError:
            return ""
        return f"{account.name}:{account.uid}"

    def _mac(self, body: str) -> bytes:
        return hmac.digest(self._key, b"bftrainer join\0" + body.encode(), hashlib.sha256)


def new_pilot(node: str) -> str:
    """Return a name for a new agent of a node."""
    return f"{node}#{secrets.token_hex(8)}"


def _plain(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
