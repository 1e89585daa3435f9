"""`TokenTable` creates, checks and revokes the tokens for the API.

Only hashes are stored. A salt and a slow hash protect passwords, which people choose from few. A token is 256 random
bits, so there is no list of likely ones to try.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import fields
from datetime import UTC, datetime
from time import time as wall_time

from bftrainer.cluster.store.database import Database
from bftrainer.cluster.store.rows import TokenRow
from bftrainer.errors import InputError
from bftrainer.util.text import text

LOCAL_TOKEN = "local"  # noqa: S105 - the name of a token
"""Name of the token in `client.json`, which `serve` creates."""
ROLES = ("user", "admin", "monitor")
"""Users see their own trainers, admins see all, monitors see only the metrics."""

LEAST_TOKEN = 32
"""Shortest token in characters. Shorter ones could be guessed."""

USED_EVERY_S = 60.0
"""Seconds between two records of a token's use: to write at every request would cost more than the request."""

_SQL = f"SELECT {', '.join(field.name for field in fields(TokenRow))} FROM tokens"  # noqa: S608 - names from this program


class TokenTable:
    """The tokens in a database; `Store.tokens`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def create(self, *, name: str, owner: str, role: str, time: float, expires: float | None = None) -> str:
        """Create a token and return it. It cannot be read again later. An expired one of that name makes room for it.

        `expires` is the time at which it becomes invalid; None: never.
        """
        token = f"bft_{secrets.token_urlsafe(32)}"
        with self._db.transaction():
            expired = "UPDATE tokens SET revoked = expires WHERE name = ? AND revoked IS NULL AND expires <= ?"
            self._db.run(expired, (text(name), time))
            if self._db.row("SELECT 1 FROM tokens WHERE name = ? AND revoked IS NULL", (text(name),)):
                raise InputError(f"a token named {name!r} already exists; revoke it first, or choose another name")
            self._insert(token, name, owner, role, time, expires)
        return token

    def adopt(self, token: str, *, name: str, owner: str, role: str, time: float) -> bool:
        """Make a given token valid, in place of an older one of that name; False if it was revoked before."""
        if len(token) < LEAST_TOKEN:
            raise InputError(f"a token must have {LEAST_TOKEN} characters or more, but got {len(token)}")
        with self._db.transaction():
            known = self._db.row("SELECT revoked FROM tokens WHERE hash = ?", (_hash(token),))
            if known:
                return known[0] is None
            self._db.run("UPDATE tokens SET revoked = ? WHERE name = ? AND revoked IS NULL", (time, text(name)))
            self._insert(token, name, owner, role, time)
        return True

    def check(self, token: str, time: float | None = None) -> TokenRow | None:
        """Return the row of a token; None if it is unknown, revoked or expired. A use at `time` is recorded at times.

        Without a `time` it is checked for now, and no use is recorded. The token is looked up by its hash, so the time
        of the lookup reveals nothing that helps to guess a token.
        """
        found = self._find(token)
        if found is None or not found.valid(wall_time() if time is None else time):
            return None
        if time is not None and (found.last_used is None or time - found.last_used >= USED_EVERY_S):
            self._db.run("UPDATE tokens SET last_used = ? WHERE id = ?", (time, found.id))
        return found

    def knows(self, token: str) -> bool:
        """Return whether a token was ever valid here; it may be revoked or expired."""
        return self._find(token) is not None

    def why_refused(self, token: str) -> str:
        """Return one sentence for the holder of a token that has expired; empty if it is invalid in another way."""
        found = self._find(token)
        if found is None or found.revoked is not None or found.expires is None:
            return ""
        day = datetime.fromtimestamp(found.expires, UTC).strftime("%Y-%m-%d %H:%M UTC")
        return f"the token {found.name} has expired at {day}: ask the operator for another (`bftrainer token create`)"

    def all(self) -> list[TokenRow]:
        """Return all tokens, including revoked ones, oldest first."""
        return [TokenRow(*row) for row in self._db.rows(f"{_SQL} ORDER BY id")]

    def owners(self, time: float) -> set[str]:
        """Return the owners who can submit trainers by a token. The one of `client.json` does not count."""
        rows = (row for row in self.all() if row.valid(time) and row.name != LOCAL_TOKEN)
        return {row.owner for row in rows if row.role != "monitor"}

    def revoke(self, name_or_id: str, time: float) -> bool:
        """Revoke a token, found by its name or else by its id; False if there is no valid one."""
        sql = "UPDATE tokens SET revoked = ? WHERE revoked IS NULL AND"
        if self._db.run(f"{sql} name = ?", (time, text(name_or_id))).rowcount:
            return True
        number = int(name_or_id) if re.fullmatch(r"[0-9]{1,18}", name_or_id) else 0
        return self._db.run(f"{sql} id = ?", (time, number)).rowcount > 0

    def _find(self, token: str) -> TokenRow | None:
        row = self._db.row(f"{_SQL} WHERE hash = ?", (_hash(token),))
        return None if row is None else TokenRow(*row)

    def _insert(self, token: str, name: str, owner: str, role: str, time: float, expires: float | None = None) -> None:
        if role not in ROLES:
            raise InputError(f"role must be one of {', '.join(ROLES)}, but got {role!r}")
        self._db.run(
            "INSERT INTO tokens (name, owner, role, hash, created, expires) VALUES (?, ?, ?, ?, ?, ?)",
            (text(name), text(owner), role, _hash(token), time, expires),
        )


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()
