"""Names in a state folder that `serve` and the doctor share. The database's name is in `store.py`."""

from __future__ import annotations

LOCK_FILE = "serve.lock"
"""Lock file, held (`flock`) by the controller for as long as it lives."""
SECRET_FILE = "agent-secret"  # noqa: S105 - the name of a file
"""The secret by which agents show that they belong to this controller."""
STATE_ID_KEY = "state_id"
"""Key in the store of the id that tells apart the processes of several state folders."""
